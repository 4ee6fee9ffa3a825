"""The points of `baton profile`, on virtual time: fitted costs equal the twin's own."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from support.twin import World, ask, text

from costs.fit import DecodeRow, PrefillRow, fit_decode, fit_prefill
from costs.step import KNEE_TOKENS, StepCost
from costs.ticks import Ticks
from engine.twin import events as ev
from engine.twin.config import TwinConfig
from loadgen.arrival import Arrival
from loadgen.measure import (
    KV_SHARE,
    EngineLimits,
    Point,
    PrefillSeconds,
    Prompt,
    Rejected,
    Streams,
    arrivals,
    decode_row,
    expected_s,
    less,
    points,
    prefill_row,
    prefill_seconds,
    too_short,
    way_ms,
)
from loadgen.record import Record, Timings, record_of

COST = StepCost(
    floor_ms=7.5,
    start_ms=-3.0,
    token_ms=0.021,
    area_ms=1.2e-6,
    decode_ms=6.1,
    context_ms=4.0e-5,
    request_ms=0.031,
    crowd_ms=0.05,
    crowd_from=16,
)
CONFIG = TwinConfig(max_num_batched_tokens=4096, num_blocks=12_000, max_model_len=16_384)
LIMITS = EngineLimits(prompt_tokens=4096, context_tokens=16_384, batch=64, kv_tokens=16 * 12_000)


def records(point: Point, config: TwinConfig = CONFIG, cost: StepCost = COST) -> list[Record]:
    """What a sender would record of this point, on a twin's clock; prompts go one at a time."""
    costs = Ticks.of(cost)
    world = World({"engine": config}, costs)  # type: ignore[arg-type]
    start = {}
    for number, arrival in enumerate(arrivals(point)):
        name = str(number)
        start[name] = world.now
        request = ask(name, text((1 + number, arrival.input_tokens)), arrival.output_tokens)
        world.send(world.now, "engine", ev.Submit(request))
        if isinstance(point, Prompt):
            world.play()
    world.play()
    tokens = world.records["engine"].tokens(costs)  # type: ignore[arg-type]
    found = []
    for number, arrival in enumerate(arrivals(point)):
        times = array("d", [at / 1e9 for _, (at, _) in sorted(tokens[str(number)].items())])
        timings = Timings(start[str(number)] / 1e9, times[0], times[-1], times)
        record = record_of(number, arrival, timings, token_times=True)
        record.prompt_tokens, record.completion_tokens = arrival.input_tokens, len(times)
        found.append(record)
    return found


def test_fit_gives_back_what_the_twin_costs() -> None:
    prefills, decodes = [], []
    for point in points(LIMITS):
        row = prefill_row(records(point)) if isinstance(point, Prompt) else decode_row(records(point))
        assert not isinstance(row, Rejected), (point, row)
        (prefills if isinstance(row, PrefillRow) else decodes).append(row)
    decode = fit_decode([row for row in decodes if isinstance(row, DecodeRow)])
    prefill = fit_prefill([row for row in prefills if isinstance(row, PrefillRow)], floor_ms=decode.decode_ms)
    for name in ("floor_ms", "start_ms", "token_ms", "area_ms"):
        assert getattr(prefill, name) == pytest.approx(getattr(COST, name), rel=0.01), name
    for name in ("decode_ms", "context_ms", "request_ms", "crowd_ms", "crowd_from"):
        assert getattr(decode, name) == pytest.approx(getattr(COST, name), rel=0.01), name
    assert max(prefill.error.max, prefill.small_error.max, decode.error.max) < 0.002


def test_a_row_is_the_step_itself() -> None:
    prefill = prefill_row(records(Prompt(tokens=2000)))
    assert isinstance(prefill, PrefillRow)
    assert prefill.new_tokens == 2000
    assert prefill.area == 2000**2
    assert prefill.ms == pytest.approx(-3.0 + 0.021 * 2000 + 1.2e-6 * 2000**2, abs=0.002)
    decode = decode_row(records(Streams(batch=8, context=1000, steps=40)))
    assert isinstance(decode, DecodeRow)
    assert decode.batch == 8
    assert decode.ms == pytest.approx(6.1 + 8 * 0.031 + 4.0e-5 * decode.sum_context, abs=0.002)


def test_streams_that_did_not_run_together_are_no_measurement() -> None:
    found = decode_row(records(Streams(batch=8, context=100, steps=40), replace(CONFIG, max_num_seqs=6)))
    assert isinstance(found, Rejected)
    assert "only 0 steps had all 8 streams" in found.why


