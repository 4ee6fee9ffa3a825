"""Small goodput searches and comparisons: they are repeatable, and right where the answer is known beforehand."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.instance import Role
from costs import shipped
from costs.step import decoding, prompt
from loadgen.lengths import FixedLength, parse
from loadgen.report import Targets
from sim.baselines import BASELINES
from sim.experiments import distserve, splitwise
from sim.experiments.goodput import attainment, highest, steady
from sim.experiments.loads import Size, fitting, made_up, traced
from sim.experiments.systems import EqualInstances, Serial, Shelf, System, simulate
from sim.experiments.tuning import Best, Case, aggregated, best_of, best_split, consider

MODEL, GPU = "Qwen/Qwen3-32B", "H200"
TINY = Size(fewest=60, most=250, lives=3.0)


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    profiles = shipped.profiles()
    return Shelf(shipped.models(), [*profiles, *distserve.vllm_profiles(profiles)])


def case(tokens: int, answer: int, targets: Targets) -> Case:
    load = made_up("tiny", FixedLength(tokens), FixedLength(answer), 1, 400)
    return Case(name="tiny", model=MODEL, load=load, targets=targets, size=TINY, tolerance=0.1)


def both(one: Case, shelf: Shelf, gpus: int = 8) -> tuple[Best, Best]:
    pool = EqualInstances(role=Role.BOTH, count=1, tp=2, gpu=GPU)
    whole = best_of(one, shelf, aggregated(pool, gpus, (2,), (512, 2048), "least_requests"))
    prefill, decode = (EqualInstances(role=role, count=1, tp=2, gpu=GPU) for role in (Role.PREFILL, Role.DECODE))
    return whole, best_split(one, shelf, (prefill, decode), gpus, "least_requests")


# --- searches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guess", [0.1, 7.0, 500.0])
def test_the_highest_rate_is_found_from_any_guess(guess: float) -> None:
    found = highest(lambda rate: rate <= 10.0, guess, 0.02)
    assert 10.0 / 1.02 <= found.rate <= 10.0
    assert found.runs < 25


def test_where_nothing_holds_the_rate_is_zero() -> None:
    assert highest(lambda _rate: False, 5.0, 0.02).rate == 0.0


def test_a_load_at_another_rate_is_the_same_requests() -> None:
    load = made_up("x", parse("uniform:10-1000"), parse("uniform:1-50"), 3, 50)
    slow, fast = load.at_rate(1.0, 50), load.at_rate(4.0, 20)
    assert [each.input_tokens for each in fast] == [each.input_tokens for each in slow[:20]]
    assert [each.at_s for each in fast] == pytest.approx([each.at_s / 4 for each in slow[:20]])
    assert load.arrivals[-1].at_s == pytest.approx(50, rel=0.5)


def test_a_trace_has_a_mean_rate_of_one_and_fits_the_model() -> None:
    made = made_up("x", FixedLength(3000), FixedLength(3000), 1, 40)
    load = traced("x", (each for each in made.at_rate(7.0, 40)), 40, 2048)
    assert load.arrivals[-1].at_s == pytest.approx(39)
    assert {(each.input_tokens, each.output_tokens) for each in load.arrivals} == {(1024, 1024)}
    assert fitting(load.arrivals[0], 10_000) == load.arrivals[0]


def test_attainment_is_of_the_middle_arrivals(shelf: Shelf) -> None:
    one = case(500, 5, Targets(1000, None, 50, None))
    system = System(name="x", pools=(EqualInstances(role=Role.BOTH, count=1, tp=2, gpu=GPU),))
    result = simulate(system, MODEL, shelf, one.load.at_rate(2.0, 50), 10.0)
    assert steady(result).sum() == 30
    assert not steady(result)[:10].any()
    assert attainment(result, one.targets) == 1.0
    assert attainment(result, Targets(1e-3, None, None, None)) == 0.0


def test_the_same_search_twice(shelf: Shelf) -> None:
    one = case(2000, 50, Targets(1000, None, 20, None))
    first, second = both(one, shelf), both(one, shelf)
    assert first == second
    assert first[0].rate > 0


def test_a_worse_variant_costs_one_run_and_changes_nothing(shelf: Shelf) -> None:
    one = case(2000, 50, Targets(1000, None, 30, None))
    best = Best()
    good = System(name="x", pools=(EqualInstances(role=Role.BOTH, count=2, tp=2, gpu=GPU, batched_tokens=512),))
    bad = System(name="x", pools=(EqualInstances(role=Role.BOTH, count=2, tp=2, gpu=GPU, batched_tokens=16),))
    assert consider(best, one, shelf, good)
    before = best.rate, best.runs
    assert not consider(best, one, shelf, bad)
    assert (best.rate, best.runs, best.system) == (before[0], before[1] + 1, good)


# --- cases whose winner is known --------------------------------------------------------------------------------------


def test_long_prompts_and_a_tight_tpot_are_for_separate_pools(shelf: Shelf) -> None:
    """On one instance, nearly every step would have a chunk of a prompt; such a step takes longer than the target."""
    whole, apart = both(case(8000, 100, Targets(4000, None, 13, None)), shelf)
    assert apart.per_gpu > 1.3 * whole.per_gpu


def test_tiny_prompts_and_loose_targets_are_for_aggregated_serving(shelf: Shelf) -> None:
    """Prefill is hardly any work here, so separate pools leave GPUs idle that could decode."""
    whole, apart = both(case(64, 200, Targets(5000, None, 100, None)), shelf)
    assert whole.per_gpu >= apart.per_gpu > 0


def test_every_policy_serves_both_kinds_of_fleet(shelf: Shelf) -> None:
    one = case(1000, 20, Targets(5000, None, 100, None))
    pair = tuple(EqualInstances(role=role, count=2, tp=2, gpu=GPU) for role in (Role.PREFILL, Role.DECODE))
    for policy in BASELINES:
        for pools in (pair, (EqualInstances(role=Role.BOTH, count=3, tp=2, gpu=GPU),)):
            system = System(name=policy, pools=pools, policy=policy)
            result = simulate(system, MODEL, shelf, one.load.at_rate(5.0, 60), 30.0)
            assert result.good().all(), (policy, result.details)
            assert bool(result.counts["pulls"]) is (len(pools) == 2)


# --- the papers -------------------------------------------------------------------------------------------------------


def test_serial_steps_take_as_long_as_both(shelf: Shelf) -> None:
    costs = shelf.costs(MODEL, EqualInstances(role=Role.BOTH, count=1, tp=2, gpu=GPU))
    serial = Serial(costs)
    mixed = prompt(700) + decoding(30, 30_000)
    assert serial.step_ns(mixed) == costs.step_ns(prompt(700)) + costs.step_ns(decoding(30, 30_000))
    assert serial.step_ns(mixed) > costs.step_ns(mixed)
    assert serial.step_ns(prompt(700)) == costs.step_ns(prompt(700))
    assert serial.decode_run_ns(30, 30_000, 7) == costs.decode_run_ns(30, 30_000, 7)


@pytest.mark.long
def test_distserve_beats_vllm_of_2023_and_more_so_as_targets_tighten(shelf: Shelf) -> None:
    """The paper's own claim. It does not hold against chunked prefill (docs/benchmarks.md)."""
    application = distserve.APPLICATIONS[0]
    rows = distserve.compare(application, application.load(600), shelf, TINY, 0.1, (1.0, 0.75))
    assert rows[0].over_old is not None
    assert rows[0].over_old > 1.5
    assert rows[1].over_old is None or rows[1].over_old > rows[0].over_old
    assert rows[0].same.per_gpu > rows[0].old.per_gpu


