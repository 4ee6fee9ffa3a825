"""The command `baton simulate`: its flags, its files, its output and its errors."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from baton.cli import main
from baton.commands.simulate import again
from router.scheduler.scheduler import Scheduler

SMALL = ["simulate", "--prefill", "1", "--decode", "1", "--rate", "20", "--requests", "30", "--ttft-ms", "500"]


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main([*SMALL, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_json_is_the_same_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    first = simulated(capsys)
    assert first == simulated(capsys)
    assert first != simulated(capsys, "--seed", "1")
    assert first["report"]["completed"] == 30
    assert first["report"]["attainment"] == 1.0
    fleet = first["fleet"]
    assert fleet == {
        "instances": 2, "gpus": 2, "model": "meta-llama/Llama-3.1-8B", "gpu_seconds": fleet["gpu_seconds"],
        "energy_j": fleet["energy_j"],
    }  # fmt: skip
    assert 105 < fleet["energy_j"] / fleet["gpu_seconds"]["H100-SXM"] < 700, "watts of an H100, idle to TDP"
    assert 0 < fleet["gpu_seconds"]["H100-SXM"] < 2 * first["report"]["elapsed_s"] + 1
    assert 0 < first["counts"]["pulls"] < 30, "a request is not handed over if D alone serves it for less"
    assert simulated(capsys, "--policy", "least_load")["counts"]["pulls"] == 30
    assert not any("time" in key for key in first), "no figure depends on this machine's speed"


def test_the_report_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--", "--enforce-eager"]) == 0
    told = capsys.readouterr()
    assert "30 requests sent, 30 completed" in told.out
    assert "attainment 100.0%" in told.out
    assert "not simulated, so no figure has what they change: --enforce-eager" in told.err
    assert "requests/s" in told.err


def test_a_stopped_simulation_says_that_nothing_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("baton.commands.simulate.World.run", stopped)
    out = tmp_path / "out"
    assert main([*SMALL, "--out", str(out)]) == 130
    assert (
        "simulate: stopped at 0 s of the run: there is no report, and nothing was written\n" in capsys.readouterr().err
    )
    assert not out.exists()


def test_a_cluster_file_brings_fleet_classes_and_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(
        "models:\n  - name: Qwen/Qwen3-32B\n    pools:\n"
        "      prefill: {start: 2, shape: {tp: 2}, gpu: H100-SXM}\n"
        "      decode: {shape: {tp: 4}, gpu: H200, engine_args: {max-num-seqs: 7}}\n"
        "slo:\n  interactive: {ttft_ms: 2000, tpot_ms: 100}\n  batch: {ttft_ms: 20000}\n"
        "limits: {first_token_s: 30}\n"
    )
    assert main(["simulate", "--cluster", str(file), "--rate", "2", "--requests", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fleet"].pop("gpu_seconds").keys() == {"H100-SXM", "H200"}
    assert found["fleet"].pop("energy_j") > 0
    assert found["fleet"] == {"instances": 3, "gpus": 8, "model": "Qwen/Qwen3-32B"}
    assert found["settings"]["first_token_s"] == 30
    assert found["report"]["targets"]["ttft_ms"] == 2000
    assert found["report"]["attainment"] == 1.0


def test_of_two_models_with_one_name_one_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(
        "models:\n"
        "  - {name: Qwen/Qwen3-32B, served_name: chat, pools: {both: {start: 2, gpu: H200}}}\n"
        "  - {name: Qwen/Qwen3-32B, served_name: batch, pools: {both: {start: 3, gpu: H200}}}\n"
        "slo:\n  interactive: {ttft_ms: 2000, tpot_ms: 100}\n"
    )
    words = ["simulate", "--cluster", str(file), "--rate", "2", "--requests", "10", "--json"]
    for name, count in (("chat", 2), ("batch", 3)):
        assert main([*words, "--model", name]) == 0
        fleet = json.loads(capsys.readouterr().out)["fleet"]
        assert (fleet["model"], fleet["instances"]) == (name, count)
    assert main([*words, "--model", "Qwen/Qwen3-32B"]) == 2
    assert "has several models of this name: give one of chat, batch" in capsys.readouterr().err


def test_records_can_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.jsonl"
    first = simulated(capsys, "--out", str(out))
    words = ["simulate", "--prefill", "1", "--decode", "1", "--trace", str(out), "--ttft-ms", "500", "--json"]
    assert main(words) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["report"] == first["report"], "the written records are the same load"


def test_a_chrome_trace_covers_the_window_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    simulated(capsys, "--chrome-trace", str(file), "--trace-window", "0.1-0.5")
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"router", "prefill-0", "decode-0"}
    steps = [event for event in events if event["ph"] == "X"]
    assert steps
    assert all(1e5 <= step["ts"] < 5e5 and step["dur"] > 0 for step in steps)
    by_engine = [[(s["ts"], s["ts"] + s["dur"]) for s in steps if s["pid"] == pid] for pid in (1, 2)]
    for spans in by_engine:
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(spans)), "no overlap"
    begun = [event["id"] for event in events if event["ph"] == "b" and event["cat"] == "request"]
    assert sorted(begun) == sorted(event["id"] for event in events if event["ph"] == "e" and event["cat"] == "request")


def test_faults_by_name_and_by_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chaos = simulated(capsys, "--faults", "chaos", "--prefill", "3", "--decode", "3")
    assert chaos["faults"]
    file = tmp_path / "faults.json"
    file.write_text(json.dumps(chaos["faults"]))
    again_ = simulated(capsys, "--faults", str(file), "--prefill", "3", "--decode", "3")
    assert again_["report"] == chaos["report"]


RANKED = """
models:
  - name: meta-llama/Llama-3.1-8B
    pools:
      prefill: {start: STARTS, shape: {dp: DP}, gpu: H100-SXM}
      decode: {start: STARTS, shape: {dp: DP}, gpu: H100-SXM}
