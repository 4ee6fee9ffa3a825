"""What a run of `bench.admission` on mocks counts, by which part of the load, and when the run is void."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from baton import cli
from bench import admission_router
from bench.admission_mocks import (
    KEPT,
    NEITHER,
    NOW,
    ON_MOCKS,
    SLOWED_LATE_S,
    OnMocks,
    around_row,
    cluster_of,
    row_on_mocks,
    seen_of,
    targets_on_mocks,
)
from loadgen.faults import Applied
from loadgen.record import Record
from router.api import server
from router.fleet.view import FleetView
from router.scheduler.scoring.policies import POLICIES
from sim.experiments.overload import PARTS_OF_SLOW, URGENT, Kept

PLAIN, LONGER, SLOW = ON_MOCKS
FINE = OnMocks(
    kept=Kept(100, 80, 79), late_first=0, late_next=1, overall=Kept(200, 160, 150), sender_late_ms=2.0,
    engines_late_ms=0.3,
)  # fmt: skip
WORSE = replace(FINE, overall=Kept(200, 160, 140))
SLOWED = replace(
    FINE,
    around=dict(zip(PARTS_OF_SLOW, (Kept(50, 40, 40), Kept(30, 20, 10), Kept(20, 20, 19)), strict=True)),
    slowed=Applied(at_s=15.0, done_s=15.06, what="slow decode"),
)


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
        PLAIN,
        0.25,
    )
    assert (found.kept, found.late_first, found.late_next) == (Kept(5, 4, 1), 1, 1)
    assert found.overall == Kept(6, 5, 2), "a class is judged by its own targets, a failed request has missed them"
    assert found.engines_late_ms == 0.25 and not found.void()
    assert found.around == {} and found.promised == found.kept and "around" not in found.as_json()


def lasting(number: int, at_s: float, end_s: float, *, well: bool = True, **more: object) -> Record:
    """A request of the urgent class that was due and ended then."""
    found = record(number, ttft_s=1.0 if well else 2.5, tpot_s=0.030)
    times = {"at_s": at_s, "sent_s": at_s, "first_token_s": at_s + (1.0 if well else 2.5), "last_token_s": end_s}
    return structs.replace(found, **times, end_s=end_s, completion_tokens=1000, **more)


def test_requests_around_a_slowdown_are_counted_apart() -> None:
    """The instance slows down at 15 s: the last that is over before, and the first that comes 5 s after."""
    assert (SLOW.middle_s, SLOW.slow) == (15.0, "decode-1-00")
    slowed = Applied(at_s=15.0, done_s=15.06, what="slow decode")
    found = seen_of(
        [
            lasting(0, 12.0, 14.999),
            lasting(1, 12.0, 15.0),
            lasting(2, 14.0, 25.0, well=False),
            lasting(3, 19.999, 24.0),
            lasting(4, 20.0, 24.0),
            lasting(5, 22.0, 26.0, well=False),
            lasting(6, 23.0, 23.001, status=429),
            lasting(7, 24.0, 26.0, slo_class="batch"),
        ],
        SLOW,
        0.25,
        slowed,
    )
    assert tuple(found.around) == PARTS_OF_SLOW
    assert list(found.around.values()) == [Kept(1, 1, 1), Kept(3, 3, 2), Kept(3, 2, 1)]
    assert found.kept == sum(found.around.values(), Kept(0, 0, 0)), "each request of the class is in one part"
    assert found.promised == Kept(3, 2, 1) and not found.void()
    told = found.as_json()
    assert list(told["around"].values()) == [1.0, 0.6667, 0.5] and told["slowed_s"] == 15.06
    assert around_row(found, NOW) == ["both, mocks", "1.000", "0.667", "0.500"]


def test_a_slow_instance_s_target_counts_what_came_5_s_after_and_later() -> None:
    assert targets_on_mocks({NEITHER: WORSE, NOW: SLOWED}, SLOW) == {
        "mocks, a decode instance slows down: kept of what was let in, 5 s after the middle and later": {
            "value": 0.95, "target": KEPT, "met": False,
        },
        "mocks, a decode instance slows down: attainment, less that before": {
            "value": 0.05, "target": 0.0, "met": True,
        },
    }  # fmt: skip
    assert list(targets_on_mocks({NEITHER: WORSE, NOW: FINE}, LONGER)) == [
        "mocks, answers longer than foretold: kept of what was let in",
        "mocks, answers longer than foretold: attainment, less that before",
    ]


def test_a_run_is_void_if_its_instance_did_not_slow_down_in_time() -> None:
    late = Applied(at_s=15.0, done_s=15.1 + SLOWED_LATE_S, what="slow decode")
    failed = Applied(at_s=15.0, done_s=15.0, what="slow decode", error="it answers 500")
    for slowed, why in ((late, "the instance slowed down 0.6 s late"), (failed, "did not slow down: it answers 500")):
        found = replace(SLOWED, slowed=slowed)
        assert why in found.void()
        kept, less = targets_on_mocks({NEITHER: SLOWED, NOW: found}, SLOW).values()
        assert kept["value"] is None and kept["void"] == less["void"] == found.void()
        assert around_row(found, NOW)[3] == "0.950 (void)"


def test_the_cluster_file_has_the_scenario_s_fleet() -> None:
    assert [each.name for each in ON_MOCKS[1:]] == ["answers longer than foretold", "a decode instance slows down"]
    assert "decode: {min: 1, max: 1, gpu" in cluster_of(PLAIN) and "decode: {min: 2, max: 2, gpu" in cluster_of(SLOW)
    assert "prefill: {min: 1, max: 1, gpu" in cluster_of(SLOW)


def test_a_run_is_void_where_the_machine_was_the_limit() -> None:
    assert not FINE.void()
    found = targets_on_mocks({NEITHER: WORSE, NOW: FINE}, PLAIN)
    assert found == {
        "mocks: kept of what was let in": {"value": 0.988, "target": KEPT, "met": True},
        "mocks: attainment, less that before": {"value": 0.05, "target": 0.0, "met": True},
    }
    for slow in (replace(FINE, sender_late_ms=21.0), replace(FINE, engines_late_ms=1.1)):
        for told in targets_on_mocks({NEITHER: WORSE, NOW: slow}, PLAIN).values():
            assert told["value"] is None and not told["met"] and told["void"] == slow.void() != ""
        kept, less = targets_on_mocks({NEITHER: slow, NOW: FINE}, PLAIN).values()
        assert kept["met"] and less["value"] is None and less["void"] == slow.void()
        assert row_on_mocks(slow, PLAIN, NOW)[4] == "0.988 (void)"
        assert slow.as_json()["void"] == slow.void()
    assert row_on_mocks(WORSE, LONGER, NEITHER) == [
        "answers longer than foretold, mocks",
        "neither",
        "100",
        "80",
        "0.988",
        "0.790",
        "0.700",
    ]


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
