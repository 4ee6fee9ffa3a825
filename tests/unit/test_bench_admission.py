"""What a run of `bench.admission` on mocks counts, and when the run is void."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from baton import cli
from bench import admission_router
from bench.admission import KEPT, NEITHER, NOW, OnMocks, row_on_mocks, seen_of, targets_on_mocks
from loadgen.record import Record
from router.api import server
from router.fleet.view import FleetView
from router.scheduler.scoring.policies import POLICIES
from sim.experiments.overload import URGENT, Kept

FINE = OnMocks(
    kept=Kept(100, 80, 79), late_first=0, late_next=1, overall=Kept(200, 160, 150), sender_late_ms=2.0,
    engines_late_ms=0.3,
)  # fmt: skip
WORSE = replace(FINE, overall=Kept(200, 160, 140))


def record(
    number: int, *, ttft_s: float, tpot_s: float, status: int = 200, late_s: float = 0.0, slo_class: str = URGENT
) -> Record:
    at_s, last_s = float(number), number + ttft_s + 10 * tpot_s
    return Record(
        request=number, at_s=at_s, input_tokens=10, output_tokens=11, slo_class=slo_class, sent_s=at_s + late_s,
        first_token_s=at_s + ttft_s, last_token_s=last_s, end_s=last_s, status=status, completion_tokens=11,
    )  # fmt: skip


def test_missed_targets_are_counted_among_admitted_requests() -> None:
    found = seen_of(
        [
            record(0, ttft_s=1.0, tpot_s=0.030),
            record(1, ttft_s=2.5, tpot_s=0.030),
            record(2, ttft_s=1.0, tpot_s=0.050, late_s=0.004),
            record(3, ttft_s=1.0, tpot_s=0.030, status=429),
            record(4, ttft_s=2.5, tpot_s=0.050, slo_class="batch"),
            structs.replace(record(5, ttft_s=1.0, tpot_s=0.030), error="timeout"),
        ],
        0.25,
    )
    assert (found.kept, found.late_first, found.late_next) == (Kept(5, 4, 1), 1, 1)
    assert found.overall == Kept(6, 5, 2), "a class is judged by its own targets, a failed request has missed them"
    assert found.engines_late_ms == 0.25 and not found.void()


def test_a_run_is_void_where_the_machine_was_the_limit() -> None:
    assert not FINE.void()
    found = targets_on_mocks({NEITHER: WORSE, NOW: FINE})
    assert found == {
        "mocks: kept of what was let in": {"value": 0.988, "target": KEPT, "met": True},
        "mocks: attainment, less that before": {"value": 0.05, "target": 0.0, "met": True},
    }
    for slow in (replace(FINE, sender_late_ms=21.0), replace(FINE, engines_late_ms=1.1)):
        for told in targets_on_mocks({NEITHER: WORSE, NOW: slow}).values():
            assert told["value"] is None and not told["met"] and told["void"] == slow.void() != ""
        kept, less = targets_on_mocks({NEITHER: slow, NOW: FINE}).values()
        assert kept["met"] and less["value"] is None and less["void"] == slow.void()
        assert row_on_mocks(slow, NOW)[4] == "0.988 (void)"
        assert slow.as_json()["void"] == slow.void()
    assert row_on_mocks(WORSE, NEITHER)[1:] == ["neither", "100", "80", "0.988", "0.790", "0.700"]


def test_a_router_without_the_rules_learns_no_margin_and_counts_each_answer_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "scheduler_of", vars(server)["scheduler_of"])  # restored after the test
    monkeypatch.setattr(cli, "main", lambda: 0)
    assert admission_router.main() == 0
    made = vars(server)["scheduler_of"]
    scheduler, _ = made(None, FleetView(lambda _: None), POLICIES["workload"], admission=True, foresees=True)
    assert scheduler.scoring.shed_weight == 1.0
    inflight = scheduler.view.all().inflight
    for margins in (inflight.first_margins, inflight.margins.shed):
        before = margins.of(40.0)
        margins.ended(40.0, before, 90.0)
        assert margins.of(40.0) == before
