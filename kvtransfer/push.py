"""The messages between the two halves of a push, and the entries that both keep. Pure.

In a push the producer writes KV into the consumer's blocks while it computes them. `prefill.push` and `decode.push`
have the rules, as rows of a table each. No engine runs it yet: Baton's connector pulls.

Invariants: every entry has a finite deadline; every block that came in leaves once; blocks that a transfer may still
write into, or read from, leave only once that transfer is known to be over. A message that is late, repeated, or for
another life of an instance changes nothing and is counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

from cluster.ids import InstanceId, TransferId
from kvtransfer.packing import Blocks
from kvtransfer.rows import Table
from kvtransfer.ticket import TicketPeer
from kvtransfer.timers import Alarms

LATE: Final = "late or unknown"
REPEATED: Final = "repeated or out of turn"
STALE: Final = "for another life of the instance"
STRANGER: Final = "not theirs to say"


@dataclass(frozen=True, slots=True)
class Proof:
    """The part of a ticket's check that the producer does itself (`kvtransfer.ticket.Accepted`)."""

    tag: str
    """The name of this one ticket."""
    tenant: str
    left_s: float
    """How much longer this ticket could be presented: the producer remembers it as used for so long."""


# --- messages. `serial`: of the consumer's reservation, different in each of its lives -------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """To the producer: write the prompt's blocks from its `first` on into these blocks of the consumer.

    `link` is the connection whose memory keys the write uses. Its number is never used again, not by a later life
    either: once the consumer has ended the link, a write posted with its keys fails, however late this message arrives.
    """

    id: TransferId
    serial: int
    first: int
    blocks: Blocks
    link: int
    ticket: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """To the producer: the consumer does not want the push any more. Answer once no write can reach its blocks."""

    id: TransferId
    serial: int


@dataclass(frozen=True, slots=True)
class Begun:
    """To the consumer: the producer may write from now on."""

    id: TransferId
    serial: int


@dataclass(frozen=True, slots=True)
class PushDone:
    """To the consumer: no more writes of the producer reach its blocks. `ok`: the KV of `tokens` tokens is there."""

    id: TransferId
    serial: int
    ok: bool
    tokens: int
    because: str


Message = Register | Withdraw | Begun | PushDone


# --- events and effects that both halves have ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A message from a peer whose identity the caller has checked."""

    by: TicketPeer
    message: Message


@dataclass(frozen=True, slots=True)
class AbortPush:
    """The hand-over is given up. This may come at any time, also before the hand-over exists."""

    id: TransferId
    because: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A peer does not answer. It may still be alive, and its transfers under way."""

    instance: InstanceId


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """A peer answers, in this life. A higher epoch than before means that it restarted."""

    peer: TicketPeer


@dataclass(frozen=True, slots=True)
class LinkEnded:
    """The connection with a peer is torn down on our side.

    From now on no transfer ordered earlier, posted or not, touches our memory, in either direction. This event comes
    before a new link with that peer is used.
    """

    instance: InstanceId


@dataclass(frozen=True, slots=True)
class PushTick:
    """The time that `next_wakeup` gave has come."""


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """The claim on these blocks has ended: give them back to the engine's pool."""

    id: TransferId
    blocks: Blocks
    because: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a peer. Best effort: messages that must arrive are repeated."""

    to: InstanceId
    message: Message


@dataclass(frozen=True, slots=True)
class CutLink:
    """Tear the connection with a peer down, and answer with `LinkEnded`. Repeated until answered."""

    instance: InstanceId
    because: str


@dataclass(frozen=True, slots=True)
class PushReport:
    """Write a line to the log: an entry ended badly."""

    id: TransferId
    because: str


@dataclass(frozen=True, slots=True)
class PushRefused:
    """No entry was made: this push does not take place, and nothing is held or reserved for it."""

    id: TransferId
    because: str


class ImpossibleMove(RuntimeError):
    """Our own engine reported an impossible event. Nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushTerms:
    """Limits and intervals, in seconds. Two instances may safely have different ones."""

    lease_s: float = 30.0
    """How long a computed prompt is kept without a registration."""
    fill_s_max: float = 600.0
    """A prompt that is not computed by then will never be."""
    write_s_max: float = 300.0
    """A push is given up after this time."""
    reserve_s_max: float = 120.0
    """A reservation that is not written by then is given up."""
    heartbeat_s: float = 5.0
    """The interval at which a registration is repeated until its producer has begun."""
    ask_again_s: float = 0.25
    """The interval at which a withdrawal is repeated."""
    cut_s: float = 10.0
    """How long an unwanted transfer may stay under way before the link is cut, and the interval at which the cut is
    repeated."""
    remember_s: float = 180.0
    """How long a producer remembers that a transfer is over: longer than a reservation can live."""
    entries_max: int = 4096
    remembered_max: int = 262_144
    """The number of ended transfers, and of used tickets, that a producer can remember. When full, it refuses
    new ones."""
    peers_max: int = 4096

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                raise ValueError(f"{each.name} must be positive")


S = TypeVar("S", bound=StrEnum)
C = TypeVar("C", bound=StrEnum)
A = TypeVar("A", bound=StrEnum)


