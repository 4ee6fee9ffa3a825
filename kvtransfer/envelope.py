"""What the two endpoints' notifications look like: a ledger's message, who says it to whom, and a MAC. Pure and total.

The carrier does not vouch for a sender, and on stock vLLM a notification ``id:1`` from anybody frees a peer's blocks.
Here each pair of instances has a key of its own, and the MAC is over sender, its life, receiver, its life, a number
that the sender never uses twice, and the message. So a note counts once, in the two lives it was made for; whatever
else comes is counted by why it was refused, and nothing raises.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import StrEnum

from cluster.ids import InstanceId, RequestId, TransferId
from kvtransfer.messages import (
    AskConfirm,
    Begun,
    Claim,
    ClaimRefused,
    Confirmation,
    Done,
    Heartbeat,
    Message,
    Peer,
    Register,
    Release,
    Withdraw,
)
from kvtransfer.packing import Malformed, Packed, Packer
from kvtransfer.ticket import BLOCKS_MAX, TEXT_CHARS_MAX

VERSION = 1
TAG_BYTES = 16
"""Half of an HMAC-SHA256: a guess succeeds once in 2^128, and notes are small."""
NOTE_BYTES_MAX = TEXT_CHARS_MAX + 4 * BLOCKS_MAX + 4096
"""A claim with the longest ticket and the most scattered blocks."""
WINDOW = 1024
"""Notes of one sender that may overtake each other. What is older than this many others is refused unread."""
PEERS_MAX = 4096
"""Senders whose numbers are remembered, the longest silent forgotten first."""
KEY_BYTES_MIN = 32

_DOMAIN = b"baton-note\x00"
_BECAUSE_BYTES_MAX = 200

PairKey = Callable[[InstanceId], bytes | None]
"""The key that we share with an instance; None: we have none, and neither send it anything nor believe it."""


class Fault(StrEnum):
    """Why a note is refused: a label of few values for a counter."""

    MALFORMED = "malformed"
    NO_KEY = "from an instance that we share no key with"
    FORGED = "forged, or for another life"
    REPEATED = "came before, or too late to tell"


# --- the message -----------------------------------------------------------------------------------------------------

_KINDS: tuple[type[Message], ...] = (
    Claim,
    AskConfirm,
    Heartbeat,
    Release,
    Register,
    Withdraw,
    ClaimRefused,
    Confirmation,
    Begun,
    Done,
)
"""By number. New ones go to the end; a change of one is a new `VERSION`."""


def pack(message: Message) -> bytes:
    """A message as bytes.

    Raises:
        ValueError: a value out of the range of the format.
    """
    packer = Packer().byte(_KINDS.index(type(message)))
    packer.text(message.id.request).number(message.id.attempt).number(message.id.producer_epoch)
    packer.number(message.serial)
    match message:
        case Claim():
            _ticket(packer.blocks(message.blocks), message.ticket)
        case Register():
            _ticket(packer.number(message.first).number(message.link).blocks(message.blocks), message.ticket)
        case ClaimRefused():
            packer.text(_short(message.because))
        case Confirmation():
            packer.byte(message.alive).text(_short(message.because))
        case Done():
            packer.byte(message.ok).number(message.tokens).text(_short(message.because))
        case _:
            pass
    return packer.done()


def unpack(data: bytes) -> Message:
    """The message that `pack` made these bytes of.

    Raises:
        Malformed: it made no such bytes. Nothing else is raised.
    """
    packed = Packed(data)
    kind = packed.byte()
    if kind >= len(_KINDS):
        raise Malformed("a message of a kind that is not known here")
    id_ = TransferId(RequestId(packed.text()), packed.number(), packed.number())
    serial = packed.number()
    message = _rest(_KINDS[kind], id_, serial, packed)
    packed.end()
    return message


def _rest(kind: type[Message], id_: TransferId, serial: int, packed: Packed) -> Message:
    if kind is Claim:
        blocks = packed.blocks(BLOCKS_MAX)
        return Claim(id_, serial, blocks, _read_ticket(packed))
    if kind is Register:
        first, link, blocks = packed.number(), packed.number(), packed.blocks(BLOCKS_MAX)
        return Register(id_, serial, first, blocks, link, _read_ticket(packed))
    if kind is ClaimRefused:
        return ClaimRefused(id_, serial, packed.text())
    if kind is Confirmation:
        return Confirmation(id_, serial, alive=_flag(packed), because=packed.text())
    if kind is Done:
        return Done(id_, serial, ok=_flag(packed), tokens=packed.number(), because=packed.text())
    return kind(id_, serial)  # type: ignore[call-arg] # the others have nothing else


def _ticket(packer: Packer, text: str) -> None:
    data = text.encode()
    if len(data) > TEXT_CHARS_MAX:
        raise ValueError("a ticket that is too long")
    packer.number(len(data)).raw(data)


def _read_ticket(packed: Packed) -> str:
    length = packed.number()
    if length > TEXT_CHARS_MAX:
        raise Malformed("a ticket that is too long")
    try:
        return packed.raw(length).decode()
    except UnicodeDecodeError:
        raise Malformed("a ticket that is no text") from None


def _flag(packed: Packed) -> bool:
    value = packed.byte()
    if value > 1:
        raise Malformed("neither yes nor no")
    return value == 1


def _short(text: str) -> str:
    return text.encode("utf-8", "replace")[:_BECAUSE_BYTES_MAX].decode("utf-8", "ignore")


# --- the envelope ----------------------------------------------------------------------------------------------------


class _Window:
    """Which numbers of one sender's life came."""

    __slots__ = ("_highest", "_seen")

    def __init__(self) -> None:
        self._highest = 0
        self._seen = 0
        """Bit `n`: the number `highest - n` came."""

    def take(self, number: int) -> bool:
        """Whether this number is new; it is not, from then on."""
        if number > self._highest:
            shift = number - self._highest
            self._seen = 1 if shift >= WINDOW else (self._seen << shift | 1) & (1 << WINDOW) - 1
            self._highest = number
            return True
        bit = self._highest - number
        if number < 1 or bit >= WINDOW or self._seen >> bit & 1:
            return False
        self._seen |= 1 << bit
        return True


