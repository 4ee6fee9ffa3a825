"""One fleet on one load: whether it keeps its promises, how certain that is, what binds, what it draws. For plans.
Pure.

Router, policy and admission are the product's own, set up as from a cluster file with these classes. Every arrival
counts: a request that was refused or failed has missed. Compared fleets get the same arrivals (common random numbers).

The interval uses batch means: the load is cut into `BATCHES` stretches of equally many arrivals, whose attainments are
treated as independent draws (Student's t). Queues that outlive a stretch make the interval too narrow. It is about this
load, and says how much another stretch of the same kind may differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.arrival import Arrival
from loadgen.report import Targets
from router.core.values import Promise
from router.scheduler.scoring.policies import POLICIES
from sim.fleet import SimulatedMember
from sim.kernel import NS
from sim.result import Result
from sim.settings import SimSettings
from sim.world import World

BATCHES: Final = 20
T_95: Final = 2.093
"""Student's t for 19 degrees of freedom, 95 % on both sides."""

Z_95: Final = 1.96
"""The normal distribution's, 95 % on both sides."""

LOOK_EVERY: Final = 10
"""The number of the registry's readings (half seconds of the world) between two checks whether the verdict is
certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One class's promise."""

    targets: Targets
    attainment: float
    promise: Promise
    """The promise by which the router admits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attained:
    """One class's result."""

    share: float
    """The share of all its arrivals that met every target."""
    low: float
    high: float
    requests: int
    missed: Mapping[str, int]
    """By target (or `served`: refused or failed), the number of requests that missed it."""
    promised: float
    """The promised share."""
    keeps: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of one run."""

    classes: Mapping[str, Attained]
    seconds: float
    """The time from the first arrival to the end of the last answer."""
    gpu_seconds: Mapping[str, float]
    energy_j: float
    output_tokens: int
    prompt_tokens: int
    ttft_p95_ms: float | None = None
    """Over all requests that were served."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """By kind of instance (its name without the number): the share of time in which the engines computed."""

    @property
    def holds(self) -> bool:
        """Whether every class attains its promise."""
        return all(each.keeps for each in self.classes.values())

    @property
    def attained(self) -> float:
        """The attainment of the class worst off: the lowest share of the classes that break their promise, or of all
        classes if none does.
        """
        broken = [each.share for each in self.classes.values() if not each.keeps]
        return min(broken or [each.share for each in self.classes.values()], default=0.0)

    @property
    def binds(self) -> str:
        """The class and target nearest to breaking, or broken most: `interactive TTFT`."""

        def room(name: str) -> tuple[bool, float]:
            here = self.classes[name]
            return here.keeps, (here.low if here.keeps else here.share) - here.promised

        worst = min(self.classes, key=room, default="")
        missed = self.classes[worst].missed if worst in self.classes else {}
        target = max(missed, key=lambda name: missed[name], default="")
        return f"{worst} {target}".strip() if target and missed[target] else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The result of a run that ends as soon as a promise is certainly broken."""

    holds: bool
    spent: int
    """The number of requests that had arrived when it ended."""
    attained_at_most: float
    """`Evaluation.attained`; of a run that ended early, the share of the broken class's arrivals that had not missed
    yet.
    """
    seen: Evaluation | None = None
    """The evaluation of a run that went to its end."""


class Certain(Exception):
    """A promise is broken, whatever still happens."""

    def __init__(self, share: float) -> None:
        super().__init__(f"{share:.1%} at most")
        self.share: Final = share
        """The highest attainment that the class can still reach."""


def evaluate(
    members: Sequence[SimulatedMember], arrivals: Sequence[Arrival], goals: Mapping[str, Goal], usual: str
) -> Evaluation:
    """A whole run.

    Args:
        members: the fleet; one model.
        arrivals: the load, in the order of time.
        goals: by class.
        usual: the class of requests that name none, or one without a goal.
    """
    world = _world(members, goals, usual)
    result = world.run(_named(arrivals, goals, usual))
    return _evaluation(result, goals)


