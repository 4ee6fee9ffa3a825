"""Ways to say what the rate of arrivals will be: each a pure function of the series so far and a horizon.

None of them is right everywhere, so they compete (`goodput.forecast`); a forecaster that cannot tell answers None.
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
"""A trend goes on for so long on average: longer than most starts take, since a start is what it is extended over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The series so far, newest last."""

    counts: Floats
    """Arrivals in bins of `bin_s`."""
    bin_s: float
    coarse: Floats
    """The same, for longer, in bins of `coarse_s`."""
    coarse_s: float
    dispersion: float = 1.0
    period_s: float | None = None
    """After which the load comes back, where that was found."""
    level: Stretch | None = None
    """The recent stretch in which no change is significant; None: too few bins."""

    @staticmethod
    def of(counts: Floats, bin_s: float, coarse: Floats, coarse_s: float, period_s: float | None = None) -> History:
        """With its burstiness and its level."""
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
        """As it was some time ago."""
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
    """The last half minute."""
    return history.mean(LATELY_S) if len(history.counts) else None


def smoothed(history: History, _horizon_s: float) -> float | None:
    """Exponentially weighted mean, time constant two minutes."""
    part = history.counts[-180:]
    if len(part) < 12:
        return None
    weights = np.exp(-np.arange(len(part))[::-1] * history.bin_s / 120.0)
    return float(part @ weights / weights.sum()) / history.bin_s


def last_value(history: History, _horizon_s: float) -> float | None:
    """What it is now, the one that others have to beat: the mean of the longest recent stretch in which no change is
    significant. Sharp where the load is steady, and quick after a step.
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
    """What it was one period earlier, scaled by how the last minutes compare with those a period before. The mean of
    half a horizon: a minute's count says little, and a start is not known to the minute either.
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
    """The rate around a time, from coarse bins, between whose middles lines are drawn."""
    at = at_s / history.coarse_s - 0.5
    low = math.floor(at)
    if low < 0 or low + 1 >= len(history.coarse):
        return None
    part = at - low
    return float(history.coarse[low] * (1 - part) + history.coarse[low + 1] * part) / history.coarse_s


def recent_peak(history: History, _horizon_s: float) -> float | None:
    """Nine in ten of the last half hour's minutes were below it: for loads that jump up and down."""
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
    """Variance over mean of bins' counts, as their differences show it: a slow change of the rate is no burst."""
    part = history_counts[-360:]
    if len(part) < 24:
        return 1.0
    mean = float(part.mean())
    jumps = float(np.square(np.diff(part)).mean()) / 2
    return min(DISPERSION_MAX, max(1.0, jumps / mean)) if mean > 0 else 1.0


def period_of(coarse: Floats, coarse_s: float) -> float | None:
    """After which time the series comes back, by its autocorrelation; None: it does not, or not yet."""
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
    """Of a day's minutes all, of a week's fewer: periods that long are known to the quarter of an hour."""
    most = math.floor(count * 0.8)
    return range(3, most + 1, max(1, most // 400))
