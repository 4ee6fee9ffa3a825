"""What a consumer makes of events: which reservation is meant, and which cause of the table it amounts to."""

from __future__ import annotations

from cluster.ids import InstanceId, TransferId
from kvtransfer.book import LATE, REPEATED, STALE, STRANGER, Book
from kvtransfer.entries import Reservation, Turn
from kvtransfer.events import (
    Allocated,
    Effect,
    ReadEnded,
    ReadStarted,
    Refused,
    ReservePull,
    ReservePush,
    Send,
)
from kvtransfer.messages import Begun, ClaimRefused, Confirmation, Done, Peer, Release, ToConsumer, Withdraw
from kvtransfer.table import Cause, ImpossibleMove, Side, State


class Consumer:
    """The reservations of one life of one instance."""

    def __init__(self, epoch: int, book: Book) -> None:
        self._book = book
        self._epochs: dict[InstanceId, int] = {}
        """The latest life of each producer that we saw."""
        self._serial = epoch << 32  # never the same in two lives: an answer to a former life fits nothing

    def seen(self, peer: Peer) -> bool:
        """Note which life of a peer this is. False: an earlier one than we know."""
        known = self._epochs.pop(peer.instance, peer.epoch)
        self._epochs[peer.instance] = max(known, peer.epoch)  # at the end: the longest unseen stand first
        if len(self._epochs) > self._book.terms.peers_max:
            del self._epochs[next(iter(self._epochs))]
        return peer.epoch >= known

    # --- our engine says ---------------------------------------------------------------------------------------------

    def reserve_pull(self, event: ReservePull, now: float) -> list[Effect]:
        self._serial += 1
        because = self._cannot_reserve(event.id, event.producer)
        if because is not None:
            return self._refuse(event, Release(event.id, self._serial), because)
        if not event.remote:  # all of it is here already
            return [Send(event.producer, Release(event.id, self._serial))]
        entry = Reservation(
            id=event.id,
            producer=event.producer,
            serial=self._serial,
            tokens=event.tokens,
            ticket=event.ticket,
            remote=event.remote,
        )
        return self._book.add(entry, Turn(now, "reserved"))

    def reserve_push(self, event: ReservePush, now: float) -> list[Effect]:
        self._serial += 1
        because = self._cannot_reserve(event.id, event.producer)
        if because is not None:
            freed = self._book.free(Side.CONSUMER, event.id, event.blocks, because)
            return [*self._refuse(event, Withdraw(event.id, self._serial), because), *freed]
        entry = Reservation(
            id=event.id,
            producer=event.producer,
            serial=self._serial,
            tokens=event.tokens,
            ticket=event.ticket,
            state=State.RESERVED,
            first=event.first,
            link=event.link,
        )
        self._book.own(entry, event.blocks)
        return self._book.add(entry, Turn(now, "reserved"))

    def _cannot_reserve(self, id_: TransferId, producer: InstanceId) -> str | None:
        if id_ in self._book.reservations:
            return "it is reserved already"
        if id_.producer_epoch < self._epochs.get(producer, 0):
            return STALE
        if self._book.full:
            return "the ledger is full"
        return None

    def _refuse(self, event: ReservePull | ReservePush, good_bye: Release | Withdraw, because: str) -> list[Effect]:
        """Make no reservation. The producer then holds for nobody, unless it does for a reservation there is."""
        self._book.ignore(f"reservation refused: {because}")
        effects: list[Effect] = [Refused(Side.CONSUMER, event.id, because)]
        if event.id not in self._book.reservations:
            effects.append(Send(event.producer, good_bye))
        return effects

    def allocated(self, event: Allocated, now: float) -> list[Effect]:
        entry = self._book.reservations.get(event.id)
        if entry is None:  # given up while the engine looked for blocks
            self._book.ignore(LATE)
            return self._book.free(Side.CONSUMER, event.id, event.blocks, "given up before it had blocks")
        self._book.row(entry, Cause.ALLOCATED)  # raises before anything has changed
        if len(event.blocks) != len(entry.remote):
            raise ImpossibleMove(f"{event.id}: {len(event.blocks)} blocks allocated to read {len(entry.remote)} into")
        self._book.own(entry, event.blocks)
        return self._book.move(entry, Cause.ALLOCATED, Turn(now, "allocated"))

    def read_started(self, event: ReadStarted, now: float) -> list[Effect]:
        entry = self._book.reservations.get(event.id)
        if entry is None or entry.serial != event.serial:
            return self._book.ignore(LATE)
        if event.parts < 1 or entry.parts:
            raise ImpossibleMove(f"{event.id}: a read starts once, with at least one part")
        self._book.row(entry, Cause.READ_STARTED)
        entry.parts, entry.under_way = event.parts, set(range(event.parts))
        return self._book.move(entry, Cause.READ_STARTED, Turn(now, "read started"))

    def read_ended(self, event: ReadEnded, now: float) -> list[Effect]:
        entry = self._book.reservations.get(event.id)
        if entry is None or entry.serial != event.serial:
            return self._book.ignore(LATE)
        if not 0 <= event.part < entry.parts:
            raise ImpossibleMove(f"{event.id}: part {event.part} of {entry.parts} cannot end")
        if event.part not in entry.under_way:
            return self._book.ignore(REPEATED)
        entry.under_way.discard(event.part)
        entry.spoiled |= not event.ok
        if entry.under_way:  # the others still write into our memory
            return [] if event.ok else self._book.move(entry, Cause.PART_FAILED, Turn(now, "a part of the read failed"))
        cause = Cause.READ_FAILED if entry.spoiled else Cause.READ_ENDED
        return self._book.move(entry, cause, Turn(now, str(cause)))

    # --- the producer says -------------------------------------------------------------------------------------------

    def received(self, by: Peer, message: ToConsumer, now: float) -> list[Effect]:
        entry = self._book.reservations.get(message.id)
        if entry is None or entry.serial != message.serial:
            return self._book.ignore(LATE)
        if by.instance != entry.producer:
            return self._book.ignore(STRANGER)
        cause = _cause(message)
        # A later life may say that it holds nothing. It cannot vouch for the memory, or the writes, of the one before.
        if by.epoch != entry.id.producer_epoch and cause not in {Cause.REFUSED, Cause.GONE}:
            return self._book.ignore(STALE)
        if isinstance(message, Done) and cause is Cause.WRITTEN:
            entry.tokens = min(entry.tokens, message.tokens)
        because = "" if isinstance(message, Begun) else message.because
        return self._book.move(entry, cause, Turn(now, because or str(cause)))


def _cause(message: ToConsumer) -> Cause:
    match message:
        case ClaimRefused():
            return Cause.REFUSED
        case Confirmation():
            return Cause.ALIVE if message.alive else Cause.GONE
        case Begun():
            return Cause.BEGUN
        case Done():
            return Cause.WRITTEN if message.ok and message.tokens > 0 else Cause.NOT_WRITTEN
