"""Results of the load generator that cannot be written: the load goes on, and ends with its report."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from baton import load_goodput
from baton.cli import main
from baton.commands import load as load_command
from baton.load_found import Goodput
from baton.load_run import LoadDone, Out
from loadgen.arrival import Arrival
from loadgen.record import Timings, line_of, record_of
from loadgen.report import LoadRun, Targets, report_of
from loadgen.search import Aim, Search, SearchFinished, StopSearch

FULL = Path("/dev/full")


@pytest.mark.parametrize("records", [1, 2000])
def test_records_that_cannot_be_written_are_told_once(records: int, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(0, Arrival(0.25, 100, 7), Timings(0.3, 0.4, 0.6, array("d", [0.4, 0.5])))
    with Out(FULL) as out:
        for _ in range(records):
            out.write(record)
    told = capsys.readouterr().err
    assert told.count("No space left on device") == 1, told


def test_what_the_file_held_stays_until_the_first_record(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("an earlier run\n")
    with Out(path):
        pass
    assert path.read_text() == "an earlier run\n"
    record = record_of(0, Arrival(0.25, 100, 7), Timings(0.3, 0.4, 0.6, array("d", [0.4, 0.5])))
    with Out(path) as out:
        out.write(record)
        out.write(record)
    assert path.read_bytes() == line_of(record) * 2


RECORD = record_of(0, Arrival(0.25, 100, 7), Timings(0.3, 0.4, 0.6, array("d", [0.4, 0.5])))


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_page_that_cannot_be_written_costs_neither_report_nor_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    pytest.importorskip("matplotlib")

    async def sent(*_: Any) -> LoadDone:
        return LoadDone([RECORD], report_of([RECORD], LoadRun(elapsed_s=1.0)), stopped=False, died=False)

    monkeypatch.setattr(load_command, "send", sent)
    picture = tmp_path / "run.png"
    words = ["load", "http://127.0.0.1:1", "--rate", "1", "--requests", "1", "--html", str(FULL), "--plot"]
    assert main([*words, str(picture), *flags]) == 2
    shown = capsys.readouterr()
    assert ('"completed": 1' if flags else "1 request sent, 1 completed") in shown.out
    assert f"--html {FULL}: No space left on device" in shown.err
    assert picture.stat().st_size > 0


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_page_that_cannot_be_written_costs_no_goodput(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    pytest.importorskip("matplotlib")
    search = Search(Aim(attainment=0.95))
    search.start(0.0)
    (finished,) = search.handle(StopSearch(), 1.0)
    assert isinstance(finished, SearchFinished)

    async def found(*_: Any) -> Goodput:
        return Goodput(finished, (), Targets(ttft_ms=5.0), 0.95)

    monkeypatch.setattr(load_goodput, "find", found)
    words = ["load", "http://127.0.0.1:1", "--find-goodput", "--ttft-ms", "5", "--html", str(FULL), *flags]
    assert main(words) == 2
    shown = capsys.readouterr()
    assert ('"goodput": {' if flags else "goodput not found") in shown.out
    assert f"--html {FULL}: No space left on device" in shown.err
