"""A system at its own best: the variant of it that serves the highest rate.

A variant is first tried at a little more than the best rate so far; one run is enough to drop it where it fails. With
common random numbers that is the comparison itself, not a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from cluster.instance import Role
from loadgen.report import Targets
from sim.experiments.early import AttainmentCertain, Watch
from sim.experiments.estimate import decode_rate, prefill_rate, tpot_of, whole_rate
from sim.experiments.goodput import attainment, highest
from sim.experiments.loads import Size, UnitLoad
from sim.experiments.systems import EqualInstances, Shelf, System, simulate
from sim.result import Result

ATTAINMENT: Final = 0.9
EXPIRES: Final = 4.0
"""A request expires at so many times its target for the first token: it has missed, and an overload ends."""
EXPIRES_S_MIN: Final = 2.0
CEILING: Final = 12.0
"""No system serves so many times what its costs suggest; prefix caches may make it several times."""

Criterion = Callable[[Result], bool]


@dataclass(frozen=True, slots=True)
class RateTrial:
    """One system at one rate."""

    holds: bool
    lasted: float
    """Share of the load's requests that had come when that was certain: of two that fail, the later one is nearer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What all systems of one comparison are given."""

    name: str
    model: str
    load: UnitLoad
    targets: Targets
    size: Size
    tolerance: float
    criterion: Criterion | None = None
    """None: attainment of `targets` by nine in ten."""
    loosest: Targets | None = None
    """If targets are varied, those that decide how long runs are, so that all runs are equally long."""

    @property
    def ttft_ms(self) -> float:
        """The TTFT target; without one, a bound for it."""
        return self.targets.ttft_ms or 10_000.0

    @property
    def life_s(self) -> float:
        """The seconds that a request lasts which just meets its targets."""
        targets = self.loosest or self.targets
        ttft_ms, tpot_ms = targets.ttft_ms or self.ttft_ms, targets.tpot_ms or 100.0
        return (ttft_ms + tpot_ms * self.load.mean_output()) / 1000

    @property
    def expires_s(self) -> float:
        """The seconds that a request waits for its first token before it is given up."""
        return max(EXPIRES_S_MIN, EXPIRES * self.ttft_ms / 1000)

    def holds(self, system: System, shelf: Shelf, rate: float) -> bool:
        """Whether this system serves this rate."""
        return self.trial(system, shelf, rate).holds

    def trial(self, system: System, shelf: Shelf, rate: float) -> RateTrial:
        """One run at this rate. If attainment is the criterion, it ends as soon as the verdict is certain."""
        arrivals = self.load.at_rate(rate, self.size.count(rate, self.life_s))
        watch = None
        if self.criterion is None:
            watch = Watch(self.targets, ATTAINMENT, len(arrivals), arrivals[-1].at_s)
        try:
            result = simulate(system, self.model, shelf, arrivals, self.expires_s, self.targets, watch)
        except AttainmentCertain as end:
            return RateTrial(end.holds, end.arrived)
        if self.criterion is not None:
            return RateTrial(self.criterion(result), 1.0)
        return RateTrial(attainment(result, self.targets) >= ATTAINMENT, 1.0)


@dataclass(slots=True)
class Best:
    """The best variant so far, and what the search cost."""

    system: System | None = None
    rate: float = 0.0
    runs: int = 0
    tried: list[str] = field(default_factory=list)

    @property
    def per_gpu(self) -> float:
        """Requests a second and GPU."""
        return self.rate / self.system.gpus if self.system is not None else 0.0


