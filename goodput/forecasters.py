"""Forecasters of the rate of arrivals: each a pure function of the series so far and a horizon in seconds.

None of them is best for every load, so they compete (`goodput.forecast`). A forecaster returns requests a second, or
None if it has too little to go by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from goodput.stretches import Floats, Stretch, steady_rate

LATELY_S: Final = 30.0
DISPERSION_MAX: Final = 50.0
FADES_S: Final = 400.0
"""Seconds for which a trend goes on, on average: longer than most starts, because it is extended over one start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The series so far, newest last."""

    counts: Floats
    """Arrivals in bins of `bin_s`."""
    bin_s: float
    coarse: Floats
    """Arrivals over a longer time, in bins of `coarse_s`."""
    coarse_s: float
    dispersion: float = 1.0
    """Variance over mean of the bins' counts; 1: Poisson."""
    period_s: float | None = None
    """Period after which the load repeats itself; None: none was found."""
    level: Stretch | None = None
    """The recent stretch in which no change is significant; None: too few bins."""

    @staticmethod
    def of(counts: Floats, bin_s: float, coarse: Floats, coarse_s: float, period_s: float | None = None) -> History:
        """The history of these counts, with its dispersion and its level."""
        dispersion = dispersion_of(counts)
        level = steady_rate(counts, bin_s, dispersion)
        return History(
            counts=counts,
            bin_s=bin_s,
            coarse=coarse,
            coarse_s=coarse_s,
            dispersion=dispersion,
            period_s=period_s,
            level=level,
        )

    def before(self, ago_s: float) -> History:
        """The history as it was `ago_s` seconds ago."""
        fine, coarse = round(ago_s / self.bin_s), round(ago_s / self.coarse_s)
        counts = self.counts[: len(self.counts) - fine]
        return replace(
            self,
            counts=counts,
            coarse=self.coarse[: max(0, len(self.coarse) - coarse)],
            level=steady_rate(counts, self.bin_s, self.dispersion),
        )

    def mean(self, seconds: float, before_s: float = 0.0) -> float:
        """Requests a second in a stretch that ended `before_s` ago."""
        end = len(self.counts) - round(before_s / self.bin_s)
        bins = max(1, round(seconds / self.bin_s))
        part = self.counts[max(0, end - bins) : max(0, end)]
        return float(part.mean()) / self.bin_s if len(part) else 0.0


Forecaster = Callable[[History, float], float | None]


def lately(history: History, _horizon_s: float) -> float | None:
    """The mean of the last half minute."""
    return history.mean(LATELY_S) if len(history.counts) else None


def smoothed(history: History, _horizon_s: float) -> float | None:
    """Exponentially weighted mean, time constant two minutes."""
    part = history.counts[-180:]
    if len(part) < 12:
        return None
    weights = np.exp(-np.arange(len(part))[::-1] * history.bin_s / 120.0)
    return float(part @ weights / weights.sum()) / history.bin_s


def last_value(history: History, _horizon_s: float) -> float | None:
    """The present level, which others have to beat: the mean of the longest recent stretch without a significant
    change. It is precise while the load is steady, and quick after a step.
    """
    return None if history.level is None else history.level.mean


def trend(history: History, horizon_s: float, stretch_s: float) -> float | None:
    """A straight line through the last `stretch_s`; its slope shrinks by how uncertain it is (James and Stein's rule),
    so that noise alone makes no trend, and fades with the horizon (the damped trend of Gardner and McKenzie): no load
    grows for ever.
    """
    bins = round(stretch_s / history.bin_s)
    part = history.counts[-bins:] / history.bin_s
    if len(part) < bins:
        return None
    x = (np.arange(bins) - (bins - 1) / 2) * history.bin_s
    mean, square = float(part.mean()), float(x @ x)
    slope = float(x @ part) / square
    variance = history.dispersion * max(mean, 1e-9) / history.bin_s / square
    kept = max(0.0, 1.0 - variance / slope**2) if slope else 0.0
    ahead_s = FADES_S * (1 - math.exp(-horizon_s / FADES_S))
    return max(0.0, mean + slope * kept * (stretch_s / 2 + ahead_s))


