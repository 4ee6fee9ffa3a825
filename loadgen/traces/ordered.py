"""The steps of every trace reader after parsing: check the order of time, count from zero, undo coarse stamps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

import msgspec
import numpy as np

from loadgen.arrival import Arrival, BadRow, Row
from loadgen.traces.fields import RowFault, numbered
from loadgen.traces.leaps import LEAP_S, Leaps, Numbered

LOOK_ROWS = 256
"""Rows that are enough to see whether a trace's stamps are quantised."""


def rows(lines: Iterable[str], parse: Callable[[str], Arrival | None]) -> Iterator[Row]:
    """Parse line by line; `parse` gives None for a header. A row that is earlier than the one before it is bad. But if
    the row before is a late one, that one is bad instead: one stamp of a wrong day would make the later rows bad. A row
    is late if the next two are earlier and follow the rows before it; rows are late, too, if they are a run after a
    leap of time and what comes next is earlier (`loadgen.traces.leaps`).

    Times stay as the trace has them: from its own zero.
    """
    leaps, stamps = Leaps(), _Stamps()
    for at, line in numbered(lines):
        try:
            arrival = parse(line)
        except RowFault as fault:
            yield BadRow(at, str(fault))
            continue
        if arrival is not None:
            yield from _sorted(leaps.take(at, arrival), stamps)
    last: list[BadRow] = []
    for row in leaps.end():
        if isinstance(row, BadRow):
            last.append(row)
        else:
            yield from stamps.take(*row)
    yield from stamps.end()
    yield from last


def _sorted(found: Iterable[Numbered | BadRow], stamps: _Stamps) -> Iterator[Row]:
    for row in found:
        if isinstance(row, BadRow):
            yield row
        else:
            yield from stamps.take(*row)


class _Stamps:
    """Checks the order of stamps; holds the latest row, and one after it that is earlier, until the next ones come."""

    def __init__(self) -> None:
        self._last_s = 0.0
        """The stamp of the last row given out."""
        self._late: Numbered | None = None
        self._doubted: Numbered | None = None

    def take(self, at: int, arrival: Arrival) -> Iterator[Row]:
        """The rows that are sure, now that this one has come."""
        if self._late is None:
            self._late = at, arrival
            return
        line, late = self._late
        ahead_s, least_s = late.at_s - arrival.at_s, self._last_s
        if self._doubted is not None:
            least_s = self._doubted[1].at_s
        if ahead_s <= 0:
            yield from self._refuse_doubted()
            yield self._given(late)
            self._late = at, arrival
        elif arrival.at_s < least_s:
            yield BadRow(at, f"not sorted: {ahead_s:.6g} s earlier than line {line}")
        elif ahead_s >= LEAP_S or self._doubted is not None:
            yield from self._refuse_late(at, arrival)
            self._late = at, arrival
        else:
            self._doubted = at, arrival

    def end(self) -> Iterator[Row]:
        """The rows that are left, now that no other one comes."""
        yield from self._refuse_doubted()
        if self._late is not None:
            yield self._given(self._late[1])

    def _refuse_doubted(self) -> Iterator[Row]:
        """The row before the one in doubt was right."""
        if self._doubted is not None and self._late is not None:
            (at, arrival), (line, late) = self._doubted, self._late
            yield BadRow(at, f"not sorted: {late.at_s - arrival.at_s:.6g} s earlier than line {line}")
        self._doubted = None

    def _refuse_late(self, at: int, arrival: Arrival) -> Iterator[Row]:
        """The row before the one in doubt, or else before this one, was late."""
        assert self._late is not None
        line, late = self._late
        after, earlier = self._doubted or (at, arrival)
        yield BadRow(line, f"not sorted: {late.at_s - earlier.at_s:.6g} s later than line {after}")
        if self._doubted is not None:
            yield self._given(earlier)
        self._doubted = None

    def _given(self, arrival: Arrival) -> Arrival:
        self._last_s = arrival.at_s
        return arrival


def from_zero(found: Iterable[Row]) -> Iterator[Row]:
    """The same rows with the first arrival at second 0."""
    start_s: float | None = None
    for row in found:
        if isinstance(row, BadRow):
            yield row
            continue
        if start_s is None:
            start_s = row.at_s
        yield msgspec.structs.replace(row, at_s=row.at_s - start_s)


def spread(found: Iterable[Row], tick_s: float, rng: np.random.Generator) -> Iterator[Row]:
    """Undo stamps that were rounded to `tick_s` seconds: move the requests of one tick to random moments inside it.

    The requests keep their order, and none reaches the next stamp, so the output is sorted. Without this a whole tick's
    requests arrive at once: Mooncake's coefficient of variation is 3.0 as written and 1.0 once spread.
    """
    if tick_s <= 0:
        yield from found
        return
    tick: list[Arrival] = []
    for row in found:
        if isinstance(row, BadRow):
            yield row
            continue
        if tick and row.at_s != tick[0].at_s:
            yield from _inside(tick, min(tick_s, row.at_s - tick[0].at_s), rng)
            tick = []
        tick.append(row)
    if tick:
        yield from _inside(tick, tick_s, rng)


def _inside(tick: list[Arrival], width_s: float, rng: np.random.Generator) -> Iterator[Arrival]:
    """The arrivals of one stamp, spread uniformly over the `width_s` seconds after it."""
    for arrival, offset_s in zip(tick, np.sort(rng.random(len(tick))) * width_s, strict=True):
        yield msgspec.structs.replace(arrival, at_s=arrival.at_s + float(offset_s))


def looks_quantised(found: Iterable[Row]) -> tuple[bool, Iterator[Row]]:
    """Whether the first rows share stamps (at most three quarters differ), and all rows, these included."""
    rest = iter(found)
    head = list(islice(rest, LOOK_ROWS))
    stamps = [row.at_s for row in head if isinstance(row, Arrival)]
    return len(set(stamps)) * 4 <= len(stamps) * 3, chain(head, rest)
