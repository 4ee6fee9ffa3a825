"""The producer's half of a push: which blocks it writes, and when they are free. Pure; see `kvtransfer.push`.

The producer frees blocks that are being written *from* only once its own writes have ended or the link was cut: a
posted write cannot be taken back. And it says "no more writes of mine" only where a late registration will be refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from cluster.ids import InstanceId, TransferId
from kvtransfer.packing import Blocks
from kvtransfer.push import (
    LATE,
    REPEATED,
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
    Proof,
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
from kvtransfer.timers import TimedKeys


class PushHoldState(StrEnum):
    """The state of a prompt that may be pushed."""

    COMPUTING = "computing"
    """The engine owns the blocks; no consumer has registered."""
    OFFERED = "offered"
    """Computed, under its lease; no consumer has registered."""
    STREAMING = "streaming"
    """Written layer by layer while it is computed."""
    WRITING = "writing"
    """Computed; writes are under way."""
    WRITTEN = "written"
    """All writes ended well before the engine reported the prompt as computed."""
    DRAINING = "draining"
    """No consumer wants the push any more, but writes under way cannot be undone, so neither side may free its blocks
    yet."""
    RELEASED = "released"


class PushHoldCause(StrEnum):
    """What moves a prompt to another state."""

    FILLED = "filled"
    WRITES_ENDED = "writes ended"
    WRITES_FAILED = "writes failed"
    REGISTERED = "registered"
    WITHDRAWN = "withdrawn"
    ABORTED = "aborted"
    TIME_UP = "time up"
    AGAIN = "again"
    PEER_LOST = "peer lost"
    LINK_ENDED = "link ended"


class PushHoldAct(StrEnum):
    """The acts on the way. Blocks leave where `RELEASED` is entered, and only there."""

    OFFER = "offer"
    POST_WRITE = "post write"
    CUT_LINK = "cut link"
    REPORT = "report"
    SAY_BEGUN = "say begun"
    SAY_WRITTEN = "say written"
    SAY_NOT_WRITTEN = "say not written"


ROWS: Table[PushHoldState, PushHoldCause, PushHoldAct] = {
    PushHoldState.COMPUTING: {
        PushHoldCause.FILLED: TransitionRow(PushHoldState.OFFERED, (PushHoldAct.OFFER,)),
        PushHoldCause.REGISTERED: TransitionRow(
            PushHoldState.STREAMING, (PushHoldAct.POST_WRITE, PushHoldAct.SAY_BEGUN)
        ),
        PushHoldCause.WITHDRAWN: TransitionRow(PushHoldState.RELEASED, (PushHoldAct.SAY_NOT_WRITTEN,)),
        PushHoldCause.ABORTED: TransitionRow(PushHoldState.RELEASED),
        PushHoldCause.TIME_UP: TransitionRow(PushHoldState.RELEASED, (PushHoldAct.REPORT,)),
    },
    PushHoldState.OFFERED: {
        PushHoldCause.REGISTERED: TransitionRow(PushHoldState.WRITING, (PushHoldAct.POST_WRITE, PushHoldAct.SAY_BEGUN)),
        PushHoldCause.WITHDRAWN: TransitionRow(PushHoldState.RELEASED, (PushHoldAct.SAY_NOT_WRITTEN,)),
        PushHoldCause.ABORTED: TransitionRow(PushHoldState.RELEASED),
        PushHoldCause.TIME_UP: TransitionRow(PushHoldState.RELEASED, (PushHoldAct.REPORT,)),
    },
    PushHoldState.STREAMING: {
        PushHoldCause.FILLED: TransitionRow(PushHoldState.WRITING),
        PushHoldCause.WRITES_ENDED: TransitionRow(PushHoldState.WRITTEN),
        PushHoldCause.WRITES_FAILED: TransitionRow(PushHoldState.RELEASED, (PushHoldAct.SAY_NOT_WRITTEN,)),
        PushHoldCause.WITHDRAWN: TransitionRow(PushHoldState.DRAINING),
        PushHoldCause.ABORTED: TransitionRow(PushHoldState.DRAINING),
        PushHoldCause.PEER_LOST: TransitionRow(PushHoldState.DRAINING),
        PushHoldCause.LINK_ENDED: TransitionRow(PushHoldState.RELEASED, (PushHoldAct.SAY_NOT_WRITTEN,)),
        PushHoldCause.TIME_UP: TransitionRow(PushHoldState.DRAINING, (PushHoldAct.REPORT,)),
    },
    PushHoldState.WRITING: {
        PushHoldCause.WRITES_ENDED: TransitionRow(PushHoldState.RELEASED, (PushHoldAct.SAY_WRITTEN,)),
        PushHoldCause.WRITES_FAILED: TransitionRow(PushHoldState.RELEASED, (PushHoldAct.SAY_NOT_WRITTEN,)),
        PushHoldCause.WITHDRAWN: TransitionRow(PushHoldState.DRAINING),
        PushHoldCause.ABORTED: TransitionRow(PushHoldState.DRAINING),
        PushHoldCause.PEER_LOST: TransitionRow(PushHoldState.DRAINING),
        PushHoldCause.LINK_ENDED: TransitionRow(PushHoldState.RELEASED, (PushHoldAct.SAY_NOT_WRITTEN,)),
        PushHoldCause.TIME_UP: TransitionRow(PushHoldState.DRAINING, (PushHoldAct.REPORT,)),
    },
    PushHoldState.WRITTEN: {
        PushHoldCause.FILLED: TransitionRow(PushHoldState.RELEASED, (PushHoldAct.SAY_WRITTEN,)),
        PushHoldCause.WITHDRAWN: TransitionRow(PushHoldState.RELEASED, (PushHoldAct.SAY_NOT_WRITTEN,)),
        PushHoldCause.ABORTED: TransitionRow(PushHoldState.RELEASED, (PushHoldAct.SAY_NOT_WRITTEN,)),
        PushHoldCause.PEER_LOST: TransitionRow(PushHoldState.RELEASED, (PushHoldAct.SAY_NOT_WRITTEN,)),
        PushHoldCause.LINK_ENDED: TransitionRow(PushHoldState.RELEASED, (PushHoldAct.SAY_NOT_WRITTEN,)),
        PushHoldCause.TIME_UP: TransitionRow(PushHoldState.RELEASED, (PushHoldAct.SAY_NOT_WRITTEN, PushHoldAct.REPORT)),
    },
    PushHoldState.DRAINING: {
        PushHoldCause.FILLED: TransitionRow(PushHoldState.DRAINING),
        PushHoldCause.WRITES_ENDED: TransitionRow(PushHoldState.RELEASED, (PushHoldAct.SAY_NOT_WRITTEN,)),
        PushHoldCause.WRITES_FAILED: TransitionRow(PushHoldState.RELEASED, (PushHoldAct.SAY_NOT_WRITTEN,)),
        PushHoldCause.LINK_ENDED: TransitionRow(PushHoldState.RELEASED, (PushHoldAct.SAY_NOT_WRITTEN,)),
        PushHoldCause.TIME_UP: TransitionRow(PushHoldState.DRAINING, (PushHoldAct.CUT_LINK, PushHoldAct.REPORT)),
    },
}
"""All moves."""

OWN_CAUSES: Final = frozenset({PushHoldCause.FILLED, PushHoldCause.WRITES_ENDED, PushHoldCause.WRITES_FAILED})
"""Causes from our own process. Without a row they are a bug of Baton's."""


