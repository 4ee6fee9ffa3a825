"""Forecasts a quantile of the load at the time when an instance that is asked for now can serve. Pure.

Forecasters compete. Every `SCORED_EVERY_S` each forecaster predicts the rate after the horizon. When that time has come
the prediction is scored; predictions one minute ahead are scored, too. A forecaster's own errors, less the part that
chance explains in a stretch that short, widen its next forecasts to the wanted quantile. Forecasters are compared by
the pinball loss of that quantile (q for each unit too low, 1 − q for each too high), and by the mean error of the short
forecasts: a forecaster is used only if it beats the last value on recent data. If several do, their median is used: the
best one of ten minutes may be best by chance, and combined forecasts err less than the one that looked best beforehand
(Bates and Granger, 1969). The seasonal forecaster is used alone if it beats the last value and all others: it foresees
changes that the others can only follow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, median
from typing import Final

import numpy as np

from goodput.forecasters import FORECASTERS, SEASONAL, Forecaster, History, last_value, period_of
from goodput.traffic import Traffic

SCORED_EVERY_S: Final = 15.0
SCORES: Final = 40
"""Newest scores that count: those of ten minutes."""
RECORD_S: Final = SCORES * SCORED_EVERY_S
"""Seconds back to the oldest score that counts."""
PERIOD_SCORES: Final = 600
"""Most scores of the seasonal forecaster that count, otherwise those of one period: it is better only when the load
changes, which may be once a period."""
SCORES_MIN: Final = 6
"""With fewer scores a forecaster is not compared."""
WINDOW_S: Final = 30.0
"""Seconds of the stretch whose mean rate a forecast predicts."""
SURE: Final = 1.0
"""A forecaster beats the last value if its losses are lower by this many standard errors of the difference."""
TOGETHER: Final = 4.0
"""Scores overlap: so many count as one independent score in that standard error."""
STAYS: Final = 0.9
"""A forecaster replaces the one in use only if its loss is below this share of that one's."""
EARLY_S: Final = 60.0
"""Seconds of the short forecasts, which are scored beside those of the whole horizon: if a start takes minutes, they
are the first to show that the load has begun to rise or fall."""
EARLY: Final = 16
"""Newest scores of short forecasts that count: those of four minutes."""
PERIOD_EVERY_S: Final = 120.0
"""Seconds between two searches for a period."""
WIDEST: Final = 0.35
"""The largest share by which a forecast is widened: with larger errors no forecast is possible."""
UNSCORED: Final = 0.1
"""The share by which a forecaster with too few scores is widened while the level has not changed. After a change it is
`WIDEST`: a load that has just left its level may go on changing, and the first score comes a start-up time later."""
SURELY: Final = 0.75
"""Newest part of a steady stretch that surely lies after the last change: compared stretches grow by a third, so the
change may lie inside the oldest quarter."""
LEAST: Final = 0.02
"""Requests a second; errors at lower rates are scaled as errors at this rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A forecast of the rate of arrivals, in requests a second."""

    mean: float
    upper: float
    """The wanted quantile."""
    horizon_s: float
    who: str
    """Name of the forecaster."""
    because: str = ""


@dataclass(frozen=True, slots=True)
class _Error:
    """The error of one scored forecast."""

    size: float
    """(actual − forecast) / √forecast: a scale between errors that grow with the rate, as a trend's do, and errors that
    do not."""
    chance: float
    """Variance of `size` by chance alone."""
    said_s: float
    """When the forecast was made."""


@dataclass(slots=True)
class _ForecastRecord:
    """One forecaster's record."""

    errors: deque[_Error] = field(default_factory=lambda: deque(maxlen=SCORES))
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=PERIOD_SCORES))
    """In requests a second."""


@dataclass(frozen=True, slots=True)
class _Said:
    """Forecasts of one moment, by forecaster, that wait to be scored."""

    said_s: float
    due_s: float
    means: Mapping[str, float]
    uppers: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Actual:
    """The rate that came, for a forecast made at `said_s`."""

    rate: float
    dispersion: float
    said_s: float


@dataclass(frozen=True, slots=True)
class _Choice:
    """The forecaster that is used, and why."""

    best: str
    because: str
    others: tuple[str, ...] = ()
    """Those that beat the last value as well."""


