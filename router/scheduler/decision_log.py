"""View, desk and prefix index that write down what they are told (`router.scheduler.log_entries`). Pure: who writes is
given.

A router without a decision log has none of these: it costs nothing then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from msgspec.structs import replace

from cluster.ids import InstanceId
from cluster.instance import Instance, Load
from router.core.journey import Choose, Chosen
from router.core.values import Reported, Sent, Standing, Wanted
from router.fleet.snapshot import FleetSnapshot
from router.fleet.view import FleetView
from router.predict.prefix_cache import PrefixCacheIndex
from router.predict.step_model import Make
from router.scheduler import log_entries as d
from router.scheduler.scheduler import Calls, Scheduler, SchedulingContext
from router.scheduler.scoring.policies import Policy

Write = Callable[[bytes], Any]


class DecisionLog:
    """Where one router's entries go."""

    def __init__(self, write: Write, policy: str) -> None:
        """`policy`: its name, by which it is found again."""
        self.policy: Final = policy
        self._write: Final = write
        self._seats = 0
        self.inside = False
        """A call is under way: what happens now follows from it."""

    def next_seat(self) -> int:
        """A number for one more request."""
        self._seats += 1
        return self._seats

    def write(self, entry: d.Entry) -> None:
        """Write it down, whatever is under way."""
        self._write(d.line_of(entry))

    @contextmanager
    def of(self, entry: d.Entry) -> Iterator[Came]:
        """A call from outside, and, by calling what this yields, what came of it; from inside, neither."""
        if self.inside:
            yield _nothing
            return
        self.write(entry)
        self.inside = True
        try:
            yield self._came
        finally:
            self.inside = False

    def _came(self, called: Calls, chosen: Chosen | None = None) -> Calls:
        if called or chosen is not None:
            self.write(d.Came(chosen, numbers(called)))
        return called


Came = Callable[..., Calls]


def _nothing(called: Calls, _: Chosen | None = None) -> Calls:
    return called


def numbers(called: Calls) -> tuple[int, ...]:
    """Of seats that stand in line: they have asked, so that they are in the log."""
    return tuple(seat.entered[0] for seat in called if isinstance(seat, SchedulingContext) and seat.entered is not None)


def nameless(wanted: Wanted) -> Wanted:
    """Without its prefix, the longest part of it and the same at every choice; and without what scoring goes by."""
    return replace(wanted, prefix=(), scoring=None) if wanted.prefix or wanted.scoring is not None else wanted


class LoggedView(FleetView):
    """A view that writes down what it is told. `leg_ended` is the desk's to write."""

    def __init__(self, log: DecisionLog, makes: Callable[[Instance], Make | None] | None = None) -> None:
        super().__init__(None if makes is None else self._make)
        self._log: Final = log
        self._makes: Final = makes
        self._known: dict[InstanceId, tuple[Instance, Make | None]] = {}

    def _make(self, instance: Instance) -> Make | None:
        """Told once, before the first entry that is about this instance."""
        known = self._known.get(instance.id)
        if known is not None and known[0] == instance:
            return known[1]
        assert self._makes is not None
        make = self._makes(instance)
        self._known[instance.id] = (instance, make)
        self._log.write(d.Made(instance.id, make))
        return make

    def add(self, instance: Instance) -> None:
        if self._makes is not None:
            self._make(instance)
        with self._log.of(d.Added(instance)):
            super().add(instance)

    def fold(self, reported: tuple[Reported, ...]) -> frozenset[InstanceId]:
        for each in reported if self._makes is not None else ():
            self._make(each.instance)
        with self._log.of(d.Folded(reported)):
            lost = super().fold(reported)
        if lost:
            self._known = {name: known for name, known in self._known.items() if self.knows(name)}
        return lost

    def seen(self, instance: InstanceId, models: tuple[dict[str, object], ...] | None, load: Load | None) -> None:
        with self._log.of(d.Seen(instance, models, load)):
            super().seen(instance, models, load)

    def probe_failed(self, instance: InstanceId) -> bool:
        with self._log.of(d.ProbeFailed(instance)):
            return super().probe_failed(instance)

    def unreachable(self, instance: InstanceId) -> bool:
        with self._log.of(d.Unreachable(instance)):
            return super().unreachable(instance)

    def set_aside(self, reasons: Mapping[InstanceId, str]) -> None:
        with self._log.of(d.SetAside(dict(reasons))):
            super().set_aside(reasons)

    def distrust(self, pairs: Mapping[tuple[InstanceId, InstanceId], str]) -> None:
        with self._log.of(d.Distrusted([(*names, because) for names, because in pairs.items()])):
            super().distrust(pairs)

    def proven(self, standing: Standing) -> None:
        doubts = [(*names, because) for names, because in standing.doubts.items()]
        with self._log.of(d.Proven(dict(standing.gives), dict(standing.takes), doubts)):
            super().proven(standing)  # what is not exact decides no choice: the entry does without

    def leg_started(self, instance: InstanceId) -> None:
        with self._log.of(d.LegStarted(instance)):
            super().leg_started(instance)


