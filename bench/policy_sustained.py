"""A bound that a long load keeps: the relaxation of `sim.experiments.ceiling` on a window that comes again and again.

The first bound is of one window. It may finish all work after the last arrival, until the last answer's target. Where
the window is over sooner than one answer, that is most of the time there is: the bound is then a rate at which requests
may come for a moment, and no rate that GPUs keep up with. The runs that are compared have to last four mean answers;
nothing asks that of the first bound.

**The load.** The window's requests, again and again, until they last `LIVES[0]` lives at the bound's own rate. Further
windows would be another load (Azure's code has one with a fourth of the others' goodput), and ours and the rivals are
compared on the same window. Each repeat has prefixes of its own, as every run begins with empty caches; what a trace's
later windows share with earlier ones would make its prompts cheaper than here.

**A life** is what a request lasts that just meets its targets, with the load's mean answer (`Case.life_s`): the longest
that the relaxation may take over it. Systems that answer sooner have shorter lives, so a load that lasts four of these
lasts more of theirs. At four lives the last answers still add a fourth to the time there is: a second figure, at
`LIVES[1]`, says how much of the bound that is.

**What it bounds.** At this rate no policy attains the share both in the measured part and in the whole of the repeated
load. Where the bound of the whole is the lesser one, the same holds of twice or three times as many repeats: each
stretch of them would be served at least as well as a load of its own, with all the time behind its last arrival. A run
of one window may be shorter than this load and then exceeds this bound by right: it has time after its last arrival,
too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import msgspec
import numpy as np

from bench import policy_grid as grid
from bench.policy_cell import bound_of
from bench.policy_loads import joined
from router.core.arrays import Floats
from sim.experiments.ceiling import GRID, Ceiling
from sim.experiments.loads import Size, UnitLoad
from sim.experiments.systems import Shelf
from sim.experiments.tuning import Case

LIVES: Final = (4.0, 16.0)
"""The load lasts so many lives or more at the bound's rate. The first: as many as the compared runs are to last."""
BOUNDS: Final = tuple(f"sustained_{lives:g}" for lives in LIVES)
"""The names of the figures at `LIVES`."""
SHARE: Final = grid.SHARES[0]

STEP: Final = 1.01
"""The factor between two rates of the lattice on which the bound is looked for."""
STRIDE: Final = 40
"""Lattice steps from one rate to the next until the bound is between two of them."""
LOWEST: Final = 1e-3
"""In requests a second: if the share is not reached at this rate, there is no bound above it."""
APART: Final = 1 << 40
"""Between the names of blocks of two repeats: traces have fewer blocks."""


@dataclass(frozen=True, slots=True)
class Sustained:
    """The bound, and the load that it is of."""

    rate: float
    """Requests a second; 0: the share is not reached at any rate."""
    requests: int
    lives: float | None
    """How many lives the load lasts at this rate."""


def repeats(case: Case, rate: float, lives: float) -> int:
    """How often the case's load has to come to last so many lives at this rate, in requests a second."""
    return max(1, math.ceil(lives * case.life_s * rate / len(case.load.arrivals)))


def repeated(case: Case, count: int) -> Case:
    """The same requests so many times, one after the other at the same mean rate. No two repeats share a prefix."""
    loads = [_again(case.load, number) for number in range(count)]
    load, requests = joined(loads), count * len(case.load.arrivals)
    return replace(case, load=load, size=Size(fewest=requests, most=requests, lives=1.0))


def _again(load: UnitLoad, number: int) -> UnitLoad:
    arrivals = [
        msgspec.structs.replace(each, prefix=tuple(name + number * APART for name in each.prefix))
        for each in load.arrivals
    ]
    return UnitLoad(load.name, arrivals)


def sustained(case: Case, bound_of_case: Callable[[Case], Ceiling], share: float, lives: float) -> Sustained:
    """The lowest rate of the lattice at which the load, repeated until it lasts so many lives, does not attain the
    share.

    Attainment is taken to fall with the rate. It does for one number of repeats; the number rises with the rate.
    """

    @cache
    def bound(count: int) -> Ceiling:
        return bound_of_case(repeated(case, count))

    def holds(step: int) -> bool:
        rate = STEP**step
        return bound(repeats(case, rate, lives)).least(rate, share) >= share

    requests = len(case.load.arrivals)
    low = math.floor(math.log(requests / (lives * case.life_s)) / math.log(STEP))  # up to here one window is enough
    while not holds(low):
        low -= STRIDE
        if STEP**low < LOWEST:
            return Sustained(0.0, requests, None)
    high = low + STRIDE
    while holds(high):
        low, high = high, high + STRIDE
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    rate = STEP**high
    count = repeats(case, rate, lives)
    return Sustained(rate, count * requests, count * requests / rate / case.life_s)


