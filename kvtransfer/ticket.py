"""Signed permission for one consumer to take over one hold, or to have its blocks pushed to it.

The router signs; the producer checks, and takes each ticket only once. The signature covers the transfer, the tenant,
the producer (instance, epoch, host, port), the consumer, the block ids, the tokens that they hold, and an expiry. Each
checking instance has its own keys (`kvtransfer.keys`): it can check the tickets meant for it, and sign none for
another. Two keys are valid while a key is being replaced. Keys are values here; the caller reads them from a file.

A ticket for a guard (`kvtransfer.guard`, in front of an engine with vLLM's own connector) names no blocks. It signs a
digest of the transfer fields it travels with, block ids included, and so stays short. It is valid for exactly those
fields.

`check` is total: it answers any input, of any type and size, with a value and raises nothing. There is one algorithm
(HMAC-SHA256) and no field that names one. A text that differs in one character from the signed one is refused, also
where base64 would decode both to the same bytes.

A ticket cannot prevent a program that has the producer's memory keys from reading memory, as reads are one-sided. It
prevents the *use* of the bytes: a claim without a valid ticket is never confirmed.
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
from kvtransfer.packing import Blocks, MalformedBytes, Packed, Packer

VERSION = 1
SECRET_BYTES_MIN = 32
"""As long as the MAC: a shorter key would be easier to guess than the MAC."""
TAG_BYTES = 32
TEXT_CHARS_MAX = 400_000
"""Enough for `BLOCKS_MAX` scattered blocks; longer texts are refused unread."""
BLOCKS_MAX = 65_536
"""A million tokens at 16 a block."""
SKEW_S = 5.0
"""The largest difference of the router's and the producer's clocks: a ticket stays valid for so much longer than it
says."""
LIFE_S_MAX = 600.0
"""Tickets with a longer life are refused: a used ticket must be remembered for its whole life."""

_DOMAIN = b"baton-ticket\x00"
"""Separates tickets from MACs made with the same key for another purpose."""
_KEY_ID = re.compile(r"[A-Za-z0-9_-]{1,16}")


@dataclass(frozen=True, slots=True)
class TicketPeer:
    """One life of an instance: one start of its engine."""

    instance: InstanceId
    epoch: int


@dataclass(frozen=True, slots=True)
class SigningKey:
    """One signing key, of the fleet or of one instance. `id` names the key while two are valid; it is not secret."""

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
    """The signed values."""

    id: TransferId
    tenant: str
    producer: InstanceId
    host: str
    """Where the producer's endpoint listens, with `port`."""
    port: int
    consumer: InstanceId
    """The decode instance that may use the ticket; for a guard's ticket the instance to which it is sent."""
    groups: tuple[Blocks, ...]
    """The producer's blocks, one tuple for each KV group; empty for a push, whose blocks are not known yet."""
    tokens: int
    """The number of tokens whose KV the blocks hold."""
    expires_ms: int
    """Unix time in milliseconds."""
    nonce: int = 0
    """Distinguishes tickets of one router that are otherwise equal, for example two releases of one hold."""
    fields: str = ""
    """For a guard: the digest of the transfer fields that the ticket travels with (`cluster.wire.fields_digest`)."""

    @property
    def blocks(self) -> frozenset[int]:
        """All blocks that the ticket permits to read."""
        return frozenset(block for group in self.groups for block in group)


class Reason(StrEnum):
    """Why a ticket is refused: a counter's label with few values."""

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
    """A genuine ticket, valid here and now."""

    ticket: Ticket
    tag: str
    """The name of this ticket, different from all others'."""
    left_s: float
    """How much longer the ticket will be accepted, in seconds, the allowance for skew included."""


@dataclass(frozen=True, slots=True)
class TicketRefused:
    """A ticket that must not be acted upon. `because` says no more than the sender already knew."""

    reason: Reason
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTicket:
    """What the checking side knows. None: this side cannot know the value, and another check covers it."""

    producer: TicketPeer | None
    """The instance, and its life, that the ticket must be for: the checking producer, or the one a consumer would pull
    from."""
    consumer: InstanceId | None
    """The consumer that presents the ticket, by its connection; or the checking consumer's own name."""
    id: TransferId | None = None
    """The transfer named by the message that carries the ticket."""
    tenant: str | None = None
    blocks: Blocks | None = None
    """The blocks claimed with the ticket; they may be fewer than it permits."""
    fields: str = ""
    """The digest of the transfer fields beside the ticket. Empty where no guard checks: then a guard's ticket is
    refused."""


