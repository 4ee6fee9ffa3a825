"""What the two ledgers of a handoff say to each other.

Any of these may be lost, late, doubled or overtaken; none may then cost more than time. `serial` names one reservation
of one life of a consumer, so that an answer can never be taken for an answer to a later reservation of the same
transfer: without it a late "alive" could bless bytes that were read after the hold had gone.

The endpoint that carries them vouches for the sender (its messages bear a MAC) and checks tickets (`kvtransfer.ticket`)
before a `Claim` or a `Register` reaches the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cluster.ids import InstanceId, TransferId

Blocks = tuple[int, ...]
"""Ids of KV-cache blocks, unique within one instance. An engine with several KV groups numbers them through."""


class Peer(NamedTuple):
    """One life of an instance. `epoch` counts its starts."""

    instance: InstanceId
    epoch: int


# --- consumer to producer --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """Pull: I am about to read these blocks of yours. Sent along with the read, which does not wait for an answer."""

    id: TransferId
    serial: int
    blocks: Blocks
    ticket: str


@dataclass(frozen=True, slots=True)
class AskConfirm:
    """Pull: my read has ended; does the hold still stand? Only ever sent after the last byte has landed."""

    id: TransferId
    serial: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Pull: I still want it."""

    id: TransferId
    serial: int


@dataclass(frozen=True, slots=True)
class Release:
    """Pull: no read of mine is under way any more, and none will be."""

    id: TransferId
    serial: int


@dataclass(frozen=True, slots=True)
class Register:
    """Push: write the prompt's blocks from its `first` on into these blocks of mine.

    `link` is the connection whose memory keys hold for the write, and its number is never used again, not by a later
    life either: once the consumer has ended that link, a write posted with its keys fails, however late this comes.
    """

    id: TransferId
    serial: int
    first: int
    blocks: Blocks
    link: int
    ticket: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Push: I do not want it any more. Tell me when nothing of yours can write into my blocks."""

    id: TransferId
    serial: int


# --- producer to consumer --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClaimRefused:
    """Pull: what you read is not yours to use."""

    id: TransferId
    serial: int
    because: str


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Pull: the answer to `AskConfirm`. `alive`: the hold has stood without a gap since it was offered."""

    id: TransferId
    serial: int
    alive: bool
    because: str


@dataclass(frozen=True, slots=True)
class Begun:
    """Push: I may write from now on."""

    id: TransferId
    serial: int


@dataclass(frozen=True, slots=True)
class Done:
    """Push: nothing of mine writes into your blocks any more. `ok`: and the KV of `tokens` tokens is there."""

    id: TransferId
    serial: int
    ok: bool
    tokens: int
    because: str


ToProducer = AskConfirm | Heartbeat | Release | Withdraw
"""What a ledger takes as it comes; `Claim` and `Register` come to it only with a checked ticket."""

ToConsumer = ClaimRefused | Confirmation | Begun | Done

Message = Claim | Register | ToProducer | ToConsumer
