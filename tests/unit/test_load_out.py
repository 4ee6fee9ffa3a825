"""The load generator's file of records on a full disk: the load goes on, and ends with its report."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from baton.load_run import Out
from loadgen.arrival import Arrival
from loadgen.record import Timings, line_of, record_of

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
