"""What agents and routers say of a fleet, and what they are told: HTTP with the operator's key. A shell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import aiohttp

from k8s.plan.children import ADMIN_PORT
from k8s.plan.observe import is_true, pods_by_instance
from k8s.plan.pods import AGENT_PORT
from k8s.plan.readiness import Known

logger = logging.getLogger("baton.operator")

ASK_S = 3.0
ASKED_AT_ONCE = 32

Json = Mapping[str, Any]


class Fleet(Protocol):
    """How the operator talks with the programs of one cluster."""

    async def look(self, pods: Sequence[Json], routers: Sequence[Json], key: str) -> tuple[frozenset[str], Known]:
        """Instances that are drained, and what routers know."""

    async def drain(self, pod: Json, deadline_s: float, key: str) -> bool:
        """Tell an agent to drain; whether it has heard."""

    async def resume(self, pod: Json, key: str) -> bool:
        """Tell an agent to take work again; whether it has heard."""


class HttpFleet:
    """By HTTP, at the pods' addresses."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._at_once = asyncio.Semaphore(ASKED_AT_ONCE)

    async def look(self, pods: Sequence[Json], routers: Sequence[Json], key: str) -> tuple[frozenset[str], Known]:
        """Ask all agents that may be draining and all Ready routers. What does not answer is not known."""
        ready = [each for each in routers if is_true(each, "Ready") and not each["metadata"].get("deletionTimestamp")]
        asked = list(pods_by_instance(tuple(pods)).items())
        answers: dict[str, Json | None] = {}

        async def ask(name: str, url: str | None) -> None:
            answers[name] = await self._ask("GET", url, key)

        async with asyncio.TaskGroup() as group:
            for name, pod in asked:
                group.create_task(ask(f"agent {name}", _url(pod, AGENT_PORT, "/state")))
            for pod in ready:
                group.create_task(ask(f"router {_name(pod)}", _url(pod, ADMIN_PORT, "/ui/data")))
        drained = frozenset(name for name, _ in asked if (answers.get(f"agent {name}") or {}).get("drained"))
        words = {_name(pod): answers.get(f"router {_name(pod)}") for pod in ready}
        return drained, known_by({name: word for name, word in words.items() if word is not None}, frozenset(words))

    async def drain(self, pod: Json, deadline_s: float, key: str) -> bool:
        """``POST /drain``."""
        return await self._ask("POST", _url(pod, AGENT_PORT, "/drain"), key, {"deadline_s": deadline_s}) is not None

    async def resume(self, pod: Json, key: str) -> bool:
        """``POST /resume``."""
        return await self._ask("POST", _url(pod, AGENT_PORT, "/resume"), key, {}) is not None

    async def _ask(self, method: str, url: str | None, key: str, body: Json | None = None) -> Json | None:
        if url is None:
            return None
        try:
            async with self._at_once, asyncio.timeout(ASK_S):
                headers = {"Authorization": f"Bearer {key}"}
                async with self._session.request(method, url, json=body, headers=headers) as answer:
                    said = await answer.json()
                    return said if answer.status < 300 and isinstance(said, dict) else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            logger.debug("%s does not answer: %s", url, error)
            return None


def _name(pod: Json) -> str:
    return str(pod["metadata"]["name"])


def _url(pod: Json, port: int, path: str) -> str | None:
    address = pod.get("status", {}).get("podIP")
    host = f"[{address}]" if address and ":" in address else address
    return f"http://{host}:{port}{path}" if address else None


def known_by(words: Mapping[str, Json], routers: frozenset[str]) -> Known:
    """Routers' own words as one: who knows which instance, and which pairs no router keeps apart.

    `routers`: all Ready ones; one that did not answer knows nothing, so that no gate opens without it.
    """
    known_to: dict[str, set[str]] = {}
    proven: set[frozenset[str]] | None = None
    for router, word in words.items():
        names = [str(each.get("id")) for each in word.get("instances") or ()]
        for name in names:
            known_to.setdefault(name, set()).add(router)
        apart = {
            frozenset({str(each.get("prefill")), str(each.get("decode"))})
            for each in word.get("pairs") or ()
            if each.get("apart")
        }
        pairs = {frozenset({one, other}) for one in names for other in names if one != other} - apart
        proven = pairs if proven is None else proven & pairs
    return Known(
        routers=routers,
        known_to={name: frozenset(who) for name, who in known_to.items()},
        proven=frozenset(proven or ()),
    )
