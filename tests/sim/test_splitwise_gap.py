"""The Splitwise paper's assumptions as wrappers: each follows its source, and a simulation can run with all of them."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from costs import shipped
from costs.step import StepWork
from loadgen.lengths import parse
from sim.experiments import splitwise_gap as gap
from sim.experiments.loads import made_up
from sim.experiments.splitwise import Design
from sim.experiments.systems import Shelf

TABLE = """model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel
bloom-176b,a100-80gb,128,1,128,80,48,8
bloom-176b,a100-80gb,128,1,128,84,48,8
bloom-176b,a100-80gb,1024,1,128,290,50,8
bloom-176b,a100-80gb,512,2,128,290,50,8
bloom-176b,a100-80gb,2048,1,128,540,52,8
bloom-176b,a100-80gb,2048,1,128,1,1,4
bloom-176b,h100-80gb,128,1,128,48,36,8
bloom-176b,h100-80gb,2048,1,128,252,37,8
opt-66b,a100-80gb,2048,1,128,1,1,8
"""
MS = 1_000_000


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], gap.Lookup]:
    return gap.lookups(csv.DictReader(TABLE.splitlines()))


def test_a_lookup_interpolates_linearly_between_medians(found: dict[tuple[str, str], gap.Lookup]) -> None:
    assert set(found) == {(gap.MODEL, "A"), (gap.MODEL, "H")}
    times = found[gap.MODEL, "A"]
    assert times.tokens == (128, 1024, 2048)
    assert times.prompt_ms(128) == 82 and times.prompt_ms(1536) == pytest.approx(415)
    assert times.prompt_ms(3072) == pytest.approx(790), "beyond the last point by its last slope"
    assert times.token_ms(1) == pytest.approx(48 - 127 * 2 / 896)


def test_steps_by_the_number_of_tokens(found: dict[tuple[str, str], gap.Lookup]) -> None:
    costs = gap.ByTokens(found[gap.MODEL, "A"])
    assert costs.step_ns(StepWork(new_tokens=1024, area=1024**2)) == 290 * MS
    few, many = costs.step_ns(StepWork(batch=1, sum_context=10)), costs.step_ns(StepWork(batch=60, sum_context=90_000))
    assert many < 1.01 * few, "neither batch nor context adds much time"
    both = StepWork(new_tokens=1004, area=1004**2, batch=20, sum_context=20_000)
    assert costs.step_ns(both) == 319 * MS
    full = StepWork(new_tokens=2040, area=2040**2, batch=20, sum_context=20_000)
    first = gap.ByTokens(found[gap.MODEL, "A"], prompts_first=True)
    assert first.step_ns(both) == costs.step_ns(both)
    assert first.step_ns(full) == costs.step_ns(StepWork(new_tokens=2040)) + costs.step_ns(StepWork(batch=20))
    none = gap.ByTokens(found[gap.MODEL, "A"], stalled=True)
    assert none.step_ns(both) == costs.step_ns(StepWork(new_tokens=1004)) + costs.step_ns(StepWork(batch=20))
    run = costs.decode_run_ns(20, 20_000, 7)
    assert costs.decode_steps_for(20, 20_000, run) == 7 and costs.decode_steps_for(20, 20_000, run + 1) == 8


def test_each_step_assumes_one_thing_more() -> None:
    values = [[getattr(assumed, name) for name, _ in gap._SAID] for _, assumed in gap.STEPS]
    assert [sum(each) for each in values] == list(range(len(gap._SAID) + 1))


def test_a_drawn_load_has_the_lengths_of_a_load_but_not_its_pairs() -> None:
    load = made_up("x", parse("uniform:10-1000"), parse("uniform:2-50"), 3, 200)
    made = gap.drawn(load, 500, 1)
    assert len(made.arrivals) == 500 and made.arrivals[-1].at_s == pytest.approx(500, rel=0.2)
    assert {each.input_tokens for each in made.arrivals} <= {each.input_tokens for each in load.arrivals}
    pairs = {(each.input_tokens, each.output_tokens) for each in load.arrivals}
    assert np.mean([(each.input_tokens, each.output_tokens) in pairs for each in made.arrivals]) < 0.2


@pytest.mark.parametrize("assumed", [gap.STEPS[0][1], gap.STEPS[-2][1]], ids=["ours", "theirs"])
def test_a_load_is_served_or_is_not(assumed: gap.Assumed, found: dict[tuple[str, str], gap.Lookup]) -> None:
    load = made_up("x", parse("lognormal:mean=1000,cv=0.5"), parse("lognormal:mean=60,cv=0.5"), 1, 80)
    ground = gap.Ground(
        model=gap.MODEL,
        load=load,
        shelf=Shelf(shipped.models(), shipped.profiles()),
        lookups=found,
        requests=80,
        tolerance=0.2,
    )
    pair = Design(name="x", prompt=("H", 2), token=("A", 2))
    assert ground.holds(pair, assumed, 0.1)
    assert not ground.holds(pair, assumed, 50.0)
