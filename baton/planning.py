"""`baton plan`: from a cluster file and a load to the cheapest fleet that keeps the promises.

Joins what is pure elsewhere: candidates and bounds (`goodput`), the search (`goodput.search`), simulations
(`sim.evaluate`). Trials run in processes of their own, one a core; the search goes on with what came of them, and what
it has found so far is there whenever somebody has waited long enough.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product

from cluster.errors import UsageError
from cluster.ids import InstanceId
from cluster.spec import Model, SloClass, Spec, flags
from costs import shipped
from costs.cost import Costs
from costs.hardware import Gpu
from costs.model import ModelShape
from costs.shape import Spans
from goodput.bounds import (
    Engine,
    Impossible,
    answer_ms,
    dearest,
    impossible,
    least_decodes,
    least_prefills,
    least_wholes,
    prompt_ms,
)
from goodput.candidates import Arrangement, Kind, arrangements
from goodput.demand import Demand, Promise, demand_of
from goodput.search import Counts, Found, Space, Trial, search
from loadgen.arrival import Arrival
from loadgen.report import Targets
from router.promises import promises_of
from router.records import NO_PROMISE
from sim.engine_args import engine_of, read_words
from sim.evaluate import Evaluation, Goal, evaluate, holds
from sim.fleet import Member, member

OBJECTIVES: Mapping[str, str] = {
    "cost": "price an hour of all GPUs",
    "gpus": "number of GPUs",
    "power": "watts that all GPUs may draw at most",
}
"""What a plan makes small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be planned for."""

    model: Model
    shape: ModelShape
    gpus: tuple[tuple[Gpu, int | None], ...]
    """Types, with the file's prices, and how many there are of each."""
    arrivals: tuple[Arrival, ...]
    goals: Mapping[str, Goal]
    usual: str
    """Class of requests that name none."""
    objective: str = "cost"
    survive: int = 0
    """How many instances may be lost, whichever they are."""

    def demand(self) -> Demand:
        """As bounds read it."""
        promises = {
            name: Promise(
                ttft_ms=goal.targets.ttft_ms,
                tt2t_ms=goal.targets.tt2t_ms,
                tpot_ms=goal.targets.tpot_ms,
                e2e_ms=goal.targets.e2e_ms,
                attainment=goal.attainment,
            )
            for name, goal in self.goals.items()
        }
        return demand_of(self.arrivals, promises, self.usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One fleet, and what was seen of it in a whole run."""

    arrangement: Arrangement
    counts: Counts
    seen: Evaluation

    @property
    def gpus(self) -> int:
        """Of all instances."""
        return sum(kind.gpus * count for kind, count in zip(self.arrangement, self.counts, strict=True))

    @property
    def price_per_hour(self) -> float:
        """Of all GPUs."""
        return sum(
            kind.gpu.usd_per_hour * kind.gpus * count for kind, count in zip(self.arrangement, self.counts, strict=True)
        )

    def __str__(self) -> str:
        """`4 × prefill H100-SXM tp1 + 2 × decode H200 tp2`."""
        return " + ".join(f"{count} × {kind}" for kind, count in zip(self.arrangement, self.counts, strict=True))


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a search came to."""

    best: Answer | None
    others: list[Answer] = field(default_factory=list)
    """The best of other arrangements of roles that were seen to hold, cheapest first."""
    found: Found
    considered: int
    """Arrangements."""
    ruled_out: int
    """Arrangements that bounds ruled out."""
    because: str = ""
    """Without an answer: why there is none."""
    stopped: bool = False
    """Somebody has waited long enough: there may be something cheaper."""


class Planner:
    """One task: its arrangements, with what bounds say of them."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._members: dict[Kind, Member | None] = {}
        self.considered = 0
        self.why: dict[str, int] = {}
        """Why arrangements cannot keep the promises, and how many."""
        self.arrangements: dict[str, Arrangement] = {}
        self.spaces: list[Space] = []
        demand = task.demand()
        for each in arrangements(task.shape, task.gpus):
            if all(self.member(kind) is not None for kind in each):
                self.considered += 1
                self._consider(each, demand)

    def member(self, kind: Kind) -> Member | None:
        """One instance of a kind; None where it cannot be: the model does not fit beside its flags."""
        if kind not in self._members:
            self._members[kind] = self._made(kind)
        return self._members[kind]

    def _made(self, kind: Kind) -> Member | None:
        words = list(_words(self.task.model, kind))
        if kind.batched_tokens is not None:
            words.append(f"--max-num-batched-tokens={kind.batched_tokens}")
        try:
            costs, config = engine_of(
                kind.role, self.task.shape, kind.gpu, Spans(tp=kind.tp), read_words(words), profiles=shipped.profiles()
            )
        except UsageError:
            return None
        return member(str(kind), kind.role, self.task.model.api_name, costs, config)

    def _consider(self, arrangement: Arrangement, demand: Demand) -> None:
        engines = [self._engine(kind) for kind in arrangement]
        answers = [engine for engine, kind in zip(engines, arrangement, strict=True) if kind.role.decodes]
        # A decode instance serves whole requests, too, where that costs less: any kind may compute a prompt.
        cannot = [impossible(prompt, answer, demand) for prompt, answer in product(engines, answers)]
        if all(isinstance(each, Impossible) for each in cannot):
            because = next(each.because for each in cannot if each is not None)
            self.why[because] = self.why.get(because, 0) + 1
            return
        space = Space(
            name=str(len(self.spaces)),
            prices=tuple(self._price(kind) for kind in arrangement),
            least=self._least(arrangement, engines, demand),
            most=tuple(self._most(kind) for kind in arrangement),
            limits=self._limits(arrangement),
            floors=_floors(arrangement, engines, demand),
        )
        if space.empty:
            told = f"not enough GPUs: at least {_counted(arrangement, space.least)} would be needed"
            self.why[told] = self.why.get(told, 0) + 1
            return
        self.arrangements[space.name] = arrangement
        self.spaces.append(space)

    def _engine(self, kind: Kind) -> Engine:
        made = self.member(kind)
        assert made is not None
        assert isinstance(made.costs, Costs)
        config = made.config
        return Engine(
            costs=made.costs,
            batched_tokens=config.max_num_batched_tokens,
            seqs_max=config.max_num_seqs,
            kv_tokens=config.num_blocks * config.block_size,
        )

    def _least(self, arrangement: Arrangement, engines: Sequence[Engine], demand: Demand) -> Counts:
        """Of each kind alone. What two kinds can do for each other is in `_floors`."""
        if len(arrangement) == 1:
            return (max(1 + self.task.survive, least_wholes(engines[0], demand).instances),)
        speakers = sum(kind.role.decodes for kind in arrangement)
        return tuple(
            least_decodes(engine, demand).instances if kind.role.decodes and speakers == 1 else 1
            for kind, engine in zip(arrangement, engines, strict=True)
        )

    def _price(self, kind: Kind) -> float:
        each = {"cost": kind.gpu.usd_per_hour, "gpus": 1.0, "power": kind.gpu.tdp_w}[self.task.objective]
        return max(each, 1e-6) * kind.gpus

    def _available(self, kind: Kind) -> int:
        there = {gpu.name: count for gpu, count in self.task.gpus}[kind.gpu.name]
        return INSTANCES_MAX * kind.gpus if there is None else there

    def _most(self, kind: Kind) -> int:
        return min(INSTANCES_MAX, self._available(kind) // kind.gpus)

    def _limits(self, arrangement: Arrangement) -> tuple[tuple[Counts, float], ...]:
        """Kinds of one type of GPU share what there is of it."""
        if len({kind.gpu.name for kind in arrangement}) == len(arrangement):
            return ()
        return ((tuple(kind.gpus for kind in arrangement), float(self._available(arrangement[0]))),)

    def fleet(self, arrangement: Arrangement, counts: Counts) -> list[Member]:
        """All instances."""
        found = []
        for at, (kind, count) in enumerate(zip(arrangement, counts, strict=True)):
            made = self.member(kind)
            assert made is not None
            found += [replace(made, name=InstanceId(f"{kind.role.value}-{at}-{n:03d}")) for n in range(count)]
        return found

    def holds(self, arrangement: Arrangement, counts: Counts) -> bool:
        """Whether a fleet keeps the promises, also with as many instances lost as it has to survive."""
        task = self.task
        for lost in _losses(counts, task.survive):
            left = tuple(count - gone for count, gone in zip(counts, lost, strict=True))
            fleet = self.fleet(arrangement, left)
            whole = any(each.role.prefills for each in fleet) and any(each.role.decodes for each in fleet)
            if not whole or not holds(fleet, task.arrivals, task.goals, task.usual):
                return False
        return True

    def answer(self, arrangement: Arrangement, counts: Counts) -> Answer:
        """A whole run of one fleet."""
        task = self.task
        seen = evaluate(self.fleet(arrangement, counts), task.arrivals, task.goals, task.usual)
        return Answer(arrangement=arrangement, counts=counts, seen=seen)

    def why_not(self) -> str:
        """Why nothing holds: what is nearest to being possible."""
        told = [because for because in self.why if not because.startswith("not enough")]
        scarce = [because for because in self.why if because.startswith("not enough")]
        if self.spaces:
            return "no fleet within the GPUs that there are keeps the promises"
        return (scarce or told or ["the model fits on none of these GPUs"])[0]


def _floors(
    arrangement: Arrangement, engines: Sequence[Engine], demand: Demand
) -> tuple[tuple[tuple[float, ...], float], ...]:
    """What two kinds have to do together: all prompts; and all answers, where both can answer."""
    if len(arrangement) == 1:
        return ()
    first, second = engines
    prompts = ((1.0, dearest(first, second, demand, prompt_ms)), least_prefills(first, demand).exact)
    if not all(kind.role.decodes for kind in arrangement):
        return (prompts,)
    return prompts, ((1.0, dearest(first, second, demand, answer_ms)), least_decodes(first, demand).exact)


INSTANCES_MAX = 64
"""Of one kind, where nobody says how many GPUs there are."""


def _losses(counts: Counts, survive: int) -> list[Counts]:
    """What may be lost: the worst are tried first, so that what fails fails soon."""
    if not survive:
        return [tuple(0 for _ in counts)]
    return [lost for lost in product(*(range(min(count, survive) + 1) for count in counts)) if sum(lost) == survive]


def _counted(arrangement: Arrangement, counts: Counts) -> str:
    return " + ".join(f"{count} × {kind}" for kind, count in zip(arrangement, counts, strict=True))


def _words(model: Model, kind: Kind) -> Sequence[str]:
    """Flags that the file's pool of this role gives its engines, less those that are searched."""
    pool = model.pools.named().get(kind.role)
    given = {} if pool is None else dict(pool.engine_args)
    given = {name: value for name, value in given.items() if name.replace("_", "-") not in SEARCHED}
    return flags.words(given)


SEARCHED = frozenset({"max-num-batched-tokens", "tensor-parallel-size"})
"""Flags that a plan chooses."""


# --- trials in processes ----------------------------------------------------------------------------------------------

_planner: list[Planner] = []
"""Of this process; set before it is forked."""


def _quietly() -> None:
    """Ctrl-C is the parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _try(arrangement: Arrangement, counts: Counts) -> bool:
    return _planner[0].holds(arrangement, counts)


def plan(task: Task, progress: Callable[[Found, Planner], None], processes: int | None = None) -> Outcome:
    """Search, and look at what was found.

    Args:
        task: what is to be planned for.
        progress: called after each trial.
        processes: None: one a core.
    """
    planner = Planner(task)
    found, stopped = Found(), False
    width = processes or max(1, len(os.sched_getaffinity(0)))
    _planner[:] = [planner]
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(width, mp_context=context, initializer=_quietly)
    try:
        _run(planner, found, pool, width, progress)
    except KeyboardInterrupt:
        stopped = True
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list((pool._processes or {}).values()) if stopped else ():  # noqa: SLF001 - a trial may take minutes
            process.terminate()
    best = None if found.best is None else _answer(planner, found.best)
    return Outcome(
        best=best,
        others=[_answer(planner, each) for each in _others(planner, found)],
        found=found,
        considered=planner.considered,
        ruled_out=planner.considered - len(planner.spaces),
        because="" if best is not None else planner.why_not(),
        stopped=stopped,
    )


def _run(
    planner: Planner, found: Found, pool: ProcessPoolExecutor, width: int, progress: Callable[[Found, Planner], None]
) -> None:
    going = search(planner.spaces, found, width=width)
    try:
        batch = next(going)
        while True:
            asked = [pool.submit(_try, planner.arrangements[each.space.name], each.counts) for each in batch]
            verdicts = [each.result() for each in asked]
            batch = going.send(verdicts)
            progress(found, planner)
    except StopIteration:
        return


def _answer(planner: Planner, trial: Trial) -> Answer:
    return planner.answer(planner.arrangements[trial.space.name], trial.counts)


OTHERS_SHOWN = 3


def _others(planner: Planner, found: Found) -> list[Trial]:
    """Of each other set of roles the cheapest that was seen to hold."""
    best: dict[tuple[str, ...], Trial] = {}
    mine = None if found.best is None else _roles(planner, found.best)
    for trial in sorted(found.held, key=lambda each: each.price):
        roles = _roles(planner, trial)
        if roles != mine:
            best.setdefault(roles, trial)
    return list(best.values())[:OTHERS_SHOWN]


def _roles(planner: Planner, trial: Trial) -> tuple[str, ...]:
    return tuple(kind.role.value for kind in planner.arrangements[trial.space.name])


# --- from the cluster file --------------------------------------------------------------------------------------------


def goals_of(spec: Spec) -> dict[str, Goal]:
    """What the file's classes are promised."""
    promises = promises_of(spec.slo)
    return {
        name: Goal(targets=_targets(each), attainment=each.attainment, promise=promises.get(name, NO_PROMISE))
        for name, each in spec.slo.items()
    }


def _targets(promised: SloClass) -> Targets:
    return Targets(promised.ttft_ms, promised.tt2t_ms, promised.tpot_ms, promised.e2e_ms)
