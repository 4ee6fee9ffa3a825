"""The longest recent stretch in which nothing changed significantly: of a rate, or of lengths. Pure.

*Rates.* Arrivals of many independent clients are Poisson, bursty ones have a variance `dispersion` times as large. Two
stretches of t₁ and t₂ seconds with n₁ and n₂ arrivals differ significantly when the root of their deviance does,

    2 · (n₁ · ln(n₁ / (r t₁)) + n₂ · ln(n₂ / (r t₂))) > z² · dispersion,    r their common rate.

Each part of a stretch is compared with the rest of it: a slow change shows first against the oldest part. A difference
of rates over its standard deviation would need many arrivals: a short stretch has ten, and counts that small are
skewed.

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
"""Standard deviations that make a change. A look every 5 s makes 253 comparisons; of a steady Poisson load of 0.2 to 8
requests a second gives a false change three times a day at 4.5, once in three days at 5, less than once in twenty days
at 5.5 (twenty simulated days at each of four rates). A load that triples is found 5 s later than at 4.5."""
LENGTHS_MIN: Final = 30
"""Requests on either side, for mean logarithms to be about normal."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The newest part of a series, in which nothing changed significantly."""

    seconds: float
    mean: float
    """Of a rate: arrivals a second. Of lengths: their logarithm, in buckets of sketches."""
    whole: bool
    """Whether it is the whole series: no change was found."""


def steady_rate(counts: Floats, bin_s: float, dispersion: float) -> Stretch | None:
    """The steady stretch of a rate, from arrivals in bins; None: too few bins."""
    edges = _edges(len(counts))
    if len(edges) < 2:
        return None
    young_s, old_s = _parts(edges.astype(np.float64) * bin_s)
    young, old = _parts(_last(counts, edges))
    common = (young + old) / (young_s + old_s)
    deviance = _excess(young, common * young_s) + _excess(old, common * old_s)
    at, whole = _change(deviance / (SIGNIFICANT**2 * dispersion))
    total, seconds = float(counts[len(counts) - edges[at] :].sum()), float(edges[at] * bin_s)
    return Stretch(seconds, total / seconds, whole)


def steady_lengths(counts: Floats, sums: Floats, squares: Floats, bin_s: float) -> Stretch | None:
    """The steady stretch of lengths; None: too few bins.

    Args:
        counts: number of lengths in each bin, newest last.
        sums: sum of their logarithms in each bin.
        squares: sum of the squared logarithms in each bin.
        bin_s: seconds of a bin.
    """
    edges = _edges(len(counts))
    if len(edges) < 2:
        return None
    number, total, square = (_parts(_last(each, edges)) for each in (counts, sums, squares))
    young, old = number
    few = np.minimum(young, old) < LENGTHS_MIN
    both = np.maximum(young + old, 1.0)
    spread = np.maximum(sum(square) / both - (sum(total) / both) ** 2, _BUCKET)
    young, old = np.maximum(young, 1.0), np.maximum(old, 1.0)
    apart = np.abs(total[0] / young - total[1] / old)
    error = np.sqrt(spread * (1 / young + 1 / old))
    at, whole = _change(np.where(few, 0.0, apart / (SIGNIFICANT * error)))
    begin = len(counts) - edges[at]
    return Stretch(float(edges[at] * bin_s), float(sums[begin:].sum() / max(1.0, counts[begin:].sum())), whole)


def _parts(upto: Floats) -> tuple[Floats, Floats]:
    """Contents of recent stretches (rows), and of longer ones (columns) without them. `upto`: contents by length."""
    young = np.broadcast_to(upto[:-1, None], (len(upto) - 1, len(upto) - 1))
    return young, np.maximum(upto[None, 1:] - young, 0.0)


def _change(apart: Floats) -> tuple[int, bool]:
    """Index of the edge at the last change: in the shortest stretch with a significant difference (`apart` above 1),
    the place where its parts differ most; and False. Without a change: the index of the whole series, and True.
    """
    ordered = np.triu(apart)
    columns = np.flatnonzero((ordered > 1).any(axis=0))
    return (int(ordered[:, columns[0]].argmax()), False) if len(columns) else (len(apart), True)


_BUCKET: Final = 1 / 12
"""Variance within a bucket, in buckets squared: what rounding to buckets leaves unknown."""


def _last(values: Floats, edges: NDArray[np.int64]) -> Floats:
    """Sums of the last values, for each number of values in `edges`."""
    sums: Floats = np.concatenate([[0.0], np.cumsum(values[::-1])])[edges]
    return sums


def _excess(counts: Floats, expected: Floats) -> Floats:
    """A stretch's part of the deviance; 0 without arrivals."""
    found: Floats = 2 * counts * np.log(np.maximum(counts, 1e-9) / np.maximum(expected, 1e-9))
    return found


def _edges(count: int) -> NDArray[np.int64]:
    """Lengths of stretches that are compared, in bins: each a third longer than the one before."""
    found = [2]
    while found[-1] < count:
        found.append(min(count, max(found[-1] + 1, math.ceil(found[-1] * 1.33))))
    return np.array([each for each in found if each <= count], dtype=np.int64)
