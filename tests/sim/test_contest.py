"""Small contests for goodput: pruned searches find what exhaustive ones find; early verdicts equal a whole run's."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from cluster.instance import Role
from costs import shipped
from loadgen.lengths import parse
from loadgen.report import Targets
from sim.experiments.contest import (
    Champion,
    Family,
    around,
    climb,
    crossed,
    doubled,
    equipped,
    homes_of,
    splits,
    whole,
    whole_by_gpu,
)
from sim.experiments.early import AttainmentCertain, Watch
from sim.experiments.goodput import attainment
from sim.experiments.loads import Size, UnitLoad, made_up
from sim.experiments.rivals import mixing
from sim.experiments.systems import EqualInstances, Shelf, System, believed, simulate
from sim.experiments.tuning import ATTAINMENT, Best, Case, RateTrial
from sim.fleet import make_of_member
from sim.world import World

MODEL, GPU = "meta-llama/Llama-3.1-8B", "H100"
TARGETS = Targets(400, None, 20, None)


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    return Shelf(shipped.models(), shipped.profiles())


@pytest.fixture(scope="module")
def load() -> UnitLoad:
    return made_up("tiny", parse("lognormal:mean=1500,cv=1"), parse("lognormal:mean=40,cv=1"), 1, 200)


def case(load: UnitLoad) -> Case:
    size = Size(fewest=150, most=150, lives=1.0)
    return Case(name="tiny", model=MODEL, load=load, targets=TARGETS, size=size, tolerance=0.1)


def pool(count: int = 4, gpu: str = GPU) -> EqualInstances:
    return EqualInstances(role=Role.BOTH, count=count, tp=1, gpu=gpu)


# --- early verdicts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [10.0, 30.0, 42.0, 60.0, 120.0])
@pytest.mark.parametrize("admission", [False, True])
def test_an_early_verdict_is_that_of_the_whole_run(rate: float, admission: bool, shelf: Shelf, load: UnitLoad) -> None:
    one = case(load)
    system = System(name="x", pools=(pool(2),), policy="least_requests", admission=admission)
    result = simulate(system, MODEL, shelf, load.at_rate(rate, 150), 2.0, TARGETS)
    trial = one.trial(system, shelf, rate)
    assert trial.holds == (attainment(result, TARGETS) >= ATTAINMENT)
    assert 0.2 < trial.lasted <= 1


def test_overload_is_certain_before_all_have_come(shelf: Shelf, load: UnitLoad) -> None:
    system = System(name="x", pools=(pool(1),))
    arrivals = load.at_rate(80.0, 150)
    watch = Watch(TARGETS, ATTAINMENT, len(arrivals), arrivals[-1].at_s)
    with pytest.raises(AttainmentCertain) as end:
        simulate(system, MODEL, shelf, arrivals, 2.0, TARGETS, watch)
    assert not end.value.holds
    assert end.value.arrived < 0.9


# --- searches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0.2, 8.0, 9.9, 10.1, 40.0])
def test_a_search_from_nearby_ends_within_its_tolerance(start: float) -> None:
    tried: list[float] = []

    def holds(rate: float) -> bool:
        tried.append(rate)
        return rate <= 10.0

    assert 10.0 / 1.04 <= around(holds, start, 0.04, 1000.0) <= 10.0
    assert len(tried) <= (4 if 9 < start < 11 else 14)


def test_where_nothing_holds_a_search_ends() -> None:
    assert around(lambda _rate: False, 5.0, 0.04, 100.0) == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet(Case):
    """A case with given results: goodput per GPU, by the number of instances in the first pool."""

    goodput: dict[int, float]
    runs: list[float]

    def trial(self, system: System, shelf: Shelf, rate: float) -> RateTrial:
        del shelf
        self.runs.append(rate)
        best = self.goodput[system.pools[0].count] * (1.2 if system.policy == "dynamo" else 1.0) * system.gpus
        return RateTrial(rate <= best, min(1.0, best / rate))


def sheet(load: UnitLoad, goodput: dict[int, float]) -> Sheet:
    one = case(load)
    return Sheet(
        name=one.name,
        model=one.model,
        load=one.load,
        targets=one.targets,
        size=one.size,
        tolerance=0.04,
        goodput=goodput,
        runs=[],
    )


HILL = {1: 1.0, 2: 2.2, 3: 3.1, 4: 4.4, 5: 2.9, 6: 1.2, 7: 0.3}
"""Goodput per GPU, by the number of instances: it has one maximum, at 4."""


def family(policy: str, start: int) -> Family:
    return Family("hill", tuple(System(name="x", pools=(pool(at),), policy=policy) for at in HILL), start)


@pytest.mark.parametrize("start", range(7))
def test_a_climb_ends_at_the_top(start: int, shelf: Shelf, load: UnitLoad) -> None:
    best, one = Best(), sheet(load, HILL)
    assert climb(best, one, shelf, family("least_requests", start), start) == 3
    assert best.system is not None
    assert best.system.pools[0].count == 4
    assert 4.4 / 1.04 <= best.per_gpu <= 4.4


@pytest.mark.parametrize("policies", [("least_requests", "dynamo"), ("dynamo", "least_requests")])
def test_the_best_policy_wins_in_any_order(policies: tuple[str, ...], shelf: Shelf, load: UnitLoad) -> None:
    champion, one = Champion(), sheet(load, HILL)
    for policy in policies:
        champion.meet(one, shelf, [family(policy, 0)])
    assert champion.best.system is not None
    assert champion.best.system.policy == "dynamo"
    assert champion.best.per_gpu == pytest.approx(1.2 * 4.4, rel=0.04)
    assert champion.best.runs == len(one.runs)


def test_a_family_is_dropped_in_one_run_where_another_policy_s_best_is_hopeless(shelf: Shelf, load: UnitLoad) -> None:
    champion, one = Champion(), sheet(load, HILL)
    champion.meet(one, shelf, [family("dynamo", 3)])
    before = len(one.runs)
    poor = sheet(load, {at: value / 2 for at, value in HILL.items()})
    champion.meet(poor, shelf, [family("least_requests", 3)])
    assert (len(one.runs), len(poor.runs)) == (before, 1)


def test_a_champion_that_serves_nothing_is_replaced_by_a_system_that_serves(shelf: Shelf, load: UnitLoad) -> None:
    champion = Champion()
    champion.meet(sheet(load, dict.fromkeys(HILL, 0.0)), shelf, [family("dynamo", 3)])
    assert champion.best.rate == 0
    champion.meet(sheet(load, HILL), shelf, [family("least_requests", 3)])
    assert champion.best.per_gpu == pytest.approx(4.4, rel=0.04)


def test_a_pruned_contest_finds_the_best_of_an_exhaustive_one(shelf: Shelf, load: UnitLoad) -> None:
    """With simulated runs: two policies, two token budgets, and all splits of three GPUs."""
    one, pools = replace(case(load), size=Size(fewest=100, most=100, lives=1.0)), (pool(3),)
    policies = ("round_robin", "dynamo")
    every = [
        each
        for policy in policies
        for made in (
            whole(pools, (512, 8192), policy, admission=False),
            splits(one, shelf, pools, policy, admission=False),
        )
        for each in made.systems
    ]
    exhaustive = max(around(lambda rate, x=each: one.holds(x, shelf, rate), 40.0, 0.1, 500.0) for each in every)
    champion = Champion()
    for policy in policies:
        champion.meet(one, shelf, [whole(pools, (512, 8192), policy, admission=False)])
        champion.meet(one, shelf, [splits(one, shelf, pools, policy, admission=False)])
    assert exhaustive / 1.1**2 <= champion.best.rate <= exhaustive * 1.1
    assert champion.best.runs < 6 * len(every)


# --- arrangements -----------------------------------------------------------------------------------------------------


def test_splits_of_two_types_give_every_gpu_a_role(shelf: Shelf, load: UnitLoad) -> None:
    pools = (pool(2), pool(2, "A100-80G-SXM"))
    made = splits(case(load), shelf, pools, "dynamo", admission=False)
    assert len(made.systems) == 3
    for at, system in enumerate(made.systems, 1):
        assert system.gpus == 4
        assert sum(each.count for each in system.pools if each.role is Role.PREFILL) == at
        assert {each.gpu for each in system.pools} == {GPU, "A100-80G-SXM"}
    mixed = splits(case(load), shelf, pools, "x", admission=True, roles=(Role.BOTH, Role.DECODE), budget=512)
    assert [each.batched_tokens for each in mixed.systems[0].pools] == [512, None, None]


def test_splitwise_knows_its_homes(shelf: Shelf, load: UnitLoad) -> None:
    pools = (pool(2), pool(2, "A100-80G-SXM"))
    system = splits(case(load), shelf, pools, "splitwise", admission=False).systems[2]
    members = shelf.members(MODEL, system.pools)
    assert system.make_policy is not None
    homes = system.make_policy(members).homes  # type: ignore[attr-defined]
    assert [homes[each.name] for each in members] == [Role.PREFILL] * 3 + [Role.DECODE]
    assert {each.role for each in members} == {Role.BOTH}


def test_splitwise_has_its_homes_among_rivals_too(shelf: Shelf) -> None:
    apart = System(name="apart", pools=(replace(pool(2), role=Role.PREFILL), replace(pool(1), role=Role.DECODE)))
    system = mixing(apart)
    members = shelf.members(MODEL, system.pools)
    assert system.make_policy is not None
    homes = system.make_policy(members).homes  # type: ignore[attr-defined]
    assert [homes[each.name] for each in members] == [Role.PREFILL] * 2 + [Role.DECODE]
    assert {each.role for each in members} == {Role.BOTH}


def test_tensor_parallel_pools_have_the_same_gpus(shelf: Shelf, load: UnitLoad) -> None:
    pools = (pool(2), pool(2, "A100-80G-SXM"))
    assert [(each.count, each.tp) for each in doubled(pools)] == [(1, 2), (1, 2)]
    shapes = [
        [(each.role, each.count, each.tp) for each in one.pools] for one in crossed(pools, "x", admission=True).systems
    ]
    assert shapes == [[(Role.PREFILL, 2, 1), (Role.DECODE, 1, 2)], [(Role.PREFILL, 1, 2), (Role.DECODE, 2, 1)]]
    budgets = whole_by_gpu(pools, ((1024, 512),), "x", admission=True).systems[0]
    assert [(each.batched_tokens, each.role) for each in budgets.pools] == [(1024, Role.BOTH), (512, Role.BOTH)]


@pytest.mark.parametrize("policy", ["dynamo, weighted", "splitwise, weighted", "weighted_requests"])
@pytest.mark.parametrize("roles", [(Role.PREFILL, Role.DECODE), (Role.PREFILL, Role.BOTH)])
def test_rivals_are_told_the_speeds(policy: str, roles: tuple[Role, Role], shelf: Shelf, load: UnitLoad) -> None:
    pools, one = (pool(2), pool(2, "A100-80G-SXM")), case(load)
    made = splits(one, shelf, pools, policy, admission=False, roles=roles, budget=512).systems[1]
    system = equipped(one, shelf, made)
    assert homes_of(system) == roles
    assert system.make_policy is not None
    speeds = system.make_policy(shelf.members(MODEL, system.pools)).speeds  # type: ignore[attr-defined]
    assert max(speeds.values()) == 1
    assert len(set(speeds.values())) == 2
    result = simulate(system, MODEL, shelf, load.at_rate(10.0, 100), 2.0, TARGETS)
    assert attainment(result, TARGETS) > 0.9


def test_a_misled_router_sees_the_costs_times_the_factor(shelf: Shelf) -> None:
    true = make_of_member(shelf.members(MODEL, (pool(1),))[0])
    taken = believed(true, 1.2)
    assert true is not None and taken is not None
    assert taken.prompt_ms(3000) == pytest.approx(1.2 * true.prompt_ms(3000))
    assert taken.decode.decode_ms == pytest.approx(1.2 * true.decode.decode_ms)
    assert taken.first_ms == pytest.approx(1.2 * true.first_ms)
    assert (taken.capacity_tokens, taken.budget_tokens) == (true.capacity_tokens, true.budget_tokens)


def test_what_a_router_believes_changes_what_it_does(shelf: Shelf, load: UnitLoad) -> None:
    def run(off: float) -> bytes:
        system = System(name="x", pools=(pool(2),), policy="workload", admission=True, costs_off=off)
        return simulate(system, MODEL, shelf, load.at_rate(40.0, 100), 2.0, TARGETS).columns.tobytes()

    assert run(1.0) == run(1.0)
    assert run(1.0) != run(0.5)


def test_answers_may_be_slower_beside_prompts_than_the_router_believes(shelf: Shelf, load: UnitLoad) -> None:
    def mean_ms(beside: float | None) -> float:
        seen: list[float] = []
        system = System(name="x", pools=(pool(2),), policy="workload", admission=True, beside=beside)

        def watch(world: World) -> None:
            seen.append(world.view.all().inflight.step_model.make(0).beside)

        result = simulate(system, MODEL, shelf, load.at_rate(40.0, 100), 2.0, TARGETS, watch)
        assert set(seen) == {believed_beside}
        return float(result.latency_s("tpot")[result.good()].mean())

    costs = shelf.costs(MODEL, pool(1))
    believed_beside = costs.by_kind.mixed.context_ms / costs.by_kind.decode.context_ms
    assert mean_ms(2.5 * believed_beside) > mean_ms(None)
    assert shelf.with_beside(2.5) is shelf.with_beside(2.5)
