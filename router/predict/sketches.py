"""Distributions learned online, one per key: histograms over log-spaced bins that forget exponentially. Pure.

Why fixed bins, and not P² (Jain and Chlamtac 1985) or a t-digest (Dunning 2019): a row of bins is added to in one
place, forgets by letting newer observations weigh more, and, above all, can be *mixed* with others by a weighted sum,
which is what backing off from a specific key to a general one needs. P² answers one quantile and cannot be mixed;
t-digests mix only by clustering again, and forget badly. The price is the width of a bin, which the caller chooses.

What always holds: no more than `keys_max` rows, those learned from longest ago go first; a mixture's distribution
function rises strictly from 0 to 1, since the caller's prior has mass everywhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import Final

_UNIT_MAX = 2.0**20
"""Weight of one observation at which a row is scaled down."""


def between(at: float, places: Sequence[float], heights: Sequence[float]) -> float:
    """The height at a place, on straight lines between those given; beyond them as at the last. Places ascend.

    To the last bit what `numpy.interp` says, which takes five times as long for one place.
    """
    below = bisect_right(places, at) - 1
    if below < 0:
        return heights[0]
    if below >= len(places) - 1 or places[below] == at:
        return heights[below]
    slope = (heights[below + 1] - heights[below]) / (places[below + 1] - places[below])
    return slope * (at - places[below]) + heights[below]


class _Row:
    """Mass by bin of one key. (A few dozen numbers at a time: a call of numpy costs more than compiled code takes for
    all of them, and most keys have seen a few bins next to each other.)
    """

    __slots__ = ("begin", "end", "mass", "total", "unit")

    def __init__(self, bins: int) -> None:
        self.mass: list[float] = [0.0] * (bins + 1)
        """Bin 0 stays empty: sums along a row are then the distribution function at each edge."""
        self.begin = bins + 1
        self.end = 0
        """All mass is in `mass[begin:end]`."""
        self.total: float = 0.0
        self.unit: float = 1.0
        """Weight of the last observation."""

    def weigh(self, growth: float) -> float:
        """What one more observation weighs. It counts from now on."""
        self.unit *= growth
        self.total += self.unit
        return self.unit

    def put(self, at: int) -> None:
        """The last observation is of this bin."""
        self.mass[at] += self.unit
        self.begin, self.end = min(self.begin, at), max(self.end, at + 1)
        self._scale_down()

    def spread(self, at: int) -> None:
        """The last observation is of this bin or a later one: put it where those before it are; into the bin where
        none is.
        """
        mass, begin, end = self.mass, max(at, self.begin), self.end
        seen = sum(mass[begin:end]) if begin < end else 0.0
        if seen <= 0.0:
            self.put(at)
            return
        grown = 1.0 + self.unit / seen
        for each in range(begin, end):
            if mass[each]:
                mass[each] *= grown
        self._scale_down()

    def _scale_down(self) -> None:
        unit = self.unit
        if unit > _UNIT_MAX:
            self.mass = [each / unit for each in self.mass]
            self.total /= unit
            self.unit = 1.0


class Sketches:
    """Rows of mass by key. `edges` are the bins' lower ends and the last one's upper end, ascending."""

    def __init__(self, edges: Sequence[float], prior: Sequence[float], *, keys_max: int, memory: float) -> None:
        """`memory`: observations of a key after which one weighs 1/e; `prior`: mass by bin, all above zero."""
        assert len(prior) == len(edges) - 1
        assert min(prior) > 0
        self.edges: Final = tuple(edges)
        self.keys_max: Final = keys_max
        self._growth: Final = 1.0 / (1.0 - 1.0 / memory)
        self._rows: Final[dict[Hashable, _Row]] = {}
        """Learned from longest ago first."""
        whole = float(sum(prior))
        self._prior: Final[list[float]] = [0.0, *[float(each) / whole for each in prior]]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def bytes(self) -> int:
        """What the bins take; keys and bookkeeping come to about 400 bytes a key on top (CPython 3.11)."""
        return sum([8 * len(row.mass) + 24 * max(0, row.end - row.begin) for row in self._rows.values()])

    def weight(self, key: Hashable) -> float:
        """Observations of this key, older ones counting less; at most `memory`."""
        row = self._rows.get(key)
        return 0.0 if row is None else row.total / row.unit

    def add(self, keys: Sequence[Hashable], value: float, *, at_least: bool = False) -> None:
        """One observation, of each of these keys. `at_least`: it was cut off there, the real value is this or more.

        A cut-off one is spread over what a key has seen beyond it (Efron 1967, "redistribute to the right"); where
        nothing was, it stays.
        """
        at = min(max(bisect_right(self.edges, value), 1), len(self.edges) - 1)
        growth = self._growth
        for key in keys:
            row = self._row(key)
            row.weigh(growth)
            if at_least:
                row.spread(at)
            else:
                row.put(at)

    def mixed(self, keys: Sequence[Hashable], credibility: float) -> list[float]:
        """The distribution function at `edges` for the last key, which the keys before it stand in for.

        Each key counts as n / (n + credibility) of what is said by it and all before it together (Bühlmann's
        credibility; n = `weight`). Before the first stands the prior.
        """
        known = self._rows
        rows: list[_Row] = []
        shares: list[float] = []
        rest = 1.0
        for key in reversed(keys):
            row = known.get(key)
            if row is not None:
                part = rest / (row.total + credibility * row.unit)
                rows.append(row)
                shares.append(part)
                rest = part * credibility * row.unit
        density = [rest * each for each in self._prior]
        for number, row in enumerate(rows):
            share, mass = shares[number], row.mass
            for at in range(row.begin, row.end):
                density[at] += share * mass[at]
        return _summed(density)

    def _row(self, key: Hashable) -> _Row:
        """The key's row, now the most recently used; a new key may take the place of the least."""
        row = self._rows.pop(key, None)
        if row is None:
            if len(self._rows) >= self.keys_max:
                del self._rows[next(iter(self._rows))]
            row = _Row(len(self.edges) - 1)
        self._rows[key] = row
        return row


def _summed(density: list[float]) -> list[float]:
    """A distribution function: sums from the first on, over the whole."""
    reached = 0.0
    for at in range(len(density)):
        reached += density[at]
        density[at] = reached
    return [each / reached for each in density]
