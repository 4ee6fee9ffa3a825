"""What a run of `bench.admission` on mocks counts, and when the run is void."""

from __future__ import annotations

from dataclasses import replace

from bench.admission import KEPT, OnMocks, row_on_mocks, seen_of, target_on_mocks
from loadgen.record import Record
from sim.experiments.overload import URGENT, Kept

FINE = OnMocks(kept=Kept(100, 80, 79), late_first=0, late_next=1, sender_late_ms=2.0, engines_late_ms=0.3)


def record(number: int, *, ttft_s: float, tpot_s: float, status: int = 200, late_s: float = 0.0) -> Record:
    at_s, last_s = float(number), number + ttft_s + 10 * tpot_s
    return Record(
        request=number, at_s=at_s, input_tokens=10, output_tokens=11, slo_class=URGENT, sent_s=at_s + late_s,
        first_token_s=at_s + ttft_s, last_token_s=last_s, end_s=last_s, status=status, completion_tokens=11,
    )  # fmt: skip


def test_missed_targets_are_counted_among_admitted_requests() -> None:
    found = seen_of(
        [
            record(0, ttft_s=1.0, tpot_s=0.030),
            record(1, ttft_s=2.5, tpot_s=0.030),
            record(2, ttft_s=1.0, tpot_s=0.050, late_s=0.004),
            record(3, ttft_s=1.0, tpot_s=0.030, status=429),
        ],
        0.25,
    )
    assert (found.kept, found.late_first, found.late_next) == (Kept(4, 3, 1), 1, 1)
    assert found.engines_late_ms == 0.25 and not found.void()


def test_a_run_is_void_where_the_machine_was_the_limit() -> None:
    assert not FINE.void()
    assert target_on_mocks(FINE) == {"mocks: kept of what was let in": {"value": 0.988, "target": KEPT, "met": True}}
    for slow in (replace(FINE, sender_late_ms=21.0), replace(FINE, engines_late_ms=1.1)):
        (told,) = target_on_mocks(slow).values()
        assert told["value"] is None and not told["met"] and told["void"] == slow.void() != ""
        assert row_on_mocks(slow)[4] == "0.988 (void)"
        assert slow.as_json()["void"] == slow.void()
