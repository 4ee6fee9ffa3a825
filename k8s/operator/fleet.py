"""Requests of the operator to agents and routers of a fleet: HTTP. A shell.

Requests to agents are signed with the fleet's ticket keys, each for one instance and valid once; those to routers'
admin side carry the operator's key. Without ticket keys no agent is asked.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import aiohttp

from cluster.bounded import PLAIN, Unfit, whole_body
from cluster.ids import InstanceId, engine_of
from cluster.instance import Role
from cluster.urls import netloc
from k8s.operator.secrets import Access
from k8s.plan.children import ADMIN_PORT
from k8s.plan.observe import INSTANCE, is_true, pods_by_instance
from k8s.plan.pods import AGENT_PORT
from k8s.plan.readiness import Circles, Known, PairsHeard
from kvtransfer.keys import instance_key
from kvtransfer.signed import NONCE_BYTES, Ask, signed_headers

logger = logging.getLogger("baton.operator")

ASK_S = 3.0
"""Longest time of one request, in seconds."""
ASKED_AT_ONCE = 32
ME: Final = "baton-operator"
"""The sender that signed requests name."""
_UNIX_TIME: Final = time.time  # noqa: TID251 - what two machines have in common

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTold:
    """What agents and routers of a fleet report."""

    drained: frozenset[str] = frozenset()
    """Instances whose agents have no stream and no hold left."""
    working: frozenset[str] = frozenset()
    """Instances whose agents take work."""
    roles: Mapping[str, Role] = field(default_factory=dict)
    """By instance, the role that its agent reports."""
    known: Known = field(default_factory=Known)
    attainment: float | None = None
    """Share of the last five minutes' requests that met their targets; None: no such request, or no answer."""


class ClusterPrograms(Protocol):
    """Requests to the programs of one cluster."""

    async def look(self, pods: Sequence[Json], routers: Sequence[Json], access: Access) -> FleetTold:
        """Ask agents for their state, and routers for the fleet as they know it."""

    async def drain(self, pod: Json, deadline_s: float, access: Access) -> bool:
        """Tell an agent to drain. Returns whether it accepted."""

    async def resume(self, pod: Json, access: Access) -> bool:
        """Tell an agent to take work again. Returns whether it accepted."""

    async def flip(self, pod: Json, role: Role, access: Access) -> bool:
        """Tell an agent to take another role. Returns whether it accepted."""


class HttpFleet:
    """`ClusterPrograms` by HTTP, at the pods' addresses."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._at_once = asyncio.Semaphore(ASKED_AT_ONCE)

    async def look(self, pods: Sequence[Json], routers: Sequence[Json], access: Access) -> FleetTold:
        """Ask all agents and all Ready routers. Those that do not answer count as unknown."""
        ready = [each for each in routers if is_true(each, "Ready") and not each["metadata"].get("deletionTimestamp")]
        asked = pods_by_instance(tuple(pods))
        answers: dict[str, Json | None] = {}
        words: dict[str, Json | None] = {}

        async def ask(name: str, pod: Json) -> None:
            answers[name] = await self._agent("GET", pod, "/state", access)

        async def ask_router(pod: Json) -> None:
            words[_name(pod)] = await self._router(pod, access)

        async with asyncio.TaskGroup() as group:
            for name, pod in asked.items():
                group.create_task(ask(name, pod))
            for pod in ready:
                group.create_task(ask_router(pod))
        said = {name: answer for name, answer in answers.items() if answer is not None}
        heard = {name: word for name, word in words.items() if word is not None}
        return FleetTold(
            drained=frozenset(name for name, answer in said.items() if answer.get("drained")),
            working=frozenset(name for name, answer in said.items() if answer.get("state") == "ready"),
            roles={name: role for name, answer in said.items() if (role := _role(answer.get("role"))) is not None},
            known=known_by(heard, frozenset(words)),
            attainment=attainment_in(next(iter(heard.values()), {})),
        )

    async def drain(self, pod: Json, deadline_s: float, access: Access) -> bool:
        """``POST /drain``."""
        return await self._agent("POST", pod, "/drain", access, {"deadline_s": deadline_s}) is not None

    async def resume(self, pod: Json, access: Access) -> bool:
        """``POST /resume``."""
        return await self._agent("POST", pod, "/resume", access, {}) is not None

    async def flip(self, pod: Json, role: Role, access: Access) -> bool:
        """``POST /role``."""
        return await self._agent("POST", pod, "/role", access, {"role": role.value}) is not None

    async def _agent(self, method: str, pod: Json, path: str, access: Access, said: Json | None = None) -> Json | None:
        """One signed request to an instance's agent; None: no answer, or a refusal."""
        name = str(pod["metadata"].get("labels", {}).get(INSTANCE, ""))
        if not access.fleet or not name:
            return None
        body = b"" if said is None else json.dumps(said).encode()
        key = instance_key(access.fleet[0], InstanceId(name))
        ask = Ask(method=method, path=path, body=body, by=ME, to=name)
        headers = signed_headers(ask, key, now=_UNIX_TIME(), nonce=secrets.token_bytes(NONCE_BYTES))
        return await self._ask(method, _url(pod, AGENT_PORT, path), headers, body)

    async def _router(self, pod: Json, access: Access) -> Json | None:
        headers = {"Authorization": f"Bearer {access.admin}"}
        return await self._ask("GET", _url(pod, ADMIN_PORT, "/ui/data"), headers, b"")

    async def _ask(self, method: str, url: str | None, headers: Mapping[str, str], body: bytes) -> Json | None:
        if url is None:
            return None
        more = {"Content-Type": "application/json"} if body else {}
        try:
            async with (
                self._at_once,
                asyncio.timeout(ASK_S),
                self._session.request(
                    method, url, data=body or None, headers={**PLAIN, **headers, **more}, allow_redirects=False
                ) as answer,
            ):
                said = json.loads(await whole_body(answer))
                return said if answer.status < 300 and isinstance(said, dict) else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError, Unfit) as error:
            logger.debug("%s does not answer: %s", url, type(error).__name__)
            return None


