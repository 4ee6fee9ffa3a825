"""Laws of the cost model under any coefficients and any work: more work never takes less, integers add up exactly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from costs import shipped
from costs.fit import fit_columns
from costs.hardware import GPUS, Gpu
from costs.memory import kv_capacity_tokens
from costs.model import ModelShape
from costs.roofline import roofline
from costs.shape import Spans
from costs.step import StepCost, StepWork, decoding, prompt
from costs.ticks import Ticks, floor_sum
from costs.transfer import handoff, nic

MODELS = st.sampled_from(
    sorted({model.name: model for model in shipped.models().values()}.values(), key=lambda m: m.name)
)
BOARDS = st.sampled_from(list(GPUS.values()))
TP = st.sampled_from([1, 2, 4, 8])
MS = st.floats(0, 100)
COSTS = st.builds(
    StepCost,
    floor_ms=MS,
    start_ms=st.floats(-20, 50),
    token_ms=st.floats(0, 0.5),
    area_ms=st.floats(0, 1e-5),
    decode_ms=MS,
    context_ms=st.floats(0, 1e-3),
    request_ms=st.floats(0, 0.3),
    crowd_ms=st.floats(0, 0.3),
    crowd_from=st.floats(0, 300),
    experts_ms=st.sampled_from([0.0, 0.0, 1.0, 40.0]),
    expert_miss=st.floats(0, 1),
)
READING = st.builds(lambda cost, cached_ms: replace(cost, cached_ms=cached_ms), COSTS, st.floats(0, 5e-3))
"""Costs that charge the reading of a chunk's prefix."""
FITTED = st.sampled_from([profile.cost for profile in shipped.profiles()])
NEW, CACHED = st.integers(0, 40_000), st.integers(0, 100_000)
BATCH, CONTEXT = st.integers(0, 1024), st.integers(0, 8_000_000)
SLACK = 1 - 1e-12
"""Allows for rounding: sums of floats in another order."""


def work(new: int, cached: int, batch: int, context: int) -> StepWork:
    return prompt(new, cached) + decoding(batch, context if batch else 0)


# -- more work never takes less time --


@given(COSTS | READING | FITTED, NEW, CACHED, BATCH, CONTEXT, st.integers(1, 3000))
def test_time_grows_with_tokens(cost: StepCost, new: int, cached: int, batch: int, context: int, more: int) -> None:
    before, after = work(new, cached, batch, context), work(new + more, cached, batch, context)
    assert cost.step_ms(after) >= cost.step_ms(before) * SLACK


@given(COSTS | READING | FITTED, NEW, CACHED, BATCH, CONTEXT, st.integers(1, 3000))
def test_time_grows_with_cached_tokens(
    cost: StepCost, new: int, cached: int, batch: int, context: int, more: int
) -> None:
    before, after = work(new, cached, batch, context), work(new, cached + more, batch, context)
    assert cost.step_ms(after) >= cost.step_ms(before) * SLACK


@given(COSTS | READING | FITTED, NEW, CACHED, BATCH, CONTEXT, st.integers(1, 100))
def test_time_grows_with_the_batch(cost: StepCost, new: int, cached: int, batch: int, context: int, more: int) -> None:
    before, after = work(new, cached, batch, context), work(new, cached, batch + more, context)
    assert cost.step_ms(after) >= cost.step_ms(before) * SLACK


@given(COSTS | READING | FITTED, NEW, CACHED, BATCH, CONTEXT, st.integers(1, 100_000))
def test_time_grows_with_context(cost: StepCost, new: int, cached: int, batch: int, context: int, more: int) -> None:
    before, after = work(new, cached, batch, context), work(new, cached, batch, context + more)
    assert cost.step_ms(after) >= cost.step_ms(before) * SLACK


@given(FITTED, st.integers(16, 30_000), st.integers(1, 30_000))
def test_a_cached_prefix_of_a_block_or_more_saves_time(cost: StepCost, cached: int, new: int) -> None:
    assert cost.step_ms(prompt(new, cached)) <= cost.step_ms(prompt(new + cached)) * (1 + 1e-12)


# -- integers --


