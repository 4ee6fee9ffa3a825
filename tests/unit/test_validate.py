"""`baton validate`: readers that name the line of a wrong row, a case that is checked by hand, and the command."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from rich.console import Console
from rich.spinner import Spinner
from support.twin import Linear

from baton.cli import main
from baton.commands import validate
from cluster.errors import UsageError
from costs import shipped
from costs.profile import FIRST_TOKEN_MS
from engine.twin.config import TwinConfig, Version
from engine.twin.tokens import Segment
from sim.validate.drive import drive
from sim.validate.figures import Figure, RunComparison, over_seeds, totals, without_its_own_run
from sim.validate.measured import read_gpu, read_requests, read_series, read_settings, read_steady
from sim.validate.stamped import Stamped, replay_stamped
from sim.validate.steady import SteadyLoad, replay_steady
from sim.validate.tables import markdown
from sim.validate.workloads import WORKLOADS, PlannedRequest, steady, warm_up

LLAMA = shipped.model_named("meta-llama/Llama-3.1-8B")
REQUEST = {
    "request_id": "bench-0",
    "input_toks": 100,
    "output_toks": 3,
    "arrival_time": 1_700_000_000.0,
    "queued_ts": 50.0,
    "scheduled_ts": 50.25,
    "first_token_ts": 50.5,
    "last_token_ts": 51.5,
}
META = {
    "vllm_version": "0.19.0",
    "started_at": "2023-11-14T22:13:19.500000Z",
    "engine_kwargs": {"model": "meta-llama/Llama-3.1-8B", "max_num_seqs": 4, "max_num_batched_tokens": 2048},
    "kv_cache": {"num_gpu_blocks": 101, "block_size": 16, "gpu_memory_utilization": 0.9},
    "hardware": {"device_name": "NVIDIA GeForce RTX 4090"},
}
HEADER = (
    "exp_id,model,hardware,tp,precision,workload,max_num_batched_tokens,cpu_offload,"
    "e2e_mean,e2e_p90,e2e_p99,itl_mean,ttft_mean,ttft_p90,ttft_p99"
)
ROW = "16.0,meta-llama/Llama-3.1-8B-Instruct,H100,1.0,FP16,general,2048.0,0.0,2000,2100,2200,8.1,40,50,90"
SERIES = "t,prompt_throughput,gen_throughput,running,waiting,kv_cache_pct\n1.0,1,2,3,0,4.5\n2.0,1,2,0,0,0\n"


def meta(**changed: object) -> str:
    return json.dumps({**META, **changed})


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# -- readers --


def test_two_clocks_become_one() -> None:
    """The shortest way of a request to the engine counts as 0 s, which aligns the two clocks. Rows are in the order of
    arrival.
    """
    late = {**REQUEST, "arrival_time": 1_700_000_001.0, "queued_ts": 51.5, "scheduled_ts": 52, "first_token_ts": 53}
    read = read_requests(lines({**late, "last_token_ts": 54}, REQUEST), "r")
    first, second = read.rows
    assert (first.arrived_s, first.queued_s, first.scheduled_s) == pytest.approx((0, 0, 0.25))
    assert (first.first_token_s, first.last_token_s) == pytest.approx((0.5, 1.5))
    assert (second.arrived_s, second.queued_s) == pytest.approx((1.0, 1.5)), (
        "this request took half a second to reach the engine"
    )
    assert read.began_unix_s == pytest.approx(1_700_000_000.0)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("{nonsense\n", "r:1: not a JSON object"),
        ("\n[1]\n", "r:2: not a JSON object"),
        ("", "r: no requests"),
        (lines({**REQUEST, "queued_ts": None}), "r:1: queued_ts is None"),
        (lines({**REQUEST, "first_token_ts": "soon"}), "r:1: first_token_ts is 'soon'; write a number"),
        (lines({**REQUEST, "last_token_ts": float("nan")}), "r:1: last_token_ts is nan"),
        (lines({**REQUEST, "output_toks": 0}), "r:1: output_toks is 0; write a whole number, 1 or more"),
        (lines({**REQUEST, "input_toks": True}), "r:1: input_toks is True"),
        (lines({**REQUEST, "first_token_ts": 50.1}), "r:1: stamps run backwards"),
        ("[" * 100_000 + "\n", "r:1: not a JSON object"),
        (lines({**REQUEST, "queued_ts": 10**400}), "r:1: queued_ts is 1000"),
    ],
)
def test_a_wrong_request_is_named_by_its_line_and_the_others_are_read(rows: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        read_requests(rows, "r")
    assert str(error.value).startswith(said)
    read = read_requests(f"{rows.rstrip()}\n{lines(REQUEST)}", "r")
    assert len(read.rows) == 1
    assert [str(each).startswith(said) for each in read.left_out] == ([] if said == "r: no requests" else [True])


def test_settings_are_the_recorded_ones_or_else_the_defaults() -> None:
    recorded = {"scheduler_config": {"async_scheduling": False, "scheduler_reserve_full_isl": False}}
    settings = read_settings(json.dumps({**META, "resolved_config": recorded}), "m")
    assert (settings.num_blocks, settings.memory_share, settings.max_num_seqs, settings.tp) == (101, 0.9, 4, 1)
    assert not settings.async_scheduling and not settings.reserve_full_prompt
    bare = read_settings(json.dumps({"engine_kwargs": META["engine_kwargs"]}), "m")
    assert bare.async_scheduling and bare.reserve_full_prompt and bare.prefix_caching
    assert (bare.num_blocks, bare.gpu, bare.max_model_len, bare.memory_share) == (None, None, None, 0.9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "m: no JSON"),
        ("[]", "m: engine_kwargs is missing"),
        ('{"engine_kwargs": {"model": "x", "max_num_seqs": 1}}', "m: engine_kwargs.max_num_batched_tokens is missing"),
        ("[" * 100_000, "m: no JSON"),
        (meta(hardware="H100"), "m: hardware is 'H100'; write a mapping"),
        (meta(hardware={"device_name": ["H100"]}), "m: hardware.device_name is ['H100']; write a text"),
        (meta(kv_cache=[1]), "m: kv_cache is [1]; write a mapping"),
        (meta(resolved_config="x"), "m: resolved_config is 'x'; write a mapping"),
        (meta(resolved_config={"scheduler_config": 7}), "m: scheduler_config is 7; write a mapping"),
        (meta(kv_cache={"gpu_memory_utilization": "auto"}), "m: gpu_memory_utilization is 'auto'; write a number"),
    ],
)
def test_wrong_settings_are_named(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        read_settings(text, "m")
    assert str(error.value).startswith(said)


def test_the_gpu_is_read_from_the_other_file() -> None:
    assert read_gpu('{"nodes": [{"instances": [{"hardware": "RTX4090"}]}]}', "c") == "RTX4090"
    with pytest.raises(UsageError, match="hardware is missing"):
        read_gpu('{"nodes": []}', "c")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{HEADER}\n{ROW}\n{ROW.replace('2000', 'fast')}", "t:3: e2e_mean is 'fast'; write a number"),
        (f"{HEADER}\n{ROW.replace('2000', '')}", "t:2: e2e_mean is ''"),
        (f"{HEADER}\n{ROW.replace('8.1', '-1')}", "t:2: itl_mean is -1; a time in ms is more than 0"),
        (f"{HEADER}\n{ROW.replace('H100,1.0', 'H100,1.5')}", "t:2: tp is 1.5; write a whole number"),
        (f"{HEADER}\n16.0,x", "t:2: 2 columns where the header has 15"),
    ],
)
def test_a_wrong_row_of_a_table_is_left_out_and_named_by_its_line(text: str, said: str) -> None:
    rows, (left_out,) = read_steady(f"{text}\n{ROW}", "t")
    assert str(left_out).startswith(said)
    assert len(rows) == text.count(ROW) + 1


@pytest.mark.parametrize(("text", "said"), [(HEADER.replace("tp,", ""), "t:1: no column 'tp'"), (HEADER, "t: no rows")])
def test_a_table_without_rows_or_without_a_column_is_an_error(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_steady(text, "t")


def test_a_table_and_a_series_are_read() -> None:
    ((row,), _) = read_steady(f"{HEADER}\n{ROW}\n", "t")
    assert (row.number, row.tp, row.workload, row.max_num_batched_tokens) == ("16", 1, "general", 2048)
    assert (row.e2e_mean, row.ttft_p99, row.offload) == (2000, 90, False)
    (first, second), _ = read_series(SERIES, "s")
    assert (first.at_s, first.running, first.kv_percent) == (1, 3, 4.5)
    assert second.at_s == 2
    (left,), (bad,) = read_series(SERIES.replace(",3,0,4.5", ",x,0,4.5"), "s")
    assert left == second and str(bad).startswith("s:2: running is 'x'")


# -- the load --


@pytest.mark.parametrize(
    ("written", "number"),
    [("16.0", "16"), ("20251130", "20251130"), ("16.5", "16.5"), ("20251130123456789", "20251130123456789")],
)
def test_a_row_of_a_table_is_found_by_its_whole_number(written: str, number: str) -> None:
    (row,), _ = read_steady(f"{HEADER}\n{ROW.replace('16.0', written)}\n", "t")
    assert row.number == number


def test_a_steady_load_follows_its_description() -> None:
    general = WORKLOADS["general"]
    planned = steady(general, np.random.default_rng(7), share=0.1)
    at = np.array([each.at_ns for each in planned]) / 1e9
    assert warm_up(0.1) == 90 and warm_up(1.0) == 0
    assert len(planned) == 90 + 60 * 8 + 60 * 20
    assert (np.diff(at) >= 0).all()
    warm_s = 90 / 8
    assert at[89] == pytest.approx(warm_s), "the warm-up comes at the first stage's rate"
    assert at[569] == pytest.approx(warm_s + 60) and at[-1] == pytest.approx(warm_s + 120)
    gaps = np.diff(at[570:])
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.1), "Poisson"
    assert {sum(part.tokens for part in each.prompt) for each in planned} == {547}
    assert {each.output_tokens for each in planned} == {248}
    texts = [each.prompt for each in planned]
    assert len(set(texts)) == 100 and texts[:100] == texts[100:200], "the same 100 prompts are repeated"
    assert len({prompt[0] for prompt in texts}) == 10, "system prompts"
    whole = steady(WORKLOADS["roleplay"], np.random.default_rng(7))
    assert len(whole) == 7200 and whole[-1].at_ns == 1200 * 10**9


def test_a_seed_fixes_the_load_and_repeated_false_makes_every_question_new() -> None:
    codegen = WORKLOADS["codegen"]
    one, same, other = (steady(codegen, np.random.default_rng(seed), share=0.02) for seed in (1, 1, 2))
    assert one == same != other
    new = steady(codegen, np.random.default_rng(1), share=0.02, repeated=False)
    assert [each.at_ns for each in new] == [each.at_ns for each in one]
    assert len({each.prompt for each in new}) == len(new)
    assert len({each.prompt[0] for each in new}) == 10


# -- by hand --

SMALL = TwinConfig(num_blocks=20, max_model_len=200, max_num_seqs=1, version=Version(pull_after_forward=False))


def test_a_case_by_hand() -> None:
    """A step takes 1000 ns, and 10 ns a prompt token, 7 ns a decoding request, 3 ns a token of context.

    The first request computes 40 prompt tokens in 1000 + 400 ns, and then takes two steps of 1000 + 7 + 3·41 and
    1000 + 7 + 3·42 ns. The second request arrives at 500 ns, waits for a place until 3663 ns, and takes 1000 + 160 ns
    and then 1000 + 7 + 3·17 ns.
    """
    planned = [PlannedRequest(0, (Segment(1, 40),), 3), PlannedRequest(500, (Segment(2, 16),), 2)]
    driven = drive(SMALL, Linear(), planned, [600, 5000])
    times = driven.times
    assert times.ttft.tolist() == pytest.approx([1400e-6, (3663 + 1160 - 500) / 1e6])
    assert times.e2e.tolist() == pytest.approx([3663e-6, (3663 + 1160 + 1058 - 500) / 1e6])
    assert times.queue.tolist() == pytest.approx([0, (3663 - 500) / 1e6])
    assert times.tpot.tolist() == pytest.approx([(1130 + 1133) / 2e6, 1058e-6])
    assert times.latency_per_token.tolist() == pytest.approx([1221e-6, 5381e-6 / 2])
    assert driven.preemptions == 0
    early, late = driven.loads
    assert (early.running, early.waiting, early.kv_usage) == (1, 1, pytest.approx(3 / 20))
    assert (late.running, late.waiting, late.kv_usage) == (1, 0, pytest.approx(2 / 20))


def test_a_first_token_from_a_step_like_any_other() -> None:
    """A prompt that is cached except for its last token takes part in a run of decode steps. Its first token comes at
    the end of the first of these steps.
    """
    twice = [PlannedRequest(0, (Segment(1, 33),), 2), PlannedRequest(10_000, (Segment(1, 33),), 5)]
    times = drive(SMALL, Linear(), twice).times
    assert times.ttft[1] == pytest.approx((1000 + 7 + 3 * 33) / 1e6)
    assert times.e2e[1] == pytest.approx(sum(1000 + 7 + 3 * context for context in range(33, 38)) / 1e6)


# -- figures --


def comparison(name: str, predicted: float) -> RunComparison:
    figures = (Figure("E2E mean", "ms", 100.0, predicted),)
    return RunComparison(name=name, model="m", engine="e", because="b", figures=figures, requests=1, preemptions=0)


def test_errors_add_up_over_runs() -> None:
    (total,) = totals([comparison("a", 90), comparison("b", 104), comparison("c", 130)])
    assert (total.runs, total.worst_run) == (3, "c")
    assert (total.median, total.mean, total.worst) == pytest.approx((0.1, 0.44 / 3, 0.3))
    assert total.aim == 0.08 and not total.met
    assert totals([comparison("a", 93)])[0].met
    assert totals([comparison("run", 90), comparison("run", 104)])[0].runs == 2, "of two folders"
    assert Figure("queue p50", "ms", 0.0, 1.0).error is None


def test_the_spread_is_half_of_the_range_over_seeds() -> None:
    assert over_seeds("x", "ms", 10, [9, 12, 11]) == Figure("x", "ms", 10, pytest.approx(32 / 3), 1.5)


# -- whole runs --


def stamped(tmp_path: Path, *, rows: str = lines(REQUEST)) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    (folder / "requests.jsonl").write_text(rows)
    (folder / "meta.json").write_text(json.dumps(META))
    (folder / "timeseries.csv").write_text(SERIES)
    return folder


def test_a_run_that_went_as_predicted_has_no_error() -> None:
    """The measured times are taken from the prediction itself, so every figure has no error except rounding."""
    settings = read_settings(json.dumps(META), "m")
    requests = read_requests(lines(REQUEST, {**REQUEST, "arrival_time": 1_700_000_000.01, "queued_ts": 50.01}), "r")
    once = replay_stamped(Stamped("x", settings, requests, (), "RTX-4090"), LLAMA, shipped.profiles())
    seen = {each.name: each.predicted / 1000 for each in once.figures}
    again = []
    for at_s in (0.0, 0.01):
        stamps = {
            "arrival_time": 1_700_000_000.0 + at_s,
            "queued_ts": 50 + at_s,
            "scheduled_ts": 50 + at_s,
            "first_token_ts": 50 + at_s + seen["TTFT p50"],
            "last_token_ts": 50 + at_s + seen["E2E p50"],
        }
        again.append({**REQUEST, **stamps})
    twice = replay_stamped(
        Stamped("x", settings, read_requests(lines(*again), "r"), (), "RTX-4090"), LLAMA, shipped.profiles()
    )
    for name in ("TTFT mean", "TTFT p50", "E2E mean", "E2E p50"):
        figure = twice.figure(name)
        assert figure is not None and figure.error == pytest.approx(0, abs=1e-6), name
    assert twice.requests == 2 and twice.one_by_one["E2E"] < 0.5
    assert "1,600 tokens of KV" in twice.engine, "one block of 101 is never used"


def test_a_steady_run_is_measured_at_its_client() -> None:
    ((row,), _) = read_steady(f"{HEADER}\n{ROW}\n", "t")
    usual = replay_steady(row, shipped.model_named(row.model), shipped.profiles(), SteadyLoad(seeds=2, share=0.02))
    bare = replay_steady(
        row, shipped.model_named(row.model), shipped.profiles(), SteadyLoad(seeds=2, share=0.02, first_token_ms=0.0)
    )
    for name in ("TTFT mean", "E2E p99"):
        with_cpu, without = usual.figure(name), bare.figure(name)
        assert with_cpu is not None and without is not None
        assert with_cpu.predicted - without.predicted == pytest.approx(FIRST_TOKEN_MS)
    tpot, same = usual.figure("TPOT mean"), bare.figure("TPOT mean")
    assert tpot is not None and tpot.measured == pytest.approx((2000 - 40) / 247)
    assert same is not None and tpot.predicted == pytest.approx(same.predicted, rel=1e-9)
    assert usual.requests == 2 * (96 + 240), "the warm-up does not count"


def test_an_unknown_workload_is_named() -> None:
    ((row,), _) = read_steady(f"{HEADER}\n{ROW.replace('general', 'poetry')}\n", "t")
    with pytest.raises(UsageError, match="workload 'poetry' is not known; there are general"):
        replay_steady(row, shipped.model_named(row.model), shipped.profiles())


# -- the command --


def test_the_command_for_people_and_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stamped(tmp_path)
    assert main(["validate", str(folder), "--series", str(tmp_path / "series.csv")]) == 0
    shown = capsys.readouterr()
    assert "TTFT mean, ms" in shown.out and "RTX-4090/tp1" in shown.out
    assert shown.err == "replaying 1 of 1: run\n"
    header, first, *_ = (tmp_path / "series.csv").read_text().splitlines()
    assert header.startswith("run,at_s,running,running_predicted") and first.startswith("run,1.0,3,")
    assert main(["validate", str(folder), "--json"]) == 0
    run, total = map(json.loads, capsys.readouterr().out.splitlines())
    assert (run["event"], run["name"], run["requests"]) == ("run", "run", 1)
    assert {"name", "unit", "measured", "predicted", "error", "spread"} == set(run["figures"][0])
    assert total["event"] == "totals" and total["totals"][0]["runs"] == 1


@pytest.mark.parametrize("path", [".", "../run", "inside/.."])
def test_the_folder_of_a_run_has_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (stamped(tmp_path) / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    assert main(["validate", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["name"] == "run"


def test_a_runs_name_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich would take one name for a style, one for a closing tag without its opening one, and one for an emoji."""
    shown: list[str] = []

    class Line(Spinner):
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing was started."""

        def update(self, text: Any = "", **_: Any) -> None:
            super().update(text=text)
            shown.append(str(self.text))

    monkeypatch.setattr(Console, "status", lambda *_: Line("dots"))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    names = ("run[red]", "run[/a]", "run:smile:", "run\\[b]")
    replays = [(name, partial(comparison, name, 90.0)) for name in names]
    assert [each.name for each in validate._progress(replays, [])] == list(names)
    assert shown == [f"replaying {number} of 4: {name}" for number, name in enumerate(names, 1)]


def test_a_table_and_a_folder_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stamped(tmp_path)
    (tmp_path / "table.csv").write_text(f"{HEADER}\n{ROW}\n")
    assert main(["validate", str(tmp_path), "--share", "0.02", "--seeds", "1", "--markdown"]) == 0
    text = capsys.readouterr().out
    assert "| h100-16: meta-llama/Llama-3.1-8B-Instruct tp1, general |" in text
    assert "**run**: 1 requests" in text
    assert "| this twin, 1 runs |" in text and "| aiconfigurator | 17.0% | 21.0% | 809.0% |" in text
    assert "median" in text and "≤ 20%" in text


BAD_ROWS = {
    "an empty cell": (ROW.replace("2000", ""), "table.csv:2: e2e_mean is ''; write a number"),
    "no such model": (
        ROW.replace("meta-llama/Llama-3.1-8B-Instruct", "org/other"),
        "table.csv:2: model is 'org/other'",
    ),
    "no such workload": (ROW.replace("general", "chess"), "table.csv:2: workload is 'chess'"),
    "no such GPU": (ROW.replace("H100", "X9"), "table.csv:2: hardware is 'X9'"),
}
TOO_LARGE = ROW.replace("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-405B")


@pytest.mark.parametrize(("row", "said"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_one_bad_row_never_stops_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str, said: str
) -> None:
    (tmp_path / "table.csv").write_text(f"{HEADER}\n{row}\n{ROW}\n")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    words = ["validate", str(tmp_path), "--share", "0.02", "--seeds", "1", "--json"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "warning: 2 left out:" in shown.err and said in shown.err and "other.csv:1: no column" in shown.err
    events = [json.loads(line) for line in shown.out.splitlines()]
    assert [each["event"] for each in events] == ["left_out", "left_out", "run", "totals"]
    told = next(each for each in events if "field" in each)
    assert told["where"].endswith("table.csv:2") and told["field"] and told["reason"]
    (tmp_path / "table.csv").write_text(f"{HEADER}\n{row}\n")
    assert main(words) == 2
    assert "nothing could be replayed; 1 more are wrong" in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "table.csv").write_text(f"{HEADER}\n{TOO_LARGE}\n{ROW}\n")
    assert main(["validate", str(tmp_path / "table.csv"), "--share", "0.02", "--seeds", "1"]) == 0
    assert "table.csv:2: 756.0 GiB of weights on each H100-SXM (tp1) leave no room" in capsys.readouterr().err


def test_a_run_whose_context_does_not_fit_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = stamped(tmp_path)
    long = tmp_path / "long"
    shutil.copytree(good, long)
    (long / "meta.json").write_text(meta(engine_kwargs={**META["engine_kwargs"], "max_model_len": 65536}))
    assert main(["validate", str(long), str(good)]) == 0
    shown = capsys.readouterr()
    assert "1 left out" in shown.err and "max_model_len does not fit into the KV cache" in shown.err


def test_a_run_whose_answers_have_one_token_has_no_time_per_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stamped(tmp_path, rows=lines({**REQUEST, "output_toks": 1, "last_token_ts": 50.5}))
    assert main(["validate", str(folder), "--json"]) == 0
    assert "TPOT" not in capsys.readouterr().out.splitlines()[0]


def test_a_model_can_be_described_by_its_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((Path(shipped.__file__).parent / "models" / "qwen3-14b.json").read_text())["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "table.csv").write_text(f"{HEADER}\n{ROW.replace('meta-llama/Llama-3.1-8B-Instruct', 'acme/ours')}\n")
    words = ["validate", str(tmp_path / "table.csv"), "--share", "0.02", "--seeds", "1"]
    assert main([*words, "--config", f"acme/ours={tmp_path / 'config.json'}"]) == 0
    assert "acme/ours tp1" in capsys.readouterr().out
    assert main([*words, "--config", "acme/ours"]) == 2
    assert "--config acme/ours: write MODEL=FILE" in capsys.readouterr().err


def test_a_broken_path_never_stops_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = stamped(tmp_path)
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "requests.jsonl").write_text(lines(REQUEST))
    (bad / "meta.json").write_text("{")
    assert main(["validate", str(bad), str(tmp_path / "none"), str(good), "--json"]) == 0
    shown = capsys.readouterr()
    assert "warning: 2 left out:" in shown.err and "no JSON" in shown.err and "no such file or folder" in shown.err
    events = [json.loads(line)["event"] for line in shown.out.splitlines()]
    assert events == ["left_out", "left_out", "run", "totals"]


def test_an_invalid_byte_costs_at_most_its_own_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stamped(tmp_path)
    for name, broken in (("requests.jsonl", b"\xff\xfe\n"), ("timeseries.csv", b"\xff,1,2,3,0,4.5\n")):
        with (folder / name).open("ab") as file:
            file.write(broken)
    assert main(["validate", str(folder)]) == 0
    shown = capsys.readouterr().err
    assert "warning: 2 left out:" in shown
    assert "requests.jsonl:2: not a JSON object" in shown and "timeseries.csv:4: t is '\\udcff'" in shown


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        (
            "timeseries.csv",
            "1.76e12,1,2,3,0,4.5",
            "timeseries.csv:4: t is 1.76e12; write seconds since the run's start",
        ),
        ("timeseries.csv", "1e300,1,2,3,0,4.5", "timeseries.csv:4: t is 1e300; write seconds since the run's start"),
        ("requests.jsonl", {"input_toks": 1600}, "requests.jsonl:2: input_toks is 1600; the engine took at most 1600"),
        ("requests.jsonl", {"last_token_ts": 1e300}, "requests.jsonl:2: last_token_ts is 1e+300; write seconds"),
    ],
)
def test_an_impossible_cell_costs_its_own_row_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, row: str | dict, said: str
) -> None:
    folder = stamped(tmp_path)
    with (folder / name).open("a") as file:
        file.write(f"{row}\n" if isinstance(row, str) else lines({**REQUEST, **row}))
    assert main(["validate", str(folder), "--json"]) == 0
    shown = capsys.readouterr()
    assert "warning: 1 left out:" in shown.err and said in shown.err
    run = json.loads(shown.out.splitlines()[1])
    assert (run["requests"], len(run["series"])) == (1, 2)


def test_settings_say_how_long_a_request_may_be() -> None:
    assert read_settings(meta(), "m").longest == 1600, "one of the blocks is never given out"
    assert read_settings(meta(kv_cache={}), "m").longest is None
    assert read_settings(meta(engine_kwargs={**META["engine_kwargs"], "max_model_len": 512}), "m").longest == 512


def test_a_run_that_cannot_be_replayed_costs_no_other_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def impossible(error: Exception) -> RunComparison:
        raise error

    errors = (UsageError("no such GPU"), OverflowError("too large"), ZeroDivisionError("division by zero"))
    replays: list[tuple[str, validate.Replay]] = [
        *((f"run {at}", partial(impossible, error)) for at, error in enumerate(errors)),
        ("good", partial(comparison, "good", 90.0)),
    ]
    left_out: list[UsageError] = []
    assert [each.name for each in validate._progress(replays, left_out)] == ["good"]
    assert list(map(str, left_out)) == ["run 0: no such GPU", "run 1: too large", "run 2: division by zero"]
    assert "replaying 4 of 4: good" in capsys.readouterr().err


def test_each_run_is_left_out_of_the_fit_that_predicts_it() -> None:
    def run(name: str, ttft: float, measured: float, e2e: float = 200) -> RunComparison:
        figures = (
            Figure("TTFT mean", "ms", measured, ttft),
            Figure("TPOT mean", "ms", 10, 10),
            Figure("E2E mean", "ms", 200, e2e),
        )
        return RunComparison(name=name, model="m", engine="e", because="b", figures=figures, requests=1, preemptions=0)

    alike = [run("a", 40, 40), run("b", 50, 50, e2e=210), run("c", 60, 80)]
    ttft, e2e = without_its_own_run(alike, 1.0)
    assert (ttft.runs, ttft.name, ttft.aim) == (3, "TTFT mean, its run left out of the fit", 0.2)
    assert ttft.worst == pytest.approx(0.25), "a and b need one step, c needs three: c is predicted with one"
    assert (e2e.runs, e2e.name, e2e.aim) == (3, "E2E mean, its run left out of the fit", 0.08)
    assert e2e.worst == pytest.approx(0.1), "without b, a and c need two steps, one more than b was predicted with"
    assert without_its_own_run(alike[:2], 1.0) == []
    same_name = [replace(each, name="run") for each in alike]
    assert [(each.runs, each.worst) for each in without_its_own_run(same_name, 1.0)] == [
        (each.runs, each.worst) for each in without_its_own_run(alike, 1.0)
    ]
    assert without_its_own_run([*alike[:2], comparison("d", 90)], 1.0) == [], (
        "a run without TTFT says nothing of the fit"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{tmp}/none"], "{tmp}/none: no such file or folder"),
        (["{tmp}/empty"], "{tmp}/empty: neither a run (requests.jsonl, meta.json) nor a folder of runs and tables"),
        (["{tmp}/run/meta.json"], "{tmp}/run/meta.json:1: no column 'exp_id'"),
        (["{tmp}/table.csv", "--row", "99"], "no row 99 in {tmp}/table.csv"),
        (["{tmp}/run", "--profile", "{tmp}/run/meta.json"], "--profile {tmp}/run/meta.json: not a file of fits"),
        (["{tmp}/run", "--series", "{tmp}/none/x.csv"], "--series {tmp}/none/x.csv: there is no folder {tmp}/none"),
        (
            ["{tmp}/run", "--series", "{tmp}/run/timeseries.csv"],
            "--series {tmp}/run/timeseries.csv is the timeseries.csv of {tmp}/run itself, and would be overwritten",
        ),
        (["{tmp}", "--series", "{tmp}/run/meta.json"], "--series {tmp}/run/meta.json is the meta.json of {tmp} itself"),
        (["{tmp}/table.csv", "--series", "{tmp}/table.csv"], "--series {tmp}/table.csv is the PATH {tmp}/table.csv"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    stamped(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "table.csv").write_text(f"{HEADER}\n{ROW}\n")
    assert main(["validate", *(word.format(tmp=tmp_path) for word in words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("baton: " + said.format(tmp=tmp_path))
    assert (tmp_path / "run" / "timeseries.csv").read_text() == SERIES
    assert (tmp_path / "table.csv").read_text() == f"{HEADER}\n{ROW}\n"


def test_a_series_may_be_written_again_among_the_runs(tmp_path: Path) -> None:
    words = ["validate", str(stamped(tmp_path)), "--series", str(tmp_path / "run" / "series.csv")]
    assert main(words) == 0
    written = (tmp_path / "run" / "series.csv").read_text()
    assert main(words) == 0
    assert (tmp_path / "run" / "series.csv").read_text() == written


def test_a_series_that_cannot_be_written_costs_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(stamped(tmp_path)), "--series", "/dev/full"]) == 2
    shown = capsys.readouterr()
    assert "TTFT mean, ms" in shown.out
    assert "--series /dev/full: No space left on device; name a file" in shown.err


def test_a_stopped_validation_leaves_the_earlier_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> list[RunComparison]:
        raise KeyboardInterrupt

    series = tmp_path / "series.csv"
    series.write_text("an earlier run\n")
    monkeypatch.setattr(validate, "_progress", stopped)
    with contextlib.suppress(KeyboardInterrupt):
        main(["validate", str(stamped(tmp_path)), "--series", str(series)])
    assert series.read_text() == "an earlier run\n"


def test_a_users_own_profile_must_fit_the_model_and_the_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stamped(tmp_path)
    files = Path(shipped.__file__).parent / "profiles"
    assert main(["validate", str(folder), "--profile", str(files / "llmservingsim.json")]) == 0
    capsys.readouterr()
    assert main(["validate", str(folder), "--profile", str(files / "aiconfigurator.json")]) == 2
    assert "no fit of meta-llama/Llama-3.1-8B on RTX-4090" in capsys.readouterr().err


def test_without_profiles_a_run_is_predicted_by_the_roofline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stamped(tmp_path)
    assert main(["validate", str(folder)]) == 0
    assert "profile llmservingsim/" in capsys.readouterr().out
    assert main(["validate", str(folder), "--no-profiles"]) == 0
    assert "no profile; efficiencies fitted on this GPU" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [["--seeds", "0"], ["--share", "2"], ["--share", "x"], ["--first-token-ms", "-1"]])
def test_wrong_flag_values_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["validate", "somewhere", *words])
    assert stopped.value.code == 2
    assert "must be" in capsys.readouterr().err


def test_a_series_is_shortened_for_a_page(tmp_path: Path) -> None:
    samples, _ = read_series("t,running,waiting,kv_cache_pct\n" + "".join(f"{at},1,0,0\n" for at in range(1, 100)), "s")
    settings = read_settings(json.dumps(META), "m")
    requests = read_requests(lines(REQUEST), "r")
    found = replay_stamped(Stamped("x", settings, requests, samples, "RTX-4090"), LLAMA, shipped.profiles())
    assert len(found.series) == 99
    assert all(row.kv_percent is None for row in found.series), "zero throughout: not recorded"
    shown = [line for line in markdown([found]) if " / " in line]
    assert len(shown) == 15


@pytest.mark.parametrize(
    ("arrival", "said"),
    [
        (3600 + 1_700_000_004.0, "3600 s sooner"),
        (1_700_000_004.0 - 3600, "3600 s later"),
        (0.0, "1700000004 s later"),
    ],
)
def test_one_arrival_of_a_wrong_hour_changes_no_other_request(arrival: float, said: str) -> None:
    stamps = [name for name in REQUEST if name.endswith(("_ts", "_time"))]
    rows = [{**REQUEST, **{name: float(REQUEST[name]) + at for name in stamps}} for at in range(5)]  # type: ignore[arg-type]
    right = read_requests(lines(*rows[:4]), "r")
    wrong = {**rows[4], "arrival_time": arrival}
    read = read_requests(lines(*rows[:4], wrong), "r")
    assert (read.rows, read.began_unix_s) == (right.rows, right.began_unix_s)
    assert [each.where for each in read.left_out] == ["r:5"] and said in str(read.left_out[0])
