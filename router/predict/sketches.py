"""Distributions learned online, one per key: histograms over log-spaced bins that forget exponentially. Pure.

Why fixed bins, and not P² (Jain and Chlamtac 1985) or a t-digest (Dunning 2019): an observation changes one place of a
row of bins, and a row forgets by giving newer observations more weight. Above all, rows can be *mixed* by a weighted
sum: backing off from a specific key to a general one needs that. P² answers one quantile and cannot be mixed;
t-digests mix only by clustering again, and forget badly. The price is the width of a bin, which the caller chooses.

Invariants: there are at most `keys_max` rows, and those learned from longest ago go first; a mixture's distribution
function rises strictly from 0 to 1, as the caller's prior has mass everywhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import Final

_UNIT_MAX = 2.0**20
"""Weight of one observation at which a row is scaled down."""

_FORGOTTEN = 1e-100
"""Mass below this share of one observation counts as none: it comes from observations some 230 memories ago, and a
quotient by still less would be infinite."""


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


TOGETHER_MAX: Final = 32
"""The most observations that wait to be learned."""

TOGETHER_PART: Final = 16
"""At most one in so many of all observations so far may wait: while little is known, each counts at once."""


class Backlog:
    """Decides when waiting observations are learned, together. Until then a distribution stays as it is, and what is
    read from it is computed once for all requests that ask for the same.
    """

    __slots__ = ("_seen", "_waiting")

    def __init__(self) -> None:
        self._seen = self._waiting = 0

    def takes(self) -> bool:
        """One more observation waits. False: all that wait are to be learned now."""
        self._seen += 1
        self._waiting += 1
        if self._waiting <= min(TOGETHER_MAX, self._seen // TOGETHER_PART):
            return True
        self._waiting = 0
        return False


class _Row:
    """Mass by bin of one key, from the first bin that has any to the last. (A few dozen numbers: a call of numpy takes
    longer than compiled code does for all of them.)
    """

    __slots__ = ("begin", "mass", "total", "unit")

    def __init__(self) -> None:
        self.begin = 0
        """The bin of `mass[0]`."""
        self.mass: list[float] = []
        self.total: float = 0.0
        self.unit: float = 1.0
        """Weight of the last observation."""

    def weigh(self, growth: float) -> None:
        """One more observation: it weighs more than the one before, and counts from now on."""
        self.unit *= growth
        self.total += self.unit

    def put(self, at: int) -> None:
        """Put the last observation into this bin."""
        if not self.mass:
            self.begin, self.mass = at, [0.0]
        elif at < self.begin:
            self.begin, self.mass = at, [0.0] * (self.begin - at) + self.mass
        elif at >= self.begin + len(self.mass):
            self.mass.extend([0.0] * (at - self.begin - len(self.mass) + 1))
        self.mass[at - self.begin] += self.unit
        self._scale_down()

    def spread(self, at: int) -> None:
        """The last observation is in this bin or a later one: spread it like the mass that is there already; without
        any (`_FORGOTTEN`), put it into this bin.
        """
        mass, first = self.mass, max(0, at - self.begin)
        seen = sum(mass[first:])
        if seen <= _FORGOTTEN * self.unit:
            self.put(at)
            return
        grown = 1.0 + self.unit / seen
        for each in range(first, len(mass)):
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
        """Bin 0 stays empty: sums are then the distribution function at each edge."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def bytes(self) -> int:
        """The bytes that the bins take; keys and bookkeeping come to about 400 bytes a key on top (CPython 3.11)."""
        return 32 * sum([len(row.mass) for row in self._rows.values()])

    def add(self, keys: Sequence[Hashable], value: float, *, at_least: bool = False) -> None:
        """One observation for each of these keys. `at_least`: it was cut off at `value`, and the real value is this or
        more.

        A cut-off observation is spread over what a key has seen beyond it (Efron 1967, "redistribute to the right"); if
        nothing was seen beyond, it stays.
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
        """The distribution function at `edges` for the last key; the keys before it stand in for it.

        Each key counts as n / (n + credibility) of the mixture of itself and all before it (Bühlmann's credibility; n:
        its observations, older ones counting less). Before the first key comes the prior.
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
            share, mass, begin = shares[number], row.mass, row.begin
            for at in range(len(mass)):
                density[begin + at] += share * mass[at]
        return _summed(density)

    def _row(self, key: Hashable) -> _Row:
        """The key's row, now the most recently used; a new key may take the place of the least."""
        row = self._rows.pop(key, None)
        if row is None:
            if len(self._rows) >= self.keys_max:
                del self._rows[next(iter(self._rows))]
            row = _Row()
        self._rows[key] = row
        return row


def _summed(density: list[float]) -> list[float]:
    """A distribution function: sums from the first on, over the whole."""
    reached = 0.0
    for at in range(len(density)):
        reached += density[at]
        density[at] = reached
    return [each / reached for each in density]