def holds(
    members: Sequence[SimulatedMember], arrivals: Sequence[Arrival], goals: Mapping[str, Goal], usual: str
) -> bool:
    """Whether the fleet keeps all promises; ends as soon as it certainly does not."""
    return tried(members, arrivals, goals, usual).holds


def tried(
    members: Sequence[SimulatedMember], arrivals: Sequence[Arrival], goals: Mapping[str, Goal], usual: str
) -> Tried:
    """The same, with what was seen until the verdict was certain."""
    world = _world(members, goals, usual)
    named = _named(arrivals, goals, usual)
    counts = {name: sum(each.slo_class == name for each in named) for name in goals}
    world.on_progress = _Watch(goals, counts)
    try:
        seen = _evaluation(world.run(named), goals)
    except Certain as certain:
        return Tried(holds=False, spent=world.book.rows.count, attained_at_most=certain.share)
    return Tried(holds=seen.holds, spent=len(named), attained_at_most=seen.attained, seen=seen)


def _world(members: Sequence[SimulatedMember], goals: Mapping[str, Goal], usual: str) -> World:
    promises = {name: goal.promise for name, goal in goals.items()}
    patience_s = max((_patience_s(goal.targets) for goal in goals.values()), default=PATIENCE_S)
    settings = SimSettings(checks=False, first_token_s=patience_s)
    return World(members, settings, policy=POLICIES["workload"], promises={**promises, "": promises[usual]})


PATIENCE: Final = 10.0
PATIENCE_S: Final = 30.0
"""A request without a first token after so many times its class's promise, and after this time, is given up: it has
missed, and an overload ends."""


def _patience_s(targets: Targets) -> float:
    """Seconds after which a request without a first token has missed for certain, or longer. One that is promised
    nothing of its first token is given up when a router gives it up.
    """
    if targets.ttft_ms is not None:
        return max(PATIENCE_S, PATIENCE * targets.ttft_ms / 1000)
    whole_s = SimSettings().first_token_s
    return whole_s if targets.e2e_ms is None else max(PATIENCE_S, targets.e2e_ms / 1000)


def _named(arrivals: Sequence[Arrival], goals: Mapping[str, Goal], usual: str) -> list[Arrival]:
    """Every request with a class that has a goal."""
    return [each if each.slo_class in goals else replace(each, slo_class=usual) for each in arrivals]


class _Watch:
    """`World.on_progress`: ends a run that cannot hold any more."""

    def __init__(self, goals: Mapping[str, Goal], counts: Mapping[str, int]) -> None:
        self._goals: Final = goals
        self._may_miss: Final = {
            name: math.floor((1 - goal.attainment) * counts[name] + 1e-9) for name, goal in goals.items()
        }
        self._counts: Final = counts
        self._looks = 0

    def __call__(self, world: World) -> None:
        self._looks += 1
        if self._looks % LOOK_EVERY:
            return
        book = world.book
        columns = book.rows.columns()
        over = columns[columns["outcome"] != 0]
        names = tuple(name or "" for name in book.classes)
        seen = Result(columns=over, members=(), classes=names, details={}, events=0, end_ns=0)
        late = self._late(world)
        for name, goal in self._goals.items():
            here = _of_class(over, names, name)
            missed = int((~seen.met(goal.targets)[here]).sum()) + late.get(name, 0)
            if missed > self._may_miss[name]:
                raise Certain(1 - missed / self._counts[name])

    def _late(self, world: World) -> dict[str, int]:
        """The number of requests without a first token that cannot have one in time any more."""
        found: dict[str, int] = {}
        for passage in world.book.open.values():
            name = passage.arrival.slo_class or ""
            target_ms = self._goals[name].targets.ttft_ms if name in self._goals else None
            if target_ms is not None and passage.row.first_ns < 0:
                waited_s = world.kernel.now_ns / NS - passage.arrival.at_s
                found[name] = found.get(name, 0) + (waited_s > target_ms / 1000)
        return found


