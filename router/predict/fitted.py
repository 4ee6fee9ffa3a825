"""A line fitted through observations, with forgetting: the time work takes, by the time it was predicted to
take. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PRIOR_SPREAD, PRIOR_COUNT = 0.5, 10.0
"""The prior counts as `PRIOR_COUNT` observations whose sizes scatter by the share `PRIOR_SPREAD`, if no other is
given."""

TOGETHER_S: Final = 0.001
"""Work that ends within this time has ended with one engine step, and is one observation."""

TOGETHER: Final = 0.5
"""The same as a share of the time that a prompt's steps take. Two prompts that end within it were computed together,
and a busy front end sent the first token of one later."""

LINE_RATE: Final = 0.01
"""Work differs in size: a hundred observations show how time grows with size."""


@dataclass(slots=True)
class Fitted:
    """observed = rest + slope · plain, by least squares with forgetting. All of it is in milliseconds.

    While sizes are alike, they do not show which part of the time grows with size. If `plain` is `trusted`, the slope
    is then pulled towards 1, so that the excess is the rest. Otherwise the rest is pulled towards slope · `base`, where
    `base` is what other instances have shown; 0: they have shown nothing.
    """

    rate: float = LINE_RATE
    """The weight of one observation, once there are as many as its inverse."""
    trusted: bool = True
    """`plain` comes from costs of this very work."""
    spread: float = PRIOR_SPREAD
    """The share by which the prior's sizes scatter."""
    count: float = 0.0
    """The number of observations, ever."""
    recent: float = 0.0
    """The number of observations that count; `times` lowers it."""
    plain: float = 0.0
    observed: float = 0.0
    variance: float = 0.0
    both: float = 0.0
    """The means of `plain` and `observed`, the variance of `plain`, and the covariance of `plain` and `observed`."""

    def add(self, plain: float, observed: float) -> None:
        """Take one observation."""
        self.count += 1
        self.recent += 1
        part = max(1.0 / self.recent, self.rate)
        apart, other = plain - self.plain, observed - self.observed
        self.plain += part * apart
        self.observed += part * other
        self.variance += part * ((1 - part) * apart * apart - self.variance)
        self.both += part * ((1 - part) * apart * other - self.both)

    def times(self, factor: float, weight: float) -> None:
        """Work takes `factor` times as long as before: former observations are scaled as if it had been so then, and
        count as `weight` observations at most.
        """
        self.observed *= factor
        self.both *= factor
        self.recent = min(self.recent, weight)

    @property
    def drawn(self) -> float:
        """The weight of the prior against `variance`, once there is an observation."""
        return (self.spread * self.plain) ** 2 * PRIOR_COUNT / self.recent

    def fit(self, base: float = 0.0) -> tuple[float, float]:
        """Slope and rest (ms) of at least one observation; the rest is not negative. `base`: the rest over the slope,
        as other instances have shown it.
        """
        drawn = self.drawn
        expected = 1.0 if self.trusted or self.plain <= 0 else self.observed / (self.plain + base)
        slope = (self.both + expected * drawn) / (self.variance + drawn) if self.variance + drawn > 0 else expected
        slope = max(slope, 0.0)
        rest = self.observed - slope * self.plain
        if rest < 0 and self.plain > 0:
            slope, rest = self.observed / self.plain, 0.0
        return slope, rest