def _each(word: Json, name: str) -> list[Json]:
    """The objects in the list `name` of an answer; other values are left out."""
    found = word.get(name)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _role(said: object) -> Role | None:
    """The role that an agent reports; None: there is no such role."""
    return next((role for role in Role if role.value == said), None)


def _name(pod: Json) -> str:
    return str(pod["metadata"]["name"])


def _url(pod: Json, port: int, path: str) -> str | None:
    address = pod.get("status", {}).get("podIP")
    return f"http://{netloc(address, port)}{path}" if address else None


def attainment_in(word: Json) -> float | None:
    """The attainment of all routers' last five minutes over all classes, in one router's answer; None: no request."""
    windows = [each.get("five_minutes") or {} for each in word.get("classes") or () if isinstance(each, Mapping)]
    counted = sum(int(each.get("counted") or 0) for each in windows)
    met = sum(float(each.get("attainment") or 0.0) * int(each.get("counted") or 0) for each in windows)
    return met / counted if counted else None


def _engine(name: object) -> str:
    """The engine of an instance: one pod runs all ranks of an engine."""
    return str(engine_of(InstanceId(str(name))))


def known_by(words: Mapping[str, Json], routers: frozenset[str]) -> Known:
    """Routers' answers together: which routers know an instance, and which pairs no router keeps apart.

    `routers`: all Ready ones. A router that did not answer knows no instance, so no gate opens without it.
    """
    heard = {router: _pairs_heard(word) for router, word in words.items()}
    known_to: dict[str, set[str]] = {}
    for router, pairs in heard.items():
        for name in pairs.circles:
            known_to.setdefault(name, set()).add(router)
    return Known(
        routers=routers,
        known_to={name: frozenset(knowing) for name, knowing in known_to.items()},
        pairs=tuple(heard.values()),
    )


def _pairs_heard(word: Json) -> PairsHeard:
    """What one router reports of pairs. The ranks of an engine count as one: proven if all are, in one circle."""
    told = _each(word, "instances")
    proves = any("gives" in each or "takes" in each for each in told)
    circles: dict[str, Circles | None] = {}
    for each in told:
        name = _engine(each.get("id"))
        rank = Circles(_circle(each.get("gives")), _circle(each.get("takes"))) if proves else None
        former = circles.setdefault(name, rank)
        if rank is not None and former is not None:
            pairs = zip(rank, former, strict=True)
            circles[name] = Circles(*(one if one == other else 0 for one, other in pairs))
    apart = frozenset(
        frozenset({_engine(each.get("prefill")), _engine(each.get("decode"))})
        for each in _each(word, "pairs")
        if each.get("apart")
    )
    return PairsHeard(circles=circles, apart=apart)


def _circle(said: object) -> int:
    """The number of a circle; 0 for anything else."""
    return said if isinstance(said, int) else 0
