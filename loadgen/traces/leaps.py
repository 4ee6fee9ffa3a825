"""Several rows of a wrong clock in a trace: runs of rows that begin with a leap of time, held until it is known which
rows are wrong, those of the run or those that come after it with earlier stamps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from loadgen.arrival import SPAN_MAX_S, Arrival, BadRow

LEAP_S = 3600.0
"""A row that is so much later than the one before it, in seconds, may have a wrong stamp."""

HELD_MAX = 1000
"""Rows that are held at most. A longer run has right stamps: no clock is set right after so many requests."""

SHORT = 5
"""The last rows of a trace are few if the rows before them are so many times as many."""

TOO_LATE = f"later than the first row; a load lasts up to {SPAN_MAX_S:g} s"

Numbered = tuple[int, Arrival]
"""A row's line, and the row."""


@dataclass(slots=True)
class _Run:
    """Rows since a leap. Rows that are a bit out of order are among them: the next step judges those."""

    first_s: float
    last_s: float
    rows: list[Numbered] = field(default_factory=list)


class Leaps:
    """Refuses runs of rows with stamps of a wrong time; all other rows are given on, in their order."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._back: list[Numbered] = []
        """Rows that came after the runs from `_contested` on, and are earlier, but follow the rows before these."""
        self._contested = 0
        self._above: Numbered | None = None
        """The row before the first that went back."""
        self._held = 0
        self._given = 0
        self._first_s = 0.0
        """The first stamp of the rows given on, if there are any."""
        self._last_s = float("-inf")
        """The last stamp of the runs given on."""

    def take(self, at: int, arrival: Arrival) -> Iterator[Numbered | BadRow]:
        """The rows that are sure, now that this one has come."""
        row, at_s = (at, arrival), arrival.at_s
        if not self._runs and self._given and at_s < self._last_s + LEAP_S:
            self._last_s = max(self._last_s, at_s)
            yield self._give(row)
            return
        self._held += 1
        if not self._runs or at_s >= self._runs[-1].last_s + LEAP_S:
            self._runs.append(_Run(at_s, at_s, [row]))
        elif at_s >= self._runs[-1].last_s:
            self._runs[-1].rows.append(row)
            self._runs[-1].last_s = at_s
        elif self._goes_back(at_s):
            self._above = self._above if self._back else self._runs[-1].rows[-1]
            self._back.append(row)
            surely = self._runs[-1].last_s - self._back[0][1].at_s >= LEAP_S
            if len(self._back) + surely > self._size(self._contested):
                yield from self._refuse_runs()
        else:
            self._runs[-1].rows.append(row)
        if self._held > HELD_MAX:
            yield from self._refuse_back()
        while self._held > HELD_MAX:
            yield from self._settle()

    def end(self) -> Iterator[Numbered | BadRow]:
        """The rows that are left, now that no other one comes."""
        if self._back:
            before = self._given + self._size(0) - self._size(self._contested) + len(self._back)
            are_few = self._size(self._contested) * SHORT <= before
            yield from self._refuse_runs() if are_few else self._refuse_back()
        while self._runs:
            if self._last_are_wrong():
                yield from self._refuse_last()
                return
            yield from self._settle()

    def _goes_back(self, at_s: float) -> bool:
        """Whether a row is earlier than runs, and follows the rows before these; or the rows that went back already."""
        if self._back:
            return self._back[-1][1].at_s <= at_s < self._runs[self._contested].first_s
        for number in reversed(range(len(self._runs))):
            before_s = self._runs[number - 1].last_s if number else self._last_s
            if before_s <= at_s < self._runs[number].first_s:
                self._contested = number
                return True
        return False

    def _size(self, number: int) -> int:
        return sum(len(run.rows) for run in self._runs[number:])

    def _last_are_wrong(self) -> bool:
        """Whether the rows that are left are few, and come after a silence longer than all that was before it."""
        few = self._size(0)
        silent_s = self._runs[0].first_s - self._last_s
        is_short = few == 1 or few * SHORT <= self._given
        return self._given > 0 and is_short and silent_s > max(LEAP_S, self._last_s - self._first_s)

    def _refuse_last(self) -> Iterator[BadRow]:
        few, silent_s = self._size(0), self._runs[0].first_s - self._last_s
        who = "the last row is" if few == 1 else f"the last {few} rows are"
        for at, _ in (row for run in self._runs for row in run.rows):
            yield BadRow(at, f"{who} {silent_s:.6g} s later than the one before {'it' if few == 1 else 'them'}")

    def _refuse_runs(self) -> Iterator[BadRow]:
        """The rows that went back were right: they continue the rows before the runs."""
        after, earlier = self._back[0]
        wrong = [row for run in self._runs[self._contested :] for row in run.rows]
        for at, arrival in wrong:
            yield BadRow(at, f"not sorted: {arrival.at_s - earlier.at_s:.6g} s later than line {after}")
        del self._runs[self._contested :]
        self._held -= len(wrong)
        if not self._runs:
            self._runs.append(_Run(earlier.at_s, earlier.at_s))
        self._runs[-1].rows.extend(self._back)
        self._runs[-1].last_s = self._back[-1][1].at_s
        self._back = []

    def _refuse_back(self) -> Iterator[BadRow]:
        """The runs were right."""
        if self._back:
            assert self._above is not None
            line, late = self._above
            for at, arrival in self._back:
                yield BadRow(at, f"not sorted: {late.at_s - arrival.at_s:.6g} s earlier than line {line}")
        self._held -= len(self._back)
        self._back = []

    def _settle(self) -> Iterator[Numbered | BadRow]:
        """Give on the first run; refuse the trace's first one if more rows come so long after it as no load lasts."""
        run = self._runs.pop(0)
        self._held -= len(run.rows)
        ahead_s = self._runs[0].first_s - run.last_s if self._runs else 0.0
        if not self._given and ahead_s > SPAN_MAX_S and self._size(0) > len(run.rows):
            for at, _ in run.rows:
                yield BadRow(at, f"{ahead_s:.6g} s earlier than the rows after it; a load lasts up to {SPAN_MAX_S:g} s")
            return
        self._last_s = run.last_s
        for row in run.rows:
            yield self._give(row)

    def _give(self, row: Numbered) -> Numbered | BadRow:
        self._first_s = row[1].at_s if not self._given else self._first_s
        self._given += 1
        after_s = row[1].at_s - self._first_s
        return row if after_s <= SPAN_MAX_S else BadRow(row[0], f"{after_s:.6g} s {TOO_LATE}")
