"""How much one more answer lengthens an engine's decode steps, learned from answers of batches of several sizes. Pure.

A line through steps by their number of answers, by least squares with forgetting. While batches are alike, the line is
drawn towards what is assumed. Engines become faster and slower, too, and are fuller while they are slow: after a
shift of its speed the former steps of an engine are scaled (`times`), and steps far from the line are taken as if they
were nearer (`NEAR`).
"""

from __future__ import annotations

import math
from typing import Final

RATE: Final = 0.005
"""The weight of one answer, once there are two hundred: batches differ over many answers."""

FEW: Final = 4
"""So many answers are believed, however far they are apart."""

PRIOR_SPREAD: Final = 0.3
PRIOR_COUNT: Final = 10.0
"""What is assumed counts as so many answers, of batches that scatter by the share `PRIOR_SPREAD`."""

NEAR: Final = math.log(3.0)
"""The largest logarithm, either way, of a step over the line that is believed."""

UNSEEN: Final = 0.2
"""The ratio that no engine without evidence is taken to exceed. Seen: 0.006 (8B on an H100) to 0.1 (tiny on a CPU)."""

STEEPEST: Final = 1.0
"""The largest ratio that is learned: each answer lengthens a step by as much as a step without answers takes."""


class BatchSlope:
    """One engine's steps, in ms, by the number of their answers. Ratios are of one answer's part of a step over the
    rest.
    """

    __slots__ = ("_assumed", "_both", "_count", "_step_ms", "_variance", "batch")

    def __init__(self, assumed: float) -> None:
        """`assumed`: the ratio as long as no other was seen."""
        self.batch = 0.0
        """The mean number of answers."""
        self._assumed: Final = assumed
        self._count = 0
        self._step_ms = 0.0
        self._variance = 0.0
        self._both = 0.0
        """The variance of the batches, and their covariance with the steps."""

    def add(self, batch: float, step_ms: float) -> None:
        """Steps with so many answers took `step_ms` on average."""
        if self._count >= FEW:
            ratio = self.ratio()
            line_ms = self._step_ms * (1.0 + ratio * batch) / (1.0 + ratio * self.batch)
            far = math.log(step_ms / line_ms)
            step_ms = line_ms * math.exp(min(NEAR, max(-NEAR, far)))
        self._count += 1
        part = max(1.0 / self._count, RATE)
        apart, other = batch - self.batch, step_ms - self._step_ms
        self.batch += part * apart
        self._step_ms += part * other
        self._variance += part * ((1.0 - part) * apart * apart - self._variance)
        self._both += part * ((1.0 - part) * apart * other - self._both)

    def times(self, factor: float) -> None:
        """Steps take `factor` times as long from now on."""
        self._step_ms *= factor
        self._both *= factor

    def ratio(self) -> float:
        """The ratio that is likely."""
        if not self._count:
            return self._assumed
        expected, drawn = self._step_ms / (1.0 / self._assumed + self.batch), self._drawn()
        slope = max(0.0, (self._both + expected * drawn) / (self._variance + drawn))
        rest = self._step_ms - slope * self.batch
        return min(STEEPEST, max(self._assumed, slope / rest)) if rest > 0 else STEEPEST

    def most(self) -> float:
        """The largest ratio that cannot be ruled out: the less batches differed, the larger."""
        if not self._count:
            return UNSEEN
        drawn = self._drawn()
        return self.ratio() + UNSEEN * drawn / (self._variance + drawn)

    def _drawn(self) -> float:
        return max(1e-9, (PRIOR_SPREAD * self.batch) ** 2 * PRIOR_COUNT * max(1.0 / self._count, RATE))
