"""Asks the router peers of a fleet, so that each router can answer for all of them. A shell.

Routers announce their admin sides in the registry (`router.fleet.discovery`). A question goes to all of them at once;
peers that do not answer within `ASK_S` are named in the answer. A peer that is asked does not ask others. A question
never carries a key of this router's caller: the router asks in its own name, names the operator or tenant on whose
behalf it asks, and signs that with the fleet's ticket keys (`kvtransfer.signed`). Without these keys a router on
another machine believes no name.

A loopback address that a router on another machine announces leads to this machine. So each answer names its router
(`FROM`), and an answer of another router than the one asked is not believed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from yarl import URL

from cluster.bounded import PLAIN, Unfit, whole_body
from cluster.registry.membership import Heartbeat
from kvtransfer.signed import NONCE_BYTES, READER, SIGNATURE, Ask, Judge, ask_in, signed_headers
from kvtransfer.ticket import SigningKey
from router.admin.peer_words import an_object

ASK_S: Final = 1.0
"""A router that is alive answers in milliseconds; waiting longer for a dead one tells an operator nothing more."""

FROM: Final = "x-baton-sibling"
"""Header: the asking router; on an answer, the answering one."""
_UNIX_TIME: Final = time.time  # noqa: TID251 - what two machines have in common

Keys = Callable[[], tuple[SigningKey, ...]]


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """One peer's answer."""

    status: int
    body: bytes


class RouterPeers:
    """The router peers of one router."""

    def __init__(
        self,
        name: str,
        others: Callable[[], tuple[Heartbeat, ...]],
        keys: Keys | None,
        clock: Callable[[], float] = _UNIX_TIME,
    ) -> None:
        """`others`: returns the announcements of the current peers."""
        self.name: Final = name
        self._others: Final = others
        self._keys: Final = keys
        self._clock: Final = clock
        self._judge: Final = Judge(name, clock())
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close connections."""
        if self._session is not None:
            await self._session.close()

    # --- questions from peers -----------------------------------------------------------------------------------------

    @staticmethod
    def asks(headers: Mapping[str, str]) -> bool:
        """Whether a router peer asks: it wants only this router's own data."""
        return FROM in headers

    def vouched(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bool:
        """Whether a router of this fleet signed this request and the reader that it names. `path` with its query.

        A signature is accepted once: a second call returns False.
        """
        if self._keys is None or SIGNATURE not in headers:
            return False
        ask = ask_in(headers, method, path, body)
        return not self._judge.fault(headers[SIGNATURE], ask, self._keys(), self._clock())

    # --- questions to peers -------------------------------------------------------------------------------------------

    async def ask(
        self, path: str, reader: str | None, *, method: str = "GET", body: bytes = b""
    ) -> dict[str, PeerAnswer | str]:
        """Each peer's answer by its name, or in words why there is none.

        Args:
            path: with its query.
            reader: the tenant on whose behalf this router asks; None: an operator.
            method: the HTTP method.
            body: JSON.
        """
        found: dict[str, PeerAnswer | str] = {}
        others = self._others()
        if not others:
            return found
        if self._session is None:
            limit = aiohttp.ClientTimeout(total=ASK_S)
            self._session = aiohttp.ClientSession(timeout=limit, headers=PLAIN, auto_decompress=False)
        async with asyncio.TaskGroup() as group:
            asking = {
                str(beat.id): group.create_task(self._ask_one(self._session, beat, path, reader, method, body))
                for beat in others
            }
        return {name: task.result() for name, task in asking.items()}

    async def _ask_one(
        self,
        session: aiohttp.ClientSession,
        beat: Heartbeat,
        path: str,
        reader: str | None,
        method: str,
        body: bytes,
    ) -> PeerAnswer | str:
        if beat.agent_url is None:
            return "it announces no admin side"
        url = URL(f"{beat.agent_url}{path}")  # yarl may spell a path differently: sign what is sent
        ask = Ask(method=method, path=url.raw_path_qs, body=body, by=self.name, to=str(beat.id), reader=reader)
        key, nonce = None if self._keys is None else self._keys()[0], secrets.token_bytes(NONCE_BYTES)
        sent = signed_headers(ask, key, now=self._clock(), nonce=nonce)
        sent |= {FROM: self.name, "Content-Type": "application/json"}
        try:
            async with session.request(method, url, headers=sent, data=body or None, allow_redirects=False) as answer:
                if answer.headers.get(FROM) != str(beat.id):
                    return f"another one answers at {beat.agent_url}: set --admin-host to an address others reach"
                if answer.status == 200 and answer.headers.get(READER) != reader:
                    return "it does not say on whose behalf it answers: give all routers one version"
                raw = await whole_body(answer)
        except Unfit as unfit:
            return str(unfit)
        except TimeoutError:
            return f"it does not answer within {ASK_S:g} s at {beat.agent_url}"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return f"it cannot be reached at {beat.agent_url}: {type(error).__name__}"
        if answer.status in {401, 403}:
            return "it refuses this router: give both the fleet's --ticket-keys-file"
        return PeerAnswer(answer.status, raw)


def read_answer(
    answer: PeerAnswer | str, read: Callable[[bytes], dict[str, Any] | str] = an_object
) -> dict[str, Any] | str:
    """A peer's answer, or why it is of no use."""
    if isinstance(answer, str):
        return answer
    return read(answer.body) if answer.status == 200 else f"it answers with HTTP {answer.status}"
