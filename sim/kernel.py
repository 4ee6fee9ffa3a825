"""Virtual time: a heap of (time, sequence, call), in whole nanoseconds; calls at equal times run in the order in which
they came.

The kernel knows nothing about its calls. Nothing is ever removed from the heap: a call that is obsolete does nothing
when its time comes.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Final

NS: Final = 1_000_000_000
"""Nanoseconds in a second."""

Call = Callable[[Any], None]


class Kernel:
    """The clock of one run."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.events = 0
        """The number of calls so far."""
        self._heap: Final[list[tuple[int, int, Call, Any]]] = []
        self._sequence = 0

    @property
    def now_s(self) -> float:
        """The same clock in seconds, as the router's machines read it."""
        return self.now_ns / NS

    def at(self, when_ns: int, call: Call, argument: Any = None) -> None:
        """Call `call(argument)` at `when_ns`."""
        assert when_ns >= self.now_ns, "nothing happens in the past"
        self._sequence += 1
        heappush(self._heap, (when_ns, self._sequence, call, argument))

    def run(self, after: Callable[[], None] | None = None) -> None:
        """Run until no call is left; `after` is called after every call."""
        heap = self._heap
        while heap:
            self.now_ns, _, call, argument = heappop(heap)
            self.events += 1
            call(argument)
            if after is not None:
                after()
