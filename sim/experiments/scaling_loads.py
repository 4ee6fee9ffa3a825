"""Loads that change: rates as functions of time, made into arrivals by thinning. Pure but for the traces given in.

Arrivals of a rate λ(t) ≤ λ_max: a Poisson stream of rate λ_max, of which each is kept with probability λ(t) / λ_max.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from msgspec.structs import replace

from loadgen.arrival import Arrival

PROMPT: Final = 8000
ANSWER: Final = 1000

Rate = Callable[[float], float]
"""Requests a second, by time in seconds."""


def poisson(
    rate: Rate, most: float, span_s: float, seed: int, sizes: Callable[[float], tuple[int, int]]
) -> list[Arrival]:
    """Arrivals of a changing rate up to `most`; `sizes`: tokens of prompt and answer by time in seconds."""
    rng = np.random.default_rng(seed)
    found, at_s = list[Arrival](), 0.0
    while True:
        at_s += float(rng.exponential(1 / most))
        if at_s > span_s:
            return found
        if rng.random() * most < rate(at_s):
            prompt, answer = sizes(at_s)
            found.append(Arrival(at_s=at_s, input_tokens=prompt, output_tokens=answer))


def fixed(_at_s: float) -> tuple[int, int]:
    """8,000 tokens in, 1,000 out."""
    return PROMPT, ANSWER


def steady(rate: float) -> Rate:
    """Always the same rate."""
    return lambda _at_s: rate


def step(low: float, high: float, at: float) -> Rate:
    """One rate before `at` seconds, another from then on."""
    return lambda at_s: low if at_s < at else high


def on_off(low: float, high: float, period_s: float) -> Rate:
    """The high rate in the first half of each period, the low one in the second."""
    return lambda at_s: high if at_s % period_s < period_s / 2 else low


def sinusoid(low: float, high: float, period_s: float) -> Rate:
    """From the lowest rate to the highest and back in each period."""
    return lambda at_s: (low + high) / 2 - (high - low) / 2 * math.cos(2 * math.pi * at_s / period_s)


def curve(times_s: Sequence[float], span_s: float, peak: float, bins: int = 58) -> Rate:
    """The rate curve of recorded times, stretched to a span and scaled to a peak; lines between bins' middles."""
    counts, _ = np.histogram(times_s, bins=bins)
    smooth = np.convolve(np.pad(counts.astype(float), 1, mode="edge"), np.ones(3) / 3, mode="valid")
    at = (np.arange(bins) + 0.5) * span_s / bins
    values = smooth / smooth.max() * peak
    return lambda at_s: float(np.interp(at_s, at, values))


@dataclass(frozen=True, slots=True)
class Drift:
    """Lengths that go from one pair to another along a span, each drawn around its mean (log-normal, sigma 0.4)."""

    first: tuple[int, int]
    last: tuple[int, int]
    span_s: float
    seed: int

    def sizes(self) -> Callable[[float], tuple[int, int]]:
        """The function that draws tokens of prompt and answer by time in seconds."""
        rng = np.random.default_rng(self.seed + 1000)

        def drawn(at_s: float) -> tuple[int, int]:
            part = at_s / self.span_s
            prompt, answer = (
                math.exp(math.log(one) * (1 - part) + math.log(other) * part + 0.4 * float(rng.normal()) - 0.08)
                for one, other in zip(self.first, self.last, strict=True)
            )
            return max(16, round(prompt)), max(2, round(answer))

        return drawn


def stretched(arrivals: Sequence[Arrival], span_s: float, rate: float, seed: int, length_max: int) -> list[Arrival]:
    """A recorded load over another span, thinned to a mean rate; longer requests are cut to `length_max` tokens."""
    begin_s, end_s = arrivals[0].at_s, arrivals[-1].at_s
    keep = rate * span_s / len(arrivals)
    rng = np.random.default_rng(seed)
    found = []
    for each in arrivals:
        if rng.random() < keep:
            at_s = (each.at_s - begin_s) * span_s / (end_s - begin_s)
            answer = max(1, min(each.output_tokens, length_max // 4))
            found.append(
                replace(each, at_s=at_s, input_tokens=min(each.input_tokens, length_max - answer), output_tokens=answer)
            )
    return found
