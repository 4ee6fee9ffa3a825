"""How far a load swings while an instance starts, and for how long capacity is kept for such a swing. Pure.

A load that fell by Δ within a start-up time h may rise as quickly, and no arrival announces it. The cost of being late
is known: of a rise by Δ within h, about Δ · h / 2 requests arrive before the instances that they need. The targets let
a share s of all requests miss because of changes that no forecast foresees. So an unforeseen swing by Δ may happen once
in

    T = Δ · h / (2 · s · mean rate)

and while a swing is younger than that, capacity for its return is kept, never more than the recent load once needed.
Small swings, and swings with a short start-up time, are forgotten within minutes; others count for hours.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from goodput.stretches import Floats

NOISE: Final = 4.0
"""Standard deviations by which two bins must differ to count as a swing; one of them is subtracted as chance. In two
hours of a steady load some two bins differ by three in a third of all cases, by four in one of a hundred."""
LONGEST_S: Final = 7200.0
"""Seconds after which any swing is forgotten."""


def kept_rate(counts: Floats, bin_s: float, horizon_s: float, dispersion: float, share: float, rate: float) -> float:
    """The rate that capacity is kept for, in requests a second; 0: no swing is to be expected.

    Args:
        counts: arrivals in bins, newest last.
        bin_s: seconds of a bin.
        horizon_s: how long an instance takes to start.
        dispersion: variance over mean of counts.
        share: share of all requests that may miss because of unforeseen changes.
        rate: present requests a second.
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
"""Capacity is kept for at most this quantile of recent bins: the very highest ones are chance."""
