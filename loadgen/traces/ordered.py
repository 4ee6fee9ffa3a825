"""The steps of every trace reader after parsing: check the order of time, count from zero, undo coarse stamps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

import msgspec
import numpy as np

from loadgen.arrival import Arrival, BadRow, Row
from loadgen.traces.fields import RowFault, numbered

LEAP_S = 3600.0
"""A row that is so much later than the next one, in seconds, has a wrong stamp."""

LOOK_ROWS = 256
"""Rows that are enough to see whether a trace's stamps are quantised."""


def rows(lines: Iterable[str], parse: Callable[[str], Arrival | None]) -> Iterator[Row]:
    """Parse line by line; `parse` gives None for a header. A row that is earlier than the one before it is bad. If it
    is earlier by `LEAP_S` and fits behind the rows before that one, the one before it is bad instead: one stamp of a
    wrong year would make all later rows bad.

    Times stay as the trace has them: from its own zero.
    """
    last_s = 0.0
    late: tuple[int, Arrival] | None = None  # the latest row, given out once the next one has come
    for at, line in numbered(lines):
        try:
            arrival = parse(line)
        except RowFault as fault:
            yield BadRow(at, str(fault))
            continue
        if arrival is None:
            continue
        if late is not None:
            ahead_s = late[1].at_s - arrival.at_s
            if ahead_s >= LEAP_S and arrival.at_s >= last_s:
                yield BadRow(late[0], f"not sorted: {ahead_s:.6g} s later than line {at}")
            elif ahead_s > 0:
                yield BadRow(at, f"not sorted: {ahead_s:.6g} s earlier than line {late[0]}")
                continue
            else:
                last_s = late[1].at_s
                yield late[1]
        late = at, arrival
    if late is not None:
        yield late[1]


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