def _evaluation(result: Result, goals: Mapping[str, Goal]) -> Evaluation:
    rows = result.columns
    names = list(result.classes)
    found = {name: _of_class(rows, names, name) for name in goals}
    classes = {name: _attained(result, goals[name], here) for name, here in found.items() if here.any()}
    served = rows[result.good()]
    begin_ns = int(rows["at_ns"].min()) if len(rows) else 0
    return Evaluation(
        classes=classes,
        seconds=max(0.0, (result.end_ns - begin_ns) / NS),
        gpu_seconds=dict(result.gpu_seconds),
        energy_j=result.energy_j,
        output_tokens=int(served["made_tokens"].sum()),
        prompt_tokens=int(served["input_tokens"].sum()),
        ttft_p95_ms=_ttft_p95_ms(result),
        busy=_busy(result),
    )


def _of_class(rows: NDArray[Any], names: Sequence[str], name: str) -> NDArray[np.bool_]:
    """The rows of a class. Requests that name none and those of the class without a name have two numbers for one
    name.
    """
    found: NDArray[np.bool_] = np.isin(rows["slo_class"], [at for at, each in enumerate(names) if each == name])
    return found


def _ttft_p95_ms(result: Result) -> float | None:
    served = result.latency_s("ttft")[result.good()]
    return float(np.nanquantile(served, 0.95)) * 1000 if len(served) and not np.isnan(served).all() else None


def _busy(result: Result) -> dict[str, float]:
    kinds: dict[str, list[float]] = {}
    for name, seconds in result.busy_s.items():
        kinds.setdefault(name.rpartition("-")[0], []).append(seconds)
    whole_s = result.end_ns / NS
    return {name: sum(each) / len(each) / whole_s if whole_s else 0.0 for name, each in kinds.items()}


def _attained(result: Result, goal: Goal, here: NDArray[np.bool_]) -> Attained:
    met = result.met(goal.targets)[here]
    share = float(met.mean())
    low, high = interval(met)
    return Attained(
        share=share,
        low=low,
        high=high,
        requests=len(met),
        missed=_missed(result, goal.targets, here),
        promised=goal.attainment,
        keeps=share >= goal.attainment - 1e-12,
    )


def interval(met: NDArray[np.bool_]) -> tuple[float, float]:
    """95 % interval of the share of requests that met their targets.

    Args:
        met: whether each request met its targets, in the order of arrival; at least one.
    """
    share, half = float(met.mean()), _half_width(met)
    low, high = _wilson(share, len(met))
    return max(0.0, min(low, share - half)), min(1.0, max(high, share + half))


def _wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of independent draws: no interval is narrower, even where all batches agree (all or none
    attained), which would say that nothing is left to chance.
    """
    square = Z_95**2 / count
    middle = (share + square / 2) / (1 + square)
    half = Z_95 * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return middle - half, middle + half


def _half_width(met: NDArray[np.bool_]) -> float:
    """Half the width of the 95 % interval; with less than two arrivals for each batch, that of independent draws."""
    if len(met) < 2 * BATCHES:
        share = float(met.mean())
        return Z_95 * math.sqrt(max(share * (1 - share), 0.25 / len(met)) / len(met))
    means = [float(batch.mean()) for batch in np.array_split(met, BATCHES)]
    return T_95 * float(np.std(means, ddof=1)) / math.sqrt(BATCHES)


def _missed(result: Result, targets: Targets, here: NDArray[np.bool_]) -> dict[str, int]:
    good = result.good()
    found = {"served": int((~good & here).sum())}
    for name in ("ttft", "tt2t", "tpot", "e2e"):
        target_ms = getattr(targets, f"{name}_ms")
        if target_ms is not None:
            with np.errstate(invalid="ignore"):
                found[name.upper()] = int(((result.latency_s(name) * 1000 > target_ms) & good & here).sum())
    return found
