"""One hold, one reservation: what the ledger knows of each, and the effect that each act of the table has on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from cluster.ids import InstanceId, TransferId
from kvtransfer.events import CutLink, Effect, Offer, PostRead, PostWrite, Recompute, Report, Send
from kvtransfer.messages import (
    AskConfirm,
    Begun,
    Blocks,
    Claim,
    Confirmation,
    Done,
    Heartbeat,
    Message,
    Peer,
    Register,
    Release,
    Withdraw,
)
from kvtransfer.table import Act, Side, State


class Turn(NamedTuple):
    """The circumstances of one move: when, why, and who said so where a peer did."""

    now: float
    because: str
    by: Peer | None = None
    serial: int = 0


@dataclass(slots=True, kw_only=True)
class Hold:
    """Blocks kept on the producer until they are pulled, or until they are pushed."""

    side: ClassVar[Side] = Side.PRODUCER

    id: TransferId
    tenant: str
    state: State = State.FILLING
    blocks: Blocks = ()
    tokens: int = 0
    reader: Peer | None = None
    """The consumer whose ticket was taken last, and `serial` its reservation."""
    serial: int = 0
    first: int = 0
    place: Blocks = ()
    """Push: where in the consumer's memory, from the prompt's block `first` on, by the keys of `link`."""
    link: int = 0
    deadline: float = math.inf
    """When the state's limit or the lease ends, in monotonic seconds."""
    again: float = math.inf
    last_end: float = math.inf
    """No extension of the lease goes beyond this."""
    cuts: int = 0
    """How often its link was asked to be cut."""

    @property
    def peer(self) -> InstanceId | None:
        """The instance at the other end, where there is one."""
        return self.reader.instance if self.reader else None

    def effect(self, act: Act, turn: Turn) -> Effect:
        """What the driver must do for one act."""
        match act:
            case Act.OFFER:
                return Offer(self.id, self.blocks, self.tokens)
            case Act.POST_WRITE:
                assert self.reader is not None
                return PostWrite(
                    self.id, self.serial, self.reader.instance, self.first, self.blocks, self.place, self.link
                )
            case Act.CUT_LINK:
                assert self.reader is not None
                self.cuts += 1
                return CutLink(self.reader.instance, turn.because)
            case Act.REPORT:
                return Report(self.side, self.id, turn.because)
            case _:
                return self._say(act, turn)

    def _say(self, act: Act, turn: Turn) -> Effect:
        """Tell the peer that asked, or else the one we serve."""
        to, serial = (turn.by, turn.serial) if turn.by else (self.reader, self.serial)
        assert to is not None
        message: Message
        match act:
            case Act.SAY_ALIVE:
                message = Confirmation(self.id, serial, alive=True, because=turn.because)
            case Act.SAY_BEGUN:
                message = Begun(self.id, serial)
            case Act.SAY_WRITTEN:
                message = Done(self.id, serial, ok=True, tokens=self.tokens, because=turn.because)
            case Act.SAY_NOT_WRITTEN:
                message = Done(self.id, serial, ok=False, tokens=0, because=turn.because)
            case _:
                raise AssertionError(f"a hold cannot {act}")
        return Send(to.instance, message)


@dataclass(slots=True, kw_only=True)
class Reservation:
    """Blocks kept on the consumer until they are filled, by its own reads or by the producer's writes."""

    side: ClassVar[Side] = Side.CONSUMER

    id: TransferId
    producer: InstanceId
    serial: int
    tokens: int
    ticket: str
    state: State = State.WAITING
    blocks: Blocks = ()
    remote: Blocks = ()
    """Pull: the producer's blocks to read."""
    first: int = 0
    link: int = 0
    parts: int = 0
    """Pull: of how many parts the read is; 0: it has not been posted."""
    under_way: set[int] = field(default_factory=set)
    """Pull: those of them that have not ended."""
    spoiled: bool = False
    """Pull: a part ended badly."""
    deadline: float = math.inf
    again: float = math.inf
    cuts: int = 0

    @property
    def peer(self) -> InstanceId:
        """The instance at the other end."""
        return self.producer

    def effect(self, act: Act, turn: Turn) -> Effect:
        """What the driver must do for one act."""
        match act:
            case Act.POST_READ:
                return PostRead(self.id, self.serial, self.producer, self.remote, self.blocks)
            case Act.RECOMPUTE:
                return Recompute(self.id, turn.because)
            case Act.CUT_LINK:
                self.cuts += 1
                return CutLink(self.producer, turn.because)
            case Act.REPORT:
                return Report(self.side, self.id, turn.because)
            case _:
                return Send(self.producer, self._message(act))

    def _message(self, act: Act) -> Message:
        match act:
            case Act.CLAIM:
                return Claim(self.id, self.serial, self.remote, self.ticket)
            case Act.ASK:
                return AskConfirm(self.id, self.serial)
            case Act.BEAT:
                return Heartbeat(self.id, self.serial)
            case Act.GIVE_BACK:
                return Release(self.id, self.serial)
            case Act.REGISTER:
                return Register(self.id, self.serial, self.first, self.blocks, self.link, self.ticket)
            case Act.WITHDRAW:
                return Withdraw(self.id, self.serial)
            case _:
                raise AssertionError(f"a reservation cannot {act}")


Entry = Hold | Reservation
