"""The simulated router's published figures, and those that rival controllers read: counters, latencies, queues. Pure.

Requests count on arrival, answers at their end. `Meters.counts` gives what `goodput.observation` reads from a live
router, and nothing more.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from goodput.observation import ClassCounts, RouterCounts
from goodput.sketch import Counting
from loadgen.arrival import Arrival
from loadgen.report import Targets
from sim.kernel import NS
from sim.result import BROKE_OFF, OUTCOMES

if TYPE_CHECKING:
    from sim.world import World

KEPT_S: Final = 600.0
"""Seconds for which single requests are remembered."""


class EndedRequest(NamedTuple):
    """One request that is over."""

    at_s: float
    ttft_ms: float
    """Infinite without a first token."""
    tpot_ms: float
    """0 without a second token."""
    input_tokens: int
    made_tokens: int
    served: bool


class _ClassCounters:
    """Counters of one SLO class."""

    def __init__(self) -> None:
        self.arrivals = self.ended = self.met = self.late_first = self.cached = self.computed = 0
        self.prompts: Final = Counting()
        self.answers: Final = Counting()

    def state(self) -> ClassCounts:
        return ClassCounts(
            arrivals=self.arrivals,
            prompts=self.prompts.state(),
            cached_tokens=self.cached,
            computed_tokens=self.computed,
            answers=self.answers.state(),
            ended=self.ended,
            met=self.met,
            late_first=self.late_first,
        )


class Meters:
    """The meters of one world."""

    def __init__(self, world: World, targets: Mapping[str, Targets], usual: str = "") -> None:
        self._world: Final = world
        self._targets: Final = targets
        self._usual: Final = usual
        self._classes: Final[dict[str, _ClassCounters]] = {}
        self._coming: Final[deque[Arrival]] = deque()
        """Arrivals that the world has taken and that are still in the future: a world takes one ahead."""
        self.ended: Final[deque[EndedRequest]] = deque()
        self.arrived: Final[deque[Arrival]] = deque()
        self._rows = 0
        """The number of rows (arrived requests) at the last look."""
        self._open: list[int] = []
        """Those of them that were open at the last look."""

    def through(self, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
        """The same arrivals, recorded as they pass."""
        for each in arrivals:
            self._coming.append(each)
            yield each

    def _class(self, name: str | None) -> _ClassCounters:
        return self._classes.setdefault(name or self._usual, _ClassCounters())

    def _pass(self, now_s: float) -> None:
        while self._coming and self._coming[0].at_s <= now_s:
            each = self._coming.popleft()
            row = self._class(each.slo_class)
            row.arrivals += 1
            row.prompts.add(each.input_tokens)
            self.arrived.append(each)
        self._end()
        while self.arrived and self.arrived[0].at_s < now_s - KEPT_S:
            self.arrived.popleft()
        while self.ended and self.ended[0].at_s < now_s - KEPT_S:
            self.ended.popleft()

    def _end(self) -> None:
        """Requests that have ended since the last look, from their rows."""
        book = self._world.book
        self._open.extend(range(self._rows, book.rows.count))
        self._rows = book.rows.count
        over = [number for number in self._open if number not in book.open]
        if not over:
            return
        self._open = [number for number in self._open if number in book.open]
        names = {number: name for name, number in book.classes.items()}
        ended = book.rows.columns()[over]
        for row in ended[ended["end_ns"].argsort(kind="stable")]:
            self._finished(row, names.get(int(row["slo_class"])))

    def _finished(self, row: Any, name: str | None) -> None:
        counted, target = self._class(name), self._targets.get(name or self._usual, Targets())
        served = OUTCOMES[row["outcome"]] == "served" and not row["flags"] & BROKE_OFF
        first_ns, last_ns, tokens = int(row["first_ns"]), int(row["last_ns"]), int(row["made_tokens"])
        ttft_ms = (first_ns - int(row["at_ns"])) / 1e6 if first_ns >= 0 else math.inf
        tpot_ms = (last_ns - first_ns) / 1e6 / (tokens - 1) if tokens > 1 and last_ns > first_ns >= 0 else 0.0
        prompt, cached = int(row["input_tokens"]), int(row["cached_tokens"])
        self.ended.append(EndedRequest(int(row["end_ns"]) / NS, ttft_ms, tpot_ms, prompt, tokens, served))
        late = not served or (target.ttft_ms is not None and ttft_ms > target.ttft_ms)
        slow = target.tpot_ms is not None and tpot_ms > target.tpot_ms
        counted.ended += 1
        counted.late_first += late
        counted.met += not late and not slow
        if served:
            counted.answers.add(tokens)
            counted.cached += cached
            counted.computed += max(0, prompt - cached)

    def counts(self) -> RouterCounts:
        """The router's current figures."""
        now_s = self._world.kernel.now_s
        self._pass(now_s)
        waits = [each.arrival.at_s for each in self._world.book.open.values() if each.row.first_ns < 0]
        return RouterCounts(
            router="router-0",
            life="1",
            at_s=now_s,
            classes={name: each.state() for name, each in sorted(self._classes.items())},
            waiting=len(waits),
            oldest_wait_s=now_s - min(waits) if waits else 0.0,
        )

    def since(self, at_s: float) -> list[EndedRequest]:
        """Requests that have ended since `at_s`; remembered for `KEPT_S`."""
        self._pass(self._world.kernel.now_s)
        listed = [*self.ended]
        return listed[bisect_left(listed, at_s, key=lambda each: each.at_s) :]

    def arrived_since(self, at_s: float) -> list[Arrival]:
        """Requests that have come since `at_s`; remembered for `KEPT_S`."""
        self._pass(self._world.kernel.now_s)
        listed = [*self.arrived]
        return listed[bisect_left(listed, at_s, key=lambda each: each.at_s) :]