@dataclass(frozen=True, slots=True)
class OpenHold:
    """Leg 1 has arrived."""

    id: TransferId
    tenant: str


@dataclass(frozen=True, slots=True)
class Filled:
    """The prompt is computed: from here this half owns its blocks. Comes once, also for an aborted prompt."""

    id: TransferId
    blocks: Blocks
    tokens: int


@dataclass(frozen=True, slots=True)
class WritesEnded:
    """Every write that `PostWrite` led to has ended, at the consumer's memory. `ok`: all of them succeeded."""

    id: TransferId
    ok: bool


@dataclass(frozen=True, slots=True)
class Registered:
    """A `Register` has arrived, with a genuine, unexpired ticket for this producer and this consumer."""

    by: TicketPeer
    register: Register
    proof: Proof


@dataclass(frozen=True, slots=True)
class Offer:
    """Answer leg 1 with this hold. A `Filled` without this effect has nothing to hand over."""

    id: TransferId
    blocks: Blocks
    tokens: int


@dataclass(frozen=True, slots=True)
class PostWrite:
    """Write the prompt's blocks from `first` on into `remote` of `consumer` as they are computed, with the keys of
    `link`.

    Answer with `WritesEnded`. A hold that is not filled yet has no `local`: the engine still owns its blocks.
    """

    id: TransferId
    serial: int
    consumer: InstanceId
    first: int
    local: Blocks
    remote: Blocks
    link: int


Event = OpenHold | Filled | WritesEnded | Registered | Received | AbortPush | PeerLost | PeerSeen | LinkEnded | PushTick


