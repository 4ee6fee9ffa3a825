"""Distributions of prompt and answer lengths in tokens. Pure: the caller gives the random generator.

Every draw is a whole number of tokens, 1 or more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

TOKENS_MAX = 10_000_000
"""Longest draw, beyond any model's context: a lognormal's tail could otherwise ask for a prompt of gigabytes."""

Z90 = 1.2815515655446004
"""The 90th percentile of the standard normal distribution."""


class Lengths(Protocol):
    """A distribution of lengths in tokens."""

    def draw(self, rng: np.random.Generator) -> int:
        """One length, 1 or more."""
        ...

    def mean(self) -> float:
        """Expected tokens, before rounding and bounds."""
        ...


class FixedLength:
    """Always the same length."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def draw(self, rng: np.random.Generator) -> int:
        return self._tokens

    def mean(self) -> float:
        return float(self._tokens)


class Uniform:
    """Every length from `low` to `high`, both included: mean (low + high)/2."""

    def __init__(self, low: int, high: int) -> None:
        self._low, self._high = low, high

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self._low, self._high, endpoint=True))

    def mean(self) -> float:
        return (self._low + self._high) / 2


class LogNormal:
    """exp of a normal: median `p50`, mean p50·exp(σ²/2), where σ = ln(p90/p50)/1.2816."""

    def __init__(self, p50: float, sigma: float) -> None:
        self._p50, self._sigma = p50, sigma

    def draw(self, rng: np.random.Generator) -> int:
        return max(1, min(TOKENS_MAX, round(self._p50 * math.exp(min(self._sigma * rng.standard_normal(), 40.0)))))

    def mean(self) -> float:
        return self._p50 * math.exp(self._sigma**2 / 2)


class Empirical:
    """Observed lengths, each with its weight. Mean = Σ length·weight / Σ weight."""

    def __init__(self, weights: Mapping[int, float]) -> None:
        assert weights and min(weights.values()) >= 0 and sum(weights.values()) > 0
        self._lengths = np.array(sorted(weights), dtype=np.int64)
        share = np.array([weights[each] for each in sorted(weights)], dtype=np.float64)
        self._cumulative = np.cumsum(share / share.sum())

    def draw(self, rng: np.random.Generator) -> int:
        at = int(np.searchsorted(self._cumulative, rng.random(), side="right"))
        return max(1, int(self._lengths[min(at, len(self._lengths) - 1)]))

    def mean(self) -> float:
        return float(self._lengths @ np.diff(self._cumulative, prepend=0.0))


def empirical(lengths: Iterable[int]) -> Empirical:
    """The distribution of exactly these lengths."""
    weights: dict[int, float] = {}
    for each in lengths:
        weights[each] = weights.get(each, 0.0) + 1.0
    return Empirical(weights)


def parse(text: str) -> Lengths:
    """Lengths as the command line writes them; ValueError says what is wrong.

    `512` · `uniform:100-200` · `lognormal:p50=512,p90=4000` · `lognormal:mean=512,cv=1.5`
    """
    kind, _, rest = text.strip().partition(":")
    if not rest:
        return FixedLength(_tokens(kind))
    if kind == "uniform":
        low, _, high = rest.partition("-")
        if _tokens(low) > _tokens(high):
            raise ValueError(f"uniform:{rest} runs backwards; write uniform:{high}-{low}")
        return Uniform(_tokens(low), _tokens(high))
    if kind == "lognormal":
        return _lognormal(dict(_named(part) for part in rest.split(",")))
    raise ValueError(f"{text!r} is no distribution; write 512, uniform:100-200 or lognormal:p50=512,p90=4000")


def _tokens(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= TOKENS_MAX or len(text) > 8:
        raise ValueError(f"{text!r} is not a number of tokens (1 to {TOKENS_MAX})")
    return int(text)


def _named(part: str) -> tuple[str, float]:
    name, _, value = part.partition("=")
    try:
        found = float(value)
    except ValueError:
        raise ValueError(f"{part!r} is not NAME=NUMBER") from None
    if not 0 <= found <= TOKENS_MAX:
        raise ValueError(f"{part!r} must be 0 to {TOKENS_MAX}")
    return name.strip(), found


def _lognormal(named: dict[str, float]) -> LogNormal:
    if set(named) == {"p50", "p90"}:
        if not 1 <= named["p50"] <= named["p90"]:
            raise ValueError("lognormal: p50 must be 1 or more, and p90 no less than p50")
        return LogNormal(named["p50"], math.log(named["p90"] / named["p50"]) / Z90)
    if set(named) == {"mean", "cv"}:
        if named["mean"] < 1:
            raise ValueError("lognormal: mean must be 1 or more")
        square = math.log1p(named["cv"] ** 2)
        return LogNormal(named["mean"] / math.exp(square / 2), math.sqrt(square))
    raise ValueError("lognormal takes p50=…,p90=… or mean=…,cv=…")
