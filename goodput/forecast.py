"""What the load will be once an instance that is asked for now can serve: a quantile. Pure.

Forecasters compete. Every `SCORED_EVERY_S` each forecaster says the rate after the horizon; when that time has come it
is scored, and so are forecasts of one minute. Its own errors, less what chance alone makes of a stretch that short,
widen its next forecasts to the wanted quantile. Then the loss that belongs to a quantile (pinball: too low costs q, too
high 1 − q) is compared, and the mean error of the short ones: a forecaster is used only if it beats the last value on
recent data, and the best of those is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
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


@dataclass(slots=True)
class _ForecastRecord:
    """One forecaster's record."""

    errors: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=SCORES))
    """(actual less forecast over the root of the forecast, its variance by chance): between an error that grows with
    the rate, as a trend's does, and one that does not."""
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=PERIOD_SCORES))


@dataclass(frozen=True, slots=True)
class _Said:
    """A forecast that waits for its time."""

    due_s: float
    means: Mapping[str, float]
    uppers: Mapping[str, float]


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
        self._used = self._base
        self._chosen: tuple[str, str] | None = None
        """The forecaster that is used until the next look, and why."""

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
        self._score(history, now)
        self._chosen = None
        if self._period_s is not None and former is None:
            self._hindcast(SEASONAL, history, horizon_s)
        if now - self._scored_s >= SCORED_EVERY_S and len(fine) >= 6:
            self._scored_s = now
            self._say(history, now, horizon_s)
        return history

    def _say(self, history: History, now: float, horizon_s: float) -> None:
        means = {name: each(history, horizon_s) for name, each in self._forecasters.items()}
        told = {name: mean for name, mean in means.items() if mean is not None and math.isfinite(mean)}
        uppers = {name: self._noisy(name, mean, history.dispersion) for name, mean in told.items()}
        self._waiting.append(_Said(now + horizon_s, told, uppers))
        if horizon_s > EARLY_S:
            soon = {name: self._forecasters[name](history, EARLY_S) for name in told}
            early = {name: mean for name, mean in soon.items() if mean is not None and math.isfinite(mean)}
            self._early_waiting.append(_Said(now + EARLY_S, early, early))

    def _score(self, history: History, now: float) -> None:
        while self._waiting and self._waiting[0].due_s + WINDOW_S / 2 <= now:
            said = self._waiting.popleft()
            actual = history.mean(WINDOW_S, max(0.0, now - said.due_s - WINDOW_S / 2))
            for name, mean in said.means.items():
                self._learn(name, mean, said.uppers[name], actual, history)

        while self._early_waiting and self._early_waiting[0].due_s + WINDOW_S / 2 <= now:
            said = self._early_waiting.popleft()
            actual = history.mean(WINDOW_S, max(0.0, now - said.due_s - WINDOW_S / 2))
            for name, mean in said.means.items():
                self._early[name].losses.append(abs(actual - mean))

    def _hindcast(self, name: str, history: History, horizon_s: float) -> None:
        """Score a forecaster that could not tell before by what it would have said of the recent past."""
        kept, each = self._kept.get(name), self._forecasters.get(name)
        if kept is None or each is None:
            return
        for step in range(self._counted(name), 0, -1):
            ago_s = step * SCORED_EVERY_S
            mean = each(history.before(horizon_s + WINDOW_S / 2 + ago_s), horizon_s)
            if mean is not None:
                self._learn(
                    name, mean, self._noisy(name, mean, history.dispersion), history.mean(WINDOW_S, ago_s), history
                )

    def _learn(self, name: str, mean: float, upper: float, actual: float, history: History) -> None:
        """Score one forecast."""
        kept, base = self._kept[name], max(mean, actual / 2, LEAST)
        kept.errors.append(((actual - mean) / math.sqrt(base), history.dispersion / WINDOW_S))
        over = actual - upper
        kept.losses.append(over * self.quantile if over > 0 else -over * (1 - self.quantile))

    def _wider(self, name: str, mean: float) -> float:
        """By how much the quantile lies above the forecast, chance within the scored stretch taken out."""
        errors, base = self._kept[name].errors, max(mean, LEAST)
        if len(errors) < SCORES_MIN:
            return 0.1 * mean
        found = float(np.quantile([error for error, _ in errors], self.quantile))
        chance = self._z**2 * sum(variance for _, variance in errors) / len(errors)
        return min(WIDEST * base, math.sqrt(base * max(0.0, found * abs(found) - chance)))

    def _noisy(self, name: str, mean: float, dispersion: float) -> float:
        """The quantile of what a stretch of `WINDOW_S` will count: what chance makes of it included."""
        chance = self._z**2 * dispersion * mean / WINDOW_S
        return mean + math.sqrt(self._wider(name, mean) ** 2 + chance)

    def _best(self) -> tuple[str, str]:
        """The forecaster to use, and why."""
        if all(len(each[self._base].losses) < SCORES_MIN for each in (self._kept, self._early)):
            return self._base, "too few forecasts are scored"
        counted = SCORES
        if SEASONAL in self._forecasters and self._share(SEASONAL, self._counted(SEASONAL)) is not None:
            counted = self._counted(SEASONAL)  # what is as good in one part of a period is not better than it
        shares = {name: self._share(name, counted) for name in self._forecasters if name != self._base}
        fair = {name: share for name, share in shares.items() if share is not None}
        if not fair:
            return self._base, "none beats it"
        best = min(fair, key=lambda name: fair[name])
        if self._used in fair and fair[best] > fair[self._used] * STAYS:
            best = self._used
        return best, f"loss {fair[best]:.0%} of the last value's"

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
        name, because = self._chosen = self._chosen or self._best()
        mean = self._forecasters[name](history, horizon_s)
        if mean is None:
            name, because = self._base, f"{name} cannot tell"
            mean = self._forecasters[name](history, horizon_s)
        if mean is None:
            return None
        self._used = name
        upper = mean + self._wider(name, mean)
        return Forecast(mean=mean, upper=upper, horizon_s=horizon_s, who=name, because=because)

    @staticmethod
    def present(history: History) -> Forecast | None:
        """The rate at present, with what is uncertain about a stretch that short."""
        mean = last_value(history, 0.0)
        return None if mean is None else Forecast(mean=mean, upper=mean, horizon_s=0.0, who="last value")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
