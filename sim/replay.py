"""Replays a router's decision log with the router's own scheduler, view and policies. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from cluster.ids import InstanceId
from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet import events as d
from router.fleet.snapshot import FleetSnapshot
from router.fleet.view import FleetView
from router.predict.step_model import Make
from router.scheduler.decision_log import nameless, numbers
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import Scheduler
from router.scheduler.scoring.policies import POLICIES, Policy


@dataclass(frozen=True, slots=True)
class Difference:
    """An entry that the replay makes differently."""

    entry: int
    """The number of the log's entry, from 0."""
    logged: d.Outcome | None
    here: d.Outcome | None
    """None: no reply in the log, or here."""


@dataclass(frozen=True, slots=True)
class ReplayedChoices:
    """The result of a replay."""

    entries: int
    choices: int
    differences: tuple[Difference, ...]
    missing: int = 0
    """Entries that the log reports missing after the last of `entries`: nothing after them is replayed."""


def replay(entries: Iterable[d.Entry], policies: Mapping[str, Policy] | None = None) -> ReplayedChoices:
    """Feed the log to a new scheduler, make each choice again, and compare, its `because` included.

    Where a choice differs, the logged one is taken: each choice is made in the router's state, and one difference does
    not make all later ones differ. A policy that keeps state between choices starts new here, as the router's did where
    the log begins. A gap in the log ends the replay: its events are unknown, so every choice after it might differ.

    Args:
        entries: from the router's start.
        policies: by name; None: the router's own.

    Raises:
        ValueError: the log does not begin with a scheduler, names a policy that is unknown, or a request not yet seen.
    """
    again = _Again(iter(entries), POLICIES if policies is None else policies)
    again.run()
    return ReplayedChoices(again.count, again.choices, tuple(again.differences), again.missing)


class _Again:
    """One replay."""

    def __init__(self, entries: Iterator[d.Entry], policies: Mapping[str, Policy]) -> None:
        self._entries = entries
        self._policies = policies
        self._next: d.Entry | None = next(entries, None)
        self._makes: dict[InstanceId, Make | None] = {}
        self._view = FleetView(lambda instance: self._makes.get(instance.id))
        self._scheduler: Scheduler | None = None
        self._contexts: dict[int, SchedulingContext] = {}
        self.count = self.choices = self.missing = 0
        self.differences: list[Difference] = []

    def run(self) -> None:
        """Replay to the log's end, or its first gap."""
        while self._next is not None:
            if isinstance(self._next, d.Missing):
                self.missing = self._next.entries
                return
            entry = self._take()
            if isinstance(entry, d.Decided | d.Came):
                self.differences.append(Difference(self.count - 1, entry, None))
            else:
                came = self._tell(entry)
                if isinstance(entry, d.SchedulerEvent):
                    self._compare(came)

    def _take(self) -> d.Entry:
        entry, self._next = self._next, next(self._entries, None)
        assert entry is not None
        self.count += 1
        return entry

    @property
    def _at_gap(self) -> bool:
        """Whether the results of the last event may be missing: lost, or not written yet, as a log is written in
        batches.
        """
        return self._next is None or isinstance(self._next, d.Missing)

    # --- results ------------------------------------------------------------------------------------------------------

    def _compare(self, here: d.Came | None) -> None:
        """Compare with the next entry, if it is one of the scheduler's results."""
        logged = self._take() if isinstance(self._next, d.Came) else None
        if logged != here and not (logged is None and self._at_gap):
            assert logged is None or isinstance(logged, d.Came)
            self.differences.append(Difference(self.count - 1, logged, here))

    def _decide(self, name: str, fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
        """Ask the policy again, compare its choice with the log's, and take the log's."""
        chosen = self._policies[name](fleet, wanted)
        here = d.Decided(name, nameless(wanted), chosen)
        logged = self._take() if isinstance(self._next, d.Decided) else None
        assert logged is None or isinstance(logged, d.Decided)
        if logged is None and self._at_gap:  # the log's choice may be in it
            return chosen
        self.choices += 1
        if logged != here:
            self.differences.append(Difference(self.count - 1, logged, here))
        return chosen if logged is None else logged.chosen

    # --- events -------------------------------------------------------------------------------------------------------

    def _tell(self, entry: d.Entry) -> d.Came | None:
        """Apply an event, or record what is known beforehand; returns the results, if any."""
        match entry:
            case d.Made(instance, make):
                self._makes[instance] = make
            case d.Began(name, admission, foresees):
                self._begin(name, admission=admission, foresees=foresees)
            case d.Seated(number, wanted, promise):
                context = self._contexts.setdefault(number, SchedulingContext(wanted, promise))
                context.wanted, context.entered = wanted, (number, wanted)
            case d.Counted(number, tokens, each):
                context = self._context(number)
                context.wanted = replace(context.wanted, prompt_tokens=tokens, prefix_block_tokens=each)
            case _ if isinstance(entry, d.FleetEvent):
                self._view.handle(entry, 0.0)
            case _:
                assert isinstance(entry, d.SchedulerEvent)
                return self._schedule(entry)
        return None

    def _begin(self, name: str, *, admission: bool, foresees: bool) -> None:
        if name not in self._policies:
            raise ValueError(f"entry {self.count - 1}: there is no policy `{name}` here")
        self._scheduler = Scheduler(
            self._view, lambda fleet, wanted: self._decide(name, fleet, wanted), admission=admission, foresees=foresees
        )

    def _schedule(self, event: d.SchedulerEvent) -> d.Came | None:
        """An event of the scheduler, with the request itself instead of its number."""
        if self._scheduler is None:
            raise ValueError(
                f"entry {self.count - 1}: no scheduler has begun; a log is replayed from its router's start"
            )
        number: int | None = getattr(event, "context", None)
        if number is not None:
            event = replace(event, context=self._context(number))
        effects = self._scheduler.handle(event, 0.0)
        if number is not None and isinstance(event, d.Finished):
            del self._contexts[number]
        if not effects or isinstance(event, d.Picked):
            return None
        return d.Came(effects[0] if isinstance(effects[0], Chosen) else None, numbers(effects))

    def _context(self, number: int) -> SchedulingContext:
        found = self._contexts.get(number)
        if found is None:
            raise ValueError(f"entry {self.count - 1}: request {number} has not come to the scheduler yet, or is over")
        return found
