"""No policy attains more than the bound: on small random cases, for any load, fleet and policy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.instance import Role
from costs import shipped
from costs.step import StepCost
from loadgen.arrival import Arrival
from loadgen.report import Targets
from sim.experiments.ceiling import Ceiling, least_token_ms, served
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


@pytest.mark.parametrize("budget", [1, 300, 1024, 3000, 8192])
@pytest.mark.parametrize("start_ms", [-8.0, 0.0, 4.0])
def test_no_number_of_tokens_is_cheaper_than_the_least(budget: int, start_ms: float) -> None:
    cost = StepCost(floor_ms=9.0, start_ms=start_ms, token_ms=0.02, area_ms=0, decode_ms=7, context_ms=0, request_ms=0)
    every = min(cost.matrices_ms(tokens) / tokens for tokens in range(1, budget + 1))
    assert least_token_ms(cost, budget) == pytest.approx(every)
