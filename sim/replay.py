"""A router's decision log, decided again by desk, view and policies of our own: they are the same objects. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from cluster.ids import InstanceId
from router.core.journey import Chosen
from router.core.values import Standing, Wanted
from router.fleet.snapshot import FleetSnapshot
from router.fleet.view import FleetView
from router.predict.prefix_cache import PrefixCacheIndex
from router.predict.step_model import Make
from router.scheduler import log_entries as d
from router.scheduler.decision_log import nameless, numbers
from router.scheduler.scheduler import Calls, Scheduler, SchedulingContext
from router.scheduler.scoring.policies import POLICIES, Policy


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that came out otherwise."""

    entry: int
    """Which entry of the log, from 0."""
    logged: d.Outcome | None
    here: d.Outcome | None
    """None: nothing was said there, or here."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a log came to."""

    entries: int
    choices: int
    differences: tuple[Difference, ...]
    missing: int = 0
    """Entries that the log says are missing after the last of `entries`: nothing after them is made again."""


def replay(entries: Iterable[d.Entry], policies: Mapping[str, Policy] | None = None) -> Replayed:
    """Feed the log to a desk of our own, make each choice again, and compare, its `because` included.

    Where a choice comes out otherwise, the logged one is taken: each is made where the router stood, and one difference
    does not make all that follow differ. A policy that keeps something between choices starts anew here, as the
    router's did where the log begins. A gap in the log ends the replay: what came in it is not known, so that every
    choice after it might differ.

    Args:
        entries: from the router's start.
        policies: by name; None: the router's own.

    Raises:
        ValueError: the log does not begin with a desk, names a policy that is not there, or a request nobody has seen.
    """
    again = _Again(iter(entries), POLICIES if policies is None else policies)
    again.run()
    return Replayed(again.count, again.choices, tuple(again.differences), again.missing)


