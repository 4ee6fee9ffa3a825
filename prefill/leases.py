"""The leases of holds at one rank: the marks in its memory, the lease times, and the readers so far
(`prefill.table.LEASES`). Pure.

A rank clears a hold's slot before it reports the hold's end, and the engine frees blocks only when every rank has
reported: no block is another request's while a mark stands for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvtransfer.hold_marks import CLEAR, Slot
from kvtransfer.notes import Beat, ReadNote
from kvtransfer.timers import Alarms
from prefill.orders import Orders
from prefill.table import LEASES, HoldAct, HoldCause, RankHold

HOLD_S_MAX: Final = 300.0
"""Heartbeats keep no hold longer than this, in seconds: a stuck consumer must not starve a producer."""


class LeaseTerms(NamedTuple):
    """How long blocks are held, in the unit of the caller's clock."""

    lease: float
    """The length of a hold without any notice from a consumer: vLLM's ``kv_lease_duration``."""
    extension: float
    """How much longer a hold lasts, from each heartbeat on."""
    longest: float
    """The longest hold, whatever notices consumers send."""


def terms(lease_s: float, unit: float = 1.0) -> LeaseTerms:
    """vLLM's terms: a heartbeat extends a lease by two thirds of it. `unit`: ticks of the caller's clock in a
    second.
    """
    return LeaseTerms(lease_s * unit, lease_s * 2 / 3 * unit, max(HOLD_S_MAX, lease_s) * unit)


@dataclass(slots=True)
class _Kept:
    slot: Slot | None
    state: RankHold = RankHold.MARKED
    until: float = 0.0
    """The end of the lease, on the caller's clock."""
    latest: float = 0.0
    """The latest end that heartbeats may set."""
    readers: tuple[str, ...] = ()
    """The ranks of the consumer that have read."""


class Leases:
    """The holds of one rank, by the engine's request ids."""

    def __init__(self, of: LeaseTerms, write: Callable[[int, bytes], None]) -> None:
        """`write` puts 16 bytes into a slot of the memory that consumers read."""
        self.counts: Final[Counter[str]] = Counter()
        """Counts since they were last taken."""
        self._terms: Final = of
        self._write: Final = write
        self._kept: Final[dict[str, _Kept]] = {}
        self._alarms: Final[Alarms[str]] = Alarms()
        self._reports: list[str] = []

    def __len__(self) -> int:
        return len(self._kept)

    def step(self, orders: Orders, now: float) -> None:
        """Apply the engine's decisions, before its step computes anything."""
        for request in orders.dropped:
            self._tell(request, HoldCause.DROPPED, now)
        for request, slot in orders.opened.items():
            if slot is not None:
                self._write(slot.index, slot.mark)
            self._kept[request] = _Kept(slot)
        for request in orders.held:
            self._tell(request, HoldCause.FILLED, now)
        for request in orders.released:
            self.counts["released" if self._tell(request, HoldCause.GIVEN_UP, now) else "released too late"] += 1

    def heard(self, reader: str, note: ReadNote | Beat | None, now: float) -> None:
        """Take a notice from a consumer's rank. None: an unreadable notice."""
        if isinstance(note, Beat):
            for request in note.requests:
                self._tell(request, HoldCause.WANTED, now)
        elif note is None or not self._count(reader, note, now):
            self.counts["notices ignored"] += 1

    def _count(self, reader: str, note: ReadNote, now: float) -> bool:
        """Whether the notice is about a hold, from a consumer that was told of it. The mark of a leg that still runs is
        not in any answer yet. (After the leg's end, a rank may receive the reader's notice before its own engine's
        orders.)
        """
        kept = self._kept.get(note.request)
        if kept is None or kept.slot is None or note.mark != kept.slot.mark:
            return False
        if HoldCause.READ not in LEASES[kept.state]:
            return False
        if reader not in kept.readers:
            kept.readers = (*kept.readers, reader)
        if len(kept.readers) >= note.consumers:
            self._move(note.request, kept, HoldCause.READ, now)
        return True

    def expire(self, now: float) -> list[str]:
        """End the leases whose time is up, and return them."""
        ended = []
        while (request := self._alarms.pop(now)) is not None:
            self._move(request, self._kept[request], HoldCause.TIME_UP, now)
            ended.append(request)
        return ended

    def next_wakeup(self) -> float | None:
        """The time at which the first lease ends."""
        return self._alarms.next()

    def take_reports(self) -> list[str]:
        """The holds that have ended since the last call: their slots are clear."""
        reports, self._reports = self._reports, []
        return reports

    def _tell(self, request: str, cause: HoldCause, now: float) -> bool:
        kept = self._kept.get(request)
        return kept is not None and self._move(request, kept, cause, now)

    def _move(self, request: str, kept: _Kept, cause: HoldCause, now: float) -> bool:
        row = LEASES[kept.state].get(cause)
        if row is None:
            return False
        kept.state = row.state
        for act in row.acts:
            if act is HoldAct.START_LEASE:
                kept.until, kept.latest = now + self._terms.lease, now + self._terms.longest
            elif act is HoldAct.EXTEND_LEASE:
                kept.until = max(kept.until, min(now + self._terms.extension, kept.latest))
            elif act is HoldAct.REPORT:
                self._reports.append(request)
            elif kept.slot is not None:
                self._write(kept.slot.index, CLEAR)
        if row.state is RankHold.KEPT:
            self._alarms.set(request, kept.until)
        else:
            self._alarms.drop(request)
        if row.state is RankHold.OVER:
            del self._kept[request]
        return True
