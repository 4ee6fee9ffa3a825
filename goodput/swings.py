"""How far a load swings while an instance starts, and for how long to be ready for it again. Pure.

A load that fell by so much within a start-up time may come back as quickly, and nothing that arrives foretells it. What
it costs to be late is known: of a rise by Δ within the horizon h, about Δ · h / 2 requests come before the instances
that they need. The targets leave a share s of all requests for what no forecast says. So a swing by Δ that is not
foreseen may happen once in

    T = Δ · h / (2 · s · mean rate)

and while a swing is younger than that, capacity for its return is kept: never more than the recent load once needed.
Swings that are small or rare beside the start-up time are forgotten within minutes, others last for hours.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from goodput.stretches import Floats

NOISE: Final = 4.0
"""Standard deviations that two bins must differ by for the load to have swung; one of them is taken for chance. Of
a steady load two bins in two hours differ by three in a third of all cases, by four in one of a hundred."""
LONGEST_S: Final = 7200.0
"""No swing is remembered for longer."""


def kept_rate(counts: Floats, bin_s: float, horizon_s: float, dispersion: float, share: float, rate: float) -> float:
    """The rate that capacity is kept for, in requests a second; 0: no swing is to be expected.

    Args:
        counts: arrivals in bins, newest last.
        bin_s: seconds of a bin.
        horizon_s: how long an instance takes to start.
        dispersion: variance over mean of counts.
        share: of all requests, those that may miss what no forecast says.
        rate: at present.
    """
    part = counts[-math.floor(LONGEST_S / bin_s) :] / bin_s
    lag = max(1, math.ceil(horizon_s / bin_s))
    if len(part) <= lag or float(part.sum()) <= 0:
        return 0.0
    before, after = part[:-lag], part[lag:]
    chance = np.sqrt(dispersion * (before + after) / bin_s)
    apart = np.abs(after - before)
    swings = np.where(apart > NOISE * chance, apart - chance, 0.0)
    ages_s = np.arange(len(swings))[::-1] * bin_s
    lasts_s = swings * horizon_s / (2 * share * float(part.mean()))
    alive = swings[(swings > 0) & (ages_s <= lasts_s)]
    if not len(alive):
        return 0.0
    return min(float(np.quantile(part, MOST)), rate + float(alive.max()))


MOST: Final = 0.98
"""The quantile of recent bins that is the most that is kept for: the very highest is chance."""
