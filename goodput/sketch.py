"""Lengths as distributions that can be added, subtracted and sent: counts in logarithmic buckets. Pure.

Neighbouring buckets differ by `GROWTH`, so a length read from a sketch is off by half of `GROWTH - 1` at most. Sums are
kept exactly, so means are exact. Routers publish cumulative sketches; the difference of two of them is the sketch of
what came between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

GROWTH: Final = 1.15
"""Width of a bucket: a length is known to 7 %. 100,000 tokens need 83 buckets."""
_LOG: Final = math.log(GROWTH)


def bucket_of(tokens: float) -> int:
    """The bucket of a length in tokens."""
    return 0 if tokens < 1 else 1 + math.floor(math.log(tokens) / _LOG)


def tokens_of(bucket: int) -> float:
    """The middle of a bucket, in tokens."""
    return 0.0 if bucket <= 0 else math.exp((bucket - 0.5) * _LOG)


@dataclass(frozen=True, slots=True)
class Sketch:
    """How many lengths fell into which bucket, and their sum."""

    counts: Mapping[int, int] = field(default_factory=dict)
    """Number of lengths, by bucket (`bucket_of`)."""
    tokens: float = 0.0
    """Sum of all lengths."""

    @property
    def count(self) -> int:
        """Number of lengths."""
        return sum(self.counts.values())

    @property
    def mean(self) -> float:
        """Mean length in tokens; 0 without lengths."""
        count = self.count
        return self.tokens / count if count else 0.0

    def __add__(self, other: Sketch) -> Sketch:
        counts = dict(self.counts)
        for bucket, count in other.counts.items():
            counts[bucket] = counts.get(bucket, 0) + count
        return Sketch(counts, self.tokens + other.tokens)

    def since(self, before: Sketch) -> Sketch:
        """What was added after `before`, an earlier state of the same counters; 0 for a counter that is behind it."""
        counts = {bucket: count - before.counts.get(bucket, 0) for bucket, count in self.counts.items()}
        return Sketch({b: c for b, c in counts.items() if c > 0}, max(0.0, self.tokens - before.tokens))

    def lengths(self) -> tuple[Floats, Floats]:
        """Lengths in tokens and their shares, scaled so that the mean is exact; one length of 1 if there is none."""
        if not self.counts:
            return np.ones(1), np.ones(1)
        buckets = sorted(self.counts)
        values = np.array([tokens_of(bucket) for bucket in buckets])
        shares = np.array([float(self.counts[bucket]) for bucket in buckets])
        shares /= shares.sum()
        middle = float(values @ shares)
        return np.maximum(1.0, values * (self.mean / middle if middle > 0 else 1.0)), shares


def sketch_of(lengths: Iterable[int]) -> Sketch:
    """The sketch of these lengths."""
    counter = Counting()
    for each in lengths:
        counter.add(each)
    return counter.state()


class Counting:
    """A cumulative sketch that grows, as a router keeps one."""

    def __init__(self) -> None:
        self._counts: Final[dict[int, int]] = {}
        self._tokens = 0.0

    def add(self, tokens: float) -> None:
        """Add one length, in tokens."""
        bucket = bucket_of(tokens)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self._tokens += tokens

    def state(self) -> Sketch:
        """What was counted so far; a copy."""
        return Sketch(dict(self._counts), self._tokens)


EMPTY: Final = Sketch()
