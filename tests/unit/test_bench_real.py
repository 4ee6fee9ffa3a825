"""What the benchmark of real goodput sends, starts and adds up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import inputs, real, real_contestants, real_figures, real_load
from bench.connectors_models import FAT, TINY
from bench.processes import ROOT
from bench.published import save
from bench.real_contestants import CONTESTANTS, OURS, PLAIN, USUAL, Serving, cluster_file
from bench.real_tables import figures, note, tables, targets
from bench.sources import below
from cluster.spec import parse
from loadgen.traces import own

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{minute:02}:{second:02}.0000000,{100 + 10 * second},{20 + second}\n"
    for minute in range(2)
    for second in range(0, 60, 2)
)


def test_load_is_the_trace_shorter_and_the_same_at_every_rate(tmp_path: Path) -> None:
    shape = real_load.shaped(TRACE.splitlines(), 10, shorter=0.5, from_s=60)
    assert [each.at_s for each in shape.arrivals] == [2.0 * at for at in range(10)]
    assert [(each.input_tokens, each.output_tokens) for each in shape.arrivals[:3]] == [(50, 10), (60, 11), (70, 12)]
    assert shape.rate == 0.5
    assert shape.speed(4.0) == 8.0
    assert shape.cut == 0
    later = shape.part(4, 3)
    assert [each.at_s for each in later.arrivals] == [0.0, 2.0, 4.0]
    assert [each.input_tokens for each in later.arrivals] == [each.input_tokens for each in shape.arrivals[4:7]]
    with pytest.raises(ValueError, match="10 requests are there, and 11 are wanted"):
        shape.part(8, 3)
    assert len(real_load.shaped(TRACE.splitlines(), None, from_s=0).arrivals) == 60
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


@pytest.mark.parametrize("name", [name for name in CONTESTANTS if name != PLAIN])
@pytest.mark.parametrize("model", [TINY, FAT])
def test_cluster_files_have_no_errors_and_say_what_the_contestant_is(name: str, model: Any) -> None:
    contestant = CONTESTANTS[name]
    made = cluster_file(contestant, model, "/models/fat", {"ttft_ms": 100.0, "tpot_ms": 8.0})
    assert not (parsed := parse(json.dumps(made), "baton.yaml")).errors, parsed.errors
    assert sum(pool["start"] for pool in made["models"][0]["pools"].values()) == 2
    budgets = {pool["engine_args"].get("max-num-batched-tokens") for pool in made["models"][0]["pools"].values()}
    assert budgets == {contestant.budget}
    assert made["router"]["policy"] == ("workload" if name == OURS else "least_load")
    assert made["slo"] == {"x5": {"ttft_ms": 100.0, "tpot_ms": 8.0, "attainment": 0.9, "when_missed": "queue"}}
    assert "slo" not in cluster_file(contestant, model, "/models/fat")


def spread(p50: float | None) -> dict[str, float | None]:
    return {"p50": p50, "p99": None if p50 is None else 2 * p50}


def cell(name: str, repeat: int, in_time: int, **more: Any) -> dict[str, Any]:
    """A run of 20 requests: `in_time` of them meet the targets of factor 5, half of those the targets of factor 2."""
    return {
        "contestant": name, "repeat": repeat, "rate": 2.0, "requests": 20, "seconds": 10.0, "failed": 1,
        "in_time": {"2": in_time // 2, "5": in_time}, "handed_over": 5 if name == OURS else 0, "completed_rate": 1.9,
        "ttft_ms": spread(30), "tt2t_ms": spread(20), "tpot_ms": spread(4), "late_ms": spread(1), **more,
    }  # fmt: skip


def found(*cells: dict[str, Any]) -> dict[str, Any]:
    return {
        "capacity": 5.0, "admitted": 5, "rates": [2.0], "repeats": 10, "seconds": 10.0,
        "targets": {"2": {"ttft_ms": 60, "tpot_ms": 8}, "5": {"ttft_ms": 150, "tpot_ms": 20}},
        "contestants": {name: CONTESTANTS[name].told for name in (OURS, PLAIN)}, "cells": list(cells),
        "load": {"requests": 20, "shared": 0.0, "from_s": 600.0, "shorter": 0.4,
                 "prompt_mean": 500.0, "answer_mean": 90.0, "cut": 1},
    }  # fmt: skip


def ten(ours: int, theirs: int) -> dict[str, Any]:
    made = [cell(name, at, count) for at in range(10) for name, count in ((OURS, ours), (PLAIN, theirs))]
    return found(*made)


def test_the_ratio_is_the_median_of_repeats_with_an_interval() -> None:
    result = ten(18, 12)
    result["cells"][1]["in_time"] = {"2": 3, "5": 6}  # one bad repeat of the rival does not move the median
    (row,) = (row for row in figures(result)["rows"] if row["contestant"] == PLAIN)
    assert row["ours_over"]["5"] == {
        "median": 1.5, "low": 1.5, "high": 1.5, "confidence": pytest.approx(0.9785, abs=1e-4), "repeats": 10,
    }  # fmt: skip
    first, second = tables(result, "tiny")
    assert first.columns[2:4] == ["2 × (60 and 8 ms)", "5 × (150 and 20 ms)"]
    assert first.rows[0][2:] == [
        "45.0% (45.0% to 45.0%)", "90.0% (90.0% to 90.0%)", "–", "1.90", "25%", "10", "10 of 10",
    ]  # fmt: skip
    assert first.rows[1][4] == "1.50 (1.50 to 1.50)"
    assert second.rows[0][2:] == ["30 / 60", "20 / 40", "4.0 / 8.0"]
    assert targets({"tiny": result}) == {"tiny_2_over_plain": {"value": 1.5, "target": 1.0, "met": True}}
    assert "10 repeats of 10 s" in note({"tiny": result})


def test_a_void_run_voids_the_ratio_of_its_repeat_and_few_repeats_have_no_interval() -> None:
    result = ten(18, 18)
    for each in result["cells"][:12]:
        each["void"] = "the sender was 30 ms late at p99"
    row = figures(result)["rows"][1]
    assert (row["ours_over"]["5"]["repeats"], row["ours_over"]["5"]["low"]) == (4, None)
    assert tables(result, "tiny")[0].rows[0][-1] == "4 of 10"
    for each in result["cells"]:
        each["void"] = "late"
    assert targets({"tiny": result})["tiny_2_over_plain"] == {"value": None, "target": 1.0, "met": False}
    assert tables(result, "tiny")[0].rows[0][2:] == ["–", "–", "–", "–", "–", "0", "0 of 10"]


def test_a_repeat_in_which_the_rival_has_nothing_in_time_counts_too() -> None:
    """It counts as if the rival had had one request in time; where neither has any, the two are even."""
    result = ten(10, 0)
    result["cells"][1]["in_time"] = {"2": 10, "5": 20}  # the rival's one good repeat of ten
    (row,) = (row for row in figures(result)["rows"] if row["contestant"] == PLAIN)
    assert (row["ours_over"]["5"]["median"], row["ours_over"]["5"]["repeats"]) == (10.0, 10)
    assert targets({"tiny": result})["tiny_2_over_plain"]["met"]
    (row,) = (row for row in figures(ten(0, 0))["rows"] if row["contestant"] == PLAIN)
    assert (row["ours_over"]["5"]["median"], row["ours_over"]["5"]["repeats"]) == (1.0, 10)
    (row,) = (row for row in figures(ten(0, 5))["rows"] if row["contestant"] == PLAIN)
    assert row["ours_over"]["5"]["median"] == 0.0


def test_nothing_answered_is_a_row_too() -> None:
    result = ten(18, 0)
    for each in result["cells"]:
        if each["contestant"] == PLAIN:
            each |= {"ttft_ms": spread(None), "tt2t_ms": spread(None), "tpot_ms": spread(None), "completed_rate": 0.0}
    first, second = tables(result, "tiny")
    assert first.rows[1][3:5] == ["0.0% (0.0% to 0.0%)", "18.00 (18.00 to 18.00)"]
    assert second.rows[1][2:] == ["– / –", "– / –", "– / –"]


def test_figure_is_drawn_from_the_result_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert real_figures.draw({"tiny": ten(18, 12)}, tmp_path, "2026-01-01") is None
    assert "make bench-real" in (tmp_path / "real-tiny.svg").read_text()


def test_sizes_keep_to_the_rules() -> None:
    """Ten repeats of two minutes, rates below saturation, at most two hours by default."""
    for size in (real.DEFAULT, real.FULL):
        assert size.repeats >= 10 and max(size.parts) < 1 and size.seconds >= 110
        assert set(size.contestants) <= set(CONTESTANTS)
    usual = real.DEFAULT
    assert usual.contestants == USUAL
    assert usual.repeats * len(usual.parts) * len(usual.contestants) * 120 <= 7200
    assert usual.rates(10.0) == [4.0, 7.0]
    assert usual.requests([4.0, 7.0]) == 770


class Fakes:
    """Contestants that answer nothing, and loads that only have reports."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.started: list[tuple[str, Any]] = []
        self.sent: list[tuple[str, tuple[str, ...], str]] = []
        self.late_ms = 1.0
        self.ended = ""
        self.lost = 0
        for name in ("serving", "load", "page"):
            monkeypatch.setattr(real, name, getattr(self, name))

    @contextmanager
    def serving(self, name: str, model: Any, folder: Path, promised: Any) -> Iterator[Serving]:
        self.started.append((name, promised))
        yield Serving(name, None if name == PLAIN else "http://a", "x5" if promised and name != PLAIN else None,
                      ended=lambda: self.ended if name == PLAIN else "")  # fmt: skip

    def load(self, url: str, *words: str) -> dict[str, Any]:
        lines = (self.folder / "load.jsonl").read_text() if "--trace" in words else ""
        self.sent.append((url, words, lines))
        if "--out" in words:
            record = {"request": 0, "at_s": 0.0, "input_tokens": 9, "output_tokens": 3, "sent_s": 0.0, "end_s": 0.09}
            times = {"first_token_s": 0.07, "second_token_s": 0.08, "last_token_s": 0.09, "status": 200}
            line = json.dumps({**record, **times}) + "\n"
            Path(words[words.index("--out") + 1]).write_text(line * (lines.count("\n") - self.lost))
        spreads = {"ttft_ms": spread(40), "tt2t_ms": spread(9), "tpot_ms": spread(4), "late_ms": spread(self.late_ms)}
        return {"sent": lines.count("\n"), "failed": 0, "completed_rate": 4.0, "ttft_sent_ms": spread(30.06), **spreads}

    def page(self, url: str) -> str:
        assert url == "http://a/metrics"
        return f'baton_handoffs_total{{result="ok"}} {3.0 * len(self.sent)}\n'


