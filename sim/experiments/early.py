"""Runs that end as soon as it is certain whether attainment holds: the same verdict as of the whole run, sooner.

Of the window's requests (`loadgen.search.WINDOW`), those that met their targets and those that missed them are counted
while the run goes on. When enough have met them, or too many have missed, nothing that is still to come can change it.
"""

from __future__ import annotations

import math
from typing import Any, Final

from numpy.typing import NDArray

from loadgen.report import Targets
from loadgen.search import WINDOW
from sim.kernel import NS
from sim.result import Result
from sim.world import World

LOOKS: Final = 100
"""About the number of looks at a run: a look costs some 0.2 ms."""


class AttainmentCertain(Exception):
    """Attainment holds, or not, whatever comes."""

    def __init__(self, *, holds: bool, arrived: float) -> None:
        super().__init__(holds, arrived)
        self.holds: Final = holds
        self.arrived: Final = arrived
        """Share of the load's requests that had come by then."""


class Watch:
    """`World.on_progress` of one run: raises `AttainmentCertain` out of `World.run`."""

    def __init__(self, targets: Targets, share: float, count: int, span_s: float) -> None:
        """`count` requests come within `span_s`; `share` of those in the window must meet `targets`."""
        self.targets: Final = targets
        self.count: Final = count
        self.low: Final = math.floor(WINDOW[0] * count)
        self.high: Final = math.ceil(WINDOW[1] * count)
        self.share: Final = share
        self._every_ns: Final = round(span_s * NS / LOOKS)
        self._next_ns = 0

    def __call__(self, world: World) -> None:
        """Look, if it is time to."""
        if world.kernel.now_ns < self._next_ns:
            return
        self._next_ns = world.kernel.now_ns + self._every_ns
        book = world.book
        if book.rows.count <= self.low:
            return
        window = book.rows.columns()[self.low : self.high]
        over = window[window["outcome"] != 0]
        met = int(_result(over, tuple(name or "" for name in book.classes)).met(self.targets).sum())
        missed = len(over) - met + self._waited_too_long(world)
        whole = self.high - self.low
        if met / whole >= self.share:
            raise AttainmentCertain(holds=True, arrived=book.rows.count / self.count)
        if (whole - missed) / whole < self.share:
            raise AttainmentCertain(holds=False, arrived=book.rows.count / self.count)

    def _waited_too_long(self, world: World) -> int:
        """Requests of the window that have no first token yet, and can have none in time."""
        if self.targets.ttft_ms is None:
            return 0
        since_s = (world.kernel.now_ns - world.front.client_ns) / NS - self.targets.ttft_ms / 1000
        return sum(
            self.low <= number < self.high and passage.row.first_ns < 0 and passage.arrival.at_s < since_s
            for number, passage in world.book.open.items()
        )


def _result(rows: NDArray[Any], classes: tuple[str, ...]) -> Result:
    return Result(columns=rows, members=(), classes=classes, details={}, events=0, end_ns=0)
