"""The entries of a ledger: their moves by the table, their deadlines, and the one place where blocks leave.

What always holds: every entry has a finite deadline; every block that came in leaves once, by `Use` or by `FreeBlocks`;
no block is in two reservations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cluster.ids import InstanceId, TransferId
from kvtransfer.alarms import Alarms
from kvtransfer.entries import Entry, Hold, Reservation, Turn
from kvtransfer.events import Effect, FreeBlocks, Use
from kvtransfer.messages import Blocks
from kvtransfer.table import ENDS, FIRST, OWN_CAUSES, TABLE, USABLE, Act, Cause, ImpossibleMove, Row, Side, State
from kvtransfer.terms import OVERDUE_S, Statistics, Terms

LATE = "late or unknown"
REPEATED = "repeated or out of turn"
STALE = "for another life of the instance"
STRANGER = "not theirs to say"


class Book:
    """Holds and reservations by id."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.holds: dict[TransferId, Hold] = {}
        self.reservations: dict[TransferId, Reservation] = {}
        self.ended: list[TransferId] = []
        """Holds that ended since `take_ended` was last called."""
        self._alarms: Alarms[tuple[Side, TransferId]] = Alarms()
        self._reserved: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._ignored: Counter[str] = Counter()

    @property
    def full(self) -> bool:
        """Whether the limit of entries is reached."""
        return len(self.holds) + len(self.reservations) >= self.terms.entries_max

    def next_wakeup(self) -> float | None:
        """The earliest deadline or repetition."""
        return self._alarms.next()

    def add(self, entry: Entry, turn: Turn) -> list[Effect]:
        """Take a new entry in, in its first state."""
        if isinstance(entry, Hold):
            self.holds[entry.id] = entry
        else:
            self.reservations[entry.id] = entry
        self._counts[f"{entry.side} {entry.state}"] += 1
        effects = self._acts(entry, FIRST[entry.side][entry.state], turn)
        self._arm(entry, None, turn.now)
        return effects

    def own(self, entry: Entry, blocks: Blocks) -> None:
        """The entry owns these blocks from here. Blocks that are being written must have no other owner."""
        if entry.blocks or not blocks:
            raise ImpossibleMove(f"{entry.id}: blocks are given once, and at least one")
        if isinstance(entry, Reservation):
            if len(set(blocks)) < len(blocks) or not self._reserved.isdisjoint(blocks):
                raise ImpossibleMove(f"{entry.id}: a block cannot be reserved twice")
            self._reserved.update(blocks)
        entry.blocks = blocks

    def row(self, entry: Entry, cause: Cause) -> Row | None:
        """What the table says. None: nothing, and it is a peer who said so."""
        row = TABLE[entry.side][entry.state].get(cause)
        if row is None and cause in OWN_CAUSES:
            raise ImpossibleMove(f"{entry.id}: {cause} while {entry.state} on the {entry.side}'s side")
        return row

    def move(self, entry: Entry, cause: Cause, turn: Turn) -> list[Effect]:
        """One turn of one entry. Without a row nothing changes, and that is counted."""
        row = self.row(entry, cause)
        if row is None:
            return self.ignore(REPEATED)
        if row.state is not entry.state:
            self._counts[f"{entry.side} {row.state}: {cause}"] += 1
            entry.state, cause_of_entry = row.state, None
        else:
            cause_of_entry = cause
        effects = self._acts(entry, row.acts, turn)
        if row.state in ENDS:
            return [*effects, *self._end(entry, turn)]
        self._arm(entry, cause_of_entry, turn.now)
        return effects

    def move_all(self, entries: Iterable[Entry], cause: Cause, turn: Turn) -> list[Effect]:
        """The same for each entry to which this cause means anything."""
        effects: list[Effect] = []
        for entry in entries:
            if cause in TABLE[entry.side][entry.state]:
                effects += self.move(entry, cause, turn)
        return effects

    def with_peer(self, instance: InstanceId) -> list[Entry]:
        """Entries whose other end is this instance."""
        entries: list[Entry] = [*self.holds.values(), *self.reservations.values()]
        return [entry for entry in entries if entry.peer == instance]

    def due(self, now: float) -> list[Effect]:
        """Do what time alone brings about."""
        effects: list[Effect] = []
        while (key := self._alarms.pop(now)) is not None:
            side, id_ = key
            entry: Entry = self.holds[id_] if side is Side.PRODUCER else self.reservations[id_]
            leased = isinstance(entry, Hold) and bool(entry.blocks) and entry.state is not State.DRAINING
            because = "its lease ended" if leased else f"it was {entry.state} for too long"
            cause = Cause.TIME_UP if entry.deadline <= now else Cause.AGAIN
            effects += self.move(entry, cause, Turn(now, because))
        return effects

    def ignore(self, why: str) -> list[Effect]:
        """Count what changed nothing."""
        self._ignored[why] += 1
        return []

    def take_ended(self) -> list[TransferId]:
        """Holds that ended since this was last called."""
        ended, self.ended = self.ended, []
        return ended

    def free(self, side: Side, id_: TransferId, blocks: Blocks, because: str) -> list[Effect]:
        """Blocks leave the ledger for the engine's pool."""
        self._counts[f"{side} blocks freed"] += len(blocks)
        return [FreeBlocks(side, id_, blocks, because)] if blocks else []

    def statistics(self, now: float) -> Statistics:
        """A record of this moment."""
        entries: list[Entry] = [*self.holds.values(), *self.reservations.values()]
        states: dict[Side, Counter[State]] = {side: Counter() for side in Side}
        for entry in entries:
            states[entry.side][entry.state] += 1
        return Statistics(
            states={side: dict(counts) for side, counts in states.items()},
            blocks=sum(len(entry.blocks) for entry in entries),
            leaked=sum(entry.deadline + OVERDUE_S < now or entry.cuts > 1 for entry in entries),
            counts=dict(self._counts),
            ignored=dict(self._ignored),
        )

    def _acts(self, entry: Entry, acts: tuple[Act, ...], turn: Turn) -> list[Effect]:
        effects: list[Effect] = []
        for act in acts:
            if isinstance(entry, Hold) and act is Act.START_LEASE:
                entry.last_end = turn.now + self.terms.hold_s_max
                entry.deadline = turn.now + self.terms.lease_s
            elif isinstance(entry, Hold) and act is Act.EXTEND_LEASE:
                entry.deadline = min(max(entry.deadline, turn.now + self.terms.extend_s), entry.last_end)
            else:
                effects.append(entry.effect(act, turn))
        return effects

    def _arm(self, entry: Entry, stayed_by: Cause | None, now: float) -> None:
        """Set the entry's deadlines: all of them when it has entered its state, else the one that has just rung."""
        limit_s = self.terms.limit_s(entry.side, entry.state)
        if limit_s is not None and stayed_by in {None, Cause.TIME_UP}:
            entry.deadline = now + limit_s
        if stayed_by in {None, Cause.AGAIN}:
            entry.again = now + (self.terms.interval_s(entry.side, entry.state) or float("inf"))
        self._alarms.set((entry.side, entry.id), min(entry.deadline, entry.again))

    def _end(self, entry: Entry, turn: Turn) -> list[Effect]:
        """The one place where an entry ends and its blocks leave."""
        self._alarms.drop((entry.side, entry.id))
        blocks, entry.blocks = entry.blocks, ()
        if isinstance(entry, Hold):
            del self.holds[entry.id]
            self.ended.append(entry.id)
        else:
            del self.reservations[entry.id]
            self._reserved.difference_update(blocks)
        if entry.state in USABLE:
            self._counts["consumer blocks used"] += len(blocks)
            return [Use(entry.id, blocks, entry.tokens)]
        return self.free(entry.side, entry.id, blocks, turn.because)
