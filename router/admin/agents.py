"""Passes what operators ask of one instance on to its agent. A shell: HTTP, a clock, chance for nonces."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web

from cluster.bounded import PLAIN, Unfit, whole_body
from cluster.errors import ApiError
from cluster.ids import InstanceId, ranks_of
from cluster.registry.membership import Heartbeat
from kvtransfer.keys import instance_key
from kvtransfer.signed import NONCE_BYTES, Ask, signed_headers
from kvtransfer.ticket import SigningKey
from router.fleet.discovery import Discovery
from router.fleet.view import FleetView

AGENT_S: Final = 5.0
"""An agent that does not answer within this time is treated as lost."""

_UNIX_TIME: Final = time.time  # noqa: TID251 - what two machines have in common


class AgentCalls:
    """One router's requests to the agents of its fleet."""

    def __init__(
        self,
        name: str,
        view: FleetView,
        watch: Discovery | None,
        ticket_keys: Callable[[], tuple[SigningKey, ...]] | None,
    ) -> None:
        """`name`: this router's, in whose name it asks. `watch`: None without a registry, so without agents."""
        self._name: Final = name
        self._view: Final = view
        self._watch: Final = watch
        self._ticket_keys: Final = ticket_keys
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close connections."""
        if self._session is not None:
            await self._session.close()

    async def tell(self, instance: str, path: str, said: dict[str, Any]) -> web.Response:
        """Post `said` to the agent of an instance; an engine may be named instead of one of its ranks. Returns the
        agent's answer.

        Raises:
            ApiError: 404: no such instance; 409: it has no agent; 502: its agent does not answer.
        """
        beat = self._agent_of(instance)
        if self._session is None:
            limit = aiohttp.ClientTimeout(total=AGENT_S)
            self._session = aiohttp.ClientSession(timeout=limit, headers=PLAIN, auto_decompress=False)
        sent = msgspec.json.encode(said)
        headers = {**self._signed(instance, path, sent), "Content-Type": "application/json"}
        try:
            url = f"{beat.agent_url}{path}"
            async with self._session.post(url, data=sent, headers=headers, allow_redirects=False) as answer:
                body = await whole_body(answer)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, Unfit) as error:
            because = f"The agent of `{instance[:200]}` at {beat.agent_url} does not answer ({type(error).__name__})."
            fix = "Without --ticket-keys-file an agent listens on its own machine only. `/quarantine` needs no agent."
            raise ApiError(502, "UpstreamError", f"{because} {fix}") from None
        if not 200 <= answer.status < 600:
            because = f"The agent of `{instance[:200]}` at {beat.agent_url} answers with status {answer.status}."
            raise ApiError(502, "UpstreamError", f"{because} `/quarantine` needs no agent.")
        return web.Response(status=answer.status, body=body, content_type="application/json")

    def _signed(self, instance: str, path: str, body: bytes) -> dict[str, str]:
        """The headers of a request to an instance's agent."""
        keys = self._ticket_keys
        key = None if keys is None else instance_key(keys()[0], InstanceId(instance))
        ask = Ask(method="POST", path=path, body=body, by=self._name, to=instance)
        return signed_headers(ask, key, now=_UNIX_TIME(), nonce=secrets.token_bytes(NONCE_BYTES))

    def _agent_of(self, instance: str) -> Heartbeat:
        """The heartbeat of an instance's agent; an engine may be named instead of one of its ranks."""
        names = (instance, ranks_of(InstanceId(instance), 2)[0])
        fleet = None if self._watch is None else self._watch.snapshot()
        member = None if fleet is None else next((each for name in names if (each := fleet.get(name))), None)
        if member is not None and member.beat.agent_url is not None:
            return member.beat
        if not self._view.knows(InstanceId(instance)):
            raise ApiError(404, "NotFoundError", f"There is no instance `{instance[:200]}` here.")
        message = f"`{instance[:200]}` has no agent that could drain it: use `POST /quarantine/{instance[:200]}`."
        raise ApiError(409, "ConflictError", message)