def short_trend(history: History, horizon_s: float) -> float | None:
    """A line through two minutes."""
    return trend(history, horizon_s, 120.0)


def middle_trend(history: History, horizon_s: float) -> float | None:
    """A line through four minutes."""
    return trend(history, horizon_s, 240.0)


def long_trend(history: History, horizon_s: float) -> float | None:
    """A line through eight minutes."""
    return trend(history, horizon_s, 480.0)


def seasonal(history: History, horizon_s: float) -> float | None:
    """The rate one period earlier, scaled by the ratio of the last minutes to those one period before. It is a mean
    over half a horizon: one minute's count is noisy, and the end of a start is not known to the minute.
    """
    if history.period_s is None:
        return None
    period_s, now_s = history.period_s, len(history.coarse) * history.coarse_s
    at_s, around_s = now_s + horizon_s - period_s, horizon_s / 4
    then = [_around(history, at_s + each) for each in (-around_s, 0.0, around_s)]
    here, there = _around(history, now_s - 90.0), _around(history, now_s - 90.0 - period_s)
    known = [each for each in then if each is not None]
    if not known or here is None or there is None:
        return None
    mean = sum(known) / len(known)
    scale = (here + 0.1 * mean + 1e-9) / (there + 0.1 * mean + 1e-9)
    return mean * min(2.0, max(0.5, scale))


def _around(history: History, at_s: float) -> float | None:
    """The rate at a time, interpolated between the middles of coarse bins; None: outside of them."""
    at = at_s / history.coarse_s - 0.5
    low = math.floor(at)
    if low < 0 or low + 1 >= len(history.coarse):
        return None
    part = at - low
    return float(history.coarse[low] * (1 - part) + history.coarse[low + 1] * part) / history.coarse_s


def recent_peak(history: History, _horizon_s: float) -> float | None:
    """The 90th percentile of the last half hour's minutes: for loads that jump up and down."""
    part = history.coarse[-30:]
    return float(np.quantile(part, 0.9)) / history.coarse_s if len(part) >= 10 else None


SEASONAL: Final = "seasonal"
FORECASTERS: Final[Mapping[str, Forecaster]] = {
    "last value": last_value,
    "lately": lately,
    "smoothed": smoothed,
    "short trend": short_trend,
    "trend": middle_trend,
    "long trend": long_trend,
    SEASONAL: seasonal,
    "recent peak": recent_peak,
}


def dispersion_of(history_counts: Floats) -> float:
    """Variance over mean of bins' counts, from the differences of neighbours: a slow change of the rate is no burst."""
    part = history_counts[-360:]
    if len(part) < 24:
        return 1.0
    mean = float(part.mean())
    jumps = float(np.square(np.diff(part)).mean()) / 2
    return min(DISPERSION_MAX, max(1.0, jumps / mean)) if mean > 0 else 1.0


def period_of(coarse: Floats, coarse_s: float) -> float | None:
    """The period of the series in seconds, by its autocorrelation; None: none is found yet."""
    count = len(coarse)
    if count < 15 or float(coarse.std()) < 0.15 * float(coarse.mean()):
        return None
    best, found = 0.6, None
    values = coarse - coarse.mean()
    fell = False
    for lag in _lags(count):
        one, other = values[lag:], values[:-lag]
        scale = math.sqrt(float(one @ one) * float(other @ other))
        likeness = float(one @ other) / scale if scale > 0 else 0.0
        fell = fell or likeness < 0.3
        if fell and likeness > best + (0.02 if found else 0.0):
            best, found = likeness, lag * coarse_s
    return found


def _lags(count: int) -> range:
    """Lags to compare, in bins: about 400 to 800 at most. Minutes of a day are compared in steps of two, those of eight
    days in steps of 23, so long periods are known to a quarter of an hour.
    """
    most = math.floor(count * 0.8)
    return range(3, most + 1, max(1, most // 400))