MACHINE = {"cpu": "EPYC", "cores": 2, "kernel": "6", "python": "3.11", "date": "2026-01-01", "load_before": 0.1}


def bench(tmp_path: Path, repeats: int, trace: str = TRACE) -> real.Bench:
    shape = real_load.shaped(trace.splitlines(), None, shorter=0.5, from_s=0)
    return real.Bench(TINY, shape, real.Scale(USUAL, repeats, 6.0, (0.25, 0.5)), tmp_path, "digest", MACHINE)


def test_every_contestant_gets_the_same_load_in_turns_and_targets_are_fixed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes, kept = Fakes(tmp_path, monkeypatch), list[str]()
    result = real.of_model(bench(tmp_path, 3), None, lambda found: kept.append(json.dumps(found)))

    assert fakes.started[0][1] is None, "nothing is promised while targets are found"
    assert [(name, promised["ttft_ms"]) for name, promised in fakes.started[1:]] == [(name, 150.3) for name in USUAL]
    measured = [(url, lines) for url, words, lines in fakes.sent if "--out" in words]
    assert len(measured) == 3 * 2 * 3
    for at in range(0, len(measured), 3):
        assert {url for url, _ in measured[at : at + 3]} == set(USUAL)
        assert len({lines for _, lines in measured[at : at + 3]}) == 1, "all contestants get the same requests"
    assert [measured[at][0] for at in (0, 6, 12)] == list(USUAL), "each repeat begins with the next contestant"
    assert [len(measured[at][1].splitlines()) for at in (0, 3)] == [6, 12], "6 s of 1 and 2 requests a second"
    assert measured[0][1] != measured[6][1], "another stretch of the trace in each repeat"
    asked = {url: words for url, words, _ in fakes.sent if "--out" in words}
    assert "x-slo-class:x5" in asked[OURS] and "x-slo-class:x5" not in asked[PLAIN]
    assert {each["handed_over"] for each in result["cells"] if each["contestant"] == OURS} == {3}
    assert result["cells"][0]["in_time"] == {"2": 0, "5": 6, "10": 6}, "a TTFT of 70 ms misses 60 ms and meets 150 ms"
    assert (result["sources"], result["machine"]) == ("digest", MACHINE)

    fakes.started.clear()
    again = real.of_model(bench(tmp_path, 3), json.loads(kept[4]), lambda _: kept.append(""))
    assert [each["repeat"] for each in again["cells"]] == [each["repeat"] for each in result["cells"]]
    assert (len(kept), len(fakes.started)) == (18 + 13, 3), "kept cells are measured no second time"
    fakes.started.clear()
    assert real.of_model(bench(tmp_path, 3), json.loads(kept[17]), lambda _: None)["cells"] == result["cells"]
    assert fakes.started == [], "a whole result starts nothing"