@dataclass(slots=True, kw_only=True)
class _Hold(PushEntry[PushHoldState]):
    tenant: str
    place: Blocks = ()


class Pushes:
    """The pushes of one life of one producer. `epoch` counts the producer's starts, and is part of the id of each of
    its holds.
    """

    def __init__(self, epoch: int, terms: PushTerms | None = None) -> None:
        self.epoch: Final = epoch
        self.terms: Final = terms or PushTerms()
        self.book: Final = Book[_Hold, PushHoldState, PushHoldCause, PushHoldAct](
            ROWS, OWN_CAUSES, self._act, self._limits, self._end, (PushHoldCause.TIME_UP, PushHoldCause.AGAIN)
        )
        self._over: Final[TimedKeys[TransferId]] = TimedKeys(self.terms.remembered_max)
        """Transfers that are over: no second hold is made under their ids."""
        self._spent: Final[TimedKeys[str]] = TimedKeys(self.terms.remembered_max)
        self._now = 0.0

    def next_wakeup(self) -> float | None:
        """The time of the next limit."""
        return self.book.next_wakeup()

    def handle(self, event: Event, now: float) -> list[Any]:
        """Apply one event, after the effects of time up to `now`.

        Raises:
            ImpossibleMove: our own engine reported an impossible event.
        """
        self._now = now
        self.book.ring(now)
        return self.book.with_owed(self._fold(event, now))

    def _fold(self, event: Event, now: float) -> list[Any]:
        match event:
            case OpenHold(id_, tenant):
                return self._open(id_, tenant, now)
            case Filled():
                return self._filled(event, now)
            case WritesEnded(id_, ok):
                cause = PushHoldCause.WRITES_ENDED if ok else PushHoldCause.WRITES_FAILED
                return self._move(id_, cause, now, str(cause))
            case Registered():
                return self._registered(event, now)
            case Received(by, Withdraw() as message):
                return self._withdrawn(by, message, now)
            case AbortPush(id_, because):
                self._give_up_early(id_, now)
                return self._move(id_, PushHoldCause.ABORTED, now, because)
            case PeerLost(instance):
                lost = self.book.with_peer(instance)
                return self.book.move_all(lost, PushHoldCause.PEER_LOST, now, f"{instance} does not answer")
            case PeerSeen(peer):
                former = self.book.with_former(peer)
                return self.book.move_all(former, PushHoldCause.PEER_LOST, now, f"{peer.instance} restarted")
            case LinkEnded(instance):
                ended = self.book.with_peer(instance)
                return self.book.move_all(ended, PushHoldCause.LINK_ENDED, now, f"the link with {instance} ended")
            case _:
                return []

    # --- our engine says ---------------------------------------------------------------------------------------------

    def _open(self, id_: TransferId, tenant: str, now: float) -> list[Any]:
        because = self._cannot_open(id_, now)
        if because is not None:
            self.book.ignore(f"hold refused: {because}")
            return [PushRefused(id_, because)]
        self.book.add(_Hold(id=id_, state=PushHoldState.COMPUTING, tenant=tenant), now)
        return []

    def _cannot_open(self, id_: TransferId, now: float) -> str | None:
        if id_.producer_epoch != self.epoch:
            return STALE
        if id_ in self.book.entries:
            return "it is held already"
        if self._over.knows(id_, now):
            return "it is over"
        full = len(self.book.entries) >= self.terms.entries_max or self._over.room(now) <= len(self.book.entries)
        return "there are too many" if full else None

    def _filled(self, event: Filled, now: float) -> list[Any]:
        hold = self.book.entries.get(event.id)
        if hold is None:  # given up during its last step
            self.book.ignore(LATE)
            return [FreeBlocks(event.id, event.blocks, "given up before it was computed")]
        self.book.allows(hold, PushHoldCause.FILLED)  # raises before any change
        if hold.blocks or not event.blocks:
            raise ImpossibleMove(f"{event.id}: blocks are given once, and at least one")
        hold.blocks, hold.tokens = event.blocks, event.tokens
        return self.book.move(hold, PushHoldCause.FILLED, now, "computed")

    def _move(self, id_: TransferId, cause: PushHoldCause, now: float, because: str) -> list[Any]:
        hold = self.book.entries.get(id_)
        return self.book.ignore(LATE) if hold is None else self.book.move(hold, cause, now, because)

    def _give_up_early(self, id_: TransferId, now: float) -> bool:
        """A transfer is over before this half has a hold for it. False: there is no room to remember that."""
        if id_.producer_epoch != self.epoch:
            return False
        if not self._over.knows(id_, now) and self._over.room(now) <= len(self.book.entries):
            return False
        return id_ in self.book.entries or self._over.remember(id_, now + self.terms.remember_s, now)

    # --- consumers say -----------------------------------------------------------------------------------------------

    def _registered(self, event: Registered, now: float) -> list[Any]:
        by, register = event.by, event.register
        hold = self.book.entries.get(register.id)
        if hold is None:
            self.book.ignore(LATE)
            over = self._over.knows(register.id, now)  # else leg 1 may still be on its way: the consumer will ask again
            return [_nothing_written(by, register.id, register.serial, "it is over")] if over else []
        if (hold.peer, hold.serial) == (by, register.serial):
            return self.book.ignore(REPEATED)
        because = self._cannot_serve(hold, event.proof, now)
        # The consumer frees its blocks on a refusal, so the refusal must last: the ticket is spent, or no answer is
        # sent.
        spent = self._spent.remember(event.proof.tag, now + event.proof.left_s, now)
        if because is not None:
            self.book.ignore(f"registration refused: {because}")
            return [_nothing_written(by, register.id, register.serial, because)] if spent else []
        hold.peer, hold.serial = by, register.serial
        hold.first, hold.place, hold.link = register.first, register.blocks, register.link
        return self.book.move(hold, PushHoldCause.REGISTERED, now, "registered")

    def _cannot_serve(self, hold: _Hold, proof: Proof, now: float) -> str | None:
        if self._spent.knows(proof.tag, now):
            return "its ticket was used before"
        if hold.tenant != proof.tenant:
            return "its ticket is another tenant's"
        if hold.peer is not None:
            return "another consumer has it"
        return "no more tickets can be remembered" if self._spent.room(now) < 1 else None

    def _withdrawn(self, by: TicketPeer, message: Withdraw, now: float) -> list[Any]:
        hold = self.book.entries.get(message.id)
        if hold is None:
            self.book.ignore(LATE)
            # "No more writes of mine" must last: a late registration has to find the transfer over.
            over = self._give_up_early(message.id, now)
            return [_nothing_written(by, message.id, message.serial, "it is over")] if over else []
        if hold.peer is not None and (hold.peer.instance != by.instance or message.serial < hold.serial):
            return self.book.ignore(STRANGER)
        hold.peer, hold.serial = by, message.serial
        return self.book.move(hold, PushHoldCause.WITHDRAWN, now, "withdrawn")

    # --- what the table's words mean ---------------------------------------------------------------------------------

    def _act(self, hold: _Hold, act: PushHoldAct, now: float, because: str) -> list[Any]:
        if act is PushHoldAct.OFFER:
            return [Offer(hold.id, hold.blocks, hold.tokens)]
        if act is PushHoldAct.REPORT:
            return [PushReport(hold.id, because)]
        peer, serial = hold.peer, hold.serial
        assert peer is not None, "a push has a consumer"
        if act is PushHoldAct.POST_WRITE:
            return [PostWrite(hold.id, serial, peer.instance, hold.first, hold.blocks, hold.place, hold.link)]
        if act is PushHoldAct.CUT_LINK:
            hold.cuts += 1
            return [CutLink(peer.instance, because)]
        if act is PushHoldAct.SAY_BEGUN:
            return [Send(peer.instance, Begun(hold.id, serial))]
        if act is PushHoldAct.SAY_WRITTEN:
            return [Send(peer.instance, PushDone(hold.id, serial, ok=True, tokens=hold.tokens, because=because))]
        return [_nothing_written(peer, hold.id, serial, because)]

    def _limits(self, state: PushHoldState) -> tuple[float | None, float | None]:
        seconds = {
            PushHoldState.COMPUTING: self.terms.fill_s_max,
            PushHoldState.OFFERED: self.terms.lease_s,
            PushHoldState.STREAMING: self.terms.fill_s_max,
            PushHoldState.WRITING: self.terms.write_s_max,
            PushHoldState.WRITTEN: self.terms.fill_s_max,
            PushHoldState.DRAINING: self.terms.cut_s,
        }
        return seconds.get(state), None

    def _end(self, hold: _Hold, because: str) -> list[Any]:
        """The only place where blocks leave. `_cannot_open` has kept room to remember the hold."""
        self._over.remember(hold.id, self._now + self.terms.remember_s, self._now)
        return [FreeBlocks(hold.id, hold.blocks, because)] if hold.blocks else []


def _nothing_written(to: TicketPeer, id_: TransferId, serial: int, because: str) -> Send:
    return Send(to.instance, PushDone(id_, serial, ok=False, tokens=0, because=because))
