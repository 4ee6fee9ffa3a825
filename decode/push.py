"""The consumer's half of a push: its blocks that a producer writes into. Pure; see `kvtransfer.push`.

The consumer uses blocks only once the producer has said that everything was written. It frees blocks that the producer
may still be writing into only once the producer has said that no more writes come, or once the link was cut. The
request does not wait for that: the engine computes its prompt in other blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from cluster.ids import InstanceId, TransferId
from kvtransfer.packing import Blocks
from kvtransfer.push import (
    LATE,
    STALE,
    STRANGER,
    AbortPush,
    Begun,
    Book,
    CutLink,
    FreeBlocks,
    ImpossibleMove,
    LinkEnded,
    PeerLost,
    PeerSeen,
    PushDone,
    PushEntry,
    PushRefused,
    PushReport,
    PushTerms,
    PushTick,
    Received,
    Register,
    Send,
    Withdraw,
)
from kvtransfer.rows import Table, TransitionRow
from kvtransfer.ticket import TicketPeer


class PushPullState(StrEnum):
    """The state of blocks that are set aside for a push."""

    RESERVED = "reserved"
    """The producer was told where the blocks are."""
    WRITING = "writing"
    """The producer has said that it has begun."""
    QUARANTINED = "quarantined"
    """The blocks are not wanted any more, and the producer may still write into them."""
    DONE = "done"
    """Everything was written: the blocks belong to the request."""
    FAILED = "failed"
    CLOSED = "closed"


class PushPullCause(StrEnum):
    """What moves the blocks to another state."""

    BEGUN = "begun"
    WRITTEN = "written"
    NOT_WRITTEN = "not written"
    ABORTED = "aborted"
    TIME_UP = "time up"
    AGAIN = "again"
    """Time to repeat the message of this state: the registration, or the withdrawal."""
    PEER_LOST = "peer lost"
    LINK_ENDED = "link ended"


class PushPullAct(StrEnum):
    """The acts on the way. Blocks leave at a final state: to the request at `DONE`, to the pool at all others."""

    REGISTER = "register"
    WITHDRAW = "withdraw"
    RECOMPUTE = "recompute"
    CUT_LINK = "cut link"
    REPORT = "report"


_WANTED = {
    PushPullCause.WRITTEN: TransitionRow(PushPullState.DONE),
    PushPullCause.NOT_WRITTEN: TransitionRow(PushPullState.FAILED, (PushPullAct.RECOMPUTE,)),
    PushPullCause.ABORTED: TransitionRow(PushPullState.QUARANTINED, (PushPullAct.WITHDRAW,)),
    PushPullCause.PEER_LOST: TransitionRow(PushPullState.QUARANTINED, (PushPullAct.WITHDRAW, PushPullAct.RECOMPUTE)),
    PushPullCause.LINK_ENDED: TransitionRow(PushPullState.FAILED, (PushPullAct.WITHDRAW, PushPullAct.RECOMPUTE)),
    PushPullCause.TIME_UP: TransitionRow(
        PushPullState.QUARANTINED, (PushPullAct.WITHDRAW, PushPullAct.RECOMPUTE, PushPullAct.REPORT)
    ),
}

ROWS: Table[PushPullState, PushPullCause, PushPullAct] = {
    PushPullState.RESERVED: {
        PushPullCause.BEGUN: TransitionRow(PushPullState.WRITING),
        PushPullCause.AGAIN: TransitionRow(PushPullState.RESERVED, (PushPullAct.REGISTER,)),
        **_WANTED,
    },
    PushPullState.WRITING: _WANTED,
    PushPullState.QUARANTINED: {
        PushPullCause.WRITTEN: TransitionRow(PushPullState.CLOSED),
        PushPullCause.NOT_WRITTEN: TransitionRow(PushPullState.CLOSED),
        PushPullCause.LINK_ENDED: TransitionRow(PushPullState.CLOSED),
        PushPullCause.AGAIN: TransitionRow(PushPullState.QUARANTINED, (PushPullAct.WITHDRAW,)),
        PushPullCause.TIME_UP: TransitionRow(PushPullState.QUARANTINED, (PushPullAct.CUT_LINK, PushPullAct.REPORT)),
    },
}
"""All moves."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Leg 2 has arrived while the producer still computes: the producer is to write into `blocks`, on `link`.

    `blocks` are this consumer's, for the prompt's blocks from number `first` on; the earlier ones are here already.
    `tokens` is the prompt's length.
    """

    id: TransferId
    producer: InstanceId
    first: int
    blocks: Blocks
    tokens: int
    link: int
    ticket: str


@dataclass(frozen=True, slots=True)
class Use:
    """These blocks hold the KV of the request's first `tokens` tokens, and belong to the request from now on."""

    id: TransferId
    blocks: Blocks
    tokens: int


@dataclass(frozen=True, slots=True)
class Recompute:
    """No KV will arrive: the engine computes the prompt in other blocks. Sent at most once."""

    id: TransferId
    because: str


Event = Reserve | Received | AbortPush | PeerLost | PeerSeen | LinkEnded | PushTick


@dataclass(slots=True, kw_only=True)
class _Reservation(PushEntry[PushPullState]):
    ticket: str