def test_a_run_with_a_late_sender_is_tried_again_and_then_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes(tmp_path, monkeypatch)
    fakes.late_ms = 2.0  # 4 ms at p99; the limit is 3 ms, a twentieth of 60 ms
    result = real.of_model(bench(tmp_path, 1), None, lambda _: None)
    assert {each["void"] for each in result["cells"]} == {"the sender was 4 ms late at p99"}
    assert len([words for _, words, _ in fakes.sent if "--out" in words]) == 2 * len(result["cells"])


def test_the_unloaded_latency_is_of_the_lengths_that_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace's first prompts are longer than the rest, and its last requests, which are not sent, are cut."""
    fakes = Fakes(tmp_path, monkeypatch)
    monkeypatch.setattr(real, "SATURATES", 4)
    head, *rows = TRACE.splitlines()
    prompts = [1000] * 4 + [100] * 44 + [9000] * 12
    made = [f"{row.split(',')[0]},{prompt},40" for row, prompt in zip(rows, prompts, strict=True)]
    found = real.begun(bench(tmp_path, 4, "\n".join([head, *made])))
    lengths = [words[words.index("--input-tokens") + 1] if "--input-tokens" in words else "trace"
               for _, words, _ in fakes.sent]  # fmt: skip
    assert lengths[-2:] == ["trace", "50"], "the load is known when the unloaded latency is measured"
    assert (found["load"]["requests"], found["load"]["cut"]) == (12, 0)
    assert found["load"]["prompt_mean"] == pytest.approx((4 * 500 + 44 * 50) / 48)


