"""The report of a load, also of a load without requests."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from loadgen.arrival import Arrival
from loadgen.record import INTERRUPTED, Record, Timings, line_of, record_of
from loadgen.report import LoadRun, Targets, as_json, report_of
from loadgen.traces import FORMATS, detect


def record(at_s: float = 0.0, first: float = 0.1, gaps: tuple[float, ...] = (0.02, 0.02), **more: Any) -> Record:
    """A complete answer: its first token `first` s after the planned send time, then one token after each gap (s)."""
    token_s = array("d", np.cumsum([at_s + first, *gaps]))
    late = more.pop("late_s", 0.0)
    made = record_of(0, Arrival(at_s, 10, 3), Timings(at_s + late, token_s[0], token_s[-1], token_s))
    made.status = 200
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_no_load_is_a_report() -> None:
    report = report_of([], LoadRun(planned=0), Targets(ttft_ms=100))
    assert (report.sent, report.attainment, report.ttft_ms.p99, report.completed_rate) == (0, None, None, None)
    assert as_json(report)["ttft_ms"]["count"] == 0


def test_one_request_is_a_report() -> None:
    report = report_of([record()], LoadRun(planned=1, elapsed_s=0.2), Targets(ttft_ms=100), [0.02, 0.02])
    assert report.ttft_ms.p50 == report.ttft_ms.p99 == pytest.approx(100)
    assert report.tt2t_ms.mean == report.tpot_ms.mean == report.itl_ms.mean == pytest.approx(20)
    assert report.e2e_ms.mean == pytest.approx(140)
    assert report.offered_rate is None
    assert report.output_tokens_s == pytest.approx(3 / 0.14)
    assert (report.attained, report.attainment) == (1, 1.0)


def test_one_failed_request_is_a_report() -> None:
    report = report_of([record(error="timeout", detail="slow")], LoadRun(), Targets(ttft_ms=1000))
    assert (report.completed, report.failed, report.attainment, report.ttft_ms.count) == (0, 1, 0.0, 0)
    assert report.errors[0].example == "slow"


def test_percentiles_are_numpys() -> None:
    firsts = [0.01 * at for at in range(1, 101)]
    report = report_of([record(at, first) for at, first in enumerate(firsts)], LoadRun())
    assert report.ttft_ms.p90 == pytest.approx(np.percentile(firsts, 90) * 1000)
    assert report.offered_rate == pytest.approx(1.0)


def test_waiting_counts_from_the_planned_send_time() -> None:
    report = report_of([record(at_s=1, first=2.0, late_s=1.5)], LoadRun())
    assert report.ttft_ms.mean == pytest.approx(2000)
    assert report.ttft_sent_ms.mean == pytest.approx(500)
    assert report.late_ms.p99 == pytest.approx(1500)
    assert any("the sender, not the server, is the limit" in note for note in report.notes)


def test_attainment_is_of_all_arrivals() -> None:
    records = [
        record(),
        record(first=0.9),
        record(gaps=(0.5, 0.0)),
        record(error="shed"),
        record(error="http_500"),
        record(error=INTERRUPTED),
    ]
    targets = Targets(ttft_ms=500, tt2t_ms=100, tpot_ms=100)
    report = report_of(records, LoadRun(planned=9, stopped=True), targets)
    assert (report.attained, report.attainment) == (1, 0.2)
    assert (report.sent, report.completed, report.failed, report.shed, report.interrupted) == (6, 3, 2, 1, 1)
    assert {kind.kind: kind.count for kind in report.errors} == {"shed": 1, "http_500": 1}
    assert any("6 of 9" in note for note in report.notes)


def test_an_answer_of_one_token_has_no_second_to_miss() -> None:
    report = report_of([record(gaps=())], LoadRun(), Targets(tt2t_ms=1, tpot_ms=1))
    assert report.attainment == 1.0
    assert report.tpot_ms.count == 0


def test_a_complete_answer_without_tokens_misses_its_ttft_target() -> None:
    empty = record_of(0, Arrival(0, 1, 1), Timings(0, None, 1, array("d")))
    assert report_of([empty], LoadRun(), Targets(ttft_ms=10_000)).attainment == 0.0


def test_token_counts_in_usage_take_precedence_over_chunks() -> None:
    report = report_of([record(completion_tokens=5, prompt_tokens=12)], LoadRun())
    assert (report.output_tokens, report.input_tokens) == (5, 12)
    assert report.tpot_ms.mean == pytest.approx(10)
    assert report.prompt_tokens_off == pytest.approx(0.2)
    assert report_of([record(completion_tokens=2)], LoadRun()).short_answers == 1


def test_requests_held_back_are_reported_and_are_not_late() -> None:
    report = report_of([record(late_s=0.09, held_back=True)], LoadRun(held_back=1))
    assert report.late_ms.count == 0
    assert any("1 requests were held back by --max-concurrency" in note for note in report.notes)


def test_a_busy_sender_is_reported() -> None:
    assert any("95% of a core" in note for note in report_of([record()], LoadRun(elapsed_s=1, cpu_s=0.95)).notes)


@pytest.mark.parametrize(("cpu_s", "starved"), [(0.2, True), (0.8, False)])
def test_a_late_sender_that_had_no_processor_is_told_what_helps(*, cpu_s: float, starved: bool) -> None:
    """Niceness may not: Linux divides the processor among sessions first."""
    (note,) = report_of([record(late_s=0.09)], LoadRun(elapsed_s=1, cpu_s=cpu_s)).notes
    assert note.startswith("the sender, not the server, is the limit: requests left 90 ms late")
    assert ("`chrt --rr 1 baton load ...`" in note) is starved


def test_records_are_replayed_as_they_arrived() -> None:
    arrivals = [Arrival(0.25, 100, 7, (1, 2), 64, "s", 2, "acme", "text", "batch"), Arrival(1.5, 3, 1)]
    timings = Timings(0.3, 0.4, 0.6, array("d", [0.4, 0.5]))
    lines = [line_of(record_of(at, each, timings)).decode() for at, each in enumerate(arrivals)]
    assert detect(lines) == "baton"
    assert list(FORMATS["baton"](reversed(lines), np.random.default_rng(0), None)) == arrivals