def of_window(cell: grid.Cell, case: Case, shelf: Shelf) -> dict[str, Any]:
    """Both figures of one window, as they are published."""
    told: dict[str, Any] = {"life_s": round(case.life_s, 3)}
    for name, lives in zip(BOUNDS, LIVES, strict=True):
        found = sustained(case, lambda each: lasting_bound_of(cell, each, shelf), SHARE, lives)
        lasts = None if found.lives is None else round(found.lives, 2)
        told[name] = {"rates": {str(SHARE): round(found.rate, 4)}, "requests": found.requests, "lives": lasts}
    return told


def lasting_bound_of(cell: grid.Cell, case: Case, shelf: Shelf) -> Lasting:
    """What no policy can beat on this load, in any arrangement of this cell's GPUs."""
    found = bound_of(cell, case, shelf)
    return Lasting(found.shapes, found.counts, found.needs, found.every, found.targets)


# --- the relaxation, for many requests --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lasting(Ceiling):
    """The same bound, found sooner where requests are many."""

    def attainment(self, rate: float, enough: float = 0.0) -> float:
        """See `Ceiling.attainment`."""
        able = self._able()
        begun_s, whole = self.needs.at_s[able] / rate, len(self.needs.at_s)
        found = float(able.sum())
        for exchange in self._exchanges():
            capacity = sum(exchange[gpu] * count for gpu, count in self.counts) * 1000
            for work, ends_s in self._loads(exchange, rate):
                found = min(found, served(begun_s, ends_s[able], work[able], capacity))
                if found < enough * whole:
                    return found / whole
        return found / whole


def served(begun_s: Floats, ends_s: Floats, work_ms: Floats, capacity_ms: float) -> float:
    """`sim.experiments.ceiling.served`: the most requests that can be done, fractions counted.

    Requests are taken in the same order, that of their work, but many at once while all of them fit. Those that lie in
    an interval that is full are left out.
    """
    if not len(begun_s):
        return 0.0
    begins, ends = _marks(begun_s), -_marks(-ends_s)[::-1]
    rows, columns = np.searchsorted(begins, begun_s, "right") - 1, np.searchsorted(ends, ends_s, "left")
    slack = capacity_ms * np.maximum(0.0, ends[None, :] - begins[:, None])
    slack[ends[None, :] <= begins[:, None]] = np.inf  # nothing begins and ends in there
    left = np.argsort(work_ms, kind="stable")
    found = float(np.count_nonzero(work_ms <= 0))
    left = left[(work_ms[left] > 0) & np.isfinite(work_ms[left])]
    many = len(left)
    while len(left):
        part = left[:many]
        at = rows[part] * len(ends) + columns[part]
        used = np.bincount(at, work_ms[part], minlength=slack.size).reshape(slack.shape)
        used = np.cumsum(np.cumsum(used[::-1], axis=0)[::-1], axis=1)  # of all that begins and ends in an interval
        if (used <= slack).all():
            slack -= used
            found += len(part)
            left, many = left[len(part) :], many * 2
        elif len(part) > 1:
            many = max(1, len(part) // 4)
        else:
            one = part[0]
            inside = slack[: rows[one] + 1, columns[one] :]
            done = float(inside.min())
            inside -= done
            found += done / float(work_ms[one])
            room = np.minimum.accumulate(np.minimum.accumulate(slack, axis=0)[:, ::-1], axis=1)[:, ::-1]
            left = left[1:]
            left = left[room[rows[left], columns[left]] > 0]
    return found


def _marks(times_s: Floats) -> Floats:
    """The grid of `sim.experiments.ceiling`: up to `GRID` of these times, the least among them, evenly by rank."""
    ordered = np.unique(times_s)
    return ordered[np.unique(np.linspace(0, len(ordered) - 1, min(GRID, len(ordered))).round().astype(np.int64))]
