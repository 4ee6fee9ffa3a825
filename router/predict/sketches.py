"""Distributions learned online, one per key: histograms over log-spaced bins that forget exponentially. Pure.

Why fixed bins, and not P² (Jain and Chlamtac 1985) or a t-digest (Dunning 2019): an observation changes one place of a
row of bins, a row forgets by giving newer observations more weight, and above all rows can be *mixed* by a weighted
sum, which backing off from a specific key to a general one needs. P² answers one quantile and cannot be mixed;
t-digests mix only by clustering again, and forget badly. The price is the width of a bin, which the caller chooses.

Invariants: there are at most `keys_max` rows, and those learned from longest ago go first; a mixture's distribution
function rises strictly from 0 to 1, as the caller's prior has mass everywhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Table = NDArray[np.float32]

_UNIT_MAX = 2.0**20
"""The weight of one observation at which a row is scaled down: float32 cells (24 bits) then still register
single ones."""

_ROWS_AT_FIRST = 64


def between(at: float, places: Sequence[float], heights: Sequence[float]) -> float:
    """The height at a place, on straight lines between the given points; beyond them the height of the last. Places
    ascend.

    The result equals `numpy.interp` to the last bit; that takes five times as long for one place.
    """
    below = bisect_right(places, at) - 1
    if below < 0:
        return heights[0]
    if below >= len(places) - 1 or places[below] == at:
        return heights[below]
    slope = (heights[below + 1] - heights[below]) / (places[below + 1] - places[below])
    return slope * (at - places[below]) + heights[below]


class Sketches:
    """Rows of mass by key. `edges` are the bins' lower ends and the last one's upper end, ascending."""

    def __init__(self, edges: Sequence[float], prior: Floats, *, keys_max: int, memory: float) -> None:
        """`memory`: observations of a key after which one weighs 1/e; `prior`: mass by bin, all above zero."""
        assert len(prior) == len(edges) - 1
        assert prior.min() > 0
        self.edges: Final = tuple(edges)
        self.keys_max: Final = keys_max
        self._growth: Final = 1.0 / (1.0 - 1.0 / memory)
        self._rows: Final[dict[Hashable, int]] = {}
        # Row 0 is the prior. Column 0 stays empty: sums along a row are then the distribution function at each edge.
        self._mass: Table = np.zeros((_ROWS_AT_FIRST, len(edges)), dtype=np.float32)
        self._mass[0, 1:] = prior / prior.sum()
        self._total: Final[list[float]] = [1.0]
        self._unit: Final[list[float]] = [1.0]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def bytes(self) -> int:
        """The memory of the bins; keys and bookkeeping take about 400 bytes a key more (CPython 3.11)."""
        return self._mass.nbytes

    def weight(self, key: Hashable) -> float:
        """The number of this key's observations, older ones counting less; at most `memory`."""
        row = self._rows.get(key)
        return 0.0 if row is None else self._total[row] / self._unit[row]

    def add(self, keys: Sequence[Hashable], value: float, *, at_least: bool = False) -> None:
        """One observation for each of these keys. `at_least`: it was cut off at `value`, and the real value is this or
        more.

        A cut-off observation is spread over what a key has seen beyond it (Efron 1967, "redistribute to the right"); if
        nothing was seen beyond, it stays.
        """
        at = min(max(bisect_right(self.edges, value), 1), len(self.edges) - 1)
        if at_least and self._has_room(keys):
            self._spread([self._row(key) for key in keys], at)
            return
        for key in keys:
            row = self._row(key)
            if at_least:
                self._spread([row], at)
            else:
                self._put(row, at, self._weigh(row))

    def _has_room(self, keys: Sequence[Hashable]) -> bool:
        """Whether there is room for all of these keys, so that none takes another's row."""
        known = self._rows
        return len(known) + sum([key not in known for key in keys]) <= self.keys_max

    def _weigh(self, row: int) -> float:
        """The weight of one more observation for this row's key, which counts from now on."""
        unit = self._unit[row] = self._unit[row] * self._growth
        self._total[row] += unit
        return unit

    def _put(self, row: int, at: int, unit: float) -> None:
        """Add an observation to this bin."""
        self._mass[row, at] += unit
        self._scale_down(row, unit)

    def _scale_down(self, row: int, unit: float) -> None:
        if unit > _UNIT_MAX:
            self._mass[row] /= unit
            self._total[row] /= unit
            self._unit[row] = 1.0

    def _spread(self, rows: list[int], at: int) -> None:
        """Spread an observation of this bin or a later one over the earlier observations there; if there are none, add
        it to the bin.
        """
        units = [self._weigh(row) for row in rows]
        beyond = self._mass.take(rows, 0)[:, at:]
        seen: list[float] = beyond.sum(axis=1).tolist()
        grown = [1.0 + unit / there if there > 0 else 1.0 for unit, there in zip(units, seen, strict=True)]
        self._mass[rows, at:] = beyond * np.array(grown, dtype=np.float32)[:, None]
        for row, unit, there in zip(rows, units, seen, strict=True):
            if there > 0:
                self._scale_down(row, unit)
            else:
                self._put(row, at, unit)

    def mixed(self, keys: Sequence[Hashable], credibility: float) -> list[float]:
        """The distribution function at `edges` for the last key; the keys before it stand in for it.

        Each key counts as n / (n + credibility) of the mixture of itself and all before it (Bühlmann's credibility; n =
        `weight`). Before the first key comes the prior.
        """
        known, totals, units = self._rows, self._total, self._unit
        rows, shares = [], []
        rest = 1.0
        for key in reversed(keys):
            row = known.get(key)
            if row is not None:
                part = rest / (totals[row] + credibility * units[row])
                rows.append(row)
                shares.append(part)
                rest = part * credibility * units[row]
        rows.append(0)
        shares.append(rest)
        density = np.array(shares, dtype=np.float32).dot(self._mass.take(rows, 0))
        whole: Floats = density.cumsum(dtype=np.float64)
        whole /= whole[-1]
        found: list[float] = whole.tolist()  # it is read at single places: cheaper in a list
        return found

    def _row(self, key: Hashable) -> int:
        """The key's row, now the most recently used; a new key may take the row used longest ago."""
        row = self._rows.pop(key, None)
        if row is None:
            if len(self._rows) >= self.keys_max:
                row = self._rows.pop(next(iter(self._rows)))
                self._mass[row] = 0.0
                self._total[row], self._unit[row] = 0.0, 1.0
            else:
                row = len(self._total)
                self._total.append(0.0)
                self._unit.append(1.0)
                if row == len(self._mass):
                    more = np.zeros((min(row, self.keys_max + 1 - row), len(self.edges)), dtype=np.float32)
                    self._mass = np.concatenate([self._mass, more])
        self._rows[key] = row
        return row