class _Again:
    """One replay."""

    def __init__(self, entries: Iterator[d.Entry], policies: Mapping[str, Policy]) -> None:
        self._entries = entries
        self._policies = policies
        self._next: d.Entry | None = next(entries, None)
        self._makes: dict[InstanceId, Make | None] = {}
        self._view = FleetView(lambda instance: self._makes.get(instance.id))
        self._desk: Scheduler | None = None
        self._seats: dict[int, SchedulingContext] = {}
        self.count = self.choices = self.missing = 0
        self.differences: list[Difference] = []

    def run(self) -> None:
        """To the log's end, or its first gap."""
        while self._next is not None:
            if isinstance(self._next, d.Missing):
                self.missing = self._next.entries
                return
            entry = self._take()
            if isinstance(entry, d.Decided | d.Came):
                self.differences.append(Difference(self.count - 1, entry, None))
            elif not self._tell_fleet(entry):
                called, chosen = self._tell_desk(entry)
                self._compare(d.Came(chosen, numbers(called)) if called or chosen is not None else None)

    def _take(self) -> d.Entry:
        entry, self._next = self._next, next(self._entries, None)
        assert entry is not None
        self.count += 1
        return entry

    @property
    def _at_gap(self) -> bool:
        return isinstance(self._next, d.Missing)

    # --- what was said ------------------------------------------------------------------------------------------------

    def _compare(self, here: d.Came | None) -> None:
        """With the entry that comes now, if it is one of what the desk said."""
        logged = self._take() if isinstance(self._next, d.Came) else None
        if logged != here and not (logged is None and self._at_gap):
            assert logged is None or isinstance(logged, d.Came)
            self.differences.append(Difference(self.count - 1, logged, here))

    def _decide(self, name: str, fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
        """The policy again: what it says is held against the log, what the log says is done."""
        chosen = self._policies[name](fleet, wanted)
        here = d.Decided(name, nameless(wanted), chosen)
        logged = self._take() if isinstance(self._next, d.Decided) else None
        assert logged is None or isinstance(logged, d.Decided)
        if logged is None and self._at_gap:  # what the log said may be in it
            return chosen
        self.choices += 1
        if logged != here:
            self.differences.append(Difference(self.count - 1, logged, here))
        return chosen if logged is None else logged.chosen

    # --- what happened ------------------------------------------------------------------------------------------------

    def _tell_fleet(self, entry: d.Entry) -> bool:
        """Whether it was about the fleet."""
        view = self._view
        match entry:
            case d.Made(instance, make):
                self._makes[instance] = make
            case d.Added(instance):
                view.add(instance)
            case d.Folded(reported):
                view.fold(reported)
            case d.Seen(instance, models, load):
                view.seen(instance, models, load)
            case d.ProbeFailed(instance):
                view.probe_failed(instance)
            case d.Unreachable(instance):
                view.unreachable(instance)
            case d.SetAside(reasons):
                view.set_aside(reasons)
            case d.Distrusted(pairs):
                view.distrust({(prefill, decode): because for prefill, decode, because in pairs})
            case d.Proven(gives, takes, doubts):
                told = {(prefill, decode): because for prefill, decode, because in doubts}
                view.proven(Standing(gives, takes, {}, told))
            case d.LegStarted(instance):
                view.leg_started(instance)
            case d.Indexed():
                view.all().prefixes = PrefixCacheIndex()
            case d.Cached(sent, each, tokens):
                prefixes = view.all().prefixes
                if prefixes is not None:
                    prefixes.reported(sent, each, tokens)
            case d.Began(name, admission, foresees):
                self._begin(name, admission=admission, foresees=foresees)
            case d.Seated(number, wanted, promise):
                seat = self._seats.setdefault(number, SchedulingContext(wanted, promise))
                seat.wanted, seat.entered = wanted, (number, wanted)
            case d.Counted(number, tokens, each):
                seat = self._seat(number)
                seat.wanted = replace(seat.wanted, prompt_tokens=tokens, prefix_block_tokens=each)
            case _:
                return False
        return True

    def _begin(self, name: str, *, admission: bool, foresees: bool) -> None:
        if name not in self._policies:
            raise ValueError(f"entry {self.count - 1}: there is no policy `{name}` here")
        self._desk = Scheduler(
            self._view, lambda fleet, wanted: self._decide(name, fleet, wanted), admission=admission, foresees=foresees
        )

    def _tell_desk(self, entry: d.Entry) -> tuple[Calls, Chosen | None]:
        """Who is called, and what a request that asked is told."""
        desk = self._desk
        if desk is None:
            raise ValueError(f"entry {self.count - 1}: no desk has begun; a log is replayed from its router's start")
        called: Calls = ()
        match entry:
            case d.Asked(number, effect, now):
                chosen, called = desk.choose(self._seat(number), effect, now)
                return called, chosen
            case d.Picked(wanted):
                desk.pick(wanted)
            case d.Shared(routers, shares, local_shares):
                self._view.routers, desk.shares, desk.local_shares = routers, shares, local_shares
            case d.PromptOver(number, now, done, cached_tokens):
                desk.prompt_over(self._seat(number), now, done=done, cached_tokens=cached_tokens)
            case d.AnswerOpened(number, now):
                desk.opened(self._seat(number), now)
            case d.Finished(number, now, tokens, cut_off, engine_ms):
                seat = self._seat(number)
                called = desk.finish(seat, now, tokens, cut_off=cut_off, engine_ms=engine_ms)
                del self._seats[number]
            case d.FoundNone(number):
                called = desk.found_none(self._seat(number))
            case d.Occupied(number, instance):
                called = desk.occupy(self._seat(number), instance)
            case d.LegEnded(instance):
                called = desk.leg_ended(instance)
            case d.Roomy():
                called = desk.room()
            case d.Looked(now):
                called = desk.look(now)
            case d.FleetChanged():
                called = desk.fleet_changed()
        return called, None

    def _seat(self, number: int) -> SchedulingContext:
        found = self._seats.get(number)
        if found is None:
            raise ValueError(f"entry {self.count - 1}: request {number} has not come to the desk yet, or is over")
        return found
