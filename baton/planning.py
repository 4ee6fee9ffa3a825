"""`baton plan`: from a cluster file and a load to the cheapest fleet that keeps the targets.

Joins pure parts: candidates and bounds (`goodput`), the search (`goodput.search`), simulations (`sim.evaluate`). Trials
run in parallel (`baton.fanout`: processes, or a Ray cluster), and the search goes on with their results. Ctrl-C ends
the search with the best fleet so far.

A long load is searched on stretches of it first; the best fleets there are then tried on the whole load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from baton import fanout
from cluster.errors import UsageError
from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.spec import Model, SloClass, Spec, flags
from costs import shipped
from costs.cost import Costs
from costs.hardware import Gpu
from costs.model import ModelShape
from costs.shape import Spans
from costs.step import decoding, prompt
from engine.twin.config import TwinConfig
from goodput.bounds import EngineBounds
from goodput.candidates import POWER_CAPS, Arrangement, InstanceKind, arrangements
from goodput.demand import ClassPromise, Demand, demand_of, sampled
from goodput.floors import FleetFloor, Floors
from goodput.search import EQUALS, Counts, SearchState, Space, Trial, TrialVerdict, losses, search
from loadgen.arrival import Arrival
from loadgen.report import Targets
from router.core.slo import promises_of
from router.core.values import NO_PROMISE
from sim.engine_args import engine_of, read_words
from sim.evaluate import Evaluation, Goal, Tried, evaluate
from sim.evaluate import tried as simulated
from sim.fleet import SimulatedMember, member

OBJECTIVES: Mapping[str, str] = {
    "cost": "price an hour of all GPUs",
    "gpus": "number of GPUs",
    "energy": "joules an output token, idle GPUs included, as simulated",
    "power": "watts that all GPUs may draw at most",
}
"""The quantities that a plan can minimise."""

EFFORT = 45_000
"""Most requests that are simulated for a plan, by default: with neighbours and next steps some 85,000, which take about
190 s of CPU (110,000 took 252 s on a busy machine), and so under two minutes on two cores."""

TRIAL_REQUESTS = 150
"""Cost of a trial besides its requests, in requests: making the fleet, choosing the next one."""

SAMPLE_REQUESTS = 3_000
SAMPLE_PARTS = 8
SAMPLE_GAP_S = 30.0
"""Loads of more than twice so many requests are searched on a sample of that size first: so many stretches of the load,
with a gap of so many seconds between them."""

WHOLE_SHARE = 1 / 5
WHOLE_PARTS = 20
"""A load of more than this share of the effort is planned on this many stretches of it, which together have that size:
a run of the whole load would take longer than the user's effort allows."""

INSTANCES_MAX = 64
"""Most instances of one kind."""

_ANY = 10**6
"""Stands for any number of instances in a bound: more than a load can need."""

_TOO_MANY = f"no more than {INSTANCES_MAX} instances of a kind are tried"

