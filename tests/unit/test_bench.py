"""What benchmarks add up, and that they tell a right answer from a wrong one."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from bench import contestants, engine, headlines, published, router_field, sender
from bench import router_tables as router
from bench.plan_averages import fails_at
from bench.router_cells import Cell, Measured

REQUESTS = Cell(kind="requests")
CHUNKS = Cell(kind="chunks", tokens=200, connections=64)


def measured(cpu_s: float, done: int = 100, failed: int = 0) -> Measured:
    return Measured(done=done, failed=failed, rewritten=0, cpu_s=cpu_s, elapsed_s=1.0, memory_mb=10.0)


def test_the_cost_of_chunks_leaves_out_that_of_their_requests() -> None:
    results = {(REQUESTS, "baton"): [measured(0.1)], (CHUNKS, "baton"): [measured(0.1 + 100 * 199 * 30e-6)]}
    assert router.per_request(results, REQUESTS, "baton") == [pytest.approx(1000)]
    assert router.per_chunk(results, CHUNKS, "baton") == [pytest.approx(30)]


def test_ratio_is_the_median_of_the_rounds_and_nothing_without_a_rival() -> None:
    assert router.ratio([10, 40, 90], [10, 20, 30]) == 2
    assert router.ratio([10, None, 90], [10, 20, 30]) == 2
    assert router.ratio([10], []) is None
    assert router.ratio([None], [10]) is None


def test_targets_are_met_or_not() -> None:
    results = {(REQUESTS, name): [measured(cpu)] for name, cpu in (("baton", 0.4), ("vllm-router", 1.0))}
    table, figures, targets = router.cost_tables(results, ["baton", "vllm-router"])
    assert targets == {"CPU to vllm-router's, requests 2 KB 1×1": {"value": 0.4, "target": 0.7, "met": True}}
    assert figures["requests 2 KB 1×1"]["cpu_us"] == {"baton": 4000.0, "vllm-router": 10000.0}
    assert table.rows == [["requests 2 KB 1×1", "4,000.0", "10,000.0", "0.40"]]
    _, _, without = router.cost_tables({(REQUESTS, "baton"): [measured(0.4)]}, ["baton"])
    assert [each["met"] for each in without.values()] == [False]
    assert published.target(0.9, 1.0, at_most=False) == {"value": 0.9, "target": 1.0, "met": False}


def test_policies_on_is_the_default_policy_and_stands_beside_least_load() -> None:
    every = (contestants.POLICIES, 0.9), (contestants.POLICIES_PAIRED, 1.2), ("vllm-router", 1.0)
    results = {(REQUESTS, name): [measured(cpu)] for name, cpu in every}
    _, _, targets = router.cost_tables(results, [name for name, _ in every])
    assert targets == {
        "baton, policies on: CPU to vllm-router's, requests 2 KB 1×1": {"value": 0.9, "target": 1.0, "met": True},
        "baton, policies on, least_load: CPU to vllm-router's, requests 2 KB 1×1": {
            "value": 1.2, "target": 1.0, "met": False,
        },
    }  # fmt: skip
    (headline,) = (each for each in headlines.HEADLINES if each.says == "the same with policies on")
    assert [bool(re.fullmatch(headline.targets, name)) for name in targets] == [True, False]
    without, _, fewer = router.cost_tables({(REQUESTS, "vllm-router"): [measured(1.0)]}, ["vllm-router"])
    assert fewer == {} and len(without.columns) == 2, "a run without the variants has no such figures"


def test_baton_with_classes_is_started_with_and_without_its_default_policy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(contestants, "ROOT", tmp_path)
    started: dict[str, tuple[str, ...]] = {}

    def baton(prefill: object, decode: object, on: object, more: tuple[str, ...], env: object) -> Any:
        return more, env

    monkeypatch.setattr(contestants, "baton", baton)
    for name in (contestants.POLICIES, contestants.POLICIES_PAIRED):
        started[name], env = cast("Any", contestants.OURS[name](["http://p"], ["http://d"], frozenset()))
        assert "OTEL_TRACES_SAMPLER_ARG=0.01" in env
    config = ("--config", str(tmp_path / ".bench" / "cluster" / "baton.yaml"))
    assert started[contestants.POLICIES] == config
    assert started[contestants.POLICIES_PAIRED] == (*config, "--policy", "least_load")
    assert {contestants.DEFAULT, contestants.POLICIES} == contestants.MAY_SERVE_WHOLE


def test_the_share_handed_over_is_told_cell_by_cell() -> None:
    large = Cell(kind="requests", prompt_bytes=100 * 1024)
    results = {(REQUESTS, "baton"): [measured(0.1)], (large, "baton"): [measured(0.2), measured(0.2), measured(0.2)]}
    for each, handed in zip(results[large, "baton"], (94, 84, 91), strict=True):
        each.handed_over = handed
    table, figures = router.trust_table(results, ["baton"])
    assert figures["baton"]["handed_over"] == {"requests 2 KB 1×1": 0.0, "requests 100 KB 1×1": 0.91}
    assert table.rows == [["baton", "400", "0", "0% to 91% (requests 100 KB 1×1)", "0", "10"]]
    every = {(REQUESTS, "relay"): [measured(0.1)]}
    every[REQUESTS, "relay"][0].handed_over = 100
    assert router.trust_table(every, ["relay"])[0].rows[0][3] == "100%"
    twins = {(Cell(kind="twins", rate=20), "relay"): [measured(0.1)]}
    assert router.trust_table(twins, ["relay"])[0].rows[0][3] == "–"


def test_open_streams_cost_the_largest_growth_of_the_process() -> None:
    streams = Cell(kind="streams", connections=2000)
    rounds = [measured(0.1), measured(0.1), measured(0.1)]
    rounds[0].grown_mb, rounds[1].grown_mb = 100.0, 20.0
    table, figures, targets = router.memory_table({(streams, "baton"): rounds, (REQUESTS, "baton"): []}, ["baton", "x"])
    assert table.rows == [["2,000", "baton", "50.0"]]
    assert figures == {streams.name: {"baton": 50.0, "x": None}}
    assert targets == {"KB per open stream, 2,000 open": {"value": 50.0, "target": 64, "met": True}}


def test_the_peak_of_a_processs_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_field, "LOOK_S", 0.001)
    sizes, seen = iter([10.0, 11.0, 35.0, 12.0]), threading.Event()

    class Process:
        def memory_mb(self) -> float:
            size = next(sizes, None)
            if size is None:
                seen.set()
            return size or 12.0

    with router_field.largest(cast("Any", Process())) as grown:
        assert seen.wait(10)
    assert grown() == 25.0
    with router_field.largest(None) as nobody:
        pass
    assert nobody() is None


def test_page_takes_the_tables_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("# B\n<!-- x: begin -->\nold\n<!-- x: end -->\nafter\n")
    monkeypatch.setattr(published, "DOCS", tmp_path)
    monkeypatch.setattr(published, "PAGE", page)
    told = {"bench": "x", "figures": {"a": 1}, "targets": {}}
    table = published.Table("A table", ["what", "ms"], [["one", "2"]])
    published.publish(told, [table], {"cores": 2}, "*note*")
    assert page.read_text() == (
        "# B\n<!-- x: begin -->\n\n*note*\n\nA table:\n\n| what | ms |\n| --- | --- |\n| one | 2 |\n\n"
        "<!-- x: end -->\nafter\n"
    )
    assert json.loads((tmp_path / "benchmarks" / "x.json").read_text()) == {**told, "machine": {"cores": 2}}


def test_tokens_are_read_whatever_the_spacing() -> None:
    assert sender.tokens_of(b"".join(engine.events(3))) == [" t1", " t2", " t3"]
    assert sender.tokens_of(b'data: {"choices": [ {"text": "a"} ]}\n\ndata: [DONE]\n\n') == ["a"]
    assert sender.tokens_of(b"data: {broken\n\n") == [" {broken".strip()]


def test_answers_are_judged_by_their_tokens() -> None:
    sent, right = sender.Sent(), b"".join(engine.events(4))
    sent.take(200, right, right)
    sent.take(200, right.replace(b'"usage":', b'"usage": '), right)
    assert (sent.done, sent.rewritten, sent.failed) == (2, 1, 0)
    sent.take(200, right.replace(b" t3", b" t7"), right)
    sent.take(200, right[: len(right) // 2], right)
    sent.take(500, b"oops", right)
    sent.take(0, b"", right, "closed")
    assert (sent.done, sent.rewritten, sent.failed) == (2, 1, 4)
    assert "other tokens" in sent.examples[0]
    assert sent.examples[2] == "HTTP 500: b'oops'"


def test_a_soaks_slope_and_its_interval() -> None:
    """Memory climbs by 2 MB an hour, with a sawtooth on top. A block of readings makes one point."""
    from bench.soak import slope_of

    climbing = [(float(at), 100 + at * 2 / 3600 + (at % 20) / 100) for at in range(0, 1800, 5)]
    found = slope_of(climbing)
    assert found is not None
    assert found.mb_per_hour == pytest.approx(2.0, abs=0.1)
    assert found.mb_per_hour - found.half_width > 0, "the slope is surely above zero"
    flat = slope_of([(float(at), 100 + (at * 7919 % 11) / 10) for at in range(0, 1800, 5)])
    assert flat is not None
    assert abs(flat.mb_per_hour) < flat.half_width
    assert slope_of(climbing[:15]) is None, "too few blocks"


def test_honest_clients_are_judged_by_phase() -> None:
    from bench.soak_hostile import EDGE_S, JUDGED_REQUESTS_MIN, PHASE_S, judged, phase_at

    assert [phase_at(at)[0] for at in (0.0, PHASE_S - 1, PHASE_S, 2 * PHASE_S)] == [False, False, True, False]
    every = [(at / 10, 0.2 if phase_at(at / 10)[0] else 0.1) for at in range(int(40 * PHASE_S))]
    edges = [(number * PHASE_S + EDGE_S / 2, 9.0) for number in range(4) for _ in range(50)]
    found = judged(every + edges)
    assert (found["p99_ttft_s_without"], found["p99_ttft_s_beside"], found["ratio"]) == (0.1, 0.2, 2.0)
    assert judged(every[: int(10 * PHASE_S) + JUDGED_REQUESTS_MIN // 2])["ratio"] is None
    assert judged([])["p99_ttft_s_beside"] is None


def test_a_plan_from_averages_fails_at_rates_between_what_is_served_and_what_it_predicts() -> None:
    assert fails_at([2.0, 4.0], [2.0, 4.0]) == 0
    assert fails_at([2.0, 4.0], [3.0, 5.0]) == 0, "averages that understate lose money, not promises"
    assert fails_at([2.0, 4.0], [1.0, 4.0]) == 0.25
    assert fails_at([2.0, 4.0], [0.0, 1.0]) == 1.0