@dataclass(slots=True, kw_only=True)
class PushEntry(Generic[S]):
    """A hold or a reservation."""

    id: TransferId
    state: S
    peer: TicketPeer | None = None
    """The life of the other instance."""
    serial: int = 0
    blocks: Blocks = ()
    tokens: int = 0
    first: int = 0
    link: int = 0
    deadline: float = math.inf
    """When the entry's state ends for want of time, in seconds of the caller's clock."""
    again: float = math.inf
    """When the entry's message is repeated."""
    cuts: int = 0
    """How often a cut of its link was requested."""


E = TypeVar("E", bound=PushEntry[Any])


class Book(Generic[E, S, C, A]):
    """The entries of one half: their moves by its table, their deadlines, and the only place where blocks leave."""

    def __init__(
        self,
        table: Table[S, C, A],
        own_causes: frozenset[C],
        carry_out: Callable[[E, A, float, str], list[Any]],
        limits: Callable[[S], tuple[float | None, float | None]],
        ended: Callable[[E, str], list[Any]],
        times: tuple[C, C],
    ) -> None:
        """`carry_out` carries out an act; `limits` gives a state's limit and the interval of its repetitions; `ended`
        says what becomes of an entry's blocks; `times` are the causes of the state's limit and of its repetition.
        """
        self.entries: Final[dict[TransferId, E]] = {}
        self.ignored: Final[Counter[str]] = Counter()
        self._table: Final = table
        self._own: Final = own_causes
        self._carry_out: Final = carry_out
        self._limits: Final = limits
        self._ended: Final = ended
        self._up, self._repeat = times
        self._alarms: Final[Alarms[TransferId]] = Alarms()
        self._owed: list[Any] = []

    def next_wakeup(self) -> float | None:
        """The earliest deadline or repetition; now, if the last event raised and effects are owed."""
        return -math.inf if self._owed else self._alarms.next()

    def ring(self, now: float) -> None:
        """Do what time alone causes. If a later event raises, these effects are kept."""
        while (id_ := self._alarms.pop(now)) is not None:
            entry = self.entries[id_]
            cause = self._up if entry.deadline <= now else self._repeat
            self._owed += self.move(entry, cause, now, f"it was {entry.state} for too long")

    def with_owed(self, effects: list[Any]) -> list[Any]:
        """The effects that time has caused, and these."""
        owed, self._owed = self._owed, []
        return [*owed, *effects]

    def add(self, entry: E, now: float) -> None:
        """Add a new entry and set its deadlines."""
        self.entries[entry.id] = entry
        self._arm(entry, None, now)

    def allows(self, entry: E, cause: C) -> bool:
        """Whether the table has a row for this cause. Causes from our own engine must have one.

        Raises:
            ImpossibleMove: our own engine reported an impossible event.
        """
        there = cause in self._table[entry.state]
        if not there and cause in self._own:
            raise ImpossibleMove(f"{entry.id}: {cause} while {entry.state}")
        return there

    def move(self, entry: E, cause: C, now: float, because: str) -> list[Any]:
        """Move one entry. If the table has no row for this cause, nothing changes, and that is counted.

        Raises:
            ImpossibleMove: as `allows`.
        """
        if not self.allows(entry, cause):
            return self.ignore(REPEATED)
        row = self._table[entry.state][cause]
        stayed_by = cause if row.state == entry.state else None
        entry.state = row.state
        effects = [effect for act in row.acts for effect in self._carry_out(entry, act, now, because)]
        if row.state in self._table:
            self._arm(entry, stayed_by, now)
            return effects
        self._alarms.drop(entry.id)
        del self.entries[entry.id]
        return [*effects, *self._ended(entry, because)]

    def move_all(self, entries: Iterable[E], cause: C, now: float, because: str) -> list[Any]:
        """Move each entry for which the table has a row for this cause."""
        meant = [entry for entry in entries if cause in self._table[entry.state]]
        return [effect for entry in meant for effect in self.move(entry, cause, now, because)]

    def with_peer(self, instance: InstanceId) -> list[E]:
        """The entries of this peer."""
        return [each for each in self.entries.values() if each.peer is not None and each.peer.instance == instance]

    def with_former(self, peer: TicketPeer) -> list[E]:
        """The entries about an earlier life of this peer."""
        same = self.with_peer(peer.instance)
        return [each for each in same if each.peer is not None and each.peer.epoch < peer.epoch]

    def ignore(self, why: str) -> list[Any]:
        """Count a message that changed nothing."""
        self.ignored[why] += 1
        return []

    def leaked(self, now: float) -> int:
        """The number of entries past their limit, and of entries whose link was never cut on request. Must
        always be 0.
        """
        return sum(each.deadline + 1.0 < now or each.cuts > 1 for each in self.entries.values())

    def _arm(self, entry: E, stayed_by: C | None, now: float) -> None:
        """Set the entry's deadlines: all of them when it has entered its state, else the one that has just rung."""
        limit_s, interval_s = self._limits(entry.state)
        if limit_s is not None and stayed_by in {None, self._up}:
            entry.deadline = now + limit_s
        if stayed_by in {None, self._repeat}:
            entry.again = now + (interval_s or math.inf)
        self._alarms.set(entry.id, min(entry.deadline, entry.again))
