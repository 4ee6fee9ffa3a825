"""The longest recent stretch in which nothing changed significantly: of a rate, or of lengths. Pure.

*Rates.* Arrivals of many independent clients are Poisson, bursty ones have a variance `dispersion` times as large. Two
stretches of t₁ and t₂ seconds with n₁ and n₂ arrivals differ significantly when the root of their deviance does,

    2 · (n₁ · ln(n₁ / (r t₁)) + n₂ · ln(n₂ / (r t₂))) > z² · dispersion,    r their common rate.

A difference of rates over its standard deviation would do for many arrivals only: a short stretch holds ten, and counts
that small are skewed.

*Lengths.* Two stretches differ when their mean logarithms do (Welch's test with a common variance). Lengths of requests
are about log-normal, so a single long one makes no change; buckets of sketches are logarithms already.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SIGNIFICANT: Final = 5.5
"""Standard deviations that make a change. A look every 5 s compares 23 lengths; of a steady Poisson load of 0.2 to 8
requests a second that finds a change that is none once a day at 4.5, once in five days at 5, less than once in twenty
at 5.5 (twenty simulated days at each of four rates). A load that triples is told 5 s later than at 4.5."""
LENGTHS_MIN: Final = 30
"""Requests on either side, for mean logarithms to be about normal."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Up to now."""

    seconds: float
    mean: float
    """Of what is asked for: a rate, or a logarithm."""
    whole: bool
    """Whether it is all that is known."""


def steady_rate(counts: Floats, bin_s: float, dispersion: float) -> Stretch | None:
    """Of arrivals in bins; None: too few bins."""
    edges = _edges(len(counts))
    if len(edges) < 2:
        return None
    lengths, totals = edges * bin_s, _last(counts, edges)
    common = totals[1:] / lengths[1:]
    deviance = _excess(totals[:-1], common * lengths[:-1]) + _excess(np.diff(totals), common * np.diff(lengths))
    changed = np.flatnonzero(deviance > SIGNIFICANT**2 * dispersion)
    at = int(changed[0]) if len(changed) else len(edges) - 1
    return Stretch(float(lengths[at]), float(totals[at] / lengths[at]), not len(changed))


def steady_lengths(counts: Floats, sums: Floats, squares: Floats, bin_s: float) -> Stretch | None:
    """Of lengths in bins: how many, the sum of their logarithms, and of those squared; None: too few bins."""
    edges = _edges(len(counts))
    if len(edges) < 2:
        return None
    number, total, square = (_last(each, edges) for each in (counts, sums, squares))
    young, old = number[:-1], np.diff(number)
    few = np.minimum(young, old) < LENGTHS_MIN
    means = total[1:] / np.maximum(number[1:], 1.0)
    spread = np.maximum(square[1:] / np.maximum(number[1:], 1.0) - means**2, _BUCKET)
    apart = np.abs(total[:-1] / np.maximum(young, 1.0) - np.diff(total) / np.maximum(old, 1.0))
    error = np.sqrt(spread * (1 / np.maximum(young, 1.0) + 1 / np.maximum(old, 1.0)))
    changed = np.flatnonzero(~few & (apart > SIGNIFICANT * error))
    at = int(changed[0]) if len(changed) else len(edges) - 1
    return Stretch(float(edges[at] * bin_s), float(total[at] / max(1.0, number[at])), not len(changed))


_BUCKET: Final = 1 / 12
"""Variance within a bucket, in buckets squared: what rounding to buckets leaves unknown."""


def _last(values: Floats, edges: NDArray[np.int64]) -> Floats:
    """Sums of the last so many values."""
    sums: Floats = np.concatenate([[0.0], np.cumsum(values[::-1])])[edges]
    return sums


def _excess(counts: Floats, expected: Floats) -> Floats:
    """A stretch's part of the deviance; nothing where it holds no arrival."""
    found: Floats = 2 * counts * np.log(np.maximum(counts, 1e-9) / np.maximum(expected, 1e-9))
    return found


def _edges(count: int) -> NDArray[np.int64]:
    """Lengths of stretches that are compared, in bins: each a third longer than the one before."""
    found = [2]
    while found[-1] < count:
        found.append(min(count, max(found[-1] + 1, math.ceil(found[-1] * 1.33))))
    return np.array([each for each in found if each <= count], dtype=np.int64)
