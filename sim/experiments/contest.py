"""Classes of systems against each other: the best of each class, found with as few runs as that takes.

Arrangements of one policy form families along an axis (token budgets, splits). A family is climbed *at the class's best
rate so far*: of two members that fail there, the one whose run was hopeless later is nearer; a member that does not
fail raises the rate. So most variants cost a part of one run, and common random numbers make that a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from cluster.ids import InstanceId
from cluster.instance import Role
from router.scheduler.scoring.policies import Policy
from sim.baselines.dynamo import Dynamo, DynamoConditional
from sim.baselines.llmd_latency import LlmdLatency
from sim.baselines.plain import WeightedRequests
from sim.baselines.splitwise import ANSWER_TOKENS
from sim.experiments.estimate import decode_rate, prefill_rate, tpot_of, whole_rate
from sim.experiments.homes import splitwise_of
from sim.experiments.systems import EqualInstances, Shelf, System, pool_of
from sim.experiments.tuning import CEILING, Best, Case, guess
from sim.fleet import SimulatedMember, make_of_member

STEP: Final = 1.08
"""Factor of the first step away from a start that is taken to be near; each further one is the square of it. Halved
once, it is within a tolerance of 4 %."""
STEP_MAX: Final = 3.0
LOWEST: Final = 1 / 100
"""The share of the start below which no rate is tried."""
HOLDS: Final = 2.0
"""Nearness of a system that does not fail at all; of others it is at most 1."""
FAR: Final = 0.95
"""A family that begins where another policy was best is left when that member's run is hopeless before so much of the
load has come: nine in ten within their targets were out of reach by far, and its neighbours differ by a whole instance.
"""
POOR: Final = 1 / 30
"""The share of the rate its costs suggest at which a system is tried, while its class has served nothing yet."""


@dataclass(frozen=True, slots=True)
class Family:
    """One policy's systems along one axis, neighbours beside each other."""

    name: str
    systems: tuple[System, ...]
    start: int
    """The index of the system with which to begin."""


def around(holds: Callable[[float], bool], start: float, tolerance: float, ceiling: float) -> float:
    """The highest rate that holds, to `tolerance` (0.03 = 3 %), if it is probably near `start`; 0: none."""
    low, high, rate, step = 0.0, 0.0, start, STEP
    while not low or not high:
        if rate < ceiling and holds(rate):
            low, rate = rate, rate * step
        else:
            high, rate = rate, rate / step
        step = min(step * step, STEP_MAX)
        if (low and high) or rate < start * LOWEST:
            break
    while low and high > low * (1 + tolerance):
        middle = float((low * high) ** 0.5)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def served(
    case: Case, shelf: Shelf, system: System, start: float, known: Mapping[float, bool] | None = None
) -> tuple[float, int]:
    """The highest rate at which this system holds, and how many runs that took; the search begins at `start`.

    `known`: rates that were tried already.
    """
    runs = dict(known or {})

    def holds(rate: float) -> bool:
        if rate not in runs:
            runs[rate] = case.trial(system, shelf, rate).holds
        return runs[rate]

    ceiling = CEILING * max(start, guess(case, shelf, system))
    return around(holds, start, case.tolerance, ceiling), len(runs) - len(known or {})


def challenge(best: Best, case: Case, shelf: Shelf, system: System, start: float = 0.0) -> float:
    """Try one more system of a class. Returns how near it came to holding at a little more than the best rate.

    `start`: requests a second and GPU from which the first of a class is searched; 0: what its costs suggest.
    """
    best.tried.append(f"{system.policy}: {system}")
    if best.rate:
        rate = best.per_gpu * system.gpus * (1 + case.tolerance)
    elif best.system is not None:
        rate = POOR * guess(case, shelf, system)
    else:
        rate = start * system.gpus or guess(case, shelf, system)
    known = {}
    if best.system is not None:
        trial = case.trial(system, shelf, rate)
        best.runs += 1
        if not trial.holds:
            return trial.lasted
        known[rate] = True
    found, runs = served(case, shelf, system, rate, known)
    best.runs += runs
    if best.system is None or found > best.per_gpu * system.gpus:
        best.system, best.rate = system, found
    return HOLDS if found else 0.0


def climb(best: Best, case: Case, shelf: Shelf, family: Family, at: int, start: float = 0.0, far: float = 0.0) -> int:
    """Try a family from its member `at` on, as long as neighbours come nearer. Returns the index of the nearest one.

    If that member's run was hopeless before `far` of its load, its neighbours are not tried.
    """
    nearest, near = at, challenge(best, case, shelf, family.systems[at], start)
    for step in (1, -1) if near >= far else ():
        went = False
        while 0 <= nearest + step < len(family.systems):
            found = challenge(best, case, shelf, family.systems[nearest + step])
            if found < near or (found == near and found < HOLDS):
                break
            nearest, near, went = nearest + step, found, True
        if went:
            break
    return nearest


