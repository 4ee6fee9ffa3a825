"""Times of served streams, counted many at once: when a request ends, it only leaves its marks here. Pure.

For requests that went through the same stages, every part of a sum is the same linear function of the stages' lengths.
So `RequestTimeline.read` runs once for each stage of such a sequence, with that stage one second long and the others
zero. The results are a matrix, which gives the parts of many requests for a small part of the work. Requests with an
engine's report, and those that are not streams, are read one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from router.core.arrays import Floats
from router.core.slo import seen_in
from router.core.timing_parts import Timing
from router.telemetry.rolling import SLOT_S, RollingStatistics
from router.telemetry.timing import Marks, RequestTimeline, StreamShape

if TYPE_CHECKING:
    from router.telemetry.histograms import Times

TOGETHER: Final = 64
"""The largest number of requests that are counted at once. Others wait meanwhile: alone in a loop, 64 take 0.18 ms
(2.8 µs each), 256 would take 0.46 ms (1.8 each), in a busy router up to 1.6, and 32 would take 0.13 ms (4.0 each)."""

SHAPES_MAX: Final = 256
"""The number of stage sequences that are remembered: retries make new ones."""


class _Lengths:
    """What is counted for requests of one shape: a column for each number, a row for each of their stages."""

    def __init__(self, shape: StreamShape) -> None:
        stages = len(shape.stages)
        units = [shape.timeline([0.0] * (at + 1) + [1.0] * (stages - at)).read(1.0) for at in range(stages)]
        self.way: Final = units[0].way
        self.names: Final = [*_numbers(units[0])]
        self.weights: Final = np.array([[_numbers(unit)[name] for name in self.names] for unit in units])


def _numbers(timing: Timing) -> dict[tuple[str, str], float]:
    """The seconds of a timing by sum and part; the part of a total is empty."""
    found = {("", ""): timing.total_s}
    if timing.first_made_s is not None:
        found["made", ""] = timing.first_made_s
    for name, each in (("ttft", timing.ttft), ("tt2t", timing.tt2t)):
        if each is not None:
            found[name, ""] = each.total_s
            found |= {(name, part): seconds for part, seconds in each.parts.items() if seconds is not None}
            found[name, "residual"] = each.residual_s
    return found


class FinishedRequests:
    """Served requests that are not counted yet. A reader of the statistics must call `count` first."""

    def __init__(self, times: Times, lately: RollingStatistics) -> None:
        self._times: Final = times
        self._lately: Final = lately
        self._fresh: list[tuple[RequestTimeline, int | None]] = []
        self._slot = -1
        self._shapes: Final[dict[StreamShape, _Lengths]] = {}
        times.settle = lately.settle = self.count

    def add(self, now: float, timeline: RequestTimeline, tokens: int | None) -> None:
        """A request has ended, after `tokens` tokens; None: they were not counted. `now` in monotonic seconds."""
        slot = int(now // SLOT_S)
        if slot != self._slot or len(self._fresh) >= TOGETHER:
            self.count()
            self._slot = slot
        self._fresh.append((timeline, tokens))

    def count(self) -> None:
        """Count all requests that have ended."""
        fresh, self._fresh = self._fresh, []
        now = self._slot * SLOT_S
        alike: dict[StreamShape, list[tuple[Marks, int | None]]] = {}
        for timeline, tokens in fresh:
            shape = timeline.shape()
            if shape is None:
                self._count_one(now, timeline, tokens)
            else:
                alike.setdefault(shape, []).append((timeline.marks(), tokens))
        for shape, rows in alike.items():
            self._count_alike(now, shape, rows)

    def _count_one(self, now: float, timeline: RequestTimeline, tokens: int | None) -> None:
        timing = timeline.read(now)
        self._times.observe(timing)
        seen = seen_in(timeline.totals(now), tokens, streamed=timing.answer is None)
        self._lately.served(
            now,
            () if timing.ttft is None else (timing.ttft.total_s,),
            () if timing.tt2t is None else (timing.tt2t.total_s,),
            () if seen.tpot_ms is None else (seen.tpot_ms / 1000,),
        )

    def _count_alike(self, now: float, shape: StreamShape, rows: list[tuple[Marks, int | None]]) -> None:
        lengths = self._shapes.get(shape)
        if lengths is None:
            if len(self._shapes) >= SHAPES_MAX:
                self._shapes.clear()
            lengths = self._shapes[shape] = _Lengths(shape)
        stages = np.diff(np.array([marks for marks, _ in rows]))
        found = np.einsum("rs,sn->rn", stages, lengths.weights)  # `@` would wake threads of its library for so little
        columns: dict[tuple[str, str], Floats] = {name: found[:, at] for at, name in enumerate(lengths.names)}
        self._times.observe_all(lengths.way, columns)
        first, second = (columns.get((name, "")) for name in ("ttft", "tt2t"))
        steps = np.array([0 if tokens is None else tokens - 1 for _, tokens in rows])
        several = steps > 0
        each = () if first is None else ((columns["", ""] - first)[several] / steps[several]).tolist()
        self._lately.served(
            now, () if first is None else first.tolist(), () if second is None else second.tolist(), each, len(rows)
        )