"""


def test_two_ranks_are_simulated_like_two_instances(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(starts: int, ranks: int, *words: str) -> dict:
        file = tmp_path / f"{starts}x{ranks}.yaml"
        file.write_text(RANKED.replace("STARTS", str(starts)).replace("DP", str(ranks)))
        assert main(["simulate", "--cluster", str(file), "--rate", "8", "--requests", "40", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    assert run(1, 2) == run(2, 1), "requests, pulls, GPUs and energy are those of two instances each"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--policy", "best"), "--policy best: there is"),
        (("--gpu", "H9000"), "Nothing is known about the GPU 'H9000'"),
        (("--model", "Llama-9"), "do not ship"),
        (("--tp-prefill", "0", "--prefill", "0", "--decode", "0"), "no instance: give at least one"),
        (("--tp-prefill", "0"), "--tp-prefill 0: write a whole number of GPUs, 1 or more"),
        (("--faults", "/nowhere"), "--faults /nowhere: .*give a file of faults, or one of kills"),
        (("--hop-us", "-1"), "--hop-us -1: write a number of microseconds, 0 or more"),
        (("--hop-us", "nan"), "--hop-us nan: write a number of microseconds, 0 or more"),
        (("--handshake-ms", "inf"), "--handshake-ms inf: write a number of milliseconds, 0 or more"),
        (("--first-token-s", "0"), "--first-token-s 0: write a number of seconds, above 0"),
        (("--tp-both", "2"), "--tp-both is of instances that the fleet has none of: give --both N, too"),
        (("--tp-prefill", "3"), "has 32 heads, which 3 ranks of tensor parallelism cannot share: vLLM does not start"),
        (("--routers", "0"), "--routers 0: write a whole number, 1 or more"),
        (("--cluster", "x.yaml"), "--prefill describes a fleet, and --cluster names a file that does"),
        (("--trace", "/nowhere"), "--rate makes load up, --trace replays one"),
        (("--routers", "1" + "0" * 400), "--routers of so many digits: write a whole number, 1 or more, up to 10,000"),
        (("--client-us", "1e12"), "--client-us 1e.12: write a number of microseconds, 0 or more, up to 60,000,000"),
        (("--start-up-s", "1e300"), "--start-up-s: 1e300 must be a number above 0, up to 1e.12"),
        (("--trace-window", "1-inf"), "write the first second and the last"),
        (("--trace-window", "5-1"), "write the first second and the last"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    try:
        code = main([*SMALL, *words])
    except SystemExit as exited:  # argparse exits by itself
        code = int(exited.code or 0)
    told = capsys.readouterr().err
    assert code == 2
    assert re.search(message, told), told


@pytest.mark.interpreted
def test_a_run_that_breaks_a_law_prints_its_seed_and_how_to_see_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--faults", "slow", "--seed", "7"]
    monkeypatch.setattr("sys.argv", ["baton", *words])
    monkeypatch.setattr(Scheduler, "finish", lambda *_, **__: ())
    assert main(words) == 1
    told = capsys.readouterr().err
    assert "simulate: LawBroken at " in told
    assert f"seed=7; to see it again: baton {' '.join(words)}" in told


def test_the_printed_command_adds_the_seed_if_the_user_gave_none() -> None:
    assert again(["simulate", "--rate", "3"], 0) == "baton simulate --rate 3 --seed 0"
    assert again(["simulate", "--seed=4", "--", "--x"], 4) == "baton simulate --seed=4 -- --x"
    assert again(["simulate", "--", "--x"], 5) == "baton simulate --seed 5 -- --x"


def test_a_fleet_changes_by_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = tmp_path / "changes.jsonl"
    changes.write_text(
        '{"at_s": 0.5, "do": "start", "pool": "decode", "instance": "decode-1", "because": "more"}\n'
        '{"at_s": 0.6, "do": "start", "pool": "decode", "instance": "decode-2"}\n'
    )
    found = simulated(capsys, "--changes", str(changes), "--gpus", "h100=3", "--start-up-s", "0.2")
    assert found["report"]["completed"] == 30
    assert found["fleet"]["gpus"] == 3
    happened = [(each["instance"], each["what"]) for each in found["fleet_events"] if each["at_s"] > 0]
    assert happened == [
        ("decode-1", "asked"), ("decode-1", "starting"), ("decode-2", "asked"), ("decode-2", "pending"),
        ("decode-1", "ready"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("x", "not JSON"),
        ("[[]]", "change 1: [] is no object"),
        ('{"at_s": -1, "do": "stop", "instance": "a"}', "at_s is -1: must be a number of seconds, 0 or more"),
        ('{"at_s": 1, "do": "run"}', "do is 'run': must be one of start, drain, resume, flip, stop"),
        (
            '{"at_s": 1, "do": "flip", "instance": "a", "role": "x"}',
            "role is 'x': must be one of prefill, decode, both",
        ),
        ('{"at_s": 1, "do": "stop", "instance": "a", "when": 1}', "'when' is no field of a stop"),
        (
            '{"at_s": 1, "do": "start", "pool": "both", "instance": "a"}',
            "pool is 'both': must be one of prefill, decode",
        ),
        ('{"at_s": 1, "do": "drain", "instance": "a", "leave": 1}', "leave is 1: must be true or false"),
        ('{"at_s": 1, "do": "stop"}', "instance is None: must be a name"),
        ("[" * 5000, "nested too deep"),
    ],
)
def test_a_malformed_change_is_named(line: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = tmp_path / "changes.jsonl"
    changes.write_text(line)
    assert main([*SMALL, "--changes", str(changes)]) == 2
    assert f"--changes {changes}: " in (said := capsys.readouterr().err)
    assert told in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpus", "H100=x"], "--gpus H100=x: write TYPE=N"),
        (["--gpus", "H100-SXM=1"], "the fleet cannot begin: decode-0: no GPU is free: 1 of 1"),
        (["--start-fails", "3"], "fails is 3: must be a share from 0 to 1"),
        (["--start-up-p95-s", "1"], "p95_s is 1: must be median_s (60) or more"),
    ],
)
def test_impossible_gpus_and_starts_are_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--decision-log", "--out"])
def test_a_file_on_a_full_disk_is_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The files are the purpose of a simulation: if one is incomplete, the command fails."""
    assert main([*SMALL, flag, "/dev/full"]) == 2
    assert f"{flag} /dev/full: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--decision-log", "--out", "--chrome-trace"])
