"""The waits of a request: for a place, for its journey's timer, for a slow client. A shell: timers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from cluster.request import Request
from router.core import journey as j
from router.http.outlet import Outlet
from router.request.answering import Answering
from router.request.legs import OVER, EventSink
from router.request.parts import Parts
from router.request.trace import RequestTrace
from router.scheduler.placements import SchedulingContext

logger = logging.getLogger("baton.router")

FAR_S = 5.0
"""Deadlines more seconds away than this have no timer yet, as most events come before. They are checked every
`router.http.legs.SWEEP_S`."""

_TIMED = frozenset(
    {j.JourneyState.CHOOSING, j.JourneyState.PREFILLING, j.JourneyState.OPENING, j.JourneyState.CANCELLING}
)
"""States that a deadline may end."""


class Waiting:
    """The waits of one request: for a call from the flow-control queue, and for the clock if its journey's state needs
    it.
    """

    __slots__ = ("_context", "_due", "_feed", "_in_line", "_journey", "_looked_at", "_parts", "_timer", "_trace")

    def __init__(
        self,
        parts: Parts,
        journey: j.Journey,
        context: SchedulingContext,
        trace: RequestTrace,
        feed: Callable[[j.Event], None],
    ) -> None:
        """`feed`: takes the event that ends the wait."""
        self._parts: Final = parts
        self._journey: Final = journey
        self._context: Final = context
        self._trace: Final = trace
        self._feed: Callable[[j.Event], None] | None = feed
        self._in_line = False
        self._looked_at = False
        """The request is in `Legs.long`."""
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        """The time at which the timer fires, in monotonic seconds; often earlier than wanted, as moving it costs more
        than checking."""

    def begin(self) -> None:
        """Begin what the journey's state waits for: a call from the queue, a timer. May be called again at any time."""
        if self._journey.state not in _TIMED:
            return
        if self._journey.state is j.JourneyState.CHOOSING and not self._in_line:
            self._in_line = True
            self._trace.waits()
            self._parts.line.wait(self._context, self._called)
        wakeup = self._journey.next_wakeup()
        if wakeup is not None and (self._timer is None or self._due > wakeup):
            self._arm(wakeup)

    def _arm(self, wakeup: float) -> None:
        left_s = wakeup - time.monotonic()
        if left_s > FAR_S:
            if not self._looked_at:
                self._looked_at = True
                self._parts.engines.legs.long.add(self)
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = wakeup
        self._timer = self._parts.engines.loop.call_later(max(0.0, left_s), self._tick)

    def look(self, now: float) -> None:
        """Set a timer if a far deadline is near now (`router.http.legs.Patient`)."""
        if self._timer is None and self._journey.state in _TIMED:
            wakeup = self._journey.next_wakeup()
            if wakeup is not None:
                self._arm(wakeup)

    def _tick(self) -> None:
        self._timer = None
        wakeup = self._journey.next_wakeup()
        if self._feed is None or wakeup is None or self._journey.state not in _TIMED:
            return
        if wakeup > time.monotonic():
            self._arm(wakeup)
            return
        self._leave_line()
        self._feed(j.Tick())

    def _called(self) -> None:
        if self._in_line and self._feed is not None:
            self._leave_line()
            self._feed(j.FleetChanged())

    def _leave_line(self) -> None:
        if self._in_line:
            self._in_line = False
            self._parts.line.forget(self._context)
            self._trace.called()

    def end(self) -> None:
        """End all waits."""
        self._feed = None
        self._parts.line.forget(self._context)
        if self._looked_at:
            self._parts.engines.legs.long.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ClientListener:
    """What the client's connection reports. While the client reads too slowly, its engine is not read (backpressure);
    after `RequestLimits.client_stall_s` of that, the client is cut off.
    """

    __slots__ = ("_answering", "_outlet", "_parts", "_request", "_sink", "_timer")

    def __init__(self, parts: Parts, request: Request, outlet: Outlet, answering: Answering, sink: EventSink) -> None:
        """`sink` is told when the client leaves."""
        self._parts: Final = parts
        self._request: Final = request
        self._outlet: Final = outlet
        self._answering: Final = answering
        self._sink = sink
        self._timer: asyncio.TimerHandle | None = None

    def client_left(self) -> None:
        """The client will read nothing more."""
        self._stop_timer()
        self._sink.feed(j.ClientLeft())

    def client_full(self) -> None:
        """The client reads too slowly."""
        self._answering.pause()
        if self._timer is None:
            self._timer = self._parts.engines.loop.call_later(self._parts.limits.client_stall_s, self._cut)

    def client_drained(self) -> None:
        """The client has read what was sent."""
        self._stop_timer()
        self._answering.resume()

    def end(self) -> None:
        """The request is over."""
        self._stop_timer()
        self._sink = OVER

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self) -> None:
        self._timer = None
        logger.warning("%s: its client reads nothing: cut off", self._request.label)
        self._outlet.abort()
