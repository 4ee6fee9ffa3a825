"""The tables and traces that Vidur reads agree with our cost model and our arrivals. These tests run without Vidur."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from bench import vidur, vidur_ours
from bench.vidur_tables import (
    BY_TOKENS,
    CHUNK_STEP,
    GRANULARITY,
    TOKEN_STEP,
    Bounds,
    arrivals_of,
    table_csv,
    tables,
    trace_csv,
    up,
    within,
)
from costs.cost import Costs
from costs.step import decoding, prompt
from loadgen.arrival import Arrival

BOUNDS = Bounds(batch=40, chunk=512, tokens=4096)


@pytest.fixture(scope="module")
def costs() -> Costs:
    return vidur_ours.engine({**vidur.MODEL, **vidur.GPU, "batch": 40, "chunk": 512, "tokens": 4096})[0]


@pytest.fixture(scope="module")
def read(costs: Costs) -> dict[str, dict[tuple[int, ...], float]]:
    """The tables as Vidur reads them: all columns but the last are the key."""
    found = {}
    for name, rows in tables(costs, BOUNDS):
        head, *lines = csv.reader(io.StringIO(table_csv(rows)))
        assert head == ["X_0", "X_1", "prediction"][-len(head) :] or head == ["X_0", "prediction"]
        found[name] = {tuple(int(each) for each in line[:-1]): float(line[-1]) for line in lines}
    return found


def step_ms(read: dict[str, Any], layers: int, contexts: list[int], prompts: list[tuple[int, int]]) -> float:
    """A step as Vidur 0.0.26 adds it up (`entities/execution_time.py`); prompts are (end of the chunk, its size)."""
    tokens = up(len(contexts) + sum(size for _, size in prompts), TOKEN_STEP)
    layer_ms = sum(read[name][tokens,] for name in BY_TOKENS if name != "attn_kv_cache_save")
    if contexts:
        layer_ms += read["attn_decode"][len(contexts), up(sum(contexts) // len(contexts), GRANULARITY)]
    for end, size in prompts:
        layer_ms += read["attn_prefill"][up(end, GRANULARITY), up(size, CHUNK_STEP)]
    return layers * layer_ms


@pytest.mark.parametrize(("batch", "context"), [(1, 64), (1, 4096), (7, 1280), (40, 640)])
def test_a_decode_step_costs_the_same_in_vidur(costs: Costs, read: dict[str, Any], batch: int, context: int) -> None:
    theirs = step_ms(read, costs.model.layers, [context] * batch, [])
    assert theirs == pytest.approx(costs.step_ms(decoding(batch, batch * context)), rel=1e-9)


@pytest.mark.parametrize("batch", [8, 32])
@pytest.mark.parametrize(("end", "size"), [(256, 256), (448, 448), (3584, 448)])
def test_a_mixed_step_costs_nearly_the_same_in_vidur(
    costs: Costs, read: dict[str, Any], batch: int, end: int, size: int
) -> None:
    theirs = step_ms(read, costs.model.layers, [1280] * batch, [(end, size)])
    ours = costs.step_ms(prompt(size, end - size) + decoding(batch, batch * 1280))
    mixed = costs.by_kind.mixed
    lacking = mixed.matrices_ms(batch) + mixed.request_ms * batch - costs.by_kind.decode.requests_ms(batch)
    assert theirs == pytest.approx(ours - lacking, rel=1e-9)
    assert theirs == pytest.approx(ours, rel=0.08)


def test_tables_reach_every_step_that_can_be(read: dict[str, Any]) -> None:
    assert {len(read[name]) for name in BY_TOKENS} == {BOUNDS.chunk + BOUNDS.batch}
    last = BOUNDS.tokens
    assert (BOUNDS.batch, last) in read["attn_decode"] and (1, 0) in read["attn_decode"]
    assert (last, BOUNDS.chunk) in read["attn_prefill"] and (GRANULARITY, CHUNK_STEP) in read["attn_prefill"]
    assert min(read["attn_prefill"].values()) >= 0


def test_a_trace_is_read_as_it_was_written() -> None:
    arrivals = [
        Arrival(at_s=0.1 + 0.2, input_tokens=1155, output_tokens=211),
        Arrival(at_s=7.25, input_tokens=3, output_tokens=1),
    ]
    text = trace_csv(arrivals)
    assert text.splitlines()[:2] == [
        "Date,Time,PromptTokenCount,CompletionTokenCount",
        "2023-11-16,0.30000000000000004,1155,211",
    ]
    assert list(arrivals_of(text)) == arrivals


def test_nothing_is_longer_than_the_tables() -> None:
    sizes = [(0, 0), (100, 50), (900, 200), (10, 5000)]
    rows = (Arrival(at_s=1.0, input_tokens=prompt, output_tokens=output) for prompt, output in sizes)
    found = [(each.input_tokens, each.output_tokens) for each in within(rows, 1000)]
    assert found == [(1, 1), (100, 50), (800, 200), (1, 999)]


def test_load_is_the_same_each_time_and_as_dense_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_DATA", raising=False)
    cell = vidur.Cell(4, 8, 2000)
    first, second = list(vidur.load(cell)), list(vidur.load(cell))
    assert first == second and len(first) == 2000
    assert first[-1].at_s == pytest.approx(2000 / 32, rel=0.1)
    assert sum(each.output_tokens for each in first) / 2000 == pytest.approx(200, rel=0.1)
    longer = vidur.load(vidur.Cell(4, 8, 2000, longer=4))
    assert [each.output_tokens for each in longer] == [4 * each.output_tokens for each in first]


def test_ratio_is_the_median_of_rounds_and_missing_without_vidur() -> None:
    cell = vidur.Cell(1, 8, 100)

    def rounds(*cpu_us: float, e2e_ms: float = 2000.0) -> list[dict[str, float]]:
        rest = dict.fromkeys(("requests_s", "ttft_ms", "cpu_s", "peak_mb"), 1.0)
        return [{"cpu_us": each, "e2e_ms": e2e_ms, **rest} for each in cpu_us]

    results: vidur.Results = {(cell, vidur.BATON): rounds(100, 200, 100)}
    assert vidur.ratio(results, cell) is None
    _, _, targets = vidur.summary(results)
    assert targets == {"Vidur's CPU to ours, 1 × 8 req/s": {"value": None, "target": 10.0, "met": False}}
    results[cell, vidur.VIDUR] = rounds(1100, 1000, 5000, e2e_ms=2100.0)
    assert vidur.ratio(results, cell) == 11
    tables_, figures, targets = vidur.summary(results)
    assert targets == {
        "Vidur's CPU to ours, 1 × 8 req/s": {"value": 11, "target": 10.0, "met": True},
        "mean E2E off by, 1 × 8 req/s": {"value": 0.05, "target": 0.03, "met": False},
    }
    assert figures["1 × 8 req/s"]["Vidur"]["ratio"] == 11
    assert tables_[0].rows[1][:4] == ["1 × 8 req/s, Vidur", "100", "1,100", "11.0 ×"]


def test_our_side_of_a_job_serves_every_request(tmp_path: Any) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(trace_csv(Arrival(at_s=at / 20, input_tokens=300, output_tokens=20) for at in range(40)))
    job = {**vidur.MODEL, **vidur.GPU, "batch": 40, "chunk": 512, "tokens": 4096, "replicas": 2}
    told = vidur_ours.run({**job, "trace": str(trace), "policy": "round_robin"})
    assert told["served"] == 40
    alone_ms = vidur_ours.engine(job)[0].prefill_ms(300)
    assert alone_ms <= told["ttft_ms"] < 3 * alone_ms
    assert told["e2e_ms"] > told["ttft_ms"] and told["peak_mb"] > 0
