"""Asks the other routers of a fleet, so that whoever asks any of them is told the whole truth. A shell.

Routers announce their admin sides in the registry (`router.watch`). A question goes to all of them at once, and those
that do not answer within `ASK_S` are named, not waited for. An asked router never asks on. It is asked as whoever asks
here: whoever has a key, with that key; an operator's question without one is vouched for with a MAC by the fleet's
ticket keys. Without these a router on another machine believes nobody.

An announced address on loopback means another machine's own: whoever answers there says which router it is, and one
that is not the one asked is not believed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec

from cluster.bounded import PLAIN, Unfit, whole_body
from cluster.readable import json_in
from cluster.registry.membership import Heartbeat
from kvtransfer.ticket import Key

ASK_S: Final = 1.0
"""A router that is alive answers in milliseconds; an operator who waits longer for a dead one learns nothing more."""

FROM: Final = "x-baton-sibling"
"""Who asks; on an answer, who answers."""
PROOF: Final = "x-baton-sibling-proof"

PROOF_S: Final = 30.0
"""For how long a proof is good, clocks that differ included."""

_DOMAIN: Final = b"baton-sibling\x00"
_UNIX_TIME: Final = time.time  # noqa: TID251 - what two machines have in common

Keys = Callable[[], tuple[Key, ...]]


@dataclass(frozen=True, slots=True)
class Answered:
    """One router's."""

    status: int
    body: bytes

    def json(self) -> Any:
        """What it says; None where that is no JSON."""
        try:
            return json_in(self.body)
        except msgspec.DecodeError:
            return None


def proof(secret: bytes, method: str, path: str, body: bytes, asker: str, asked: str, at: int) -> str:
    """A MAC over who asks whom what, and when."""
    text = "\0".join((method, path, asker, asked, str(at), hashlib.sha256(body).hexdigest()))
    return hmac.new(secret, _DOMAIN + text.encode(), hashlib.sha256).hexdigest()


class Siblings:
    """The other routers, as one router sees them."""

    def __init__(
        self,
        name: str,
        others: Callable[[], tuple[Heartbeat, ...]],
        keys: Keys | None,
        clock: Callable[[], float] = _UNIX_TIME,
    ) -> None:
        """`others`: announcements of those that are there now."""
        self.name: Final = name
        self._others: Final = others
        self._keys: Final = keys
        self._clock: Final = clock
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close connections."""
        if self._session is not None:
            await self._session.close()

    # --- asked --------------------------------------------------------------------------------------------------------

    @staticmethod
    def asks(headers: Mapping[str, str]) -> bool:
        """Whether it is a router that asks: it wants this one's own word."""
        return FROM in headers

    def vouched(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bool:
        """Whether a router of this fleet says that an operator asks. `path` with its query."""
        stamp, _, mac = headers.get(PROOF, "").partition(".")
        if self._keys is None or not stamp.isdecimal() or len(stamp) > 12:
            return False
        if abs(self._clock() - int(stamp)) > PROOF_S or not mac.isascii():  # only texts that can be right are compared
            return False
        asker = headers.get(FROM, "")
        made = (proof(key.secret, method, path, body, asker, self.name, int(stamp)) for key in self._keys())
        return any(hmac.compare_digest(each, mac) for each in made)

    # --- asking -------------------------------------------------------------------------------------------------------

    async def ask(
        self, path: str, headers: Mapping[str, str], *, method: str = "GET", body: bytes | None = None
    ) -> dict[str, Answered | str]:
        """Every other router's answer by its name, or in words why there is none.

        Args:
            path: with its query.
            headers: of whoever asks: his keys; none for an operator.
            method: of HTTP.
            body: JSON.
        """
        found: dict[str, Answered | str] = {}
        others = self._others()
        if not others:
            return found
        if self._session is None:
            limit = aiohttp.ClientTimeout(total=ASK_S)
            self._session = aiohttp.ClientSession(timeout=limit, headers=PLAIN, auto_decompress=False)
        async with asyncio.TaskGroup() as group:
            asking = {
                str(beat.id): group.create_task(self._ask_one(self._session, beat, path, headers, method, body))
                for beat in others
            }
        return {name: task.result() for name, task in asking.items()}

    async def _ask_one(
        self,
        session: aiohttp.ClientSession,
        beat: Heartbeat,
        path: str,
        headers: Mapping[str, str],
        method: str,
        body: bytes | None,
    ) -> Answered | str:
        if beat.agent_url is None:
            return "it announces no admin side"
        sent = {**headers, FROM: self.name, "Content-Type": "application/json"}
        if self._keys is not None and not headers:
            at = int(self._clock())
            mac = proof(self._keys()[0].secret, method, path, body or b"", self.name, str(beat.id), at)
            sent[PROOF] = f"{at}.{mac}"
        try:
            async with session.request(
                method, f"{beat.agent_url}{path}", headers=sent, data=body, allow_redirects=False
            ) as answer:
                if answer.headers.get(FROM) != str(beat.id):
                    return f"another one answers at {beat.agent_url}: set --admin-host to an address others reach"
                raw = await whole_body(answer)
        except Unfit as unfit:
            return str(unfit)
        except TimeoutError:
            return f"it does not answer within {ASK_S:g} s at {beat.agent_url}"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return f"it cannot be reached at {beat.agent_url}: {type(error).__name__}"
        if answer.status in {401, 403}:
            return "it refuses this router: give both the fleet's --ticket-keys-file"
        return Answered(answer.status, raw)