def test_a_pair_that_is_too_fast_for_the_trace_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Fakes(tmp_path, monkeypatch)
    head, *rows = TRACE.splitlines()
    with pytest.raises(SystemExit, match="too fast for the trace: 10 requests are there, and 12 are wanted"):
        real.begun(bench(tmp_path, 6, "\n".join([head, *rows[:10]])))


def test_where_the_trace_is_too_short_for_all_repeats_neighbouring_stretches_share_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fakes(tmp_path, monkeypatch)
    assert real.begun(bench(tmp_path, 5))["load"]["shared"] == 0, "60 requests are five times 12"
    load = bench(tmp_path, 9)
    found = real.begun(load)
    assert (found["load"]["requests"], found["load"]["shared"]) == (12, 0.5), "one begins each 6 requests"
    first, second, last = (load.stretch(real.Run(repeat, 2.0, OURS), 12) for repeat in (0, 1, 8))
    lengths = [each.input_tokens for each in load.shape.arrivals]
    assert [each.input_tokens for each in first.arrivals] == lengths[:12]
    assert [each.input_tokens for each in second.arrivals] == lengths[6:18]
    assert [each.input_tokens for each in last.arrivals] == lengths[48:60], "the last one ends with the trace"
    assert "neighbours share 50% of their requests" in note({"tiny": found})


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"ended": "engine one:\nout of memory"}, "bench-real: plain: engine one:\nout of memory"),
        ({"lost": 1}, "6 requests were to be sent, 6 were, and 5 have a record"),
    ],
)
def test_a_run_that_says_nothing_of_its_contestant_ends_the_benchmark_and_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], message: str
) -> None:
    fakes, kept = Fakes(tmp_path, monkeypatch), list[str]()

    def keep(found: dict[str, Any]) -> None:
        kept.append(json.dumps(found))
        if len(kept) == 2:  # the next run is plain's
            for name, value in fault.items():
                setattr(fakes, name, value)

    with pytest.raises(SystemExit) as ended:
        real.of_model(bench(tmp_path, 1), None, keep)
    assert message in str(ended.value)
    assert [each["contestant"] for each in json.loads(kept[-1])["cells"]] == list(USUAL[:2])


