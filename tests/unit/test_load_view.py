"""The load generator's report for people: words of the server are shown as they are."""

from __future__ import annotations

from array import array

import pytest

from baton.load_view import print_report
from loadgen.arrival import Arrival
from loadgen.record import Timings, record_of
from loadgen.report import LoadRun, report_of


@pytest.mark.parametrize("word", ["[/x]", "[red]", ":smile:", "a\\[b"])
def test_a_routers_words_are_no_markup(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(0, Arrival(0.0, 10, 2), Timings(0.0, 0.1, 0.3, array("d", [0.1, 0.2])))
    record.timing = {"way": word, "ttft_ms": {"total": 10.0, word: 10.0}}
    print_report(report_of([record], LoadRun(elapsed_s=1.0)))
    shown = capsys.readouterr().out
    assert f"1 {word} requests, ms" in shown
    assert f"\n{word} " in shown