def guess(case: Case, shelf: Shelf, system: System) -> float:
    """The rate that costs alone suggest, in requests a second: where a search begins."""
    inputs, outputs = case.load.mean_input(), case.load.mean_output()
    rates = {Role.PREFILL: 0.0, Role.DECODE: 0.0, Role.BOTH: 0.0}
    for pool in system.pools:
        costs = shelf.costs(case.model, pool)
        tpot = tpot_of(case.targets, costs)
        if pool.role is Role.PREFILL:
            rates[pool.role] += pool.count * prefill_rate(costs, inputs)
        elif pool.role is Role.DECODE:
            rates[pool.role] += pool.count * decode_rate(costs, inputs, outputs, tpot)
        else:
            rates[pool.role] += pool.count * whole_rate(costs, inputs, outputs, tpot)
    return 0.6 * (rates[Role.BOTH] + min(rates[Role.PREFILL], rates[Role.DECODE]))


def consider(best: Best, case: Case, shelf: Shelf, system: System) -> bool:
    """Try one more variant. Returns whether it is the best now; rates are compared per GPU."""
    best.tried.append(str(system))
    start = guess(case, shelf, system)
    if best.system is not None and best.rate:
        start = best.per_gpu * system.gpus * (1 + case.tolerance)
        best.runs += 1
        if not case.holds(system, shelf, start):
            return False
    ceiling = CEILING * guess(case, shelf, system)
    found = highest(lambda rate: rate < ceiling and case.holds(system, shelf, rate), start, case.tolerance)
    best.runs += found.runs
    if best.system is None or found.rate / system.gpus > best.per_gpu:
        best.system, best.rate = system, found.rate
        return True
    return False


def best_of(case: Case, shelf: Shelf, systems: Iterable[System]) -> Best:
    """The best of these systems."""
    best = Best()
    for system in systems:
        consider(best, case, shelf, system)
    return best


def aggregated(
    pool: EqualInstances, gpus: int, tps: Sequence[int], budgets: Sequence[int | None], policy: str
) -> list[System]:
    """Instances that do both, for every shape and token budget."""
    return [
        System(
            name="aggregated",
            pools=(replace(pool, role=Role.BOTH, count=gpus // tp, tp=tp, batched_tokens=budget),),
            policy=policy,
        )
        for tp in tps
        for budget in budgets
    ]


def split(prefill: EqualInstances, decode: EqualInstances, gpus: int, decodes: int) -> System | None:
    """`decodes` decode instances, and prefill instances on the GPUs that are left; None: one side would have none."""
    prefills = (gpus - decodes * decode.tp) // prefill.tp
    if decodes < 1 or prefills < 1:
        return None
    pools = (replace(prefill, count=prefills), replace(decode, count=decodes))
    return System(name="disaggregated", pools=pools)


def best_split(
    case: Case,
    shelf: Shelf,
    pair: tuple[EqualInstances, EqualInstances],
    gpus: int,
    policy: str,
    *,
    start: int | None = None,
    adapt: Callable[[System], System] = lambda system: system,
) -> Best:
    """Climb from the split that balances the two pools on average, or `start` decode instances, while neighbours win.

    `adapt` makes of the pair of pools the system that a policy needs.
    """
    best = Best()
    decodes = balanced(case, shelf, *pair, gpus) if start is None else start

    def attempt(count: int) -> bool:
        system = split(*pair, gpus, count)
        return system is not None and consider(best, case, shelf, adapt(replace(system, policy=policy)))

    attempt(decodes)
    for step in (1, -1):
        count, went = decodes, False
        while attempt(count + step):
            count, went = count + step, True
        if went:
            break
    return best


def balanced(case: Case, shelf: Shelf, prefill: EqualInstances, decode: EqualInstances, gpus: int) -> int:
    """Decode instances for which both pools serve the same rate, on average."""
    inputs, outputs = case.load.mean_input(), case.load.mean_output()
    costs = shelf.costs(case.model, decode)
    each = decode_rate(costs, inputs, outputs, tpot_of(case.targets, costs))
    prefills = prefill_rate(shelf.costs(case.model, prefill), inputs)

    def served(count: int) -> float:
        return min(count * each, (gpus - count * decode.tp) // prefill.tp * prefills)

    return max(range(1, max(2, gpus // decode.tp + 1)), key=served)
