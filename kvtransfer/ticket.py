"""Signed permission for one consumer to take over one hold, or to have one pushed to it.

The router signs; the producer checks, and sees to it that each ticket serves once. What is signed: the
transfer, the tenant, the producer (instance, epoch, host, port), the consumer, the block ids, how many tokens they
hold, and an expiry. Keys are one per instance that checks (`kvtransfer.keys`), so that it can check what is meant for
it and sign nothing for another; two at a time while a key is being replaced. They are values here: whoever calls reads
them from a file.

A ticket for a guard (`kvtransfer.guard`, in front of an engine with vLLM's own connector) names no blocks: it signs a
digest of the very fields it travels with, block ids and all, and so stays short. It is good for nothing but them.

`check` is total: it answers any input, of any type and size, with a value and raises nothing. There is one algorithm
(HMAC-SHA256) and no field that names one; a text that differs in a single character from the one that was signed is
refused, also where base64 would decode both to the same bytes.

What a ticket does not do: it cannot keep anybody who has the producer's memory keys from reading memory, since reads
are one-sided. It keeps the bytes from being *used*: a claim without a good ticket is never confirmed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

from cluster.ids import InstanceId, RequestId, TransferId
from kvtransfer.packing import Blocks, Malformed, Packed, Packer

VERSION = 1
SECRET_BYTES_MIN = 32
"""As long as the MAC: a shorter key would be the easier thing to guess."""
TAG_BYTES = 32
TEXT_CHARS_MAX = 400_000
"""Enough for `BLOCKS_MAX` scattered blocks; longer texts are refused before they are looked at."""
BLOCKS_MAX = 65_536
"""A million tokens at 16 a block."""
SKEW_S = 5.0
"""How far the router's clock and the producer's may be apart: a ticket is good for so much longer than it says."""
LIFE_S_MAX = 600.0
"""Tickets that live longer are refused: for so long a spent one must be remembered."""

_DOMAIN = b"baton-ticket\x00"
"""Keeps a MAC made with the same key for another purpose from being a ticket."""
_KEY_ID = re.compile(r"[A-Za-z0-9_-]{1,16}")


@dataclass(frozen=True, slots=True)
class Peer:
    """One life of an instance."""

    instance: InstanceId
    epoch: int


@dataclass(frozen=True, slots=True)
class Key:
    """One signing key of one producer. `id` names it while two are valid, and is no secret."""

    id: str
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not _KEY_ID.fullmatch(self.id):
            raise ValueError(f"key id {self.id!r}: 1 to 16 of A-Z a-z 0-9 _ -")
        if len(self.secret) < SECRET_BYTES_MIN:
            raise ValueError(
                f"key {self.id}: the secret has {len(self.secret)} bytes, at least {SECRET_BYTES_MIN} needed"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What is signed."""

    id: TransferId
    tenant: str
    producer: InstanceId
    host: str
    """Where the producer's endpoint listens, and `port`."""
    port: int
    consumer: InstanceId
    """Who may use it: the decode instance; of a guard's ticket whichever instance it is sent to."""
    groups: tuple[Blocks, ...]
    """The producer's blocks, one tuple for each KV group; none for a push, whose blocks are not known yet."""
    tokens: int
    """How many tokens' KV they hold."""
    expires_ms: int
    """Unix time."""
    nonce: int = 0
    """Tells it from every other ticket of its router, where all else is equal: two releases of one hold, say."""
    fields: str = ""
    """For a guard: the digest of the transfer fields that it travels with (`cluster.wire.fields_digest`)."""

    @property
    def blocks(self) -> frozenset[int]:
        """All blocks it permits to read."""
        return frozenset(block for group in self.groups for block in group)


class Reason(StrEnum):
    """Why a ticket is refused: a label of few values for a counter."""

    MALFORMED = "malformed"
    UNKNOWN_KEY = "unknown key"
    FORGED = "forged"
    EXPIRED = "expired"
    LIVES_TOO_LONG = "lives too long"
    OTHER_PRODUCER = "for another producer"
    OTHER_EPOCH = "for another life of the producer"
    OTHER_CONSUMER = "for another consumer"
    OTHER_TENANT = "for another tenant"
    OTHER_TRANSFER = "for another transfer"
    OTHER_BLOCKS = "for other blocks"
    OTHER_FIELDS = "for other transfer fields"


@dataclass(frozen=True, slots=True)
class Accepted:
    """A genuine ticket, for here and now."""

    ticket: Ticket
    tag: str
    """Names this ticket among all others."""
    left_s: float
    """How much longer it would be accepted, the allowance for skew included."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Not to be acted upon. `because` says no more than the sender knew."""

    reason: Reason
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the checking side knows by itself. None: it cannot know, and leaves that to whoever can."""

    producer: Peer | None
    """Which life of which instance it has to be for: the producer's own, or the one a consumer would pull from."""
    consumer: InstanceId | None
    """Who presents it, by the connection it came on; or the consumer's own name."""
    id: TransferId | None = None
    """The transfer of the message that carries it."""
    tenant: str | None = None
    blocks: Blocks | None = None
    """The blocks that are claimed by it; fewer than it permits are fine."""
    fields: str = ""
    """The digest of the fields it came with; empty where no guard checks, and then a guard's ticket is none."""


