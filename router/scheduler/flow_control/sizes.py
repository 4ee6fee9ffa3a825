"""Which sizes of prompts are given up, and how often: so that no size bears more than its part. Pure.

When not all waiting requests can be in time, fewest are late if those with most work are given up. Then the longest
prompts bear nearly all of it. So the share that was given up is kept by size, half an octave of tokens each, over the
last `MEMORY` promised requests. A class may set a bound (`lengths_within` in the cluster file). A size that is given up
more often than all together, by more than the bound, has had enough: others go first until the difference is smaller
again. The bound has a price: for each long prompt that is served several short ones are late (docs/policy.md).
"""

from __future__ import annotations

import math
from typing import Final

MEMORY: Final = 500.0
"""Requests over which shares are counted; older ones fade."""

FEW: Final = 5.0
"""Requests of a size that must be known before it has had enough."""

_GROWTH: Final = math.exp(1.0 / MEMORY)
_HEAVY: Final = 1e12


class GivenUp:
    """How often one queue has given up prompts of each size."""

    __slots__ = ("_all", "_gone", "_gone_all", "_seen", "_weight")

    def __init__(self) -> None:
        self._weight = 1.0
        """The weight of the next request: it grows, in place of a fading of all earlier ones."""
        self._seen: Final[dict[int, float]] = {}
        self._gone: Final[dict[int, float]] = {}
        self._all = 0.0
        self._gone_all = 0.0

    def add(self, tokens: int, *, gone: bool) -> None:
        """A prompt of so many tokens was let in, or was given up (`gone`)."""
        size, weight = size_of(tokens), self._weight
        self._seen[size] = self._seen.get(size, 0.0) + weight
        self._all += weight
        if gone:
            self._gone[size] = self._gone.get(size, 0.0) + weight
            self._gone_all += weight
        self._weight = weight * _GROWTH
        if self._weight > _HEAVY:
            self._lighten()

    def _lighten(self) -> None:
        """Scale all weights down, so that floats stay exact."""
        by = 1.0 / self._weight
        for each in (self._seen, self._gone):
            for size in each:
                each[size] *= by
        self._all *= by
        self._gone_all *= by
        self._weight = 1.0

    def enough(self, tokens: int, within: float) -> bool:
        """Whether prompts of this size were given up so often that others go first: the share of them that was given up
        is more than `within` above that of all prompts.
        """
        if within >= 1.0:
            return False
        gone = self._gone.get(size := size_of(tokens), 0.0)
        if not gone:
            return False
        seen = self._seen[size]
        return seen >= FEW * self._weight and gone * self._all > (self._gone_all + within * self._all) * seen


def size_of(tokens: int) -> int:
    """The size class of a prompt: its number of half octaves."""
    return round(2.0 * math.log2(max(1, tokens)))
