"""A cluster on virtual time: instances, agents, registry, router and load, wired together for one run.

The simulation adds only what lies between the product's machines: messages take `hop_us`, engines die and restart,
heartbeats are read. An imported object makes every decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from cluster.ids import InstanceId
from cluster.spec import POLICY
from engine.twin import events as ev
from loadgen.arrival import Arrival
from router.core.values import Promise
from router.fleet import events
from router.fleet.view import FleetView
from router.scheduler.decision_log import DecisionLog, fleet_of, scheduler_of
from router.scheduler.scoring.policies import FORESEEING, POLICIES, Policy
from sim.checks import Checks
from sim.energy import Energy
from sim.fleet import SimulatedMember, check_members, make_of_member
from sim.front import RequestBook, SimulatedRouter
from sim.instance import SimInstance
from sim.kernel import NS, Kernel
from sim.legs import SimulatedLegs
from sim.lives import Lives
from sim.peer_notes import PeerNotes
from sim.provisioning import Provisioning, Site
from sim.pulls import SimulatedPulls
from sim.result import Result
from sim.roughness import Rough
from sim.settings import SimSettings

_TICK: Final = ev.Tick()


class World:
    """One cluster, for one run. It has many attributes, as it holds each part of the simulation."""

    def __init__(
        self,
        members: Sequence[SimulatedMember],
        settings: SimSettings | None = None,
        *,
        policy: Policy = POLICIES[POLICY],
        model: str | None = None,
        view: FleetView | None = None,
        promises: Mapping[str, Promise] | None = None,
        log: DecisionLog | None = None,
        site: Site | None = None,
        others: Sequence[Policy] = (),
    ) -> None:
        """One cluster.

        Args:
            members: its instances.
            settings: None: the defaults.
            policy: makes the choices.
            model: the model that requests name; None: the first instance's.
            view: the router's view, if the caller wants to share it; None: one of its own.
            promises: the promises of SLO classes; with them the router admits (`router.scheduler.flow_control`).
            log: takes what choices depend on, as a live router's decision log does. A given `view` must be logged
                there, too.
            site: the instances that may be started during the run, and the budget; None: the fleet stays as it is.
            others: the policies of further routers. Requests are dealt to all routers in turns; each knows its own and
                what heartbeats say, and may use an equal share of the instances' credits.
        """
        check_members(everybody := [*members, *_one_more(site)])
        self.settings: Final = settings or SimSettings()
        self.kernel: Final = Kernel()
        self.instances: Final = [
            SimInstance(each, index, peers=self.settings.peers, early=self.settings.early)
            for index, each in enumerate(members)
        ]
        """All instances that ever existed."""
        self.by_name: Final = {each.name: each for each in self.instances}
        self.living: Final = dict.fromkeys(self.instances)  # their agents have not left
        self.hop_ns: Final = self.settings.hop_ns
        self.keeps_contents: Final = all(map(_keeps_contents, members))
        self.counts: Final[Counter[str]] = Counter()
        self.view: Final = view or FleetView(lambda instance: make_of_member(self.by_name[instance.id].member))
        self.book: Final = RequestBook()
        caches, name = any(map(_caches, everybody)), model or members[0].model
        routers = max(self.settings.routers, 1 + len(others))
        alone = partial(self._router, model=name, caches=caches, promises=promises or {}, routers=routers)
        self.fronts: Final = [alone(self.view, policy, log), *self._peers(alone, others)]
        """The routers."""
        self.notes: Final = PeerNotes(self.kernel, self.settings, self.fronts)
        self.fleet: Final = self.fronts[0].fleet
        self.rough: Final = Rough(self, self.settings.rough)
        self.pulls: Final = SimulatedPulls(self)
        self.legs: Final = SimulatedLegs(
            self.kernel, self.settings, self.rough, self.pulls, self.counts, self.tell, reads_text=self.keeps_contents
        )
        self.lives: Final = Lives(self)
        self.provisioning: Final = Provisioning(self, site or Site())
        self.energy: Final = Energy()
        self.on_effect: Callable[[SimInstance, ev.Effect], None] | None = None
        """Called with every effect of every twin."""
        self.on_progress: Callable[[World], None] | None = None
        """Called at each of the router's readings of the registry, every `SimSettings.read_every_s`."""
        self.touched: Final[dict[SimInstance, None]] = {}
        """Instances with an event since the last check."""
        self._arrivals: Any = iter(())
        self._arriving = True
        self._carry: Final = self._carriers()
        for each in self.instances:
            self.provisioning.already(each)
            self.lives.start(each)

    @property
    def front(self) -> SimulatedRouter:
        """The first router."""
        return self.fronts[0]

    def _router(
        self,
        view: FleetView,
        policy: Policy,
        log: DecisionLog | None = None,
        *,
        model: str,
        caches: bool,
        promises: Mapping[str, Promise],
        routers: int,
        number: int = 0,
    ) -> SimulatedRouter:
        fleet = fleet_of(log, view)
        if caches and (promises or policy in FORESEEING):
            fleet.handle(events.Indexed(), 0.0)
        scheduler, scheduling = scheduler_of(log, view, policy, admission=bool(promises), foresees=policy in FORESEEING)
        made = SimulatedRouter(self, fleet, scheduler, scheduling, model)
        made.promises = promises
        view.routers, view.router_number = routers, number
        return made

    def _peers(self, alone: Callable[..., SimulatedRouter], policies: Sequence[Policy]) -> list[SimulatedRouter]:
        return [alone(FleetView(self.view.makes), each, number=at) for at, each in enumerate(policies, 1)]

    def _carriers(self) -> dict[type, Callable[[SimInstance, Any], None]]:
        """The method that carries out each kind of a twin's effects."""
        return {
            ev.StepRun: self._run,
            ev.Cut: self._cut,
            ev.RequestFinished: self.legs.finished,
            ev.PullBlocks: self.pulls.order,
            ev.GiveBack: lambda at, effect: self.pulls.give_back(at, effect.source),
            ev.RequestRefused: self.legs.refused,
            ev.RequestLost: self.legs.lost,
            ev.Preempted: self.legs.preempted,
            ev.EngineReady: self.lives.ready,
            ev.NotUsed: self.pulls.not_used,
            ev.LoadIs: _load_is,
            ev.Contents: _contents,
            ev.SlotSays: _slot_says,
        }

    def add(self, member: SimulatedMember) -> None:
        """Add an instance, which starts now."""
        at = SimInstance(member, len(self.instances), peers=self.settings.peers, early=self.settings.early)
        self.instances.append(at)
        self.by_name[at.name] = at
        self.living[at] = None
        self.lives.join(at)

    # --- one run ------------------------------------------------------------------------------------------------------

    def run(self, arrivals: Iterable[Arrival]) -> Result:
        """Run until every request and every hold is over. With `SimSettings.checks` raises `sim.checks.LawBroken`."""
        self._arrivals = iter(arrivals)
        self._arrive(None)
        self.lives.begin()
        self.notes.begin(lambda: self.busy)
        checks = Checks(self) if self.settings.checks else None
        self.kernel.run(None if checks is None else checks.after)
        if checks is not None:
            checks.at_end()
        return self.result()

    def result(self) -> Result:
        """The result so far."""
        counts = {
            "pulls": self.pulls.ended,
            "pulls_failed": self.pulls.failed,
            "bytes_moved": self.pulls.bytes_moved,
            **self.counts,
        }
        return Result(
            columns=self.book.rows.columns(),
            members=tuple(each.name for each in self.instances),
            classes=tuple(name or "" for name in self.book.classes),
            details=self.book.details,
            events=self.kernel.events,
            end_ns=self.book.ended_ns,
            counts=counts,
            gpus=self.provisioning.peak_gpus,
            gpu_seconds=self.provisioning.gpu_seconds(self.book.ended_ns),
            energy_j=sum(
                self.energy.joules(each, self.provisioning.there_s(each, self.book.ended_ns)) for each in self.instances
            ),
            busy_s={each.name: self.energy.busy_s(each) for each in self.instances},
            fleet_events=tuple(self.provisioning.events),
        )

    @property
    def busy(self) -> bool:
        """Whether requests are left to serve, or changes of the fleet are left to finish."""
        return self._arriving or bool(self.book.open) or self.provisioning.busy

    def _arrive(self, arrival: Arrival | None) -> None:
        if arrival is not None:
            self.fronts[self.book.rows.count % len(self.fronts)].arrive(arrival)
        following = next(self._arrivals, None)
        if following is None:
            self._arriving = False
        else:
            self.kernel.at(max(self.kernel.now_ns, round(following.at_s * NS)), self._arrive, following)

    # --- twins --------------------------------------------------------------------------------------------------------

    def tell(self, at: SimInstance, event: ev.Event) -> None:
        """Send an event to an instance's engine."""
        effects = at.handle(event, self.kernel.now_ns)
        carry = self._carry
        for effect in effects:
            done = carry.get(type(effect))
            if done is not None:
                done(at, effect)
        if self.on_effect is not None:
            for effect in effects:
                self.on_effect(at, effect)
        self.arm(at)
        self.touched[at] = None

    def arm(self, at: SimInstance) -> None:
        """Set the timer that wakes its twin."""
        due_ns = at.wakeup_ns()
        if due_ns is not None and due_ns != at.armed_ns:
            at.armed_ns = due_ns
            self.kernel.at(due_ns, self._wake, at)

    def kv_usage(self, at: SimInstance) -> float:
        """The share of its blocks in use now."""
        self.tell(at, ev.ReadLoad())
        return at.load_said.kv_usage

    def _wake(self, at: SimInstance) -> None:
        if at.armed_ns == self.kernel.now_ns:
            at.armed_ns = -1
            self.tell(at, _TICK)

    def _run(self, at: SimInstance, run: ev.StepRun) -> None:
        self.energy.ran(at, run)
        self.legs.ran(at, run)

    def _cut(self, at: SimInstance, cut: ev.Cut) -> None:
        at.run_steps = cut.steps
        self.energy.cut(at, cut)


def _one_more(site: Site | None) -> list[SimulatedMember]:
    """For each pool one more instance, with an unused name, to check that new instances fit the present ones."""
    pools = {} if site is None else site.pools
    return [replace(each, name=InstanceId(f"{pool}+")) for pool, each in pools.items()]


def _keeps_contents(member: SimulatedMember) -> bool:
    return bool(getattr(member.config, "contents", True))


def _caches(member: SimulatedMember) -> bool:
    return bool(getattr(member.config, "prefix_caching", False))


def _load_is(at: SimInstance, effect: ev.LoadIs) -> None:
    at.load_said = effect.load


def _slot_says(at: SimInstance, effect: ev.SlotSays) -> None:
    at.slot_said = effect.said


def _contents(at: SimInstance, effect: ev.Contents) -> None:
    at.contents_said = effect.contents
