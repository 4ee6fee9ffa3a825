"""The longest recent stretch in which nothing changed significantly: of a rate, or of lengths. Pure.

*Rates.* Arrivals of many independent clients are Poisson, bursty ones have a variance `dispersion` times as large. Two
stretches of t₁ and t₂ seconds with n₁ and n₂ arrivals differ significantly when the root of their deviance does,

    2 · (n₁ · ln(n₁ / (r t₁)) + n₂ · ln(n₂ / (r t₂))) > z² · dispersion,    r their common rate.

Each part of a stretch is compared with the rest of it, since a slow change shows against what is long ago first. A
difference of rates over its standard deviation would do for many arrivals only: a short stretch holds ten, and counts
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
"""Standard deviations that make a change. A look every 5 s makes 253 comparisons; of a steady Poisson load of 0.2 to 8
requests a second that finds a change that is none three times a day at 4.5, once in three days at 5, less than once in
twenty at 5.5 (twenty simulated days at each of four rates). A load that triples is told 5 s later than at 4.5."""
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
    young_s, old_s = _parts(edges.astype(np.float64) * bin_s)
    young, old = _parts(_last(counts, edges))
    common = (young + old) / (young_s + old_s)
    deviance = _excess(young, common * young_s) + _excess(old, common * old_s)
    at, whole = _change(deviance / (SIGNIFICANT**2 * dispersion))
    total, seconds = float(counts[len(counts) - edges[at] :].sum()), float(edges[at] * bin_s)
    return Stretch(seconds, total / seconds, whole)


def steady_lengths(counts: Floats, sums: Floats, squares: Floats, bin_s: float) -> Stretch | None:
    """Of lengths in bins: how many, the sum of their logarithms, and of those squared; None: too few bins."""
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
    """Of what recent stretches hold, by their length: each one (row), and each longer one less it (column)."""
    young = np.broadcast_to(upto[:-1, None], (len(upto) - 1, len(upto) - 1))
    return young, np.maximum(upto[None, 1:] - young, 0.0)


def _change(apart: Floats) -> tuple[int, bool]:
    """Where the last change was: in the shortest stretch that is not all of a kind, where its parts differ most. Above
    1 in `apart`: significantly. All that is known, and True, where there is no change.
    """
    ordered = np.triu(apart)
    columns = np.flatnonzero((ordered > 1).any(axis=0))
    return (int(ordered[:, columns[0]].argmax()), False) if len(columns) else (len(apart), True)


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