class Forecasting:
    """All forecasters, their scores, and the choice between them. It has many attributes: records and waiting forecasts
    of two horizons, what is known of period and level, and the choice made.
    """

    def __init__(self, quantile: float = 0.9, forecasters: Mapping[str, Forecaster] = FORECASTERS) -> None:
        self.quantile: Final = quantile
        self._forecasters: Final = forecasters
        self._base: Final = next(iter(forecasters))
        self._z: Final = NormalDist().inv_cdf(quantile)
        self._kept: Final = {name: _ForecastRecord() for name in forecasters}
        self._waiting: Final[deque[_Said]] = deque()
        self._early: Final = {name: _ForecastRecord(losses=deque(maxlen=EARLY)) for name in forecasters}
        self._early_waiting: Final[deque[_Said]] = deque()
        self._scored_s = -math.inf
        self._period_at_s = -math.inf
        self._period_s: float | None = None
        self._steady_since_s = -math.inf
        """Since when the level has surely not changed; minus infinity: no change is known."""
        self._used = self._base
        self._chosen: _Choice | None = None
        """The choice of this look; None: not made yet."""

    def look(self, traffic: Traffic, now: float, horizon_s: float) -> History:
        """The series as it is now. Scores forecasts that have come due, and asks every forecaster for the next one."""
        fine = traffic.fine.counts()
        coarse = traffic.coarse.counts()
        if now - self._period_at_s >= PERIOD_EVERY_S:
            former, self._period_s = self._period_s, period_of(coarse, traffic.coarse.bin_s)
            self._period_at_s = now
        else:
            former = self._period_s
        history = History.of(fine, traffic.fine.bin_s, coarse, traffic.coarse.bin_s, self._period_s)
        level = history.level
        self._steady_since_s = -math.inf if level is None or level.whole else now - SURELY * level.seconds
        self._score(history, now)
        self._chosen = None
        if self._period_s is not None and former is None:
            self._hindcast(SEASONAL, history, now, horizon_s)
        if now - self._scored_s >= SCORED_EVERY_S and len(fine) >= 6:
            self._scored_s = now
            self._say(history, now, horizon_s)
        return history

    def _say(self, history: History, now: float, horizon_s: float) -> None:
        means = {name: each(history, horizon_s) for name, each in self._forecasters.items()}
        told = {name: mean for name, mean in means.items() if mean is not None and math.isfinite(mean)}
        uppers = {name: self._noisy(name, mean, history.dispersion) for name, mean in told.items()}
        self._waiting.append(_Said(now, now + horizon_s, told, uppers))
        if horizon_s > EARLY_S:
            soon = {name: self._forecasters[name](history, EARLY_S) for name in told}
            early = {name: mean for name, mean in soon.items() if mean is not None and math.isfinite(mean)}
            self._early_waiting.append(_Said(now, now + EARLY_S, early, early))

    def _score(self, history: History, now: float) -> None:
        while self._waiting and self._waiting[0].due_s + WINDOW_S / 2 <= now:
            said = self._waiting.popleft()
            actual = history.mean(WINDOW_S, max(0.0, now - said.due_s - WINDOW_S / 2))
            came = _Actual(actual, history.dispersion, said.said_s)
            for name, mean in said.means.items():
                self._learn(name, mean, said.uppers[name], came)

        while self._early_waiting and self._early_waiting[0].due_s + WINDOW_S / 2 <= now:
            said = self._early_waiting.popleft()
            actual = history.mean(WINDOW_S, max(0.0, now - said.due_s - WINDOW_S / 2))
            for name, mean in said.means.items():
                self._early[name].losses.append(abs(actual - mean))

    def _hindcast(self, name: str, history: History, now: float, horizon_s: float) -> None:
        """Score a forecaster that gave no forecasts so far by those it would have given in the recent past."""
        kept, each = self._kept.get(name), self._forecasters.get(name)
        if kept is None or each is None:
            return
        for step in range(self._counted(name), 0, -1):
            ago_s = step * SCORED_EVERY_S
            before_s = horizon_s + WINDOW_S / 2 + ago_s
            mean = each(history.before(before_s), horizon_s)
            if mean is not None:
                came = _Actual(history.mean(WINDOW_S, ago_s), history.dispersion, now - before_s)
                self._learn(name, mean, self._noisy(name, mean, history.dispersion), came)

    def _learn(self, name: str, mean: float, upper: float, came: _Actual) -> None:
        """Score one forecast."""
        kept, base = self._kept[name], max(mean, came.rate / 2, LEAST)
        kept.errors.append(_Error((came.rate - mean) / math.sqrt(base), came.dispersion / WINDOW_S, came.said_s))
        over = came.rate - upper
        kept.losses.append(over * self.quantile if over > 0 else -over * (1 - self.quantile))

    def _errors(self, name: str) -> Sequence[_Error]:
        """The errors that count: of forecasts made since the level last changed, if enough of these are scored, else
        all. A step in the load spoils forecasts made before it, not those made after it.
        """
        errors = self._kept[name].errors
        since = [each for each in errors if each.said_s >= self._steady_since_s]
        return since if len(since) >= SCORES_MIN else errors

    def _wider(self, name: str, mean: float) -> float:
        """How far the quantile lies above the forecast, in requests a second, without the scored stretch's chance."""
        errors, base = self._errors(name), max(mean, LEAST)
        if len(errors) < SCORES_MIN:
            return (UNSCORED if math.isinf(self._steady_since_s) else WIDEST) * base
        found = float(np.quantile([each.size for each in errors], self.quantile))
        chance = self._z**2 * _mean([each.chance for each in errors])
        return min(WIDEST * base, math.sqrt(base * max(0.0, found * abs(found) - chance)))

    def _noisy(self, name: str, mean: float, dispersion: float) -> float:
        """The quantile of the rate in a stretch of `WINDOW_S`, chance included: scores are compared with it."""
        chance = self._z**2 * dispersion * mean / WINDOW_S
        return mean + math.sqrt(self._wider(name, mean) ** 2 + chance)

    def _best(self) -> _Choice:
        """The forecaster to use, and why."""
        if all(len(each[self._base].losses) < SCORES_MIN for each in (self._kept, self._early)):
            return _Choice(self._base, "too few forecasts are scored")
        counted = SCORES
        if SEASONAL in self._forecasters and self._share(SEASONAL, self._counted(SEASONAL)) is not None:
            counted = self._counted(SEASONAL)  # compare over a whole period: parts of it differ
        shares = {name: self._share(name, counted) for name in self._forecasters if name != self._base}
        fair = {name: share for name, share in shares.items() if share is not None}
        if not fair:
            return _Choice(self._base, "none beats it")
        best = min(fair, key=lambda name: fair[name])
        if self._used in fair and fair[best] > fair[self._used] * STAYS:
            best = self._used
        others = () if best == SEASONAL else tuple(name for name in fair if name not in (best, SEASONAL))
        told = f", median with {', '.join(others)}" if others else ""
        return _Choice(best, f"loss {fair[best]:.0%} of the last value's{told}", others)

    def _counted(self, name: str) -> int:
        """Scores of a forecaster that count."""
        if name != SEASONAL or self._period_s is None:
            return SCORES
        return max(SCORES, min(PERIOD_SCORES, round(self._period_s / SCORED_EVERY_S)))

    def _share(self, name: str, counted: int) -> float | None:
        """A forecaster's losses over those of the last value; None: it does not beat the last value by more than
        chance. Short forecasts do not count if a whole period counts: they are of one part of it.
        """
        apart, shares = [], []
        for each in (self._kept, self._early) if counted <= SCORES else (self._kept,):
            base, losses = each[self._base].losses, each[name].losses
            count = min(len(losses), len(base), counted)
            if count < SCORES_MIN:
                continue
            theirs = np.array([*base][-count:])
            scale = float(theirs.mean()) or 1.0
            apart.append((theirs - np.array([*losses][-count:])) / scale)
            shares.append(1 - float(apart[-1].mean()))
        if not apart:
            return None
        together = np.concatenate(apart)
        error = float(together.std()) * math.sqrt(TOGETHER / len(together))
        return _mean(shares) if float(together.mean()) > SURE * error else None

    def forecast(self, history: History, horizon_s: float) -> Forecast | None:
        """The rate after `horizon_s` seconds; None: there is no history yet."""
        chosen = self._chosen = self._chosen or self._best()
        name, because = chosen.best, chosen.because
        mean = self._median(chosen, history, horizon_s)
        if mean is None:
            name, because = self._base, f"{name} cannot tell"
            mean = self._forecasters[name](history, horizon_s)
        if mean is None:
            return None
        self._used = name
        upper = mean + self._wider(name, mean)
        return Forecast(mean=mean, upper=upper, horizon_s=horizon_s, who=name, because=because)

    def _median(self, chosen: _Choice, history: History, horizon_s: float) -> float | None:
        """The median of the forecasters in use; None: the best of them gives no forecast."""
        mean = self._forecasters[chosen.best](history, horizon_s)
        if mean is None:
            return None
        others = [self._forecasters[name](history, horizon_s) for name in chosen.others]
        return median([mean, *(each for each in others if each is not None)])

    @staticmethod
    def present(history: History) -> Forecast | None:
        """The present rate, not widened: `upper` is `mean`. None: there is no history yet."""
        mean = last_value(history, 0.0)
        return None if mean is None else Forecast(mean=mean, upper=mean, horizon_s=0.0, who="last value")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