def test_answers_that_tell_nothing_are_rejected_with_the_reason() -> None:
    whole = records(Streams(batch=2, context=100, steps=40))
    whole[1].completion_tokens = 50
    assert decode_row(whole) == Rejected("events carry more than one token each")
    empty = records(Streams(batch=2, context=100, steps=40))
    empty[1].completion_tokens, empty[1].token_s, empty[1].chunks = 0, (), 0
    assert decode_row(empty) == Rejected("an answer ended without a token")
    whole[0].error, whole[0].detail = "http_400", "too long"
    assert decode_row(whole) == Rejected("http_400: too long")
    assert prefill_row(whole) == Rejected("http_400: too long")
    assert isinstance(decode_row([]), Rejected)
    assert prefill_row([]) == Rejected("not enough answers")


def test_the_way_is_the_senders_time_less_the_engines() -> None:
    metrics = (
        'vllm:request_prefill_time_seconds_bucket{engine="0",le="0.3"} 7.0\n'
        'vllm:request_prefill_time_seconds_sum{engine="0",model_name="a b"} 1.5\n'
        'vllm:request_prefill_time_seconds_count{engine="0",model_name="a b"} 7.0\n'
        'vllm:request_prefill_time_seconds_sum{engine="1",model_name="a b"} 1e-01\n'
        'vllm:request_prefill_time_seconds_count{engine="1",model_name="a b"} 3\n'
    )
    before = prefill_seconds(metrics)
    assert before == PrefillSeconds(pytest.approx(1.6), 10)
    assert prefill_seconds("vllm:num_requests_running 1\n") is None
    found = records(Prompt(tokens=2000))
    engine_s = 5 * (-3.0 + 0.021 * 2000 + 1.2e-6 * 2000**2 - 2.0) / 1000
    assert way_ms(found, before, PrefillSeconds(1.6 + engine_s, 15)) == pytest.approx(2.0, abs=0.002)
    assert way_ms(found, before, PrefillSeconds(1.6 + engine_s, 14)) is None, "one of them is not counted by the engine"
    assert way_ms(found, before, None) is None
    row = prefill_row(found)
    assert isinstance(row, PrefillRow)
    assert less(row, 2.0) == row._replace(ms=row.ms - 2.0)
    assert isinstance(less(row, 200.0), Rejected)


@pytest.mark.parametrize("prompt_tokens", [1613, 2048, 8192])
@pytest.mark.parametrize("kv", [None, 4_000, 1_000_000])
@pytest.mark.parametrize("batch", [1, 5, 256])
def test_points_stay_within_limits(prompt_tokens: int, kv: int | None, batch: int) -> None:
    limits = EngineLimits(prompt_tokens=prompt_tokens, context_tokens=8194, batch=batch, kv_tokens=kv)
    assert too_short(limits) is None
    wanted = points(limits)
    prompts = [each for each in wanted if isinstance(each, Prompt)]
    streams = [each for each in wanted if isinstance(each, Streams)]
    assert max(each.tokens for each in prompts) == prompt_tokens
    assert sum(each.tokens > KNEE_TOKENS for each in wanted[: len(wanted) // 2] if isinstance(each, Prompt)) >= 3
    assert streams
    for each in streams:
        assert 1 <= each.batch <= batch
        assert each.context + each.steps < limits.context_tokens
        assert kv is None or each.batch * (each.context + each.steps) <= KV_SHARE * kv


def test_a_context_too_short_to_measure_is_reported() -> None:
    found = too_short(EngineLimits(prompt_tokens=1500, context_tokens=1502, batch=64))
    assert found is not None
    assert "1,500" in found
    assert "1,613" in found


def test_prompts_are_new_and_streams_repeat() -> None:
    assert all(not each.prefix for each in arrivals(Prompt(tokens=100)))
    first, second = arrivals(Streams(batch=2, context=100, steps=10))
    assert first == Arrival(0.0, 100, 11, prefix=(0,), block_tokens=100)
    assert second.prefix == (1,)


def test_expectation_grows_with_what_was_measured() -> None:
    rows = [PrefillRow(2000, 4e6, 100.0)], [DecodeRow(1, 100, 10.0)]
    assert expected_s(Prompt(tokens=4000), [], []) == 0
    assert expected_s(Prompt(tokens=4000), *rows) == pytest.approx(5 * 0.2)
    assert expected_s(Streams(batch=4, context=1000, steps=20), *rows) == pytest.approx(4 * 0.05 + 20 * 0.02)