def test_a_file_that_cannot_be_made_is_refused_before_the_run(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, flag, str(tmp_path / "none" / "file")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main([*SMALL, flag, str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert "is a folder" in shown.err and not shown.out


def test_a_report_is_printed_though_a_file_is_incomplete(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json", "--out", "/dev/full"]) == 2
    assert json.loads(capsys.readouterr().out)


def test_a_wrong_file_of_faults_leaves_an_earlier_log_as_it_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("earlier")
    assert main([*SMALL, "--decision-log", str(log), "--faults", str(tmp_path / "none")]) == 2
    assert log.read_text() == "earlier"


def test_a_decision_log_is_written_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "decisions.jsonl"
    simulated(capsys, "--policy", "workload", "--decision-log", str(file))
    again_words = ["simulate", "--replay", str(file)]
    assert main([*again_words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choices"] == 30
    with file.open("ab") as log:
        log.write(b'{"type":"cut o')  # the router was killed while it wrote this line
    assert main(again_words) == 0
    told = capsys.readouterr()
    assert "30 choices made again: all came out the same" in told.out
    assert "is cut off" in told.err
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(line for line in lines if b'"prompt_over"' not in line))
    assert main(again_words) == 1
    told = capsys.readouterr()
    assert "came out otherwise" in told.out and "here it is `" in told.out
    middle = lines.index(next(line for line in lines[len(lines) // 2 :] if b'"asked"' in line)) + 1
    file.write_bytes(b"".join([*lines[:middle], b'{"type":"missing","entries":7}\n', *lines[middle + 7 :]]))
    assert main(again_words) == 1
    told = capsys.readouterr().out
    assert "all came out the same" in told
    assert f"line {middle + 1}: the log has a gap of 7 entries" in told
    assert main([*again_words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["missing"] == 7
    file.write_bytes(b'{"type":"room"}\n')
    assert main(again_words) == 2
    assert "no scheduler has begun" in capsys.readouterr().err
    file.write_bytes(b"nonsense\n")
    assert main(again_words) == 2
    assert "line 1 is no entry of a decision log" in capsys.readouterr().err
    for empty in (b"", b"cut off before its end"):
        file.write_bytes(empty)
        assert main(again_words) == 2
        assert "no entry of a decision log is in it" in capsys.readouterr().err
    assert main(["simulate", "--replay", str(tmp_path / "none")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_input_files_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, link = tmp_path / "run.jsonl", tmp_path / "link.jsonl"
    rows = [{"timestamp": at, "input_length": 100, "output_length": 5, "hash_ids": []} for at in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    link.symlink_to(file)
    before = file.read_bytes()
    for words, told in (
        (["--trace", str(file), "--out", str(file)], f"--out {file} is the --trace itself"),
        (["--trace", str(file), "--out", str(link)], f"--out {link} is the --trace itself"),
        (["--input-tokens", f"like:{file}", "--chrome-trace", str(file)], "is the --input-tokens itself"),
        (["--faults", str(file), "--decision-log", str(file)], "is the --faults itself"),
        (["--out", str(tmp_path / "x"), "--chrome-trace", str(tmp_path / "x")], "--out and --chrome-trace name one"),
    ):
        assert main(["simulate", *words]) == 2
        assert told in capsys.readouterr().err
        assert file.read_bytes() == before


def test_the_model_that_ships_is_simulated_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--model", "baton-tiny", "--gpu", "CPU-core", "--rate", "5", "--requests", "5", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)