def test_splitwise_designs_keep_their_budget() -> None:
    for designs, weight in ((splitwise.ISO_POWER, splitwise.POWER), (splitwise.ISO_COST, splitwise.COST)):
        totals = [sum(weight[kind] * count for kind, count in each.machines) for each in designs]
        assert min(totals) > 0.89 * max(totals)
        for design in designs:
            for variant in design.splits(weight, max(totals)):
                assert sum(weight[kind] * count for kind, count in variant.machines) <= max(totals) + 1e-6


def test_splitting_serves_a_rate_that_its_own_baseline_does_not(shelf: Shelf) -> None:
    """Splitwise's own claim, at equal power. Machines with both roles hand over no request."""
    model = "meta-llama/Llama-2-70b-hf"
    lengths = parse("lognormal:mean=1155,cv=1"), parse("lognormal:mean=211,cv=1")
    arrivals = made_up("x", *lengths, 1, 700, splitwise.LENGTH_MAX).at_rate(13.5, 700)
    alone = splitwise.Alone(splitwise.reference(model, shelf))
    whole, apart = (
        simulate(splitwise.system(design, model), model, shelf, arrivals, 10.0)
        for design in (splitwise.ISO_POWER[0], splitwise.Design(name="x", prompt=("A", 7), token=("A", 7)))
    )
    assert not splitwise.within(alone, whole)
    assert splitwise.within(alone, apart)
    assert whole.counts["pulls"] == 0 and apart.counts["pulls"] == len(arrivals)


def test_slowdowns_of_a_lone_request_are_about_one(shelf: Shelf) -> None:
    design = splitwise.Design(name="x", prompt=("A", 1))
    model = "meta-llama/Llama-2-70b-hf"
    system = splitwise.system(design, model)
    load = made_up("x", FixedLength(1000), FixedLength(50), 1, 30)
    result = simulate(system, model, shelf, load.at_rate(0.05, 30), 60.0)
    alone = splitwise.Alone(shelf.costs(model, system.pools[0]))
    for name, values in alone.slowdowns(result).items():
        assert np.median(values) == pytest.approx(1.0, abs=0.1), name
    assert splitwise.within(alone, result)