class LoggedPrefixes(PrefixCacheIndex):
    """An index that writes down what it is told by others than the desk and the view."""

    def __init__(self, log: DecisionLog) -> None:
        super().__init__()
        self._log: Final = log
        log.write(d.Indexed())

    def reported(self, sent: Sent, each: float, cached_tokens: int) -> None:
        with self._log.of(d.Cached(sent, each, cached_tokens)):
            super().reported(sent, each, cached_tokens)


class LoggedDesk(Scheduler):
    """A desk that writes down what it is told, and what came of it."""

    def __init__(self, log: DecisionLog, view: FleetView, policy: Policy, *, admission: bool, foresees: bool) -> None:
        super().__init__(view, _logged(log, policy), admission=admission, foresees=foresees)
        self._log: Final = log
        self._shared: d.Shared | None = None
        log.write(d.Began(log.policy, admission, foresees))

    def _number(self, seat: SchedulingContext) -> int:
        """The seat's; what it wants now is written down first, where that is not what the log says."""
        known, wanted = seat.entered, seat.wanted
        if known is not None and known[1] is wanted:
            return known[0]
        number = self._log.next_seat() if known is None else known[0]
        seat.entered = (number, wanted)
        tokens, each = wanted.prompt_tokens, wanted.prefix_block_tokens
        if known is not None and replace(known[1], prompt_tokens=tokens, prefix_block_tokens=each) == wanted:
            self._log.write(d.Counted(number, tokens, each))
        else:
            self._log.write(d.Seated(number, wanted, seat.promise))
        return number

    def _share_out(self) -> None:
        shared = self._shared
        now = (self.view.routers, self.shares, self.local_shares)
        if shared is None or now != (shared.routers, shared.shares, shared.local_shares):
            self._shared = d.Shared(now[0], dict(now[1]), dict(now[2]))
            self._log.write(self._shared)

    def choose(self, seat: SchedulingContext, effect: Choose, now: float) -> tuple[Chosen, Calls]:
        self._share_out()
        with self._log.of(d.Asked(self._number(seat), effect, now)) as came:
            chosen, called = super().choose(seat, effect, now)
            return chosen, came(called, chosen)

    def pick(self, wanted: Wanted) -> Chosen:
        with self._log.of(d.Picked(wanted)):
            return super().pick(wanted)

    def prompt_over(self, seat: SchedulingContext, now: float, *, done: bool, cached_tokens: int | None = None) -> None:
        if self.foresight is None:  # nobody remembers it
            return
        with self._log.of(d.PromptOver(self._number(seat), now, done, cached_tokens)):
            super().prompt_over(seat, now, done=done, cached_tokens=cached_tokens)

    def opened(self, seat: SchedulingContext, now: float) -> None:
        if self.foresight is None:
            return
        with self._log.of(d.AnswerOpened(self._number(seat), now)):
            super().opened(seat, now)

    def finish(
        self,
        seat: SchedulingContext,
        now: float,
        tokens: int | None = None,
        *,
        cut_off: bool = False,
        engine_ms: tuple[float, float] | None = None,
    ) -> Calls:
        with self._log.of(d.Finished(self._number(seat), now, tokens, cut_off, engine_ms)) as came:
            called = came(super().finish(seat, now, tokens, cut_off=cut_off, engine_ms=engine_ms))
        seat.entered = None
        return called

    def room(self) -> Calls:
        if self.gate is None:
            return ()
        with self._log.of(d.Roomy()) as came:
            return came(super().room())

    def look(self, now: float) -> Calls:
        with self._log.of(d.Looked(now)) as came:
            return came(super().look(now))

    def found_none(self, seat: SchedulingContext) -> Calls:
        with self._log.of(d.FoundNone(self._number(seat))) as came:
            return came(super().found_none(seat))

    def occupy(self, seat: SchedulingContext, instance: InstanceId | None) -> Calls:
        if self._log.inside:
            return super().occupy(seat, instance)
        with self._log.of(d.Occupied(self._number(seat), instance)) as came:
            return came(super().occupy(seat, instance))

    def leg_ended(self, instance: InstanceId) -> Calls:
        with self._log.of(d.LegEnded(instance)) as came:
            return came(super().leg_ended(instance))

    def fleet_changed(self) -> Calls:
        with self._log.of(d.FleetChanged()) as came:
            return came(super().fleet_changed())


def _logged(log: DecisionLog, policy: Policy) -> Policy:
    """A policy that writes down what it says."""

    def choose(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
        chosen = policy(fleet, wanted)
        log.write(d.Decided(log.policy, nameless(wanted), chosen))
        return chosen

    return choose


def view_of(log: DecisionLog | None, makes: Callable[[Instance], Make | None] | None) -> FleetView:
    """A view, logged where there is a log."""
    return FleetView(makes) if log is None else LoggedView(log, makes)


def desk_of(log: DecisionLog | None, view: FleetView, policy: Policy, *, admission: bool, foresees: bool) -> Scheduler:
    """A desk, logged where there is a log."""
    if log is None:
        return Scheduler(view, policy, admission=admission, foresees=foresees)
    return LoggedDesk(log, view, policy, admission=admission, foresees=foresees)


def prefixes_of(log: DecisionLog | None) -> PrefixCacheIndex:
    """An index, logged where there is a log."""
    return PrefixCacheIndex() if log is None else LoggedPrefixes(log)