@given(st.integers(0, 60), st.integers(1, 1 << 20), st.integers(0, 1 << 30), st.integers(0, 1 << 30))
def test_floor_sum_is_the_sum(count: int, modulus: int, slope: int, start: int) -> None:
    assert floor_sum(count, modulus, slope, start) == sum((slope * at + start) // modulus for at in range(count))


@given(COSTS | FITTED, BATCH, CONTEXT, st.integers(0, 80))
def test_a_run_takes_exactly_the_sum_of_its_steps(cost: StepCost, batch: int, context: int, steps: int) -> None:
    ticks = Ticks.of(cost)
    single = [ticks.decode_step_ns(batch, context + batch * at) for at in range(steps)]
    assert ticks.decode_run_ns(batch, context, steps) == sum(single)


@given(FITTED, st.integers(1, 512), CONTEXT, st.integers(0, 5000), st.integers(0, 5000))
def test_a_run_may_be_cut_anywhere(cost: StepCost, batch: int, context: int, first: int, second: int) -> None:
    ticks = Ticks.of(cost)
    cut = ticks.decode_run_ns(batch, context, first) + ticks.decode_run_ns(batch, context + batch * first, second)
    assert ticks.decode_run_ns(batch, context, first + second) == cut


@given(COSTS | FITTED, st.integers(1, 512), CONTEXT, st.integers(-5, 10**11))
def test_the_steps_for_a_time_are_the_fewest(cost: StepCost, batch: int, context: int, duration_ns: int) -> None:
    assume(cost.decode_ms >= 0.01 or duration_ns < 10**6)
    ticks = Ticks.of(cost)
    steps = ticks.decode_steps_for(batch, context, duration_ns)
    assert ticks.decode_run_ns(batch, context, steps) >= duration_ns
    assert steps == 0 or ticks.decode_run_ns(batch, context, steps - 1) < duration_ns


@given(COSTS | READING | FITTED, NEW, CACHED, BATCH, CONTEXT)
def test_ticks_in_ns_equal_the_costs_in_ms(cost: StepCost, new: int, cached: int, batch: int, context: int) -> None:
    step = work(new, cached, batch, context)
    assert Ticks.of(cost).step_ns(step) == pytest.approx(cost.step_ms(step) * 1e6, rel=1e-8, abs=3)


@given(FITTED, NEW, CACHED, BATCH, CONTEXT, st.integers(0, 500))
def test_ticks_grow_with_tokens_and_batch(
    cost: StepCost, new: int, cached: int, batch: int, context: int, more: int
) -> None:
    ticks = Ticks.of(cost)
    before = ticks.step_ns(work(new, cached, batch, context))
    assert ticks.step_ns(work(new + more, cached, batch, context)) >= before
    assert ticks.step_ns(work(new, cached, batch + more, context)) >= before
    assert ticks.step_ns(work(new, cached + more, batch, context)) >= before


# -- sizes --


@given(MODELS, TP, BOARDS)
def test_more_ranks_never_need_more_memory_each(model: ModelShape, tp: int, gpu: Gpu) -> None:
    few, many = Spans(tp=tp), Spans(tp=2 * tp)
    assert model.weight_bytes_per_gpu(many) <= model.weight_bytes_per_gpu(few)
    assert model.kv_bytes_per_token_per_gpu(many) <= model.kv_bytes_per_token_per_gpu(few)
    capacity = [kv_capacity_tokens(model, gpu, shape, batched_tokens=2048) for shape in (few, many)]
    assert capacity[1] >= capacity[0] or tp == 1, "with tp = 1 there are no NCCL buffers, so two ranks may have less"


@given(MODELS, TP, st.integers(1, 4))
def test_stages_never_need_more_memory_each(model: ModelShape, tp: int, pp: int) -> None:
    few, many = Spans(tp=tp, pp=pp), Spans(tp=tp, pp=pp + 1)
    assert model.weight_bytes_per_gpu(many) <= model.weight_bytes_per_gpu(few)


@given(MODELS, BOARDS, TP)
def test_every_roofline_is_a_step_cost(model: ModelShape, gpu: Gpu, tp: int) -> None:
    """Steps of a roofline take more than 0 ms, and more work takes no less time."""
    cost = roofline(model, gpu, Spans(tp=tp))
    assert 0 < cost.step_ms(decoding(1, 100)) <= cost.step_ms(decoding(8, 800))
    assert cost.step_ms(prompt(64)) <= cost.step_ms(prompt(4096))


@given(MODELS, TP, TP, st.integers(0, 50_000), st.integers(1, 16))
def test_transfers(model: ModelShape, source: int, target: int, tokens: int, sharers: int) -> None:
    moved = handoff(model, tokens, Spans(tp=source), Spans(tp=target))
    link = nic(GPUS["H100-SXM"], GPUS["H200"])
    assert moved.size_bytes >= model.kv_bytes_per_token() * tokens
    assert moved.ms(link) <= moved.ms(link, sharers=sharers) <= sharers * moved.ms(link) * (1 + 1e-12)
    assert handoff(model, tokens + 16, Spans(tp=source), Spans(tp=target)).ms(link) > moved.ms(link)


# -- fits --


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e9)), min_size=4, max_size=12),
    st.floats(0.1, 50),
    st.floats(0, 1e-2),
    st.floats(0, 1e-6),
)
def test_fits_are_never_negative(
    points: list[tuple[float, float]], constant: float, first: float, second: float
) -> None:
    columns = np.array([[1.0, one, two] for one, two in points])
    measured = columns @ np.array([constant, first, second])
    found = fit_columns(columns, measured)
    assert (found >= 0).all()
    assert np.abs(columns @ found / measured - 1).max() <= 1e-5
