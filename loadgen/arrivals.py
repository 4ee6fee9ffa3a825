"""Arrival times: renewal processes, which are streams of independent gaps. Pure: the caller gives the generator.

Every process is endless and gives the times of arrivals in seconds, ascending; the first one comes after one gap. With
mean rate r (requests per second) the mean gap is 1/r, and r·t arrivals are expected in t seconds. Processes burstier
than Poisson give about (CV² − 1)/2 more, because the start counts as an arrival. CV is a gap's standard deviation over
its mean.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

BATCH = 256
"""Gaps are drawn in batches of this size: one call of numpy costs as much as a few hundred numbers."""

CV_MIN = 1e-3
CV_MAX: Mapping[str, float] = MappingProxyType({"gamma": 1000.0, "weibull": 30.0})
"""Largest CV of each process. Beyond 30 a Weibull's shape lies below 0.14, and a single gap can be longer than any run.
Beyond 1,000 nearly all of a gamma's gaps are 0."""


def cv_fault(process: str, cv: float) -> str:
    """Why this process cannot have this CV; empty if it can. Processes without a CV of their own take any."""
    most = CV_MAX.get(process)
    if most is None or CV_MIN <= cv <= most:
        return ""
    more = "; gamma takes more" if most < cv <= CV_MAX["gamma"] else ""
    return f"{process} takes {CV_MIN:g} to {most:g}{more}"


def constant(rate: float) -> Iterator[float]:
    """Gaps all 1/rate: CV 0. The n-th arrival is at n/rate exactly, without a sum's error."""
    at = 0
    while True:
        at += 1
        yield at / rate


def poisson(rate: float, rng: np.random.Generator) -> Iterator[float]:
    """Exponential gaps, density r·exp(−r·x): mean 1/rate, CV 1."""
    at_s = 0.0
    while True:
        for gap_s in rng.exponential(1 / rate, BATCH).tolist():
            at_s += gap_s
            yield at_s


def gamma(rate: float, cv: float, rng: np.random.Generator) -> Iterator[float]:
    """Gamma gaps of shape k = 1/CV² and scale CV²/rate: mean k·scale = 1/rate, standard deviation CV/rate.

    With CV 0 the gaps are constant.
    """
    if cv == 0:
        yield from constant(rate)
    shape = 1 / cv**2
    at_s = 0.0
    while True:
        for gap_s in rng.gamma(shape, 1 / (rate * shape), BATCH).tolist():
            at_s += gap_s
            yield at_s


def weibull(rate: float, cv: float, rng: np.random.Generator) -> Iterator[float]:
    """Weibull gaps of the shape k that has this CV and the scale 1/(rate·Γ(1 + 1/k)): mean 1/rate.

    With CV 0 the gaps are constant.
    """
    if cv == 0:
        yield from constant(rate)
    shape = weibull_shape(cv)
    scale = 1 / (rate * math.gamma(1 + 1 / shape))
    at_s = 0.0
    while True:
        for gap in rng.weibull(shape, BATCH).tolist():
            at_s += gap * scale
            yield at_s


def weibull_shape(cv: float) -> float:
    """The shape k with CV² = Γ(1 + 2/k)/Γ(1 + 1/k)² − 1, by bisection: CV falls as k rises. 0 < cv ≤ 30."""
    assert 0 < cv <= CV_MAX["weibull"]
    low, high = 0.1, 1e4
    for _ in range(100):
        middle = math.sqrt(low * high)
        square = math.expm1(math.lgamma(1 + 2 / middle) - 2 * math.lgamma(1 + 1 / middle))
        low, high = (middle, high) if square > cv**2 else (low, middle)
    return math.sqrt(low * high)


class Window(NamedTuple):
    """A stretch of time in which a client keeps one rate and one burstiness."""

    start_s: float
    end_s: float
    rate: float
    """Mean requests per second; 0 = silent."""
    family: str
    """`Gamma` or `Weibull`."""
    shape: float
    """The family's shape k; below 1 is burstier than Poisson."""


def windows(schedule: Iterable[Window], rng: np.random.Generator) -> Iterator[float]:
    """A renewal process whose rate changes: gaps of mean 1 are spent at the current rate, across windows.

    The expected number of arrivals in a window is the integral of the rate over it, whatever its shape. A gap keeps the
    shape of the window that it began in.
    """
    left: float | None = None
    for window in schedule:
        at_s = window.start_s
        if window.rate <= 0:
            continue
        while True:
            if left is None:
                left = _unit_gap(window.family, window.shape, rng)
            next_s = at_s + left / window.rate
            if next_s >= window.end_s:
                left -= (window.end_s - at_s) * window.rate
                break
            at_s, left = next_s, None
            yield at_s


def _unit_gap(family: str, shape: float, rng: np.random.Generator) -> float:
    """One gap of mean 1."""
    if family == "Weibull":
        return float(rng.weibull(shape)) / math.gamma(1 + 1 / shape)
    return float(rng.gamma(shape, 1 / shape))


def mixed(streams: Iterable[Iterator[float]]) -> Iterator[tuple[float, int]]:
    """Merge several clients: (time in seconds, index of the stream), ascending. Rates add up."""
    return heapq.merge(*(_named(stream, at) for at, stream in enumerate(streams)))


def _named(stream: Iterator[float], at: int) -> Iterator[tuple[float, int]]:
    for at_s in stream:
        yield at_s, at