class Reservations:
    """The reservations of one life of one consumer."""

    def __init__(self, epoch: int, terms: PushTerms | None = None) -> None:
        self.terms: Final = terms or PushTerms()
        self.book: Final = Book[_Reservation, PushPullState, PushPullCause, PushPullAct](
            ROWS, frozenset(), self._act, self._limits, self._end, (PushPullCause.TIME_UP, PushPullCause.AGAIN)
        )
        self._serial = epoch << 32  # different in each life: an answer to a former life matches nothing
        self._epochs: dict[InstanceId, int] = {}
        """The latest known life of each producer."""

    def next_wakeup(self) -> float | None:
        """The time of the next limit or repetition."""
        return self.book.next_wakeup()

    def handle(self, event: Event, now: float) -> list[Any]:
        """Apply one event, after the effects of time up to `now`.

        Raises:
            ImpossibleMove: our own engine reported an impossible event.
        """
        self.book.ring(now)
        return self.book.with_owed(self._fold(event, now))

    def _fold(self, event: Event, now: float) -> list[Any]:
        match event:
            case Reserve():
                return self._reserve(event, now)
            case Received(by, Begun() | PushDone() as message):
                return self._heard(by, message, now)
            case AbortPush(id_, because):
                entry = self.book.entries.get(id_)
                return (
                    self.book.ignore(LATE)
                    if entry is None
                    else self.book.move(entry, PushPullCause.ABORTED, now, because)
                )
            case PeerLost(instance):
                lost = self.book.with_peer(instance)
                return self.book.move_all(lost, PushPullCause.PEER_LOST, now, f"{instance} does not answer")
            case PeerSeen(peer):
                return self._seen(peer, now)
            case LinkEnded(instance):
                ended = self.book.with_peer(instance)
                return self.book.move_all(ended, PushPullCause.LINK_ENDED, now, f"the link with {instance} ended")
            case _:
                return []

    def _seen(self, peer: TicketPeer, now: float) -> list[Any]:
        """A producer that restarted has lost its former life's registrations."""
        known = self._epochs.pop(peer.instance, peer.epoch)
        self._epochs[peer.instance] = max(known, peer.epoch)  # moved to the end: the longest unseen stand first
        if len(self._epochs) > self.terms.peers_max:
            del self._epochs[next(iter(self._epochs))]
        if peer.epoch < known:
            return self.book.ignore(STALE)
        former = self.book.with_former(peer)
        return self.book.move_all(former, PushPullCause.PEER_LOST, now, f"{peer.instance} restarted")

    def _reserve(self, event: Reserve, now: float) -> list[Any]:
        self._serial += 1
        because = self._cannot_reserve(event)
        if because is not None:
            self.book.ignore(f"reservation refused: {because}")
            told = [] if event.id in self.book.entries else [Send(event.producer, Withdraw(event.id, self._serial))]
            return [PushRefused(event.id, because), *told, FreeBlocks(event.id, event.blocks, because)]
        taken = {block for each in self.book.entries.values() for block in each.blocks}
        if not event.blocks or len(set(event.blocks)) < len(event.blocks) or not taken.isdisjoint(event.blocks):
            raise ImpossibleMove(f"{event.id}: at least one block, and none that is reserved already")
        entry = _Reservation(
            id=event.id,
            state=PushPullState.RESERVED,
            peer=TicketPeer(event.producer, event.id.producer_epoch),
            serial=self._serial,
            blocks=event.blocks,
            tokens=event.tokens,
            first=event.first,
            link=event.link,
            ticket=event.ticket,
        )
        self.book.add(entry, now)
        return self._act(entry, PushPullAct.REGISTER, now, "reserved")

    def _cannot_reserve(self, event: Reserve) -> str | None:
        if event.id in self.book.entries:
            return "it is reserved already"
        if event.id.producer_epoch < self._epochs.get(event.producer, 0):
            return STALE
        return "there are too many" if len(self.book.entries) >= self.terms.entries_max else None

    def _heard(self, by: TicketPeer, message: Begun | PushDone, now: float) -> list[Any]:
        entry = self.book.entries.get(message.id)
        if entry is None or entry.serial != message.serial or entry.peer is None:
            return self.book.ignore(LATE)
        if by.instance != entry.peer.instance:
            return self.book.ignore(STRANGER)
        if by.epoch != entry.peer.epoch:  # a later life cannot answer for the writes of an earlier one
            return self.book.ignore(STALE)
        if isinstance(message, Begun):
            return self.book.move(entry, PushPullCause.BEGUN, now, "begun")
        written = message.ok and message.tokens > 0
        if written:
            entry.tokens = min(entry.tokens, message.tokens)
        return self.book.move(
            entry, PushPullCause.WRITTEN if written else PushPullCause.NOT_WRITTEN, now, message.because
        )

    def _act(self, entry: _Reservation, act: PushPullAct, now: float, because: str) -> list[Any]:
        assert entry.peer is not None, "a reservation that was sent has a producer"
        to = entry.peer.instance
        match act:
            case PushPullAct.REGISTER:
                told = Register(entry.id, entry.serial, entry.first, entry.blocks, entry.link, entry.ticket)
                return [Send(to, told)]
            case PushPullAct.WITHDRAW:
                return [Send(to, Withdraw(entry.id, entry.serial))]
            case PushPullAct.RECOMPUTE:
                return [Recompute(entry.id, because)]
            case PushPullAct.CUT_LINK:
                entry.cuts += 1
                return [CutLink(to, because)]
            case PushPullAct.REPORT:
                return [PushReport(entry.id, because)]

    def _limits(self, state: PushPullState) -> tuple[float | None, float | None]:
        if state is PushPullState.RESERVED:
            return self.terms.reserve_s_max, self.terms.heartbeat_s
        if state is PushPullState.QUARANTINED:
            return self.terms.cut_s, self.terms.ask_again_s
        return None, None  # `WRITING` has the time that `RESERVED` has left

    def _end(self, entry: _Reservation, because: str) -> list[Any]:
        """The only place where blocks leave."""
        if entry.state is PushPullState.DONE:
            return [Use(entry.id, entry.blocks, entry.tokens)]
        return [FreeBlocks(entry.id, entry.blocks, because)]