def sign(ticket: Ticket, key: Key) -> str:
    """The ticket as a text for ``kv_transfer_params``.

    Raises:
        ValueError: a field is out of the range of the format; the router made it, so this is a bug of ours.
    """
    payload = Packer().byte(VERSION).text(key.id).raw(_pack(ticket)).done()
    text = _encode(payload + _tag(key, payload))
    if len(text) > TEXT_CHARS_MAX:
        raise ValueError(f"a ticket of {len(text)} characters, at most {TEXT_CHARS_MAX} are accepted")
    return text


def check(text: object, keys: Collection[Key], now: float, expected: Expected) -> Accepted | Refused:
    """Whether this text is a ticket for what is expected. Never raises.

    Args:
        text: whatever came.
        keys: the producer's valid keys.
        now: Unix time in seconds.
        expected: what the checking side knows.
    """
    data = _decode(text)
    if data is None:
        return Refused(Reason.MALFORMED, "not a ticket")
    payload, tag = data[:-TAG_BYTES], data[-TAG_BYTES:]
    try:
        packed = Packed(payload)
        if packed.byte() != VERSION:
            return Refused(Reason.MALFORMED, f"not a ticket of version {VERSION}")
        key_id = packed.text()
        key = next((key for key in keys if key.id == key_id), None)
        if key is None:
            return Refused(Reason.UNKNOWN_KEY, "signed with a key that is not valid here")
        if not hmac.compare_digest(tag, _tag(key, payload)):
            return Refused(Reason.FORGED, "the signature is wrong")
        ticket = _unpack(packed)
    except Malformed as malformed:
        return Refused(Reason.MALFORMED, str(malformed))
    return _timely(ticket, now) or _meant(ticket, expected) or Accepted(ticket, tag[:16].hex(), _left_s(ticket, now))


def _left_s(ticket: Ticket, now: float) -> float:
    return ticket.expires_ms / 1000 + SKEW_S - now


def _timely(ticket: Ticket, now: float) -> Refused | None:
    left_s = _left_s(ticket, now)
    if not left_s > 0:
        return Refused(Reason.EXPIRED, f"it expired {SKEW_S - left_s:.3f} s ago")
    if not left_s <= LIFE_S_MAX + 2 * SKEW_S:
        return Refused(Reason.LIVES_TOO_LONG, f"it has {left_s - SKEW_S:.0f} s to live, {LIFE_S_MAX:.0f} are allowed")
    return None


def _meant(ticket: Ticket, expected: Expected) -> Refused | None:
    if expected.producer is not None:
        if ticket.producer != expected.producer.instance:
            return Refused(Reason.OTHER_PRODUCER, f"it is for {ticket.producer}")
        if ticket.id.producer_epoch != expected.producer.epoch:
            return Refused(Reason.OTHER_EPOCH, f"it is for epoch {ticket.id.producer_epoch}")
    if expected.consumer is not None and ticket.consumer != expected.consumer:
        return Refused(Reason.OTHER_CONSUMER, f"it is for {ticket.consumer}")
    if expected.id is not None and ticket.id != expected.id:
        return Refused(Reason.OTHER_TRANSFER, f"it is for {ticket.id}")
    if expected.tenant is not None and ticket.tenant != expected.tenant:
        return Refused(Reason.OTHER_TENANT, "it is another tenant's")
    if expected.blocks is not None and not ticket.blocks.issuperset(expected.blocks):
        return Refused(Reason.OTHER_BLOCKS, "it does not permit these blocks")
    if ticket.fields != expected.fields:
        return Refused(Reason.OTHER_FIELDS, "it was signed for other transfer fields")
    return None


# --- the text --------------------------------------------------------------------------------------------------------


def _tag(key: Key, payload: bytes) -> bytes:
    return hmac.digest(key.secret, _DOMAIN + payload, hashlib.sha256)


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _decode(text: object) -> bytes | None:
    """The bytes of a text, if it is the one and only spelling of them."""
    if not isinstance(text, str) or not TAG_BYTES < len(text) <= TEXT_CHARS_MAX or not text.isascii():
        return None
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if len(data) > TAG_BYTES and _encode(data) == text else None


# --- the fields ------------------------------------------------------------------------------------------------------


def _pack(ticket: Ticket) -> bytes:
    if sum(len(group) for group in ticket.groups) > BLOCKS_MAX:
        raise ValueError(f"a ticket names at most {BLOCKS_MAX} blocks")
    packer = Packer()
    packer.text(ticket.id.request).number(ticket.id.attempt).number(ticket.id.producer_epoch)
    packer.text(ticket.tenant).text(ticket.producer).text(ticket.host).number(ticket.port).text(ticket.consumer)
    packer.number(ticket.tokens).number(ticket.expires_ms).number(ticket.nonce).text(ticket.fields)
    packer.number(len(ticket.groups))
    for group in ticket.groups:
        packer.blocks(group)
    return packer.done()


def _unpack(packed: Packed) -> Ticket:
    id_ = TransferId(RequestId(packed.text()), packed.number(), packed.number())
    tenant, producer, host, port, consumer = (
        packed.text(),
        packed.text(),
        packed.text(),
        packed.number(),
        packed.text(),
    )
    tokens, expires_ms, nonce, fields = packed.number(), packed.number(), packed.number(), packed.text()
    groups: list[Blocks] = []
    left = BLOCKS_MAX
    for _ in range(packed.number()):
        groups.append(packed.blocks(left))
        left -= len(groups[-1])
    packed.end()
    return Ticket(
        id=id_,
        tenant=tenant,
        producer=InstanceId(producer),
        host=host,
        port=port,
        consumer=InstanceId(consumer),
        groups=tuple(groups),
        tokens=tokens,
        expires_ms=expires_ms,
        nonce=nonce,
        fields=fields,
    )
