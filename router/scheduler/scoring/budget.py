"""The cost of a part of a budget, which grows the less of the budget is left; and of a missed target. Pure.

A budget is what a target allows for: a first token, or the time per later token; a part of it is what a prediction
takes. Tables are used because every choice asks for dozens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from router.core.arrays import Floats

MISS: Final = 30.0
"""The cost of a missed target: it never pays to miss one to save time for others, and of two places that miss it the
faster one is still taken."""

BARRIER_MAX: Final = 0.8
"""At least a fifth of a budget counts as left: being late must not cost more than several misses of others."""

RAMP: Final[tuple[float, ...]] = (0.85, 1.1)
"""From this share of a target on, a prediction counts as partly missed, beyond the second as missed: predictions here
are right within some 10 % (docs/policy.md)."""

_SLOPE: Final = 1.0 / (RAMP[1] - RAMP[0])

POINTS: Final = 121
PER: Final = 100.0
"""The number of a table's points in one budget."""


class BudgetTable:
    """A function of the used share of a budget, as straight lines between equally spaced points."""

    def __init__(self, of: Callable[[Floats], Floats]) -> None:
        used: Floats = np.concatenate([np.arange(POINTS) * 0.01, [1e6]])
        costs = of(used)
        self._slope: Final[Floats] = np.diff(costs) / np.diff(used)
        self._rest: Final[Floats] = costs[:-1] - self._slope * used[:-1]
        self._slopes: Final[list[float]] = self._slope.tolist()
        self._rests: Final[list[float]] = self._rest.tolist()

    def at(self, used: Floats) -> Floats:
        """The costs of these shares, none of them negative. (`np.interp` would search for each.)"""
        line = (used * PER).astype(np.int64)
        found = self._slope.take(line, mode="clip")
        found *= used
        found += self._rest.take(line, mode="clip")
        return found

    def of(self, used: float) -> float:
        """The cost of one share: the same to the last bit."""
        line = int(min(used * PER, POINTS - 1.0))
        return self._slopes[line] * used + self._rests[line]


def missed(part: Floats) -> Floats:
    """The shares of a miss that predictions count as (`RAMP`). `part`: the predictions over their target."""
    found: Floats = np.minimum(np.maximum((part - RAMP[0]) * _SLOPE, 0.0), 1.0)
    return found


def missed_one(part: float) -> float:
    """The same for one value, to the last bit."""
    return min(max((part - RAMP[0]) * _SLOPE, 0.0), 1.0)


def _near(used: Floats) -> Floats:
    """The cost of a used share, divided by that share: it grows the less of the budget is left."""
    found: Floats = 1.0 / (1.0 - np.minimum(used, BARRIER_MAX))
    return found


NEAR: Final = BudgetTable(_near)
"""The factor by which more time costs more, the less of the budget is left."""
OWN: Final = BudgetTable(lambda used: used * _near(used))
"""The cost of a used share..."""
OWN_MISSED: Final = BudgetTable(lambda used: used * _near(used) + MISS * missed(used))
"""... and with the cost of missing the target."""
