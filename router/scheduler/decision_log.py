"""Machines whose events are logged: the decision log is the list of these events (`router.fleet.events`). Pure: the
writer is passed in.

A router without a decision log makes none of these, so it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec.structs import replace

from cluster.ids import InstanceId
from cluster.instance import Instance
from cluster.machine import Machine
from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet import events as d
from router.fleet.snapshot import FleetSnapshot
from router.fleet.view import FleetView
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import Scheduler
from router.scheduler.scoring.policies import Policy

Write = Callable[[bytes], Any]
Fleet = Machine[d.FleetEvent, d.InstanceLost]
Scheduling = Machine[d.SchedulerEvent, Chosen | SchedulingContext]


class DecisionLog:
    """The receiver of one router's events."""

    def __init__(self, write: Write, policy: str) -> None:
        """`policy`: its name, by which it is found again."""
        self.policy: Final = policy
        self._write: Final = write

    def write(self, entry: d.Entry) -> None:
        """Write an entry."""
        self._write(d.line_of(entry))


def numbers(called: Sequence[object]) -> tuple[int, ...]:
    """The numbers of queued requests: they have asked, so the log has them."""
    return tuple(each.entered[0] for each in called if isinstance(each, SchedulingContext) and each.entered is not None)


def nameless(wanted: Wanted) -> Wanted:
    """The same without its prefix, the longest part, which no choice changes; and without the scoring's inputs."""
    return replace(wanted, prefix=(), scoring=None) if wanted.prefix or wanted.scoring is not None else wanted


class LoggedFleet:
    """A view of the fleet that logs each event before it applies it."""

    def __init__(self, log: DecisionLog, view: FleetView) -> None:
        self._log: Final = log
        self._view: Final = view
        self._made: dict[InstanceId, Instance] = {}

    def handle(self, event: d.FleetEvent, now: float) -> tuple[d.InstanceLost, ...]:
        """See `FleetView.handle`."""
        if isinstance(event, d.Added):
            self._tell_make(event.instance)
        elif isinstance(event, d.Folded):
            for each in event.reported:
                self._tell_make(each.instance)
        self._log.write(event)
        lost = self._view.handle(event, now)
        if lost:
            self._made = {name: made for name, made in self._made.items() if self._view.knows(name)}
        return lost

    def next_wakeup(self) -> float | None:
        """See `FleetView.next_wakeup`."""
        return self._view.next_wakeup()

    def _tell_make(self, instance: Instance) -> None:
        """Log what is known of the instance's speed, once, before the first event about it."""
        makes = self._view.makes
        if makes is not None and self._made.get(instance.id) != instance:
            self._made[instance.id] = instance
            self._log.write(d.Made(instance.id, makes(instance)))


class LoggedScheduler:
    """A scheduler that logs each event before it applies it, and the results."""

    def __init__(self, log: DecisionLog, scheduler: Scheduler) -> None:
        self._log: Final = log
        self._scheduler: Final = scheduler
        self._requests = 0
        self._shared: d.Shared | None = None

    def handle(self, event: d.SchedulerEvent, now: float) -> tuple[Chosen | SchedulingContext, ...]:
        """See `Scheduler.handle`."""
        if isinstance(event, d.Asked):
            self._share_out()
        request: SchedulingContext | None = getattr(event, "context", None)
        if request is not None:
            self._enter(request)
        self._log.write(event)
        effects = self._scheduler.handle(event, now)
        if effects and not isinstance(event, d.Picked):
            chosen = effects[0] if isinstance(effects[0], Chosen) else None
            self._log.write(d.Came(chosen, numbers(effects)))
        if isinstance(event, d.Finished) and request is not None:
            request.entered = None
        return effects

    def next_wakeup(self) -> float | None:
        """See `Scheduler.next_wakeup`."""
        return self._scheduler.next_wakeup()

    def _enter(self, request: SchedulingContext) -> None:
        """Number the request; first log what it wants now, if the log does not have it."""
        known, wanted = request.entered, request.wanted
        if known is not None and known[1] is wanted:
            return
        if known is None:
            self._requests += 1
        number = self._requests if known is None else known[0]
        request.entered = (number, wanted)
        tokens, each = wanted.prompt_tokens, wanted.prefix_block_tokens
        if known is not None and replace(known[1], prompt_tokens=tokens, prefix_block_tokens=each) == wanted:
            self._log.write(d.Counted(number, tokens, each))
        else:
            self._log.write(d.Seated(number, wanted, request.promise))

    def _share_out(self) -> None:
        """Log how the fleet is divided, if that has changed."""
        scheduler, shared = self._scheduler, self._shared
        view = scheduler.view
        now = d.Shared(view.routers, dict(scheduler.shares), dict(scheduler.local_shares), view.router_number)
        if now != shared:
            self._shared = now
            self._log.write(now)


def fleet_of(log: DecisionLog | None, view: FleetView) -> Fleet:
    """The view as a machine, logged if there is a log."""
    return view if log is None else LoggedFleet(log, view)


def scheduler_of(
    log: DecisionLog | None, view: FleetView, policy: Policy, *, admission: bool, foresees: bool
) -> tuple[Scheduler, Scheduling]:
    """A scheduler, and the same as a machine, logged if there is a log."""
    if log is None:
        scheduler = Scheduler(view, policy, admission=admission, foresees=foresees)
        return scheduler, scheduler
    scheduler = Scheduler(view, _logged(log, policy), admission=admission, foresees=foresees)
    log.write(d.Began(log.policy, admission, foresees))
    return scheduler, LoggedScheduler(log, scheduler)


def _logged(log: DecisionLog, policy: Policy) -> Policy:
    """A policy that logs its decisions."""

    def choose(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
        chosen = policy(fleet, wanted)
        log.write(d.Decided(log.policy, nameless(wanted), chosen))
        return chosen

    return choose
