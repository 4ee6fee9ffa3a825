"""What the benchmark of real goodput sends, starts and adds up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench import real, real_figures, real_load
from bench.connectors_models import FAT, TINY
from bench.real_tables import goodput, note, tables, targets
from cluster.spec import parse
from loadgen.traces import own

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{minute:02}:{second:02}.0000000,{100 + 10 * second},{20 + second}\n"
    for minute in range(2)
    for second in range(0, 60, 2)
)


@pytest.mark.parametrize(
    ("runs", "rate", "sign"),
    [
        ([(1.0, 1.0), (2.0, 0.95), (3.0, 0.85)], 2.5, ""),
        ([(1.0, 0.99), (2.0, 0.9)], 2.0, "≥"),
        ([(1.0, 0.89), (2.0, 0.95)], 1.0, "<"),
        ([(1.0, 1.0), (2.0, 0.0), (3.0, 1.0)], 1.1, ""),
    ],
)
def test_goodput_is_where_attainment_first_crosses_nine_in_ten(
    runs: list[tuple[float, float]], rate: float, sign: str
) -> None:
    assert goodput(runs) == (pytest.approx(rate), sign)


def test_load_is_the_trace_shorter_and_the_same_at_every_rate(tmp_path: Path) -> None:
    shape = real_load.shaped(TRACE.splitlines(), 10, shorter=0.5, from_s=60)
    assert [each.at_s for each in shape.arrivals] == [2.0 * at for at in range(10)]
    assert [(each.input_tokens, each.output_tokens) for each in shape.arrivals[:3]] == [(50, 10), (60, 11), (70, 12)]
    assert shape.rate == 0.5
    assert shape.speed(4.0) == 8.0
    assert shape.cut == 0
    assert shape.first(3).arrivals == shape.arrivals[:3]
    real_load.write(shape.arrivals, tmp_path / "load.jsonl")
    assert list(own.read((tmp_path / "load.jsonl").read_text().splitlines(), None)) == list(shape.arrivals)  # type: ignore[arg-type]


def test_what_is_too_long_is_cut_and_counted_and_what_is_missing_is_said() -> None:
    shape = real_load.shaped(TRACE.splitlines(), 30, shorter=4.0, from_s=0)
    assert all(each.input_tokens + each.output_tokens <= real_load.CONTEXT for each in shape.arrivals)
    assert shape.cut == sum(400 + 40 * second > 2048 - 4 * (20 + second) for second in range(0, 60, 2)) > 0
    with pytest.raises(ValueError, match="has 30 requests from second 60 on, and 31 are wanted"):
        real_load.shaped(TRACE.splitlines(), 31, from_s=60)
    with pytest.raises(ValueError, match="ContextTokens"):
        real_load.shaped([*TRACE.splitlines()[:3], "2023-11-16 18:00:03.0000000,x,1"], 3, from_s=0)


@pytest.mark.parametrize("name", real.CONTESTANTS)
@pytest.mark.parametrize("model", [TINY, FAT])
def test_cluster_files_have_no_errors_and_say_what_the_contestant_is(name: str, model: Any) -> None:
    contestant = real.CONTESTANTS[name]
    made = real.cluster_file(contestant, model, "/models/fat", {2: {"ttft_ms": 100.0, "tpot_ms": 8.0}})
    assert not (parsed := parse(json.dumps(made), "baton.yaml")).errors, parsed.errors
    assert sum(pool["start"] for pool in made["models"][0]["pools"].values()) == 2
    budgets = {pool["engine_args"].get("max-num-batched-tokens") for pool in made["models"][0]["pools"].values()}
    assert budgets == {contestant.budget}
    assert made["router"]["policy"] == ("workload" if name == "free" else "least_load")
    assert made["slo"] == {"x2": {"ttft_ms": 100.0, "tpot_ms": 8.0, "attainment": 0.9, "when_missed": "queue"}}
    assert "slo" not in real.cluster_file(contestant, model, "/models/fat")


def spread(p50: float) -> dict[str, float]:
    return {"p50": p50, "p99": 2 * p50}


def found(attained: dict[str, list[float]]) -> dict[str, Any]:
    """A result with one class and two rates, 2 and 4."""
    cells = [
        {"contestant": name, "factor": 5, "rate": rate, "attainment": share, "requests": 10, "failed": 1,
         "handed_over": 5 if name.startswith("apart") else 0, "ttft_ms": spread(30), "tt2t_ms": spread(20),
         "tpot_ms": spread(4)}
        for name, shares in attained.items() for rate, share in zip((2.0, 4.0), shares, strict=True)
    ]  # fmt: skip
    return {
        "capacity": 5.0, "factors": [5], "rates": [2.0, 4.0], "targets": {"5": {"ttft_ms": 150, "tpot_ms": 20}},
        "contestants": {name: real.CONTESTANTS[name].told for name in attained}, "cells": cells,
        "load": {"requests": 10, "from_s": 600.0, "shorter": 0.4, "prompt_mean": 500.0, "answer_mean": 90.0, "cut": 1,
                 "speeds": [0.4, 0.8]},
    }  # fmt: skip


def test_tables_show_what_was_found_and_targets_compare_with_the_best_that_does_both() -> None:
    result = found(
        {"apart-vllm": [1.0, 0.8], "apart-baton": [0.5, 0.4], "both-256": [1.0, 0.4], "both-512": [1.0, 0.9]}
    )
    first, second, third = tables(result, "tiny")
    assert [row[1] for row in first.rows] == ["3.00", "< 2.00", "2.33", "≥ 4.00"]
    assert first.columns[1] == "5 × (150 and 20 ms)"
    assert second.rows[0] == ["5 ×", "1 P + 1 D, vLLM's connector", "100.0%", "80.0%", "50%", "2"]
    assert second.rows[2][-2:] == ["0%", "2"]
    assert third.rows[0] == ["2.00/s", "1 P + 1 D, vLLM's connector", "30 / 60", "20 / 40", "4.0 / 8.0"]
    told = targets({"tiny": result})
    assert told["tiny_5x_apart-vllm_over_both"] == {"value": 0.75, "target": 1.0, "met": False}
    assert told["tiny_5x_apart-baton_over_both"]["value"] == 0.0, "what serves nowhere is not worth its lowest rate"
    assert "rate of the trace × 0.40, 0.80" in note({"tiny": result})


def test_figure_is_drawn_from_the_result_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = found({"apart-vllm": [1.0, 0.8], "both-256": [1.0, 0.4]})
    assert real_figures.draw({"tiny": result}, tmp_path, "2026-01-01") is None
    assert "make bench-real" in (tmp_path / "real-tiny.svg").read_text()


def test_a_slow_machine_gets_fewer_requests_and_every_rate_the_same() -> None:
    scale = real.Scale(("both-512",), requests_min=40, requests_max=100, seconds=60.0, parts=(0.5, 1.0))
    assert scale.rates(4.0) == [2.0, 4.0]
    assert scale.requests([2.0, 4.0]) == 80  # 40 s and 20 s
    assert scale.requests([20.0, 40.0]) == 100
    assert scale.requests([0.5, 1.0]) == 40
    assert set(real.QUICK.contestants) <= set(real.CONTESTANTS)
    assert real.CALIBRATES in real.FULL.contestants


def test_every_contestant_gets_the_same_load_and_targets_fixed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []
    sent: list[tuple[int, tuple[str, ...], int]] = []

    @contextmanager
    def up(words: list[str], bench: str) -> Iterator[dict[str, Any]]:
        started.append(json.loads(Path(words[0]).read_text()))
        yield {"endpoint": "http://e", "admin": "http://a"}

    def load(url: str, *words: str) -> dict[str, Any]:
        sent.append((len(started), words, len((tmp_path / "load.jsonl").read_text().splitlines())))
        times = {"ttft_ms": spread(40), "tt2t_ms": spread(9), "tpot_ms": spread(4), "late_ms": spread(1)}
        return {"sent": 6, "failed": 0, "attainment": 0.95, "completed_rate": 4.0, "ttft_sent_ms": spread(30.06),
                "notes": [], **times}  # fmt: skip

    def metrics(url: str) -> str:
        assert url == "http://a/metrics"
        return f'baton_handoffs_total{{result="ok"}} {3.0 * len(sent)}\n'

    monkeypatch.setattr(real, "up", up)
    monkeypatch.setattr(real, "load", load)
    monkeypatch.setattr(real, "page", metrics)
    shape = real_load.shaped(TRACE.splitlines(), 30, shorter=0.5, from_s=0)
    scale = real.Scale(("apart-baton", "both-256"), requests_min=1, requests_max=30, seconds=6.0, parts=(0.25, 0.5))
    kept: list[str] = []

    def keep(found: dict[str, Any]) -> None:
        kept.append(json.dumps(found))

    bench = real.Bench(TINY, shape, scale, tmp_path)
    result = real.of_model(bench, scale.contestants, None, keep)

    assert "slo" not in started[0], "nothing is promised while targets are found"
    assert [each["slo"]["x5"]["ttft_ms"] for each in started[1:]] == [150.3] * 2
    assert {count for number, _, count in sent if number > 1} == {4}, "6 s of 1 and 2 requests a second"
    first, second = ([words for number, words, _ in sent if number == at] for at in (2, 3))
    assert first == second
    assert len(first) == 1 + len(real.FACTORS) * len(scale.parts)
    assert len({word for words in first[1:] for word in words if word.startswith("--speed")}) == len(scale.parts)
    assert [cell["handed_over"] for cell in result["cells"]] == [3] * 12
    assert (result["rates"], result["load"]["requests"], result["capacity"]) == ([1.0, 2.0], 4, 4.0)
    assert tables(result, "tiny")[1].rows[0][:3] == ["2 ×", "1 P + 1 D, Baton's connector", "95.0%"]

    again = real.of_model(bench, scale.contestants, json.loads(kept[0]), keep)
    assert again["cells"] == result["cells"], "what was kept is gone on with"
    assert (len(kept), len(started)) == (3, 4), "nothing is measured twice"
