"""A simulation's columns and its records give the same report, in the load generator's format."""

import msgspec
import numpy as np
import pytest
from support.simulated import every, members, simulate

from baton.load_view import target_lines
from cluster.instance import Role
from loadgen.arrival import Arrival
from loadgen.report import ClassAttainment, LoadReport, LoadRun, Targets, report_of
from sim.faults import Fault
from sim.result import Result, Rows

P, D = Role.PREFILL, Role.DECODE


@pytest.fixture(scope="module")
def result() -> Result:
    """The result of 32 requests: answers of 30, 3 and 1 tokens, with the decode instance killed at 0.3 s."""
    load = sorted(
        [*every(0.02, 30, answer=30), Arrival(at_s=0.1, input_tokens=1000, output_tokens=3)], key=lambda a: a.at_s
    )
    load.append(Arrival(at_s=0.9, input_tokens=10, output_tokens=1, slo_class="batch"))
    kill = [Fault(at_s=0.3, kind="kill", instance=members(P, D)[1].name)]
    return simulate(members(P, D), load, faults=kill)[1]


def test_the_report_is_that_of_the_records(result: Result) -> None:
    middle_ms = float(np.nanmedian(result.latency_s("e2e"))) * 1000
    targets = Targets(ttft_ms=20, tpot_ms=5, e2e_ms=middle_ms)
    ours = msgspec.to_builtins(result.report(targets))
    records = list(result.records())
    theirs = msgspec.to_builtins(
        report_of(records, LoadRun(planned=len(records), elapsed_s=result.end_ns / 1e9), targets)
    )
    other = {"late_ms", "cpu_share", "prompt_tokens_off", "notes", "itl_ms"}
    for name in set(LoadReport.__struct_fields__) - other:
        assert _close(ours[name], theirs[name]), name
    assert 0 < ours["attained"] < ours["completed"] < ours["sent"] == 32


def _close(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_close(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_close, one, other))
    return one == (pytest.approx(other, rel=1e-9, abs=1e-3) if isinstance(other, float) else other)


def test_targets_by_class(result: Result) -> None:
    strict, loose = Targets(ttft_ms=0.001), Targets(ttft_ms=1e6)
    assert result.met(strict).sum() == 0
    assert result.met(strict, {"batch": loose}).sum() == 1
    assert result.met(loose, {"batch": strict}).sum() == result.good().sum() - 1
    assert result.report(loose, {"batch": strict}).attainment == (result.good().sum() - 1) / 32


def test_each_class_is_told_by_its_own_targets(result: Result) -> None:
    """The line of all requests once named the targets of the first class, which the others did not have."""
    strict, loose = Targets(ttft_ms=0.001), Targets(ttft_ms=1e6)
    report = result.report(loose, {"batch": strict})
    assert [(each.name, each.attained, each.requests) for each in report.classes] == [
        ("", result.good().sum() - 1, 31),
        ("batch", 0, 1),
    ]
    first, *rest = target_lines(report)
    assert first == f"attainment {report.attainment:.1%}: {report.attained} of 32 met the targets of their class"
    assert rest[0].startswith("attainment of requests without a class ") and rest[0].endswith("TTFT ≤ 1e+06 ms")
    assert rest[1] == "attainment batch 0.0%: 0 of 1 met TTFT ≤ 0.001 ms"
    assert result.report(loose).classes == ()


def test_a_class_without_targets_is_not_told_as_one_that_missed_them(result: Result) -> None:
    free = ClassAttainment(name="batch", targets=Targets(), attained=9, requests=10)
    lines = target_lines(msgspec.structs.replace(result.report(), classes=(free,)))
    assert "attainment batch 90.0%: 9 of 10 were served whole (no targets)" in lines
    assert not any("met no" in line for line in lines)


def test_records_have_what_the_load_had(result: Result) -> None:
    """Prefixes, too: a record without them, replayed as a trace, has no prefix to find in a cache."""
    load = [
        Arrival(at_s=at / 10, input_tokens=100, output_tokens=3, prefix=(at, 7), block_tokens=50, session="s", turn=1,
                tenant="t", kind="k", slo_class="batch")
        for at in range(3)
    ]  # fmt: skip
    records = list(simulate(members(P, D), load)[1].records(load))
    names = Arrival.__struct_fields__
    assert [[getattr(each, name) for name in names] for each in records] == [
        [getattr(each, name) for name in names] for each in load
    ]


def test_clients_that_left_are_counted_as_errors_of_their_own_kind() -> None:
    leave = [Fault(at_s=0.3, kind="leave", share=1.0)]
    _, result = simulate(members(P, D), every(0.02, 30, answer=30), faults=leave)
    (error,) = result.report().errors
    assert error.kind == "client_left" and error.count == result.counts["clients_left"] > 0


def test_a_run_without_requests_has_an_empty_report() -> None:
    _, empty = simulate(members(P, D), [])
    report = empty.report(Targets(ttft_ms=5))
    assert (report.sent, report.completed, report.attainment, report.ttft_ms.mean) == (0, 0, None, None)
    assert list(empty.records()) == []


def test_rows_are_written_at_their_number() -> None:
    rows = Rows()
    for _ in range(3):
        rows.add()
    rows.write(1, *range(5), *range(10, 15), *range(15, 21))
    columns = rows.columns()
    assert columns["at_ns"].tolist() == [-1, 0, -1]
    assert columns["outcome"].tolist() == [0, 16, 0]
    assert (rows.count, rows.ended) == (3, 1)
