"""Wakes the waiting requests that the scheduler names, and calls back for legs on a lost instance. A shell: timers and
callbacks.

Callers may be inside a state change, so callbacks run on the next loop turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

from cluster.ids import InstanceId
from router.core.journey import Chosen
from router.fleet import events as d
from router.fleet.view import FleetView
from router.scheduler.decision_log import Fleet, Scheduling
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import Calls, Scheduler
from router.scheduler.scoring.workload import pair_costs_more

logger = logging.getLogger("baton.router")

Callback = Callable[[], None]

_MAKES_ROOM: Final = frozenset({d.Finished, d.Occupied, d.LegEnded})
"""The events with which a request may leave a place, beside `Asked` and changes of the fleet."""


class Waiters:
    """One callback for each waiting request. A call that comes before the request waits is kept for it."""

    def __init__(self) -> None:
        self._waiting: dict[object, Callback] = {}
        self._called: set[object] = set()

    def wait(self, request: object, callback: Callback) -> None:
        """Run `callback` once, on the loop turn after the request is called."""
        if request in self._called:
            self._called.discard(request)
            asyncio.get_running_loop().call_soon(callback)
        else:
            self._waiting[request] = callback

    def call(self, requests: tuple[object, ...]) -> None:
        """These requests are to ask for a place again."""
        for request in requests:
            callback = self._waiting.pop(request, None)
            if callback is None:
                self._called.add(request)
            else:
                asyncio.get_running_loop().call_soon(callback)

    def forget(self, request: object) -> None:
        """The request will not wait again."""
        self._waiting.pop(request, None)
        self._called.discard(request)


class WatchedLeg(Protocol):
    """A leg that has to know whether instances are lost."""

    @property
    def producer(self) -> InstanceId | None:
        """The instance with the hold that it pulls, if it pulls one that is known."""

    def left(self) -> None:
        """Its instance is lost."""

    def producer_left(self) -> None:
        """The instance with the hold that it pulls is lost."""


class Losses:
    """The legs that can no longer end well, or not soon, once an instance is gone, down, or restarted: those that were
    sent there, and those that pull from there.
    """

    def __init__(self) -> None:
        self._watching: Final[dict[InstanceId, dict[WatchedLeg, None]]] = {}

    def watch(self, instance: InstanceId, leg: WatchedLeg) -> None:
        """The leg is sent to this instance."""
        watching = self._watching.get(instance)
        if watching is None:
            watching = self._watching[instance] = {}
        watching[leg] = None

    def unwatch(self, instance: InstanceId, leg: WatchedLeg) -> None:
        """The leg has ended, or its answer has begun."""
        watching = self._watching.get(instance)
        if watching is not None:
            watching.pop(leg, None)

    def announce(self, instance: InstanceId) -> None:
        """The instance is lost: tell all legs that were sent there, and all that pull from there."""
        loop = asyncio.get_running_loop()
        for leg in self._watching.pop(instance, {}):
            loop.call_soon(leg.left)
        for watching in self._watching.values():
            for leg in watching:
                if leg.producer == instance:
                    loop.call_soon(leg.producer_left)


class Dispatch:
    """One router's scheduler and view of the fleet: passes events to them, and wakes the requests concerned."""

    def __init__(self, view: FleetView, scheduler: Scheduler, fleet: Fleet, scheduling: Scheduling) -> None:
        """`fleet`, `scheduling`: the view and the scheduler as machines, which may log their events."""
        self.view: Final = view
        self.scheduler: Final = scheduler
        self.fleet: Final = fleet
        self.scheduling: Final = scheduling
        self.line: Final = Waiters()
        self.losses: Final = Losses()
        self.outside: Final[dict[asyncio.Future[None], None]] = {}
        """The requests outside the queue that wait for room (`router.api.passthrough`): each ends when there may be."""
        self._outside_first = False
        """When there is room, the requests outside the queue ask first: while they waited, another one got a place."""
        self._looks_s = -1.0
        """The time at which the scheduler is to look for room; -1: none."""
        self.said_aggregated = False
        """The log has said that a request which could be handed over is not."""

    def tell(self, event: d.SchedulerEvent, now: float) -> None:
        """Pass an event to the scheduler; requests that may find a place now ask again."""
        if self.outside and type(event) in _MAKES_ROOM:
            context: SchedulingContext | None = getattr(event, "context", None)
            former = None if context is None else context.decode
            called = self.scheduling.handle(event, now)
            if context is None:
                self._call_both(called)
            else:
                self.moved(context, former, called)
            return
        called = self.scheduling.handle(event, now)
        if called or self.scheduler.wakeup_s is not None:
            self.call(called)

    def moved(self, context: SchedulingContext, former: InstanceId | None, requests: Calls) -> None:
        """After an event of a request, while others wait outside the queue: wake `requests`, and those outside if the
        request has left its place.

        Args:
            context: the request.
            former: the instance where its answer had a place before the event.
            requests: the queued requests that the scheduler named.
        """
        if context.decode == former:  # nothing has become free
            self.call(requests)
            return
        if context.decode is not None:
            self._outside_first = True
        if former is None:
            self.call(requests)
        else:
            self._call_both(requests)

    def outside_took(self) -> None:
        """A request outside the queue takes a place: at the next free place the queue asks first."""
        self._outside_first = False

    def _call_both(self, requests: Calls) -> None:
        """Wake these requests, and those outside the queue. The side that did not get the last place asks first: then
        neither can keep every place from the other.
        """
        first = self._outside_first
        if not first:
            self.call(requests)
        for waiting in self.outside:
            if not waiting.done():
                waiting.set_result(None)
        if first:
            self.call(requests)

    def call(self, requests: Calls) -> None:
        """Wake these requests to ask for a place again; when the scheduler wants it, set a timer to look for room."""
        if requests:
            self.line.call(requests)
        wakeup_s = self.scheduler.wakeup_s
        if wakeup_s is not None and wakeup_s != self._looks_s:
            self._looks_s = wakeup_s
            asyncio.get_running_loop().call_later(max(0.0, wakeup_s - time.monotonic()), self._look, wakeup_s)

    def served_aggregated(self, chosen: Chosen) -> None:
        """A request is not handed over. If a pair could have served it at a higher price, the log says so, once."""
        if not self.said_aggregated and pair_costs_more(chosen):
            self.said_aggregated = True
            logger.info("handing over costs more here than it gives, so far: %s (said once)", chosen.because)

    def _look(self, wakeup_s: float) -> None:
        """The fleet may have room now, if no event has come since."""
        if wakeup_s == self._looks_s:
            self._looks_s = -1.0
            now = time.monotonic()
            self.call(self.scheduling.handle(d.Looked(now), now))

    def fleet_changed(self) -> None:
        """The fleet has changed: requests may find a place."""
        self._call_both(self.scheduling.handle(d.FleetMoved(), time.monotonic()))

    def leg_started(self, instance: InstanceId) -> None:
        """A leg without an answer of its own (a prefill leg) goes to the instance."""
        self.fleet.handle(d.LegStarted(instance), time.monotonic())

    def leg_ended(self, instance: InstanceId) -> None:
        """A place is free again."""
        self.tell(d.LegEnded(instance), time.monotonic())

    def unreachable(self, instance: InstanceId) -> None:
        """A leg could not connect: all other legs on the instance should move, too."""
        if self.view.knows(instance):
            for lost in self.fleet.handle(d.Unreachable(instance), time.monotonic()):
                logger.warning("%s is down: it accepts no connection", lost.instance)
                self.losses.announce(lost.instance)
