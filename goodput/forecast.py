"""What the load will be once an instance that is asked for now can serve: a quantile. Pure.

Forecasters compete. Every `SCORED_EVERY_S` each forecaster says the rate after the horizon; when that time has come it
is scored, and so are forecasts of one minute. Its own errors, less what chance alone makes of a stretch that short,
widen its next forecasts to the wanted quantile. Then the loss that belongs to a quantile (pinball: too low costs q, too
high 1 − q) is compared, and the mean error of the short ones: a forecaster is used only if it beats the last value on
recent data. Of several that do, the median is used: the best one of ten minutes is so by chance as well, and forecasts
combined err less than the one that looked best beforehand (Bates and Granger, 1969). A season that beats it is used
alone, since it knows what the others can only follow.
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
"""Newest scored forecasts that count: those of ten minutes."""
RECORD_S: Final = SCORES * SCORED_EVERY_S
"""Seconds back to the oldest score that counts."""
PERIOD_SCORES: Final = 600
"""Of what comes back after a period, those of one period count, and so many at most: it shows its worth when the load
changes, which may be once a period."""
SCORES_MIN: Final = 6
WINDOW_S: Final = 30.0
"""The stretch whose mean rate a forecast is of."""
SURE: Final = 1.0
"""A forecaster's losses must lie below the last value's by so many standard errors of their difference. Scores overlap:
`TOGETHER` of them are one."""
TOGETHER: Final = 4.0
STAYS: Final = 0.9
"""A forecaster replaces the one in use only if its loss is smaller by this factor."""
EARLY_S: Final = 60.0
"""Forecasts of so short a time are scored beside those of the whole horizon: they are the first to show that the load
has begun to rise or to fall, where a start takes minutes."""
EARLY: Final = 16
"""Of those, so many count: four minutes."""
PERIOD_EVERY_S: Final = 120.0
WIDEST: Final = 0.35
"""A forecast is widened by this share at most: errors beyond it say that nothing can be told."""
UNSCORED: Final = 0.1
"""Of a forecaster of which too few forecasts are scored, while the level has not changed; after a change, `WIDEST`: a
load that has just left its level may go on changing, and the first score comes a start-up time later."""
SURELY: Final = 0.75
"""Part of a steady stretch that lies after the change before it: stretches are compared in steps of a third."""
LEAST: Final = 0.02
"""Requests a second; below it errors are counted as of this rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Of the rate of arrivals, in requests a second."""

    mean: float
    upper: float
    """The wanted quantile."""
    horizon_s: float
    who: str
    because: str = ""


@dataclass(frozen=True, slots=True)
class _Error:
    """Of one scored forecast."""

    size: float
    """Actual less forecast over the root of the forecast: between an error that grows with the rate, as a trend's does,
    and one that does not."""
    chance: float
    """Variance that chance alone gives it."""
    said_s: float
    """When the forecast was made."""


@dataclass(slots=True)
class _ForecastRecord:
    """One forecaster's record."""

    errors: deque[_Error] = field(default_factory=lambda: deque(maxlen=SCORES))
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=PERIOD_SCORES))


@dataclass(frozen=True, slots=True)
class _Said:
    """A forecast that waits for its time."""

    said_s: float
    due_s: float
    means: Mapping[str, float]
    uppers: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Actual:
    """What came, for a forecast made at `said_s`."""

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
    """All forecasters, their scores, and the choice between them."""

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
        """Since when the level has surely not changed; minus infinity: as far as is known."""
        self._used = self._base
        self._chosen: _Choice | None = None
        """Until the next look."""

    def look(self, traffic: Traffic, now: float, horizon_s: float) -> History:
        """The series as it is now; scores the forecasts that have come due, and asks every forecaster for the
        next.
        """
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
        """Score a forecaster that could not tell before by what it would have said of the recent past."""
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
        """Those that count: of forecasts made since the level last changed, where enough of these are scored. What a
        step did to forecasts made before it says nothing of those made after it.
        """
        errors = self._kept[name].errors
        since = [each for each in errors if each.said_s >= self._steady_since_s]
        return since if len(since) >= SCORES_MIN else errors

    def _wider(self, name: str, mean: float) -> float:
        """By how much the quantile lies above the forecast, chance within the scored stretch taken out."""
        errors, base = self._errors(name), max(mean, LEAST)
        if len(errors) < SCORES_MIN:
            return (UNSCORED if math.isinf(self._steady_since_s) else WIDEST) * base
        found = float(np.quantile([each.size for each in errors], self.quantile))
        chance = self._z**2 * _mean([each.chance for each in errors])
        return min(WIDEST * base, math.sqrt(base * max(0.0, found * abs(found) - chance)))

    def _noisy(self, name: str, mean: float, dispersion: float) -> float:
        """The quantile of what a stretch of `WINDOW_S` will count: what chance makes of it included."""
        chance = self._z**2 * dispersion * mean / WINDOW_S
        return mean + math.sqrt(self._wider(name, mean) ** 2 + chance)

    def _best(self) -> _Choice:
        """The forecaster to use, and why."""
        if all(len(each[self._base].losses) < SCORES_MIN for each in (self._kept, self._early)):
            return _Choice(self._base, "too few forecasts are scored")
        counted = SCORES
        if SEASONAL in self._forecasters and self._share(SEASONAL, self._counted(SEASONAL)) is not None:
            counted = self._counted(SEASONAL)  # what is as good in one part of a period is not better than it
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
        """A forecaster's losses over those of the last value; None: it does not beat it by more than chance. Early ones
        do not count where a whole period does: they are of one part of it.
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
        """The rate after `horizon_s`; None: there is no history yet."""
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
        """What those that are used say; None: the best of them cannot tell."""
        mean = self._forecasters[chosen.best](history, horizon_s)
        if mean is None:
            return None
        others = [self._forecasters[name](history, horizon_s) for name in chosen.others]
        return median([mean, *(each for each in others if each is not None)])

    @staticmethod
    def present(history: History) -> Forecast | None:
        """The rate at present, with what is uncertain about a stretch that short."""
        mean = last_value(history, 0.0)
        return None if mean is None else Forecast(mean=mean, upper=mean, horizon_s=0.0, who="last value")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
