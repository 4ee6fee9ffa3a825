"""Attainment over rate, and the rate at which it is what was promised.

A bisection keeps whatever it meets: if attainment goes up and down around nine in ten, a spike decides. Here several
rates on both sides are run whole. The falling curve that fits them best (isotonic regression) is drawn through them,
and goodput is where it crosses the share. All systems use rates of one lattice on the same requests, so that
differences between them are theirs (common random numbers).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from loadgen.report import Targets
from sim.experiments.goodput import steady
from sim.result import Result

RATIO: Final = 1.06
"""The factor between two neighbouring rates of the lattice."""
BESIDE: Final = 2
"""The number of rates in a row that must hold, and must fail, before the curve counts as crossed."""
STRIDES: Final = (1, 1, 1, 2, 2, 3, 4, 4, 6, 6)
"""Lattice steps from one rate to the next, away from the start; no more rates than these on either side."""
DECILES: Final = 10


def traced(attained: Callable[[int], float], start: int, shares: Sequence[float]) -> dict[int, float]:
    """Attainment by lattice step, on both sides of the highest share and down to the other ones, within `STRIDES`.

    `shares`: from the lowest to the highest, which lies at the lowest rate.
    """
    found: dict[int, float] = {}

    def walk(sign: int, enough: Callable[[float], bool]) -> None:
        at, row = start, 0
        for stride in (0, *STRIDES):
            at += sign * stride
            if at not in found:
                found[at] = attained(at)
            row = row + 1 if enough(found[at]) else 0
            if row == BESIDE:
                return

    walk(1, lambda share: share < shares[0])
    for wanted in shares:
        walk(-1, lambda share, wanted=wanted: share >= wanted)  # type: ignore[misc]
    return found


def falling(values: Sequence[float]) -> list[float]:
    """The falling sequence that is nearest to these in squares (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            (one, count), (other, more) = blocks[-2], blocks[-1]
            blocks[-2:] = [((one * count + other * more) / (count + more), count + more)]
    return [mean for mean, count in blocks for _ in range(count)]


def rate_at(curve: Mapping[float, float], share: float) -> float:
    """The highest rate at which the fitted curve has this share, on straight lines between rates (in their
    logarithms). 0: the curve is below the share everywhere; the highest rate tried: it is above the share everywhere.
    """
    rates = sorted(curve)
    fitted = falling([curve[rate] for rate in rates])
    held = [number for number, value in enumerate(fitted) if value >= share]
    if not held:
        return 0.0
    last = held[-1]
    if last == len(rates) - 1:
        return rates[-1]
    above, below = fitted[last], fitted[last + 1]
    part = (above - share) / (above - below)
    return math.exp((1 - part) * math.log(rates[last]) + part * math.log(rates[last + 1]))


def details(result: Result, targets: Targets) -> dict[str, Any]:
    """Figures of one run's window: attainment, also by decile of prompt length, TTFT in ms, the share dropped."""
    window = steady(result)
    met, good = result.met(targets)[window], result.good()[window]
    prompts = result.columns["input_tokens"][window]
    order = np.argsort(prompts, kind="stable")
    ttft_ms = result.latency_s("ttft")[window][good] * 1000
    e2e_s = result.latency_s("e2e")[result.good()]
    span_s = float(result.columns["at_ns"].max() - result.columns["at_ns"].min()) / 1e9
    return {
        "attained": round(float(met.mean()), 4),
        "attained_overall": round(float(result.met(targets).mean()), 4),
        "by_length": [round(float(met[rows].mean()), 3) for rows in np.array_split(order, DECILES)],
        "ttft_ms": {str(p): round(float(np.percentile(ttft_ms, p)), 1) for p in (50, 99)} if len(ttft_ms) else {},
        "dropped": round(1 - float(good.mean()), 4),
        "lives": round(span_s / float(e2e_s.mean()), 1) if len(e2e_s) else None,
    }