SEARCHED = frozenset({flags.BUDGET, "tensor-parallel-size"})
"""Flags of vLLM that a plan chooses itself: those of the file are not taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of a plan."""

    model: Model
    shape: ModelShape
    gpus: tuple[tuple[Gpu, int | None], ...]
    """Types with the file's prices, and how many there are of each; None: any number."""
    arrivals: tuple[Arrival, ...]
    goals: Mapping[str, Goal]
    usual: str
    """Class of requests that name none."""
    objective: str = "cost"
    survive: int = 0
    """Number of instances whose loss, whichever they are, the targets must survive."""
    power_w: float | None = None
    """Most watts that all GPUs together may draw, by their caps; None: no bound."""
    effort: int = EFFORT
    """Requests that are simulated at most; each trial counts as `TRIAL_REQUESTS` more."""

    def demand(self) -> Demand:
        """The load in the form of the bounds."""
        promises = {
            name: ClassPromise(
                ttft_ms=goal.targets.ttft_ms,
                tt2t_ms=goal.targets.tt2t_ms,
                tpot_ms=goal.targets.tpot_ms,
                e2e_ms=goal.targets.e2e_ms,
                attainment=goal.attainment,
            )
            for name, goal in self.goals.items()
        }
        return demand_of(self.arrivals, promises, self.usual)

    @property
    def caps(self) -> tuple[float, ...]:
        """Power caps to try, as shares of a GPU's power: only 1 unless watts count, since a capped GPU costs the same
        and does less.
        """
        return POWER_CAPS if self.objective in {"energy", "power"} or self.power_w is not None else (1.0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResults:
    """One fleet, and the results of its whole run."""

    arrangement: Arrangement
    counts: Counts
    seen: Evaluation

    @property
    def gpus(self) -> int:
        """The GPUs of all instances."""
        return sum(kind.gpus * count for kind, count in zip(self.arrangement, self.counts, strict=True))

    @property
    def price_per_hour(self) -> float:
        """The price of all GPUs, per hour."""
        return price_per_hour(self.arrangement, self.counts)

    @property
    def power_w(self) -> float:
        """The most watts that all GPUs may draw, by their caps."""
        return sum(
            kind.power_cap_w * kind.gpus * count for kind, count in zip(self.arrangement, self.counts, strict=True)
        )

    def __str__(self) -> str:
        """`4 × prefill H100-SXM tp1 + 2 × decode H200 tp2`."""
        return counted(self.arrangement, self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One fleet that was tried."""

    arrangement: Arrangement
    counts: Counts
    holds: bool
    attained: float
    """`Evaluation.attained`; for a run that ended early, the most that the broken class could attain."""
    whole: bool
    """Whether the run went to its end."""
    ttft_p95_ms: float | None = None


@dataclass(slots=True, kw_only=True)
class SearchResult:
    """The result of a search. It has many fields: the answer, and all that reports say of how it was found."""

    best: FleetResults | None
    others: list[FleetResults] = field(default_factory=list)
    """The best of other arrangements of roles that were seen to hold, cheapest first."""
    found: SearchState
    considered: int
    """Arrangements in which the model fits on every kind."""
    ruled_out: int
    """Arrangements that bounds ruled out."""
    because: str = ""
    """Without an answer: the reason."""
    stopped: bool = False
    """Whether the user stopped the search: a cheaper fleet may exist."""
    points: list[Point] = field(default_factory=list)
    """Fleets that were tried on the whole load."""
    sampled: int = 0
    """Requests of the sample that was searched first; 0: no sample."""
    left_out: int = 0
    """Requests of the load that were never simulated, because the effort is too small for all of them."""
    scarcest: str = ""
    """The bound that the best fleet is nearest to, and how near."""
    spent: int = 0
    """The effort that was spent: requests that were simulated, and `TRIAL_REQUESTS` for each trial."""
    trials: int = 0
    presumed: list[str] = field(default_factory=list)
    """Assumptions, and how each was checked."""
    last: Searched | None = None
    """The search of the whole load, for what the next steps would take."""

    @property
    def simulated(self) -> int:
        """Requests that were simulated."""
        return self.spent - TRIAL_REQUESTS * self.trials


class Planner:
    """One task: its arrangements, their bounds, and trials of fleets."""

    def __init__(self, task: Task, only: Sequence[Arrangement] | None = None) -> None:
        """Prepare one task.

        Args:
            task: the task.
            only: arrangements to look at; None: all.
        """
        self.task = task
        self._members: dict[InstanceKind, SimulatedMember | None] = {}
        self._engines: dict[InstanceKind, EngineBounds] = {}
        self.considered = 0
        self.why: dict[str, float] = {}
        """By reason why an arrangement cannot keep the promises: how far that is from possible (`why_not`)."""
        self.arrangements: dict[str, Arrangement] = {}
        self.spaces: list[Space] = []
        demand = task.demand()
        self._floors = Floors(demand)
        self._span_s = max(demand.span_s, 1e-3)
        self._tokens = float(demand.outputs.sum())
        for each in arrangements(task.shape, task.gpus, task.caps) if only is None else only:
            if all(self.member(kind) is not None for kind in each):
                self.considered += 1
                self._consider(each)
        self.weaker = _weaker({str(kind): made for kind, made in self._members.items() if made is not None})

    def __getstate__(self) -> dict[str, object]:
        """What is pickled for other machines: they simulate, and need no bounds."""
        kept = ("task", "_members", "arrangements")
        return {name: value for name, value in self.__dict__.items() if name in kept}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)

    def member(self, kind: InstanceKind) -> SimulatedMember | None:
        """One instance of a kind; None if it cannot exist: the model does not fit beside its flags."""
        if kind not in self._members:
            self._members[kind] = self._made(kind)
        return self._members[kind]

    def _made(self, kind: InstanceKind) -> SimulatedMember | None:
        try:
            costs, config = engine(self.task, kind)
        except UsageError:
            return None
        costs = costs if kind.power_cap >= 1 else costs.capped(kind.power_cap)
        return member(str(kind), kind.role, self.task.model.api_name, costs, config)

    def _consider(self, arrangement: Arrangement) -> None:
        roles, engines = [kind.role for kind in arrangement], [self._engine(kind) for kind in arrangement]
        cannot = self._floors.impossible(roles, engines)
        if cannot is not None:
            self.why[cannot.because] = cannot.short_by
            return
        space = self._space(arrangement, self._floors.of(roles, engines))
        if space.empty:
            self._note_too_few(space, arrangement)
            return
        self.arrangements[space.name] = arrangement
        self.spaces.append(space)

    def _note_too_few(self, space: Space, arrangement: Arrangement) -> None:
        """Note why the fleet needs more than there is: GPUs, or watts."""
        scale = space.scale(space.most)
        if scale < 1:
            there = [self._there(kind) for kind in arrangement]
            known = [(kind, few) for kind, few in zip(arrangement, there, strict=True) if few is not None]
            everything = space.scale(tuple(_ANY if few is None else few for few in there))
            if known and everything < 1:
                kinds, counts = zip(*known, strict=True)
                scale, told = everything, f"not enough GPUs: {counted(kinds, counts)} is the most there is, and "
            else:
                told = f"{_TOO_MANY}: {counted(arrangement, space.most)} is the most that is tried, and "
            self.why[told + f"{1 / max(scale, 1e-9):.2g} times that would be needed at least"] = 0.0
            return
        watts = sum(kind.power_cap_w * kind.gpus * few for kind, few in zip(arrangement, space.least, strict=True))
        power_w = self.task.power_w
        if power_w is not None and watts > power_w:
            told = f"not enough power: {counted(arrangement, space.least)} alone may draw {watts:g} W, and all GPUs "
            self.why[told + f"together may draw {power_w:g} W (--power-w)"] = 1 - power_w / watts
            return
        self.why[f"not enough GPUs for {counted(arrangement, space.least)}, the least of its kind"] = 0.0

    def _space(self, arrangement: Arrangement, floors: Sequence[FleetFloor]) -> Space:
        alone = 1 + (self.task.survive if len(arrangement) == 1 else 0)
        energy = self.task.objective == "energy"
        roles, engines = [kind.role for kind in arrangement], [self._engine(kind) for kind in arrangement]
        return Space(
            name=str(len(self.spaces)),
            prices=tuple(self._price(kind) for kind in arrangement),
            least=(alone,) * len(arrangement),
            most=tuple(self._most(kind) for kind in arrangement),
            limits=self._limits(arrangement),
            floors=tuple((each.weights, each.least) for each in floors),
            base=self._floors.dynamic_j(roles, engines) / self._tokens if energy else 0.0,
            survive=self.task.survive,
            kinds=tuple(map(str, arrangement)),
            family=" ".join(f"{kind.role.value}{kind.batched_tokens or ''}{_cap(kind)}" for kind in arrangement),
            make=" ".join(f"{kind.role.value} {kind.gpu.name} {kind.tp}" for kind in arrangement),
            gpus=tuple(kind.gpus for kind in arrangement),
        )

    def _engine(self, kind: InstanceKind) -> EngineBounds:
        if kind not in self._engines:
            made = self.member(kind)
            assert made is not None
            assert isinstance(made.costs, Costs)
            self._engines[kind] = EngineBounds.of(made.costs, made.config)
        return self._engines[kind]

    def _price(self, kind: InstanceKind) -> float:
        idle_j = kind.gpu.idle_w * self._span_s / self._tokens
        each = {"cost": kind.gpu.usd_per_hour, "gpus": 1.0, "power": kind.power_cap_w, "energy": idle_j}
        return max(each[self.task.objective], 1e-6) * kind.gpus

    def _gpus_of(self, kind: InstanceKind) -> int | None:
        """The user's GPUs of this kind's type; None: any number."""
        return {gpu.name: count for gpu, count in self.task.gpus}[kind.gpu.name]

    def _available(self, kind: InstanceKind) -> int:
        there = self._gpus_of(kind)
        return INSTANCES_MAX * kind.gpus if there is None else there

    def _most(self, kind: InstanceKind) -> int:
        return min(INSTANCES_MAX, self._available(kind) // kind.gpus)

    def _there(self, kind: InstanceKind) -> int | None:
        """How many instances of this kind the user's GPUs allow; None: any number."""
        few = self._gpus_of(kind)
        return None if few is None else few // kind.gpus

    def _cut(self, kind: InstanceKind) -> bool:
        """Whether there are GPUs for more instances of this kind than are tried."""
        few = self._there(kind)
        return few is None or few > INSTANCES_MAX

    def cut_below(self, cost: float) -> bool:
        """Whether a fleet that costs less than this may have more instances of a kind than are tried."""
        made = [kind for kind, there in self._members.items() if there is not None]
        return any(self._cut(kind) and (INSTANCES_MAX + 1) * self._price(kind) < cost for kind in made)

    def _limits(self, arrangement: Arrangement) -> tuple[tuple[tuple[float, ...], float], ...]:
        """Kinds of one GPU type share its GPUs; all kinds share the watts."""
        names = [kind.gpu.name for kind in arrangement]
        shared = [
            (
                tuple(float(kind.gpus) if kind.gpu.name == name else 0.0 for kind in arrangement),
                float(max(self._available(kind) for kind in arrangement if kind.gpu.name == name)),
            )
            for name in dict.fromkeys(names)
            if names.count(name) > 1
        ]
        watts = tuple(kind.power_cap_w * kind.gpus for kind in arrangement)
        return (*shared, *([(watts, self.task.power_w)] if self.task.power_w is not None else []))

    def fleet(self, arrangement: Arrangement, counts: Counts) -> list[SimulatedMember]:
        """All instances of a fleet: of kind i of the arrangement `counts[i]`."""
        found = []
        for at, (kind, count) in enumerate(zip(arrangement, counts, strict=True)):
            made = self.member(kind)
            assert made is not None
            found += [replace(made, name=InstanceId(f"{kind.role.value}-{at}-{n:03d}")) for n in range(count)]
        return found

    def tried(self, arrangement: Arrangement, counts: Counts) -> Tried:
        """Simulate a fleet, also without each set of instances whose loss it must survive: whether it keeps the
        targets, and the requests that this took. The measurements are those of the whole fleet.
        """
        task, spent = self.task, 0
        for lost in losses(counts, task.survive):
            left = tuple(count - gone for count, gone in zip(counts, lost, strict=True))
            fleet = self.fleet(arrangement, left)
            if not (any(each.role.prefills for each in fleet) and any(each.role.decodes for each in fleet)):
                return Tried(holds=False, spent=spent, attained_at_most=0.0)
            seen = simulated(fleet, task.arrivals, task.goals, task.usual)
            spent += seen.spent
            if not seen.holds or not task.survive:
                return replace(seen, spent=spent)
        seen = simulated(self.fleet(arrangement, counts), task.arrivals, task.goals, task.usual)
        return replace(seen, spent=spent + seen.spent)

    def holds(self, arrangement: Arrangement, counts: Counts) -> bool:
        """Whether a fleet keeps the targets (`tried`)."""
        return self.tried(arrangement, counts).holds

    def answer(self, arrangement: Arrangement, counts: Counts) -> FleetResults:
        """The results of a whole run of one fleet."""
        task = self.task
        seen = evaluate(self.fleet(arrangement, counts), task.arrivals, task.goals, task.usual)
        return FleetResults(arrangement=arrangement, counts=counts, seen=seen)

    def verdict(self, seen: Tried) -> TrialVerdict:
        """What a trial says to the search. For the objective energy with the measured joules an output token."""
        cost = None
        if self.task.objective == "energy" and seen.seen is not None:
            cost = seen.seen.energy_j / max(1, seen.seen.output_tokens)
        return TrialVerdict(
            holds=seen.holds, cost=cost, attained=seen.attained_at_most, spent=seen.spent + TRIAL_REQUESTS
        )

    def scarcest(self, arrangement: Arrangement, counts: Counts) -> str:
        """The bound that a fleet is nearest to, and how near, for people; empty if there are no bounds."""
        roles, engines = [kind.role for kind in arrangement], [self._engine(kind) for kind in arrangement]
        floors = self._floors.of(roles, engines)
        if not floors:
            return ""

        def share(floor: FleetFloor) -> float:
            return sum(weight * count for weight, count in zip(floor.weights, counts, strict=True)) / floor.least

        nearest = min(floors, key=share)
        return f"{nearest.because}; the fleet has {share(nearest):.2f} times what that takes at least"

    def why_not(self, found: SearchState) -> str:
        """Why no fleet holds: what comes nearest to being possible."""
        if self.spaces and not found.proven:
            told = f"none of the {found.trials:,} fleets that were tried keeps the promises, and not all were tried"
            return f"{told}: give more GPUs, or look further with --effort"
        if self.spaces:
            tried = f" ({_TOO_MANY})" if self.cut_below(math.inf) else ""
            return f"no fleet within the GPUs that there are keeps the promises{tried}"
        if not self.why:
            there = ", ".join(f"{'any number of' if few is None else few} {gpu.name}" for gpu, few in self.task.gpus)
            return f"the model fits on none of these GPUs: {there}"
        return min(self.why, key=lambda because: self.why[because])


def _cap(kind: InstanceKind) -> str:
    return f"@{kind.power_cap:g}" if kind.power_cap < 1 else ""


def price_per_hour(arrangement: Arrangement, counts: Counts) -> float:
    """The price of all GPUs of a fleet."""
    return sum(kind.gpu.usd_per_hour * kind.gpus * count for kind, count in zip(arrangement, counts, strict=True))


def counted(arrangement: Arrangement, counts: Counts) -> str:
    """A fleet, for people: `4 × prefill H100-SXM tp1 + 2 × decode H200 tp2`."""
    return " + ".join(f"{count} × {kind}" for kind, count in zip(arrangement, counts, strict=True))


def args_of(model: Model, role: Role) -> dict[str, Any]:
    """The flags that a planned pool of a role has: its own in the file, else what all pools of a model must share."""
    pools, every = model.pools.named(), model.pools.every().values()
    return dict(pools[role].engine_args if role in pools else flags.shared(pool.engine_args for _, pool in every))


def not_simulated(model: Model) -> list[str]:
    """Flags of planned pools that change nothing in a simulation: no figure of the plan has their effect."""
    found = (read_words(flags.words(args_of(model, role))).unread for role in Role)
    return list(dict.fromkeys(name for names in found for name in names))


def engine(task: Task, kind: InstanceKind) -> tuple[Costs, TwinConfig]:
    """The costs and settings of one instance of a kind, without its power cap.

    Raises:
        UsageError: it cannot exist: the model does not fit beside its flags.
    """
    words = list(_words(task.model, kind))
    if kind.batched_tokens is not None:
        words.append(f"--{flags.BUDGET}={kind.batched_tokens}")
    shape = Spans(tp=kind.tp)
    return engine_of(kind.role, task.shape, kind.gpu, shape, read_words(words), profiles=shipped.profiles())


def _words(model: Model, kind: InstanceKind) -> Sequence[str]:
    """Flags that the file's pool of this role gives its engines, less those that are searched."""
    given = args_of(model, kind.role)
    given = {name: value for name, value in given.items() if flags.normal(name) not in SEARCHED}
    return flags.words(given)


_STEPS = (
    *(prompt(tokens) for tokens in (1, 128, 512, 1024, 2048, 8192)),
    *(decoding(batch, batch * context) for batch in (1, 8, 64, 256) for context in (100, 2000, 16_000)),
    *(prompt(tokens) + decoding(batch, batch * 1000) for tokens in (128, 1024) for batch in (1, 32, 256)),
)
"""Steps at which two kinds are compared."""


def _weaker(members: Mapping[str, SimulatedMember]) -> dict[str, frozenset[str]]:
    """By kind: kinds of the same role and token budget that are better in none of steps, memory, seats and network."""
    traits: dict[str, tuple[object, tuple[float, ...]]] = {}
    for name, each in members.items():
        costs = each.costs
        assert isinstance(costs, Costs)
        worth = (each.config.num_blocks * each.config.block_size, each.config.max_num_seqs, each.nic_gb_s)
        less = (each.prompt_front_ns, each.latency_ns)
        numbers = (*worth, *(-float(each) for each in less), *(-costs.step_ms(step) for step in _STEPS))
        traits[name] = (each.role, each.config.max_num_batched_tokens), numbers
    return {
        name: frozenset(
            other
            for other, (alike, theirs) in traits.items()
            if other != name and alike == same and all(few <= many for few, many in zip(theirs, ours, strict=True))
        )
        for name, (same, ours) in traits.items()
    }


# --- searching --------------------------------------------------------------------------------------------------------


def tried(planner: Planner, name: str, counts: Counts) -> Tried:
    """One trial of a fleet of the arrangement `name`. Runs in another process."""
    return planner.tried(planner.arrangements[name], counts)


Tell = Callable[[SearchState, Planner], None]
"""Progress, after each trial."""


class SimulationPlace(TypedDict):
    """Where simulations run: as `baton.fanout.opened` takes it."""

    on: str | None
    processes: int | None


@dataclass(slots=True)
class Searched:
    """One search of one planner, and what it has found."""

    planner: Planner
    found: SearchState = field(default_factory=SearchState)
    seen: dict[tuple[str, Counts], Tried] = field(default_factory=dict)
    stopped: bool = False
    failed: Sequence[Trial] = ()
    """Fleets that are known to fail before the search begins."""
    known: list[Trial] = field(default_factory=list)
    """Fleets that another search has seen (`take`)."""
    equals: int = EQUALS
    """As `goodput.search.search` takes it."""

    def take(self, other: Searched) -> None:
        """Take over the trials of another search with the same load and targets; its objective may differ."""
        mine = {space.kinds: space for space in self.planner.spaces}
        theirs = {space.name: space.kinds for space in other.planner.spaces}
        for (name, counts), came in other.seen.items():
            space = mine.get(theirs[name])
            if space is not None and (space.name, counts) not in self.seen:
                self.seen[space.name, counts] = came
                self.known.append(Trial(space, counts))

    def run(self, progress: Tell, *, effort: float, on: str | None, processes: int | None) -> None:
        """Run to the end, or until Ctrl-C. If it was stopped before, use known results only (`effort` 0)."""
        planner = self.planner
        effort = 0.0 if self.stopped else effort
        going = search(
            planner.spaces,
            self.found,
            effort=effort,
            weaker=planner.weaker,
            failed=self.failed,
            known=[(each, planner.verdict(self.seen[each.space.name, each.counts])) for each in self.known],
            equals=self.equals,
        )
        try:
            with fanout.opened(planner, on=on, processes=processes) as trials:
                fanout.in_order(
                    trials,
                    self._judged(going),
                    lambda trial: trials.submit(tried, trial.space.name, trial.counts),
                    lambda: progress(self.found, planner),
                )
        except KeyboardInterrupt:
            self.stopped = True

    def _judged(self, going: fanout.Search[Trial, TrialVerdict]) -> fanout.Search[Trial, Tried]:
        """`going` for `fanout.in_order`: keeps each trial in `seen`, and sends `going` its verdict."""
        try:
            todo = next(going)
            while True:
                came = yield todo
                self.seen[todo[0].space.name, todo[0].counts] = came
                todo = going.send(self.planner.verdict(came))
        except StopIteration:
            return

    def answer(self, trial: Trial) -> FleetResults:
        """The measurements of a fleet that held."""
        arrangement = self.planner.arrangements[trial.space.name]
        seen = self.seen[trial.space.name, trial.counts].seen
        assert seen is not None, "a fleet that holds was seen to the end"
        return FleetResults(arrangement=arrangement, counts=trial.counts, seen=seen)

    def points(self) -> list[Point]:
        """Every fleet that was tried."""
        return [
            Point(
                arrangement=self.planner.arrangements[name],
                counts=counts,
                holds=each.holds,
                attained=each.attained_at_most,
                whole=each.seen is not None,
                ttft_p95_ms=None if each.seen is None else each.seen.ttft_p95_ms,
            )
            for (name, counts), each in self.seen.items()
        ]


def plan(task: Task, progress: Tell, processes: int | None = None, *, on: str | None = None) -> SearchResult:
    """Search for the best fleet of a task. Ctrl-C ends it with the best so far.

    Args:
        task: the task.
        progress: called after each trial.
        processes: None: one a core.
        on: where simulations run; None: on this machine, else as `baton.fanout.opened` takes it.
    """
    where: SimulationPlace = {"on": on, "processes": processes}
    whole, task = task, bounded(task)
    first = None
    if len(task.arrivals) > 2 * SAMPLE_REQUESTS:
        few = sampled(task.arrivals, SAMPLE_REQUESTS, SAMPLE_PARTS, SAMPLE_GAP_S)
        first = _widest(replace(task, arrivals=tuple(few), effort=task.effort // 2), progress, where)
        first.run(progress, effort=task.effort / 2, **where)
    last = _widest(task, progress, where) if first is None else Searched(Planner(task, _promising(first)))
    if first is not None and not last.planner.spaces:
        last = Searched(Planner(task))
    if first is not None:
        last.found.scales.update(first.found.scales)
    if first is None or not first.stopped:
        left = task.effort - (0 if first is None else first.found.spent)
        last.run(progress, effort=max(left, task.effort / 3), **where)
        if first is not None and last.found.best is None and not last.stopped:
            last = _wider(last, task)
            last.run(progress, effort=last.found.spent + task.effort / 3, **where)
    return replace(_outcome(task, first, last), left_out=len(whole.arrivals) - len(task.arrivals))


OTHERS = ("power", "cost")
OTHERS_SHARE = 0.2
"""A plan for energy begins with searches for these objectives, each with this share of the effort: bounds of energy are
loose, and fleets that draw few watts mostly need few joules."""


def _widest(task: Task, progress: Tell, where: SimulationPlace) -> Searched:
    """A search of all arrangements, yet to be run."""
    searched = Searched(Planner(task))
    for objective in OTHERS if task.objective == "energy" else ():
        other = Searched(Planner(replace(task, objective=objective)), equals=0)
        other.run(progress, effort=task.effort * OTHERS_SHARE, **where)
        searched.take(other)
        searched.stopped = other.stopped
        if other.stopped:
            break
    return searched


def _wider(narrow: Searched, task: Task) -> Searched:
    """A search of all arrangements, for a whole load that no arrangement from the sample holds."""
    wide = Searched(Planner(task), failed=[each for each in narrow.found.failed if each.space.kinds])
    wide.found.scales.update(narrow.found.scales)
    wide.found.trials, wide.found.spent = narrow.found.trials, narrow.found.spent
    return wide


def bounded(task: Task) -> Task:
    """The task; with stretches of its load, if the effort is too small to simulate all of it a few times."""
    most = max(2 * SAMPLE_REQUESTS, round(task.effort * WHOLE_SHARE))
    if len(task.arrivals) <= most:
        return task
    gap_s = (task.arrivals[-1].at_s - task.arrivals[0].at_s) / len(task.arrivals)
    return replace(task, arrivals=tuple(sampled(task.arrivals, most, WHOLE_PARTS, gap_s)))


PROMISING = 1.15
PROMISING_MAX = 24
"""Of the arrangements that hold on the sample, those with a fleet that costs at most `PROMISING` times the best are
tried on the whole load: `PROMISING_MAX` at most, cheapest first."""


def _promising(first: Searched) -> list[Arrangement] | None:
    """Arrangements to look at on the whole load, cheapest first; None: the sample shows nothing, so all."""
    found, planner = first.found, first.planner
    held = sorted(found.held, key=lambda trial: trial.price)
    good = [trial for trial in held if trial.price <= found.cost * PROMISING or trial is found.best]
    names = dict.fromkeys(trial.space.name for trial in ([found.best] if found.best is not None else []) + good)
    return [planner.arrangements[name] for name in list(names)[:PROMISING_MAX]] or None


def _outcome(task: Task, first: Searched | None, last: Searched) -> SearchResult:
    found, planner = last.found, last.planner
    if first is not None and not first.found.proven:
        found.proven = False
    widest, stopped = planner if first is None else first.planner, last.stopped or (first is not None and first.stopped)
    found.proven = found.proven and not stopped
    best = None if found.best is None else last.answer(found.best)
    return SearchResult(
        best=best,
        others=[last.answer(each) for each in _others(planner, found)],
        found=found,
        considered=widest.considered,
        ruled_out=widest.considered - len(widest.spaces),
        because="" if best is not None else planner.why_not(found),
        stopped=stopped,
        points=last.points(),
        sampled=0 if first is None else len(first.planner.task.arrivals),
        scarcest="" if best is None else planner.scarcest(best.arrangement, best.counts),
        spent=found.spent + (0 if first is None else first.found.spent),
        trials=found.trials + (0 if first is None else first.found.trials),
        presumed=_presumed(task, found, planner, sampled=first is not None, stopped=stopped),
        last=last,
    )


def _presumed(task: Task, found: SearchState, planner: Planner, *, sampled: bool, stopped: bool) -> list[str]:
    """The assumptions of the answer besides the simulations."""
    told = ["more instances never hold less, and slower ones never more: "]
    if stopped:
        told[0] += "not all neighbours of the answer were simulated"
    else:
        told[0] += "neighbours of the answer were simulated, and "
        told[0] += "none says otherwise" if not found.contradicted else "some do: " + "; ".join(found.contradicted)
    if sampled:
        told.append("what is dear on stretches of the load is dear on the whole: only the best of a sample were tried")
    if task.objective == "energy":
        told.append("a larger fleet of the same kinds draws no less")
    if found.best is not None and planner.cut_below(found.cost):
        told.append(f"nothing cheaper has more: {_TOO_MANY}")
    return told


OTHERS_SHOWN = 3
"""Most other arrangements of roles that are shown beside the best."""


def _others(planner: Planner, found: SearchState) -> list[Trial]:
    """Of each set of roles but the best fleet's, the cheapest fleet that was seen to hold."""
    best: dict[tuple[str, ...], Trial] = {}
    mine = None if found.best is None else _roles(planner, found.best)
    for trial in sorted(found.held, key=lambda each: each.price):
        roles = _roles(planner, trial)
        if roles != mine:
            best.setdefault(roles, trial)
    return list(best.values())[:OTHERS_SHOWN]


def _roles(planner: Planner, trial: Trial) -> tuple[str, ...]:
    return tuple(dict.fromkeys(kind.role.value for kind in planner.arrangements[trial.space.name]))


# --- from the cluster file --------------------------------------------------------------------------------------------


def goals_of(spec: Spec) -> dict[str, Goal]:
    """The targets of the file's classes, and how the router's scheduler takes them."""
    promises = promises_of(spec.slo)
    return {
        name: Goal(targets=_targets(each), attainment=each.attainment, promise=promises.get(name, NO_PROMISE))
        for name, each in spec.slo.items()
    }


def _targets(promised: SloClass) -> Targets:
    return Targets(promised.ttft_ms, promised.tt2t_ms, promised.tpot_ms, promised.e2e_ms)
