"""No policy attains more than the bound: on small random cases, for any load, fleet and policy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import policy_sustained
from bench.policy_sustained import Lasting, repeated, repeats, sustained
from cluster.instance import Role
from costs import shipped
from costs.step import StepCost
from loadgen.arrival import Arrival
from loadgen.report import Targets
from sim.experiments.ceiling import Ceiling, Needs, least_token_ms, served
from sim.experiments.contest import crossed, doubled, equipped, splits, whole
from sim.experiments.goodput import attainment
from sim.experiments.loads import Size, UnitLoad
from sim.experiments.systems import EqualInstances, Shelf, System, simulate
from sim.experiments.tuning import Case

MODEL = "meta-llama/Llama-3.1-8B"
POLICIES = (
    "workload",
    "dynamo",
    "dynamo_conditional",
    "splitwise",
    "llm_d_latency",
    "least_requests",
    "weighted_requests",
)
BUDGET = 1024


@cache
def shelf() -> Shelf:
    return Shelf(shipped.models(), shipped.profiles())


def case_of(seed: int, inputs: int, outputs: int, targets: Targets, *, shared: bool) -> Case:
    rng = np.random.default_rng(seed)
    count = 60
    gaps = rng.exponential(1.0, count) * np.where(rng.random(count) < 0.3, 0.05, 1.0)
    at = np.cumsum(gaps) / gaps.mean()
    ins, outs = (rng.lognormal(np.log(each), 0.9, count) for each in (inputs, outputs))
    arrivals = [
        Arrival(
            at_s=float(at[row]),
            input_tokens=int(ins[row]) + 1,
            output_tokens=int(outs[row]) + 1,
            prefix=tuple(range(100, 100 + int(ins[row]) // 128)) if shared and row % 3 else (),
            block_tokens=128 if shared and row % 3 else 0,
        )
        for row in range(count)
    ]
    size = Size(fewest=count, most=count, lives=1.0)
    return Case(name="x", model=MODEL, load=UnitLoad("x", arrivals), targets=targets, size=size, tolerance=0.1)


def pools(*, mixed: bool, shared: bool) -> tuple[EqualInstances, ...]:
    gpus = (("H100", 2), ("A100-80G-SXM", 2)) if mixed else (("H100", 2),)
    return tuple(
        EqualInstances(role=Role.BOTH, count=count, tp=1, gpu=gpu, prefix_caching=shared, block_tokens=128)
        for gpu, count in gpus
    )


def arrangements(case: Case, fleet: tuple[EqualInstances, ...], policy: str, *, admission: bool) -> list[System]:
    found = [*whole(fleet, (BUDGET,), policy, admission=admission).systems]
    found += whole(doubled(fleet), (BUDGET,), policy, admission=admission).systems
    for roles in ((Role.PREFILL, Role.DECODE), (Role.PREFILL, Role.BOTH), (Role.BOTH, Role.DECODE)):
        found += splits(case, shelf(), fleet, policy, admission=admission, roles=roles, budget=BUDGET).systems
    if len(fleet) > 1:
        found += crossed(fleet, policy, admission=admission).systems
    return [equipped(case, shelf(), each) for each in found]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_policy_attains_more_than_the_bound(data: st.DataObject) -> None:
    shared, mixed, admission = (data.draw(st.booleans()) for _ in range(3))
    targets = Targets(
        data.draw(st.sampled_from([100.0, 250.0, 600.0, 2500.0])), None, data.draw(st.sampled_from([9.0, 15, 40, 90]))
    )
    sizes = data.draw(st.sampled_from([(300, 300), (2000, 20), (2000, 200), (8000, 100), (100, 5)]))
    case = case_of(data.draw(st.integers(0, 10_000)), *sizes, targets, shared=shared)
    fleet = pools(mixed=mixed, shared=shared)
    policy = data.draw(st.sampled_from(POLICIES))
    system = data.draw(st.sampled_from(arrangements(case, fleet, policy, admission=admission)))
    rate = data.draw(st.sampled_from([1.0, 4.0, 12.0, 40.0, 150.0]))
    made = [replace(each, batched_tokens=tokens) for each in (*fleet, *doubled(fleet)) for tokens in (None, BUDGET)]
    bound = Ceiling.of(case, shelf(), made, case.load.arrivals)
    result = simulate(system, MODEL, shelf(), case.load.at_rate(rate, 60), case.expires_s, targets)
    in_window, overall = attainment(result, targets), float(result.met(targets).mean())
    assert in_window <= bound.attainment(rate) + 1e-9
    assert overall <= bound.overall(rate) + 1e-9
    assert min(in_window, overall) <= bound.least(rate) + 1e-9


def test_the_bound_falls_with_the_rate_and_is_not_far_above_a_policy() -> None:
    """The bound is 1 for a fleet with little load, and falls with the rate. The policy `workload` reaches the target at
    a fourth of the bound's goodput.
    """
    case = case_of(3, 2000, 100, Targets(600, None, 60), shared=False)
    fleet = pools(mixed=False, shared=False)
    bound = Ceiling.of(case, shelf(), [replace(each, batched_tokens=BUDGET) for each in fleet], case.load.arrivals)
    attained = [bound.least(rate) for rate in (1.0, 20.0, 60.0, 200.0, 1000.0)]
    assert attained[0] == 1
    assert attained[-1] < 0.9
    assert all(one >= other - 1e-9 for one, other in pairwise(attained))
    goodput = bound.goodput(0.9, 10.0)
    assert bound.least(goodput * 1.001) < 0.9
    system = whole(fleet, (BUDGET,), "workload", admission=True).systems[0]
    result = simulate(system, MODEL, shelf(), case.load.at_rate(goodput / 4, 60), case.expires_s, case.targets)
    assert attainment(result, case.targets) >= 0.9


@given(
    jobs=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=9),
    capacity=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_the_greedy_bound_is_at_least_the_best_set_that_fits(jobs: list[tuple[int, int, int]], capacity: int) -> None:
    """The bound is compared with all subsets of the jobs. A subset fits if, in each interval, the work that begins and
    ends there is at most the capacity of the interval.
    """
    begun, lasts, work = (np.array(each, dtype=np.float64) for each in zip(*jobs, strict=True))
    ends = begun + lasts

    def fits(chosen: np.ndarray) -> bool:
        return all(
            work[chosen & (begun >= start) & (ends <= end)].sum() <= capacity * (end - start)
            for start in begun
            for end in ends
            if end > start
        )

    sets = (np.array([at >> bit & 1 for bit in range(len(jobs))], dtype=bool) for at in range(1 << len(jobs)))
    best = max(int(chosen.sum()) for chosen in sets if fits(chosen))
    found = served(begun, ends, work, float(capacity))
    assert best <= found + 1e-9 <= len(jobs) + 2e-9


# --- the bound of loads that last -------------------------------------------------------------------------------------


def lasting(case: Case, fleet: tuple[EqualInstances, ...]) -> Lasting:
    made = [replace(each, batched_tokens=tokens) for each in (*fleet, *doubled(fleet)) for tokens in (None, BUDGET)]
    return Lasting.of(case, shelf(), made, case.load.arrivals)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_policy_attains_more_of_a_repeated_load_than_the_bound(data: st.DataObject) -> None:
    shared, mixed, admission = (data.draw(st.booleans()) for _ in range(3))
    targets = Targets(
        data.draw(st.sampled_from([100.0, 250.0, 600.0, 2500.0])), None, data.draw(st.sampled_from([9.0, 15, 40, 90]))
    )
    sizes = data.draw(st.sampled_from([(300, 300), (2000, 20), (2000, 200), (100, 5)]))
    one = case_of(data.draw(st.integers(0, 10_000)), *sizes, targets, shared=shared)
    case = repeated(one, data.draw(st.integers(1, 3)))
    fleet = pools(mixed=mixed, shared=shared)
    policy = data.draw(st.sampled_from(POLICIES))
    system = data.draw(st.sampled_from(arrangements(case, fleet, policy, admission=admission)))
    rate = data.draw(st.sampled_from([1.0, 12.0, 40.0, 150.0]))
    bound = lasting(case, fleet)
    result = simulate(system, MODEL, shelf(), case.load.at_rate(rate, case.size.fewest), case.expires_s, targets)
    in_window, overall = attainment(result, targets), float(result.met(targets).mean())
    assert len(result.met(targets)) == case.size.fewest
    assert in_window <= bound.attainment(rate) + 1e-9
    assert overall <= bound.overall(rate) + 1e-9
    assert min(in_window, overall) <= bound.least(rate) + 1e-9


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.sampled_from([1, 5, 90, 400]),
    load=st.sampled_from([0.2, 0.9, 1.5, 10.0]),
    lasts=st.sampled_from([0.5, 5.0, 100.0]),
)
def test_many_requests_at_once_are_served_as_one_by_one(seed: int, count: int, load: float, lasts: float) -> None:
    rng = np.random.default_rng(seed)
    begun = np.cumsum(rng.exponential(1.0, count))
    ends = begun + rng.exponential(lasts, count)
    work = rng.lognormal(0.0, 1.0, count)
    work[rng.random(count) < 0.05] = 0.0
    work[rng.random(count) < 0.05] = np.inf
    capacity = 1.6 / load
    assert policy_sustained.served(begun, ends, work, capacity) == pytest.approx(
        served(begun, ends, work, capacity), rel=1e-6
    )


def test_a_load_that_lasts_has_a_bound_where_a_short_one_has_none() -> None:
    """The 60 requests of one window can be served within the last one's targets at any rate. Repeated they last four
    lives at the bound's rate, which is the lowest of the lattice at which nine in ten are not attained.
    """
    case = case_of(3, 300, 100, Targets(600, None, 40), shared=False)
    fleet = pools(mixed=False, shared=False)
    assert lasting(case, fleet).least(1e6) == 1
    found, longer = (sustained(case, lambda each: lasting(each, fleet), 0.9, lives) for lives in (4.0, 8.0))
    assert longer.rate < found.rate
    for each, lives in ((found, 4.0), (longer, 8.0)):
        assert each.lives is not None
        assert each.requests == repeats(case, each.rate, lives) * 60
        assert each.lives == pytest.approx(each.requests / each.rate / case.life_s)
        assert lives <= each.lives <= lives + 60 / each.rate / case.life_s
        last = lasting(repeated(case, each.requests // 60), fleet)
        assert last.least(each.rate, 0.9) < 0.9
        below = each.rate / policy_sustained.STEP
        assert lasting(repeated(case, repeats(case, below, lives)), fleet).least(below, 0.9) >= 0.9


def test_where_a_window_lasts_both_bounds_are_one() -> None:
    case = case_of(3, 2000, 5, Targets(250, None, 15), shared=False)
    fleet = pools(mixed=False, shared=False)
    found = sustained(case, lambda each: lasting(each, fleet), 0.9, 1.0)
    first = lasting(case, fleet).goodput(0.9, found.rate)
    assert found.requests == 60
    assert found.lives is not None
    assert found.lives > 2, "one window lasts more than is asked for"
    assert found.rate == pytest.approx(first, rel=0.04), "on two lattices"


def test_a_share_that_no_idle_fleet_attains_has_no_bound() -> None:
    case = case_of(3, 300, 300, Targets(600, None, 1.0), shared=False)
    fleet = pools(mixed=False, shared=False)
    assert sustained(case, lambda each: lasting(each, fleet), 0.9, 4.0).rate == 0


def test_repeats_come_one_after_the_other_and_share_no_prefix() -> None:
    case = case_of(5, 2000, 100, Targets(600, None, 40), shared=True)
    twice = repeated(case, 2)
    assert twice.size.fewest == len(twice.load.arrivals) == 120
    assert [each.at_s for each in twice.load.arrivals[60:]] == [60 + each.at_s for each in case.load.arrivals]
    one, both = (Needs.of(each.load.arrivals, (0.0, 1.0), caches=True) for each in (case, twice))
    assert one.new.sum() < one.prompt.sum() / 2, "requests of one window share much"
    assert both.new.tolist() == [*one.new, *one.new]


@pytest.mark.parametrize("budget", [1, 300, 1024, 3000, 8192])
@pytest.mark.parametrize("start_ms", [-8.0, 0.0, 4.0])
def test_no_number_of_tokens_is_cheaper_than_the_least(budget: int, start_ms: float) -> None:
    cost = StepCost(floor_ms=9.0, start_ms=start_ms, token_ms=0.02, area_ms=0, decode_ms=7, context_ms=0, request_ms=0)
    every = min(cost.matrices_ms(tokens) / tokens for tokens in range(1, budget + 1))
    assert least_token_ms(cost, budget) == pytest.approx(every)
