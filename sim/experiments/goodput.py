"""Goodput: the highest rate at which a criterion holds, found by bisection on the rate.

Attainment is taken of a run's middle arrivals, from 20 % to 80 % of their number: before, the fleet fills up, after, it
drains, and both flatter. Of those every arrival counts; one that failed or was turned away has missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from loadgen.report import Targets
from loadgen.search import WINDOW
from sim.result import Result

STEP: Final = 1.6
"""Factor between tries until one holds and one does not."""
GIVE_UP: Final = 1 / 300
"""The share of the first guess below which no rate is tried."""
RUNS_MAX: Final = 40


def steady(result: Result) -> NDArray[np.bool_]:
    """Which rows are in the window; rows are in the order of arrival."""
    count = len(result.columns)
    found = np.zeros(count, dtype=np.bool_)
    found[math.floor(WINDOW[0] * count) : math.ceil(WINDOW[1] * count)] = True
    return found


def attainment(result: Result, targets: Targets) -> float:
    """Share of the window's arrivals that met every target."""
    return float(result.met(targets)[steady(result)].mean())


@dataclass(frozen=True, slots=True)
class GoodputFound:
    """Where a search ended."""

    rate: float
    """The highest rate that held, in requests a second; 0: none did."""
    runs: int


def highest(holds: Callable[[float], bool], guess: float, tolerance: float) -> GoodputFound:
    """Bracket from a guess, then bisect until the bracket is narrower than `tolerance` (0.03 = 3 %)."""
    low, high, rate, runs = 0.0, 0.0, guess, 0
    while (not low or not high) and runs < RUNS_MAX:
        runs += 1
        if holds(rate):
            low, rate = rate, rate * STEP
        else:
            high, rate = rate, rate / STEP
            if rate < guess * GIVE_UP:
                return GoodputFound(0.0, runs)
    while high > low * (1 + tolerance) and runs < RUNS_MAX:
        runs += 1
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return GoodputFound(low, runs)
