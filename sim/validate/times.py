"""The times of many requests, measured or predicted: columns of times, and the latencies that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """One row per request; times in ms since one time 0."""

    arrived: Array
    started: Array
    """When its first step was decided (measured) or began (predicted)."""
    first: Array
    """First token."""
    last: Array
    outputs: Array
    """Tokens of its answer."""

    @property
    def queue(self) -> Array:
        """Arrival to the first step, ms."""
        return self.started - self.arrived

    @property
    def ttft(self) -> Array:
        """Arrival to the first token, ms."""
        return self.first - self.arrived

    @property
    def e2e(self) -> Array:
        """Arrival to the last token, ms."""
        return self.last - self.arrived

    @property
    def tpot(self) -> Array:
        """Time per token after the first, ms; only of answers longer than one token, so it may have fewer rows."""
        long = self.outputs > 1
        return (self.last - self.first)[long] / (self.outputs - 1)[long]

    @property
    def latency_per_token(self) -> Array:
        """Arrival to the last token, per token: what inference-perf calls normalized time per output token, ms."""
        return self.e2e / self.outputs

    def after(self, count: int) -> RequestTimes:
        """Without the first `count` rows."""
        columns = (self.arrived, self.started, self.first, self.last, self.outputs)
        arrived, started, first, last, outputs = (column[count:] for column in columns)
        return RequestTimes(arrived=arrived, started=started, first=first, last=last, outputs=outputs)

    @property
    def duration_s(self) -> float:
        """Time 0 to the last token of all."""
        return float(self.last.max()) / 1000
