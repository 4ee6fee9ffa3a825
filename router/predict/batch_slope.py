"""How much one more answer lengthens an engine's decode steps, learned from answers of batches of several sizes. Pure.

A line through steps by their number of answers (`Fitted`). While batches are alike, the line is drawn towards what is
assumed. Engines become faster and slower, too, and are fuller while they are slow: after a shift of its speed the
former steps of an engine are scaled (`times`), and steps far from the line are taken as if they were nearer (`NEAR`).
"""

from __future__ import annotations

import math
from typing import Final

from router.predict.fitted import Fitted

RATE: Final = 0.005
"""The weight of one answer, once there are two hundred: batches differ over many answers."""

FEW: Final = 4
"""So many answers are believed, however far they are apart."""

PRIOR_SPREAD: Final = 0.3
"""What is assumed counts as some answers (`fitted.PRIOR_COUNT`) of batches that scatter by this share."""

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

    __slots__ = ("_assumed", "_line")

    def __init__(self, assumed: float) -> None:
        """`assumed`: the ratio as long as no other was seen."""
        self._assumed: Final = assumed
        self._line: Final = Fitted(rate=RATE, trusted=False, spread=PRIOR_SPREAD)

    @property
    def batch(self) -> float:
        """The mean number of answers."""
        return self._line.plain

    def add(self, batch: float, step_ms: float) -> None:
        """Steps with so many answers took `step_ms` on average."""
        line = self._line
        if line.count >= FEW:
            ratio = self.ratio()
            line_ms = line.observed * (1.0 + ratio * batch) / (1.0 + ratio * line.plain)
            if line_ms > 0.0:
                far = math.log(step_ms / line_ms)
                step_ms = line_ms * math.exp(min(NEAR, max(-NEAR, far)))
        line.add(batch, step_ms)
        line.recent = min(line.recent, 1.0 / RATE)  # the rest is forgotten, and what is assumed counts on

    def times(self, factor: float) -> None:
        """Steps take `factor` times as long from now on."""
        self._line.times(factor, self._line.recent)

    def ratio(self) -> float:
        """The ratio that is likely."""
        if not self._line.count:
            return self._assumed
        slope, rest = self._line.fit(1.0 / self._assumed)
        return min(STEEPEST, max(self._assumed, slope / rest)) if rest > 0 else STEEPEST

    def most(self) -> float:
        """The largest ratio that cannot be ruled out: the less batches differed, the larger."""
        if not self._line.count:
            return UNSEEN
        drawn = self._line.drawn
        return self.ratio() + UNSEEN * drawn / (self._line.variance + drawn)
