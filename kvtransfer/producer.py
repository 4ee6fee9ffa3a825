"""What a producer makes of events: which hold is meant, who may say so, and which cause of the table it amounts to."""

from __future__ import annotations

from typing import Final

from cluster.ids import TransferId
from kvtransfer.alarms import Memory
from kvtransfer.book import LATE, REPEATED, STALE, STRANGER, Book
from kvtransfer.entries import Hold, Turn
from kvtransfer.events import Claimed, Effect, Filled, OpenHold, Proof, Refused, Registered, Send, WritesEnded
from kvtransfer.messages import (
    AskConfirm,
    ClaimRefused,
    Confirmation,
    Done,
    Heartbeat,
    Peer,
    Release,
    ToProducer,
    Withdraw,
)
from kvtransfer.table import Cause, Side


class Producer:
    """The holds of one life of one instance."""

    def __init__(self, epoch: int, book: Book) -> None:
        self.epoch: Final = epoch
        self._book = book
        self._over: Memory[TransferId] = Memory(book.terms.remembered_max)
        """Transfers that are over: no second hold under their id."""
        self._spent: Memory[str] = Memory(book.terms.remembered_max)
        """Tickets that were presented."""

    def remember_ended(self, now: float) -> None:
        """Know the holds that have just ended as over. `cannot_open` has kept room for them."""
        for id_ in self._book.take_ended():
            self._over.remember(id_, now + self._book.terms.remember_s, now)

    def give_up_early(self, id_: TransferId, now: float) -> bool:
        """A transfer is over that we hold nothing for. False: we cannot see to it that it stays so."""
        if id_.producer_epoch != self.epoch:
            return False
        if not self._over.knows(id_, now) and self._over.room(now) <= len(self._book.holds):
            return False
        return self._over.remember(id_, now + self._book.terms.remember_s, now)

    # --- our engine says ---------------------------------------------------------------------------------------------

    def open(self, event: OpenHold, now: float) -> list[Effect]:
        because = self._cannot_open(event.id, now)
        if because is not None:
            self._book.ignore(f"hold refused: {because}")
            return [Refused(Side.PRODUCER, event.id, because)]
        return self._book.add(Hold(id=event.id, tenant=event.tenant), Turn(now, "opened"))

    def _cannot_open(self, id_: TransferId, now: float) -> str | None:
        if id_.producer_epoch != self.epoch:
            return STALE
        if id_ in self._book.holds:
            return "it is held already"
        if self._over.knows(id_, now):
            return "it is over"
        if self._book.full or self._over.room(now) <= len(self._book.holds):
            return "the ledger is full"
        return None

    def filled(self, event: Filled, now: float) -> list[Effect]:
        hold = self._book.holds.get(event.id)
        if hold is None:  # given up while its last step ran: nobody wants the blocks
            self._book.ignore(LATE)
            return self._book.free(Side.PRODUCER, event.id, event.blocks, "given up before it was computed")
        self._book.row(hold, Cause.FILLED)  # raises before anything has changed
        self._book.own(hold, event.blocks)
        hold.tokens = event.tokens
        return self._book.move(hold, Cause.FILLED, Turn(now, "computed"))

    def writes_ended(self, event: WritesEnded, now: float) -> list[Effect]:
        hold = self._book.holds.get(event.id)
        if hold is None:
            return self._book.ignore(LATE)
        cause = Cause.WRITES_ENDED if event.ok else Cause.WRITES_FAILED
        return self._book.move(hold, cause, Turn(now, str(cause)))

    # --- consumers say, with a ticket --------------------------------------------------------------------------------

    def claimed(self, event: Claimed, now: float) -> list[Effect]:
        by, claim = event.by, event.claim
        hold = self._book.holds.get(claim.id)
        if hold is None:
            return self._refuse_claim(event, "there is no such hold here")
        if hold.reader == by and claim.serial <= hold.serial:
            return self._book.ignore(REPEATED)
        because = self._cannot_serve(hold, Cause.CLAIMED, event.proof, now)
        if because is None and not set(claim.blocks) <= set(hold.blocks):
            because = "it names blocks that the hold does not have"
        if because is not None:
            return self._refuse_claim(event, because)
        self._spend(event.proof, now)
        hold.reader, hold.serial = by, claim.serial
        return self._book.move(hold, Cause.CLAIMED, Turn(now, "claimed"))

    def _refuse_claim(self, event: Claimed, because: str) -> list[Effect]:
        self._book.ignore(f"claim refused: {because}")
        return [Send(event.by.instance, ClaimRefused(event.claim.id, event.claim.serial, because))]

    def registered(self, event: Registered, now: float) -> list[Effect]:
        by, register = event.by, event.register
        hold = self._book.holds.get(register.id)
        if hold is None:
            self._book.ignore(LATE)
            over = self._over.knows(register.id, now)  # else leg 1 may still be on its way: they will ask again
            return [_nothing_written(by, register.id, register.serial, "it is over")] if over else []
        if (hold.reader, hold.serial) == (by, register.serial):
            return self._book.ignore(REPEATED)
        because = self._cannot_serve(hold, Cause.REGISTERED, event.proof, now)
        if because is None and hold.reader is not None:
            because = "another consumer has it"
        if because is not None:
            self._book.ignore(f"registration refused: {because}")
            # The consumer frees its blocks on a refusal, so it must last: the ticket is spent, or nothing is said.
            lasts = self._spend(event.proof, now)
            return [_nothing_written(by, register.id, register.serial, because)] if lasts else []
        self._spend(event.proof, now)
        hold.reader, hold.serial = by, register.serial
        hold.first, hold.place, hold.link = register.first, register.blocks, register.link
        return self._book.move(hold, Cause.REGISTERED, Turn(now, "registered", by, register.serial))

    def _cannot_serve(self, hold: Hold, cause: Cause, proof: Proof, now: float) -> str | None:
        if self._spent.knows(proof.tag, now):
            return "its ticket was used before"
        if hold.tenant != proof.tenant:
            return "its ticket is another tenant's"
        if self._book.row(hold, cause) is None:
            return f"the hold is {hold.state}"
        if self._spent.room(now) < 1:
            return "no more tickets can be remembered"
        return None

    def _spend(self, proof: Proof, now: float) -> bool:
        return self._spent.remember(proof.tag, now + proof.left_s, now)

    # --- consumers say -----------------------------------------------------------------------------------------------

    def received(self, by: Peer, message: ToProducer, now: float) -> list[Effect]:
        hold = self._book.holds.get(message.id)
        match message:
            case AskConfirm():
                return self._asked(by, message, hold, now)
            case Heartbeat():
                return self._book.ignore(LATE) if hold is None else self._for_consumer(hold, message, by, now)
            case Release() | Withdraw() if hold is not None:
                return self._for_consumer(hold, message, by, now)
            case Release() | Withdraw():
                self._book.ignore(LATE)
                # "Nothing of mine writes" must last: a registration that this overtook has to find the transfer over.
                over = self.give_up_early(message.id, now)
                if over and isinstance(message, Withdraw):
                    return [_nothing_written(by, message.id, message.serial, "it is over")]
                return []

    def _asked(self, by: Peer, message: AskConfirm, hold: Hold | None, now: float) -> list[Effect]:
        """Only who has shown a ticket is told: a use that nobody permitted cannot be prevented, but it fails here."""
        claimed = hold is not None and (hold.reader, hold.serial) == (by, message.serial)
        if hold is not None and claimed and self._book.row(hold, Cause.ASKED) is not None:
            return self._book.move(hold, Cause.ASKED, Turn(now, "it is held", by, message.serial))
        because = "there is no such hold here" if hold is None else f"it is {hold.state}, and not for this reservation"
        self._book.ignore(f"not confirmed: {because}")
        return [Send(by.instance, Confirmation(message.id, message.serial, alive=False, because=because))]

    def _for_consumer(self, hold: Hold, message: Heartbeat | Release | Withdraw, by: Peer, now: float) -> list[Effect]:
        """A move for the hold's consumer to ask for; while it has none, for whoever was sent here by the router.

        A later reservation of the same consumer, in this life or another, speaks for those before it: they are over.
        """
        if hold.reader is not None and (hold.reader.instance != by.instance or message.serial < hold.serial):
            return self._book.ignore(STRANGER)
        cause = _CAUSES[type(message)]
        return self._book.move(hold, cause, Turn(now, str(cause), by, message.serial))


_CAUSES: dict[type, Cause] = {
    Heartbeat: Cause.HEARTBEAT,
    Release: Cause.GIVEN_BACK,
    Withdraw: Cause.WITHDRAWN,
}


def _nothing_written(to: Peer, id_: TransferId, serial: int, because: str) -> Effect:
    return Send(to.instance, Done(id_, serial, ok=False, tokens=0, because=because))