@dataclass(slots=True)
class Champion:
    """The best of one class, and where its families were best."""

    best: Best = field(default_factory=Best)
    starts: dict[str, int] = field(default_factory=dict)
    """By name of the family: the index with which the next policy's family begins."""

    def meet(self, case: Case, shelf: Shelf, families: Iterable[Family], start: float = 0.0) -> None:
        """Let these families join. The first of a name begins at `Family.start`, later ones at the best index."""
        for family in families:
            known = self.starts.get(family.name)
            at, far = (family.start, 0.0) if known is None else (known, FAR)
            nearest = climb(self.best, case, shelf, family, at, start, far)
            if far == 0.0 or self.best.system in family.systems:
                self.starts[family.name] = nearest


# --- arrangements -----------------------------------------------------------------------------------------------------


def whole(pools: Sequence[EqualInstances], budgets: Sequence[int], policy: str, *, admission: bool) -> Family:
    """Every instance does both, for each token budget."""
    return Family(
        "whole",
        tuple(
            System(
                name="whole",
                pools=tuple(replace(pool, role=Role.BOTH, batched_tokens=budget) for pool in pools),
                policy=policy,
                admission=admission,
            )
            for budget in budgets
        ),
        len(budgets) // 2,
    )


def whole_by_gpu(
    pools: Sequence[EqualInstances], budgets: Sequence[Sequence[int]], policy: str, *, admission: bool
) -> Family:
    """Every instance does both, each pool with a token budget of its own; `budgets`: one for each pool."""
    systems = tuple(
        System(
            name="whole",
            pools=tuple(
                replace(pool, role=Role.BOTH, batched_tokens=budget) for pool, budget in zip(pools, each, strict=True)
            ),
            policy=policy,
            admission=admission,
        )
        for each in budgets
    )
    return Family("whole, budgets by GPU", systems, len(budgets) // 2)


def crossed(pools: Sequence[EqualInstances], policy: str, *, admission: bool) -> Family:
    """The first half of the GPUs computes prompts, the other answers, one of the two sides with twice the TP.

    Pools must have TP 1: half of the GPUs are counted as so many instances.
    """
    half = sum(pool.gpus for pool in pools) // 2
    first, second = _cut(pools, half)
    systems = [
        _split((one, other), policy, (Role.PREFILL, Role.DECODE), None, admission=admission)
        for one, other in ((first, doubled(second)), (doubled(first), second))
    ]
    return Family(f"crossed {'+'.join(pool.gpu for pool in pools)}", tuple(systems), 0)


def doubled(pools: Sequence[EqualInstances]) -> list[EqualInstances]:
    """The same GPUs as half as many instances of twice the TP."""
    assert all(pool.count % 2 == 0 for pool in pools)
    return [replace(pool, count=pool.count // 2, tp=pool.tp * 2) for pool in pools]


def splits(
    case: Case,
    shelf: Shelf,
    pools: Sequence[EqualInstances],
    policy: str,
    *,
    admission: bool,
    roles: tuple[Role, Role] = (Role.PREFILL, Role.DECODE),
    budget: int | None = None,
) -> Family:
    """The first instances of these pools have the first role, the others the second; `budget` is for role both.

    Begins where both sides serve the same rate on average.
    """
    count = sum(pool.count for pool in pools)
    systems = tuple(_split(_cut(pools, at), policy, roles, budget, admission=admission) for at in range(1, count))
    name = f"{roles[0].value}+{roles[1].value} {'+'.join(f'{pool.gpu} tp{pool.tp}' for pool in pools)}"
    balance = [_balance(case, shelf, pools, at) for at in range(1, count)]
    return Family(name, systems, balance.index(max(balance)))


def _split(
    cut: tuple[list[EqualInstances], list[EqualInstances]],
    policy: str,
    roles: tuple[Role, Role],
    budget: int | None,
    *,
    admission: bool,
) -> System:
    sides = [
        [replace(pool, role=role, batched_tokens=budget if role is Role.BOTH else pool.batched_tokens) for pool in side]
        for role, side in zip(roles, cut, strict=True)
    ]
    system = System(name="apart", pools=(*sides[0], *sides[1]), policy=policy, admission=admission)
    if policy not in SPLITWISE:
        return system
    homes = tuple(pool.role for pool in system.pools)
    return replace(
        system,
        pools=tuple(replace(pool, role=Role.BOTH) for pool in system.pools),
        make_policy=partial(_splitwise, homes, ANSWER_TOKENS, None),
    )


def _cut(pools: Sequence[EqualInstances], at: int) -> tuple[list[EqualInstances], list[EqualInstances]]:
    """The first `at` instances, and the others."""
    first: list[EqualInstances] = []
    second: list[EqualInstances] = []
    for pool in pools:
        here = min(pool.count, at)
        at -= here
        if here:
            first.append(replace(pool, count=here))
        if pool.count > here:
            second.append(replace(pool, count=pool.count - here))
    return first, second


def _balance(case: Case, shelf: Shelf, pools: Sequence[EqualInstances], at: int) -> float:
    inputs, outputs = case.load.mean_input(), case.load.mean_output()
    first, second = _cut(pools, at)
    prefills = sum(pool.count * prefill_rate(shelf.costs(case.model, pool), inputs) for pool in first)
    decodes = 0.0
    for pool in second:
        costs = shelf.costs(case.model, pool)
        decodes += pool.count * decode_rate(costs, inputs, outputs, tpot_of(case.targets, costs))
    return min(prefills, decodes)


def _splitwise(
    homes: tuple[Role, ...], answer_tokens: int, speeds: Sequence[float] | None, members: Sequence[SimulatedMember]
) -> Policy:
    """Splitwise's policy. Its instances have their homes in one of two pools or in the mixed one, and can do both."""
    return splitwise_of(homes, members, answer_tokens=answer_tokens, speeds=_by_name(speeds, members))


# --- what rivals are told ---------------------------------------------------------------------------------------------

SPLITWISE: Final = ("splitwise", "splitwise, weighted")


def homes_of(system: System) -> tuple[Role, ...]:
    """The role of each pool; Splitwise's machines can all do both, and have homes."""
    maker = system.make_policy
    if system.policy in SPLITWISE and isinstance(maker, partial) and maker.args[0]:
        return tuple(maker.args[0])
    return tuple(pool.role for pool in system.pools)


def equipped(case: Case, shelf: Shelf, system: System) -> System:
    """The same system, with a policy that has what its operator would tell it: targets, token budgets, the mean
    answer. Weighted policies also get the speeds of unequal GPUs in their roles.
    """
    homes = homes_of(system)
    speeds = tuple(_speed(case, shelf, pool, role) for pool, role in zip(system.pools, homes, strict=True))
    answer = round(case.load.mean_output())
    makers: dict[str, Callable[[Sequence[SimulatedMember]], Policy]] = {
        "llm_d_latency": partial(_llmd_latency, case.targets.ttft_ms or 0.0, case.targets.tpot_ms or 0.0),
        "dynamo_conditional": _dynamo_conditional,
        "dynamo, weighted": partial(_dynamo_weighted, speeds),
        "weighted_requests": partial(_weighted_requests, speeds),
        "splitwise": partial(_splitwise, homes, answer, None),
        "splitwise, weighted": partial(_splitwise, homes, answer, speeds),
    }
    return replace(system, make_policy=makers[system.policy]) if system.policy in makers else system


def _speed(case: Case, shelf: Shelf, pool: EqualInstances, role: Role) -> float:
    """Requests a second of one instance, by its costs."""
    costs, inputs, outputs = shelf.costs(case.model, pool), case.load.mean_input(), case.load.mean_output()
    if role is Role.PREFILL:
        return prefill_rate(costs, inputs)
    rate = decode_rate if role is Role.DECODE else whole_rate
    return rate(costs, inputs, outputs, tpot_of(case.targets, costs))


def _by_name(speeds: Sequence[float] | None, members: Sequence[SimulatedMember]) -> dict[InstanceId, float] | None:
    """The speed of each member's pool, by name; the fastest has 1."""
    if speeds is None:
        return None
    return {each.name: speeds[pool_of(each)] / max(speeds) for each in members}


def _llmd_latency(ttft_ms: float, tpot_ms: float, members: Sequence[SimulatedMember]) -> Policy:
    makes = {each.name: make for each in members if (make := make_of_member(each)) is not None}
    return LlmdLatency(makes, ttft_ms, tpot_ms)


def _dynamo_conditional(members: Sequence[SimulatedMember]) -> Policy:
    return DynamoConditional({each.name: each.config.max_num_batched_tokens for each in members})


def _dynamo_weighted(speeds: Sequence[float], members: Sequence[SimulatedMember]) -> Policy:
    return Dynamo(speeds=_by_name(speeds, members))


def _weighted_requests(speeds: Sequence[float], members: Sequence[SimulatedMember]) -> Policy:
    return WeightedRequests(_by_name(speeds, members) or {})