def test_an_ended_process_of_plain_vllm_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = {"one": True, "two": True, "router": True}

    @contextmanager
    def engines(*_: Any, **__: Any) -> Iterator[Any]:
        made = {name: SimpleNamespace(alive=lambda name=name: alive[name], tail=lambda name=name: f"{name}'s log")
                for name in ("one", "two")}  # fmt: skip
        yield SimpleNamespace(running=made, url=lambda name: f"http://{name}")

    process = SimpleNamespace(poll=lambda: None if alive["router"] else 1)
    router = SimpleNamespace(process=process, said=lambda: "router's log", stop=lambda: None)
    monkeypatch.setattr(real_contestants, "Engines", engines)
    monkeypatch.setattr(real_contestants, "environment", lambda _: tmp_path)
    monkeypatch.setattr(real_contestants, "rival", lambda *_, **__: (router, "http://router"))
    with real_contestants.serving(PLAIN, TINY, tmp_path / "plain", None) as there:
        assert there.ended() == ""
        alive["two"] = False
        assert there.ended() == "engine two ended:\ntwo's log"
        alive |= {"two": True, "router": False}
        assert there.ended() == "vllm-router ended:\nrouter's log"


def test_kept_runs_survive_a_save_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "real-tiny.json"
    save(path, "old")
    with monkeypatch.context() as broken:
        broken.setattr(Path, "write_text", half_written)
        with pytest.raises(OSError, match="No space left"):
            save(path, "new text")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("real-tiny.json", "old")]
    save(path, "new text")
    assert path.read_text() == "new text"


def half_written(path: Path, text: str, *_: Any, **__: Any) -> int:
    """`Path.write_text` on a disk that is full half-way."""
    path.write_bytes(text.encode()[: len(text) // 2])
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        ({}, ""),
        ({"sources": "other"}, "other sources"),
        ({"sources": None}, "other sources"),
        ({"machine": {**MACHINE, "date": "2025-12-31", "load_before": 3.0}}, ""),
        ({"machine": {**MACHINE, "cores": 4}}, "another machine (4 cores of EPYC)"),
    ],
)
def test_kept_runs_of_other_sources_or_another_machine_are_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: dict[str, Any], why: str
) -> None:
    path, found = tmp_path / "real-tiny.json", {"sources": "digest", "machine": MACHINE, "cells": [1], **kept}
    assert real.resumed(path, "digest", MACHINE) is None
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))
    assert real.resumed(path, "digest", MACHINE) == (None if why else found)
    said = capsys.readouterr().err
    assert f"kept runs are of {why}" in said if why else said == ""


@pytest.mark.parametrize("words", [["--quick", "--publish"], ["--models", "fat", "--publish"]])
def test_only_a_whole_run_is_published(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        real.parsed(words)
    assert ended.value.code == 2
    assert "only a whole run is published" in capsys.readouterr().err
    assert real.parsed(["--models", "tiny,fat", "--full", "--publish"]).publish


def test_what_decides_about_kept_runs_is_what_runs() -> None:
    names = {str(path.relative_to(ROOT)) for path in below(real.SOURCES, ROOT)}
    assert {"bench/real.py", "bench/real_load.py", "bench/contestants.py", "router/http/front.py"} <= names
    assert not {name for name in names if name.startswith(("tests", "bench/real_tables", "bench/real_figures", "sim"))}


def test_what_is_published_is_of_the_machine_of_the_kept_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    published, path = list[Any](), tmp_path / "real-tiny.json"
    monkeypatch.setattr(real, "kept_at", lambda name: tmp_path / f"real-{name}.json")
    monkeypatch.setattr(real, "digest", lambda: "digest")
    monkeypatch.setattr(real, "machine", lambda: {**MACHINE, "date": "2026-02-02", "load_before": 9.0})
    monkeypatch.setattr(real, "publish", lambda *given: published.append(given))
    monkeypatch.setattr(real, "draw", lambda _, __, date: published.append(date))
    (trace := tmp_path / real_load.TRACE).parent.mkdir(parents=True)
    trace.write_text(TRACE)
    monkeypatch.setattr(inputs, "required", lambda *_: tmp_path)
    monkeypatch.setattr(real, "shaped", lambda lines, _: real_load.shaped(lines, None, from_s=0))
    whole = ten(18, 12) | {"sources": "digest", "machine": MACHINE}
    path.write_text(json.dumps(whole))
    assert real.main(["--publish"]) == 0
    assert published[0] == MACHINE["date"] and published[1][2] == MACHINE
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]["tiny"]["machine"] == MACHINE
