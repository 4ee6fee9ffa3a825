"""Laws of loads under random input: sorted, deterministic for a seed, no row dropped, and no reader raises an error."""

from __future__ import annotations

import json
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen import arrivals as processes
from loadgen import lengths, servegen
from loadgen.arrival import Arrival, BadRow
from loadgen.made import made
from loadgen.prompts import Fit, prompt_text
from loadgen.shaping import denser, faster, window
from loadgen.stream import Tally
from loadgen.traces import FORMATS, detect

SEEDS = st.integers(0, 2**32 - 1)
STEPS = st.lists(st.sampled_from([0, 0, 1, 3000, 2999, 12_000]), max_size=60)
TIMES = st.lists(st.floats(0, 1e4, allow_nan=False), max_size=50).map(sorted)


def is_sorted(found: list[Arrival]) -> bool:
    return all(one.at_s <= later.at_s for one, later in pairwise(found))


def mooncake(steps: list[int]) -> list[str]:
    at, lines = 500, []
    for number, step in enumerate(steps):
        at += step
        lines.append(json.dumps({"timestamp": at, "input_length": 9, "output_length": number, "hash_ids": [number]}))
    return lines


@settings(max_examples=100, deadline=None)
@given(STEPS, SEEDS, st.sampled_from([None, 0.0, 0.5, 3.0]))
def test_arrivals_are_spread_within_their_tick_in_order(steps: list[int], seed: int, tick_s: float | None) -> None:
    lines = mooncake(steps)
    found = list(FORMATS["mooncake"](lines, np.random.default_rng(seed), tick_s))
    assert all(isinstance(row, Arrival) for row in found)
    good = [row for row in found if isinstance(row, Arrival)]
    assert is_sorted(good)
    assert [each.output_tokens for each in good] == list(range(len(lines)))
    for each, line in zip(good, lines, strict=True):
        stamp_s = (json.loads(line)["timestamp"] - json.loads(lines[0])["timestamp"]) / 1000
        assert -1e-9 <= each.at_s - stamp_s <= 3.0 + 1e-9
    assert found == list(FORMATS["mooncake"](lines, np.random.default_rng(seed), tick_s))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.lists(st.text(max_size=80), max_size=8))
def test_readers_accept_any_lines(format_: str, lines: list[str]) -> None:
    detect(lines)
    rows = list(FORMATS[format_](lines, np.random.default_rng(0), None))
    assert all(isinstance(row, Arrival | BadRow) for row in rows)


CELL = st.sampled_from(
    ["", "0", "5", "-1", "x", "1e3", "nan", "2023-11-16 18:17:03.5", "2023-11-16 18:17:04", '"7"', "²"]
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["azure", "burstgpt"]), st.lists(st.lists(CELL, min_size=1, max_size=4), max_size=8))
def test_no_row_is_dropped(format_: str, table: list[list[str]]) -> None:
    header = {
        "azure": "TIMESTAMP,ContextTokens,GeneratedTokens",
        "burstgpt": "Timestamp,Request tokens,Response tokens",
    }
    lines = [header[format_], *(",".join(cells) for cells in table)]
    rows = list(FORMATS[format_](lines, np.random.default_rng(0), None))
    assert len(rows) == sum(bool(line.strip()) for line in lines[1:])
    assert is_sorted([row for row in rows if isinstance(row, Arrival)])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = ["timestamp", "input_length", "output_length", "hash_ids", "chat_id", "turn", "at_s", "input_tokens", "prefix"]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["mooncake", "bailian", "baton"]), st.dictionaries(st.sampled_from(KEYS), JSON))
def test_json_rows_of_any_values(format_: str, row: dict[str, object]) -> None:
    assert len(list(FORMATS[format_]([json.dumps(row)], np.random.default_rng(0), None))) == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=40), max_size=4), st.text(max_size=60))
def test_the_servegen_reader_accepts_any_lines(trace: list[str], dataset: str) -> None:
    pool = servegen.read({"a-trace.csv": trace, "a-dataset.json": [dataset]})
    assert pool.bad or pool.silent or pool.clients


@settings(max_examples=100, deadline=None)
@given(TIMES, st.floats(0.1, 10), st.floats(0, 5), SEEDS)
def test_shaping_keeps_order(times: list[float], speed: float, factor: float, seed: int) -> None:
    load = [Arrival(at_s, 1, number) for number, at_s in enumerate(times)]
    quick = list(faster(load, speed))
    assert [each.at_s for each in quick] == [at_s / speed for at_s in times]
    dense = list(denser(load, factor, np.random.default_rng(seed)))
    assert is_sorted(dense)
    assert int(factor) * len(load) <= len(dense) <= (int(factor) + 1) * len(load)
    assert dense == list(denser(load, factor, np.random.default_rng(seed)))
    part = list(window(load, 10.0, 1000.0))
    assert len(part) == sum(10.0 <= at_s < 1000.0 for at_s in times)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["poisson", "gamma", "weibull"]), st.floats(0.1, 500), st.floats(0.2, 8), SEEDS)
def test_a_generated_load_is_sorted_and_fixed_by_its_seed(kind: str, rate: float, cv: float, seed: int) -> None:
    def load() -> list[Arrival]:
        rng = np.random.default_rng(seed)
        times = processes.poisson(rate, rng) if kind == "poisson" else getattr(processes, kind)(rate, cv, rng)
        sizes = lengths.parse("lognormal:p50=100,p90=900")
        return list(islice(made(times, sizes, sizes, rng.spawn(1)[0]), 300))

    first = load()
    assert is_sorted(first)
    assert first[0].at_s >= 0
    assert first == load()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=5), st.integers(1, 400), st.floats(0.5, 8))
def test_prompts_have_the_length_and_share_the_prefix(prefix: list[int], tokens: int, ratio: float) -> None:
    fitted = Fit(ratio)
    arrival = Arrival(0, tokens, 1, tuple(prefix), 32 if prefix else 0)
    one, two = prompt_text(arrival, fitted, "a"), prompt_text(arrival, fitted, "b")
    assert len(one) == len(two) == fitted.chars(tokens)
    shared = min(len(one), len(prefix) * max(1, round(32 * ratio)))
    assert one[:shared] == two[:shared]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 120), st.data())
def test_tokens_are_counted_however_the_stream_is_cut(tokens: int, data: st.DataObject) -> None:
    event = b'data: {"choices":[{"text":"ab","finish_reason":%b}]}\n\n'
    whole = event % b"null" * (tokens - 1) + event % b'"stop"'
    whole += b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % tokens
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=40)))
    tally = Tally()
    for at, (one, later) in enumerate(pairwise([0, *cuts, len(whole)])):
        tally.feed(whole[one:later], float(at))
    found = tally.end()
    assert len(found.token_s) == tokens == found.completion_tokens
    assert found.error is None
    assert list(found.token_s) == sorted(found.token_s)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_an_answer(raw: bytes) -> None:
    tally = Tally()
    tally.feed(raw, 0.0)
    assert len(tally.end().token_s) <= raw.count(b"data:") + 1


def test_rate_scaling_keeps_the_expected_count() -> None:
    load = [Arrival(0.1 * at, 1, 1) for at in range(4000)]
    for factor in (0.3, 1.7, 2.5):
        assert len(list(denser(load, factor, np.random.default_rng(2)))) == pytest.approx(4000 * factor, rel=0.05)
