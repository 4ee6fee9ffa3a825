"""Signed requests between the programs of one fleet: from a router to an agent, from a router to a router. Pure.

Programs with the fleet's ticket keys sign (routers, `baton status` and other operator commands). An agent checks with
its instance's key, a router with the fleet's. The signature covers the method, the path with its query, a digest of the
body, the sender, the receiver, the tenant on whose behalf the sender asks, an expiry and a nonce. So a request is valid
once, for one receiver, for half a minute.

The signature is one header, ``1.KEY.EXPIRES.NONCE.MAC``; sender, receiver and tenant stand in headers beside it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from cluster.ids import InstanceId, engine_of
from kvtransfer.packing import Packer
from kvtransfer.ticket import SKEW_S, SigningKey
from kvtransfer.timers import TimedKeys

BY: Final = "x-baton-by"
"""Header: the name of the program that sends the request."""
TO: Final = "x-baton-to"
"""Header: the name of the instance or router that receives the request. A receiver of another name refuses it."""
READER: Final = "x-baton-reader"
"""Header: the tenant on whose behalf a router asks. Absent: an operator."""
SIGNATURE: Final = "x-baton-signature"

LIFE_S: Final = 30.0
"""The lifetime of a signature. The machines' clocks may differ by `kvtransfer.ticket.SKEW_S`."""

NONCE_BYTES: Final = 16

SPENT_MAX: Final = 1 << 14
"""The number of used signatures that a receiver remembers: 500 requests a second for their whole life. Further ones are
refused."""

_TEXT: Final = re.compile(r"1\.([A-Za-z0-9_-]{1,16})\.([0-9]{1,15})\.([0-9a-f]{32})\.([0-9a-f]{64})")
_DOMAIN: Final = b"baton-request\x00"
"""Separates request signatures from MACs made with the same key for another purpose."""
_NAME_BYTES_MAX: Final = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The signed parts of one request."""

    method: str
    path: str
    """The path with its query."""
    by: str
    to: str
    body: bytes = b""
    reader: str | None = None
    """The tenant on whose behalf the sender asks; None: an operator."""


def signed_headers(ask: Ask, key: SigningKey | None, *, now: float, nonce: bytes) -> dict[str, str]:
    """The headers to send with this request. Without a key they name sender and receiver and prove nothing.

    Args:
        ask: the request.
        key: the receiver's: an agent's instance key, a router's fleet key.
        now: Unix time in seconds.
        nonce: `NONCE_BYTES` random bytes, new each time.
    """
    headers = {BY: ask.by, TO: ask.to}
    if ask.reader is not None:
        headers[READER] = ask.reader
    if key is not None:
        expires_ms = int((now + LIFE_S) * 1000)
        headers[SIGNATURE] = f"1.{key.id}.{expires_ms}.{nonce.hex()}.{_mac(ask, key, expires_ms, nonce).hex()}"
    return headers


def ask_in(headers: Mapping[str, str], method: str, path: str, body: bytes = b"") -> Ask:
    """The request that these headers describe."""
    return Ask(
        method=method,
        path=path,
        body=body,
        by=headers.get(BY, ""),
        to=headers.get(TO, ""),
        reader=headers.get(READER),
    )


class Judge:
    """Judges signatures for one receiver and remembers those it has seen. `now` is Unix time in seconds."""

    def __init__(self, me: str, started: float) -> None:
        """`started`: the Unix time in seconds since which this process remembers signatures."""
        self.me: Final = me
        self._started = started
        self._spent: Final[TimedKeys[str]] = TimedKeys(SPENT_MAX)

    def fault(self, text: str, ask: Ask, keys: Collection[SigningKey], now: float) -> str:
        """Why this signature is not valid for this request, here and now. Empty: it is valid, and is now used up. Never
        raises.

        The text says no more than the sender already knew.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            return "the signature is malformed"
        key = next((key for key in keys if key.id == match[1]), None)
        if key is None:
            return "it is signed with a key that is not valid here"
        expires_ms, nonce = int(match[2]), bytes.fromhex(match[3])
        if not _packs(ask) or not hmac.compare_digest(bytes.fromhex(match[4]), _mac(ask, key, expires_ms, nonce)):
            return "the signature is wrong"
        if engine_of(InstanceId(ask.to)) != self.me:  # an engine's agent answers for all of its ranks
            return f"it is for another receiver; this is {self.me}"
        return self._untimely(expires_ms / 1000, now) or self._used(match[4], expires_ms / 1000, now)

    def _untimely(self, expires: float, now: float) -> str:
        self._started = min(self._started, now)  # the clock may have been set back beyond it
        issued = expires - LIFE_S
        if expires + SKEW_S <= now:
            return "the signature has expired: are the machines' clocks together?"
        if issued > now + SKEW_S:
            return "the signature is from the future: are the machines' clocks together?"
        if issued + SKEW_S < self._started:
            return "the signature is older than this process, which cannot know if it was used"
        return ""

    def _used(self, mac: str, expires: float, now: float) -> str:
        if self._spent.knows(mac, now):
            return "the signature was used before"
        if not self._spent.remember(mac, expires + SKEW_S, now):
            return "too many signatures in half a minute to remember another"
        return ""


def _packs(ask: Ask) -> bool:
    """Whether the names are short enough to be signed, and UTF-8. Baton sends no others."""
    try:
        sizes = [len(text.encode()) for text in (ask.method, ask.by, ask.to, ask.reader or "")]
        ask.path.encode()
    except UnicodeEncodeError:
        return False
    return max(sizes) <= _NAME_BYTES_MAX


def _mac(ask: Ask, key: SigningKey, expires_ms: int, nonce: bytes) -> bytes:
    packer = Packer().text(key.id).text(ask.method).text(ask.by).text(ask.to)
    packer.byte(ask.reader is not None).text(ask.reader or "").number(expires_ms).raw(nonce)
    packer.raw(hashlib.sha256(ask.path.encode()).digest()).raw(hashlib.sha256(ask.body).digest())
    return hmac.digest(key.secret, _DOMAIN + packer.done(), hashlib.sha256)
