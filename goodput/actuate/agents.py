"""Tells instances' agents over HTTP to take another role. The same for every actuator. A shell.

An agent on this machine answers any program here. One on another machine answers only requests that are signed with its
ticket keys (`kvtransfer.signed`); without keys it listens on its own loopback alone.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Final

import aiohttp
import msgspec

from cluster.bounded import PLAIN, Unfit, whole_body
from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.registry.membership import Heartbeat
from cluster.telemetry import trace_headers
from kvtransfer.keys import instance_key
from kvtransfer.signed import NONCE_BYTES, Ask, signed_headers
from kvtransfer.ticket import SigningKey

ASK_S: Final = 2.0
"""Seconds for an answer. An agent only answers and counts: one that needs longer is taken to be lost."""

BY: Final = "controller"
"""The sender that signed requests name."""
_UNIX_TIME: Final = time.time  # noqa: TID251 - what two machines have in common


class Agents:
    """Sends requests to agents in the controller's name. Each answer is an empty text, or why nothing came of it."""

    def __init__(self, keys: Callable[[], tuple[SigningKey, ...]] | None) -> None:
        """`keys` returns the fleet's ticket keys, the signing one first; None: the fleet has none."""
        self._keys: Final = keys
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close connections."""
        if self._session is not None:
            await self._session.close()

    async def flip(self, beat: Heartbeat, role: Role) -> str:
        """Tell the agent of `beat` to take another role."""
        return await self._tell(beat, "/role", {"role": role.value})

    async def _tell(self, beat: Heartbeat, path: str, said: dict[str, object]) -> str:
        if beat.agent_url is None:
            return f"{beat.id} has no agent that could be told"
        body = msgspec.json.encode(said)
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=ASK_S)
            self._session = aiohttp.ClientSession(timeout=timeout, headers=PLAIN)
        url = f"{beat.agent_url}{path}"
        try:
            headers = self._signed(beat.id, path, body)
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as answer:
                raw = await whole_body(answer)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, Unfit) as error:
            return f"the agent of {beat.id} at {beat.agent_url} does not answer ({type(error).__name__})"
        return "" if answer.status in {200, 202} else _refusal(beat.id, answer.status, raw)

    def _signed(self, instance: InstanceId, path: str, body: bytes) -> dict[str, str]:
        key = None if self._keys is None else instance_key(self._keys()[0], instance)
        ask = Ask(method="POST", path=path, body=body, by=BY, to=str(instance))
        headers = signed_headers(ask, key, now=_UNIX_TIME(), nonce=secrets.token_bytes(NONCE_BYTES))
        return {**headers, **trace_headers(), "Content-Type": "application/json"}


def _refusal(instance: InstanceId, status: int, raw: bytes) -> str:
    """The refusal as a sentence: the agent's own message if its answer has one, else the HTTP status."""
    try:
        said = msgspec.json.decode(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = f"status {status}"
    return f"the agent of {instance} refuses: {said!s:.300}"