def sign(ticket: Ticket, key: SigningKey) -> str:
    """The ticket as text for ``kv_transfer_params``.

    Raises:
        ValueError: a field is out of the format's range. The router made the field, so this is a bug of Baton's.
    """
    payload = Packer().byte(VERSION).text(key.id).raw(_pack(ticket)).done()
    text = _encode(payload + _tag(key, payload))
    if len(text) > TEXT_CHARS_MAX:
        raise ValueError(f"a ticket of {len(text)} characters, at most {TEXT_CHARS_MAX} are accepted")
    return text


def check(text: object, keys: Collection[SigningKey], now: float, expected: ExpectedTicket) -> Accepted | TicketRefused:
    """Whether this text is a valid ticket for what is expected. Never raises.

    Args:
        text: any input.
        keys: the producer's valid keys.
        now: Unix time in seconds.
        expected: what the checking side knows.
    """
    data = _decode(text)
    if data is None:
        return TicketRefused(Reason.MALFORMED, "not a ticket")
    payload, tag = data[:-TAG_BYTES], data[-TAG_BYTES:]
    try:
        packed = Packed(payload)
        if packed.byte() != VERSION:
            return TicketRefused(Reason.MALFORMED, f"not a ticket of version {VERSION}")
        key_id = packed.text()
        key = next((key for key in keys if key.id == key_id), None)
        if key is None:
            return TicketRefused(Reason.UNKNOWN_KEY, "signed with a key that is not valid here")
        if not hmac.compare_digest(tag, _tag(key, payload)):
            return TicketRefused(Reason.FORGED, "the signature is wrong")
        ticket = _unpack(packed)
    except MalformedBytes as malformed:
        return TicketRefused(Reason.MALFORMED, str(malformed))
    return _timely(ticket, now) or _meant(ticket, expected) or Accepted(ticket, tag[:16].hex(), _left_s(ticket, now))


def _left_s(ticket: Ticket, now: float) -> float:
    return ticket.expires_ms / 1000 + SKEW_S - now


def _timely(ticket: Ticket, now: float) -> TicketRefused | None:
    left_s = _left_s(ticket, now)
    if not left_s > 0:
        return TicketRefused(Reason.EXPIRED, f"it expired {SKEW_S - left_s:.3f} s ago")
    if not left_s <= LIFE_S_MAX + 2 * SKEW_S:
        return TicketRefused(
            Reason.LIVES_TOO_LONG, f"it has {left_s - SKEW_S:.0f} s to live, {LIFE_S_MAX:.0f} are allowed"
        )
    return None


def _meant(ticket: Ticket, expected: ExpectedTicket) -> TicketRefused | None:
    if expected.producer is not None:
        if ticket.producer != expected.producer.instance:
            return TicketRefused(Reason.OTHER_PRODUCER, f"it is for {ticket.producer}")
        if ticket.id.producer_epoch != expected.producer.epoch:
            return TicketRefused(Reason.OTHER_EPOCH, f"it is for epoch {ticket.id.producer_epoch}")
    if expected.consumer is not None and ticket.consumer != expected.consumer:
        return TicketRefused(Reason.OTHER_CONSUMER, f"it is for {ticket.consumer}")
    if expected.id is not None and ticket.id != expected.id:
        return TicketRefused(Reason.OTHER_TRANSFER, f"it is for {ticket.id}")
    if expected.tenant is not None and ticket.tenant != expected.tenant:
        return TicketRefused(Reason.OTHER_TENANT, "it is another tenant's")
    if expected.blocks is not None and not ticket.blocks.issuperset(expected.blocks):
        return TicketRefused(Reason.OTHER_BLOCKS, "it does not permit these blocks")
    if ticket.fields != expected.fields:
        return TicketRefused(Reason.OTHER_FIELDS, "it was signed for other transfer fields")
    return None


# --- the text --------------------------------------------------------------------------------------------------------


def _tag(key: SigningKey, payload: bytes) -> bytes:
    return hmac.digest(key.secret, _DOMAIN + payload, hashlib.sha256)


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _decode(text: object) -> bytes | None:
    """The bytes of a text, if the text is their one canonical spelling."""
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