class Envelopes:
    """One life of one instance writing to others and reading what comes."""

    def __init__(self, me: Peer, key: PairKey) -> None:
        self.me = me
        self.refused: Counter[Fault] = Counter()
        self._key = key
        self._number = 0
        self._windows: OrderedDict[Peer, _Window] = OrderedDict()

    def close(self, message: Message, to: Peer) -> bytes | None:
        """A note for one life of an instance; None where we share no key with it.

        Raises:
            ValueError: a value out of the range of the format: a bug of ours.
        """
        key = self._key(to.instance)
        if key is None:
            return None
        self._number += 1
        packer = Packer().byte(VERSION).text(self.me.instance).number(self.me.epoch).number(self._number)
        data = packer.raw(pack(message)).done()
        return data + _tag(key, to, data)

    def read(self, note: bytes) -> tuple[Peer, Message] | Fault:
        """Who says what; or why it is not believed, which is counted."""
        found = self._read(note)
        if isinstance(found, Fault):
            self.refused[found] += 1
        return found

    def _read(self, note: bytes) -> tuple[Peer, Message] | Fault:
        if not TAG_BYTES < len(note) <= NOTE_BYTES_MAX:
            return Fault.MALFORMED
        data, tag = note[:-TAG_BYTES], note[-TAG_BYTES:]
        try:
            packed = Packed(data)
            if packed.byte() != VERSION:
                return Fault.MALFORMED
            by = Peer(InstanceId(packed.text()), packed.number())
            number = packed.number()
            key = self._key(by.instance)
            if key is None:
                return Fault.NO_KEY
            if not hmac.compare_digest(tag, _tag(key, self.me, data)):
                return Fault.FORGED
            message = unpack(packed.rest())
        except Malformed:
            return Fault.MALFORMED
        return (by, message) if self._window(by).take(number) else Fault.REPEATED

    def _window(self, by: Peer) -> _Window:
        """Only ever for a genuine sender: strangers cannot push others out."""
        window = self._windows.setdefault(by, _Window())
        self._windows.move_to_end(by)
        if len(self._windows) > PEERS_MAX:
            self._windows.popitem(last=False)
        return window


def _tag(key: bytes, to: Peer, data: bytes) -> bytes:
    if len(key) < KEY_BYTES_MIN:
        raise ValueError(f"a pair's key has at least {KEY_BYTES_MIN} bytes")
    head = Packer().text(to.instance).number(to.epoch).done()
    return hmac.digest(key, _DOMAIN + head + data, hashlib.sha256)[:TAG_BYTES]
