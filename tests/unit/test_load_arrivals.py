"""`baton load`: the arrivals that flags make, before anything is sent."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import pytest

from baton.cli import main
from baton.commands import load, plan, simulate
from baton.load_arrivals import Loads, planned
from baton.load_sessions import conversations
from baton.load_sessions import planned as planned_sessions
from baton.workload import workload
from cluster.errors import UsageError
from loadgen.body import Asking

GOOD = [{"timestamp": 1000 * at, "input_length": 100, "output_length": 7, "hash_ids": []} for at in range(4)]


def trace(folder: Path, *bad: str, good: int = len(GOOD)) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(line + "\n" for line in (*bad, *map(json.dumps, GOOD[:good]))))
    return file


def args(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    load.add_arguments(parser)
    return parser.parse_args(["http://h:1", *words])


def test_a_search_takes_a_trace_and_a_first_rate_together(tmp_path: Path) -> None:
    given = args("--find-goodput", "--trace", str(trace(tmp_path)), "--rate", "2")
    found = Loads(given).load(0, 3, 2.0)
    assert (found[-1].at_s - found[0].at_s) == pytest.approx(1.0), "two gaps at two a second"
    assert given.rate == 2
    with pytest.raises(UsageError, match="--rate makes load up, --trace replays one"):
        planned(given)


@pytest.mark.parametrize("harm", ["cut off", "a bad block", "a bad sum", "no gzip"])
def test_a_damaged_gzip_trace_is_refused_by_its_name(tmp_path: Path, harm: str) -> None:
    packed = bytearray(gzip.compress("".join(json.dumps(each) + "\n" for each in GOOD).encode(), mtime=0))
    if harm == "cut off":
        del packed[-12:]
    elif harm == "a bad block":
        packed[10] = 0xFF  # the first byte after gzip's header: no block has this type
    elif harm == "a bad sum":
        packed[-8] ^= 1
    else:
        packed[:2] = b"{}"
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(packed)
    with pytest.raises(UsageError, match=f"^{file}: the file is not whole gzip data .*again"):
        planned(args("--trace", str(file)))


# -- lengths like those of a trace --

BAD = json.dumps({**GOOD[0], "input_length": -1})


def test_bad_rows_of_a_trace_of_lengths_are_left_out_and_reported(tmp_path: Path) -> None:
    file = trace(tmp_path, BAD, "{nonsense")
    found = planned(args("--input-tokens", f"like:{file}", "--requests", "5"))
    assert {each.input_tokens for each in found.arrivals} == {100}
    (note,) = found.notes
    assert note.startswith(f"--input-tokens: {file}: 2 bad rows were left out; the first: line 1: ")
    assert "-1" in note


def test_every_kind_of_load_reports_bad_rows_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    like = f"like:{trace(tmp_path, BAD)}"
    loads = Loads(args("--find-goodput", "--output-tokens", like))
    for number in range(3):
        loads.load(number, 2, 1.0)
    (note,) = loads.notes
    assert "1 bad row was left out" in note
    sessions = args("--sessions", "2", "--input-tokens", like)
    assert len(planned_sessions(sessions).notes) == 1
    conversations(sessions, Asking(model="m"))
    assert not capsys.readouterr().err
    file = tmp_path / "workload.yaml"
    file.write_text(f"duration_s: 5\nparts: {{chat: {{rate: 1, input_tokens: '{like}'}}}}")
    workload(file, 0)
    assert "parts.chat: --input-tokens" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"parts\.chat: --input-tokens: .*line 1"):
        workload(file, 0, strict=True)


@pytest.mark.parametrize(("words", "good"), [((), 0), (("--strict",), 4)])
def test_a_load_without_a_good_row_and_a_strict_load_with_a_bad_one_are_refused(
    tmp_path: Path, words: tuple[str, ...], good: int
) -> None:
    file = trace(tmp_path, BAD, BAD, BAD, good=good)
    with pytest.raises(UsageError, match=r"--input-tokens: .*: line 1: "):
        planned(args("--input-tokens", f"like:{file}", *words))


def test_simulate_and_plan_take_the_same_lengths(tmp_path: Path) -> None:
    file = trace(tmp_path, BAD)
    for command, first in ((simulate, []), (plan, ["baton.yaml"])):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        assert len(planned(parser.parse_args([*first, "--input-tokens", f"like:{file}"])).notes) == 1


def test_a_dry_run_reports_bad_rows_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "--input-tokens", f"like:{trace(tmp_path, BAD)}", "--dry-run"]) == 0
    assert "1 bad row was left out" in capsys.readouterr().err


def test_a_given_seed_goes_before_a_workload_files_own(tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    file.write_text("duration_s: 60\nseed: 7\nparts: {chat: {rate: 1, input_tokens: 100, output_tokens: 10}}\n")
    own, given_ = workload(file, 0), workload(file, 8)
    assert own == workload(file, 7) and own != given_
    file.write_text(file.read_text().replace("seed: 7\n", ""))
    assert workload(file, 8) == given_


def test_the_number_of_senders_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    assert args("--senders", "256").senders == 256
    with pytest.raises(SystemExit, match="2"):
        args("--senders", "5000")
    assert "argument --senders: 5000 is more than 256" in capsys.readouterr().err
