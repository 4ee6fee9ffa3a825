"""`bench.defaults`: what voids a sample, which rival ours is compared with, and what the targets come to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import defaults
from bench.chats import Seen
from bench.defaults_rows import FLEETS, GAIN, NO_WORSE, OURS, PLAIN, RIVALS, Rounds, Sample, compared
from bench.defaults_tables import figures_of, tables_of, targets_of

FINE = Sample(
    ttft_ms=100.0, p99_ms=200.0, computed=0.5, late_ms=1.0, engines_late_ms=0.5, cpu_ms=2.0, waited_ms=1.0, failed=0
)
SESSIONS, ALONE = ("4+4", "sessions, cold"), ("4+4", "no shared prefix")


def rounds(*ttfts: float, **more: float) -> Rounds:
    return Rounds({at: replace(FINE, ttft_ms=ttft, p99_ms=2 * ttft, **more) for at, ttft in enumerate(ttfts)})


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({}, ""),
        ({"late_ms": 11.0}, "the sender was late by 11.0 ms (p99)"),
        ({"engines_late_ms": 2.5}, "the mocks' clocks were late by 2.5 ms on average"),
        ({"waited_ms": 10.5}, "the router waited 10.5 ms for a core, for each request"),
    ],
)
def test_a_sample_is_void_where_something_else_was_the_limit(more: dict[str, float], why: str) -> None:
    assert replace(FINE, **more).void() == why


def test_ours_is_compared_with_the_least_mean_by_rounds_that_both_have() -> None:
    row = {OURS: rounds(50.0, 90.0), "round_robin": rounds(100.0, 100.0), "random": rounds(200.0, 10.0)}
    row["random"].samples[1] = replace(row["random"].samples[1], late_ms=1e3)
    found = compared(row, RIVALS)
    assert found is not None
    assert (found.best, found.ratio, found.by_round) == ("round_robin", 0.7, (0.5, 0.9))
    assert compared({"round_robin": rounds(1.0)}, RIVALS) is None
    assert compared({OURS: rounds(1.0), "random": rounds(1.0, waited_ms=1e3)}, RIVALS) is None


def test_sessions_are_to_gain_and_the_rest_is_to_lose_nothing_against_any_simple_rule() -> None:
    row = {OURS: rounds(59.0), "round_robin": rounds(100.0), PLAIN: rounds(57.0)}
    targets = targets_of({SESSIONS: row, ALONE: row})
    assert targets["4+4, sessions, cold: mean TTFT over the best"] == {"value": 0.59, "target": GAIN, "met": True}
    assert targets["4+4, sessions, cold: p99 of TTFT over the best"]["met"]
    assert targets["4+4, no shared prefix: mean TTFT over the best"] == {
        "value": 1.035, "target": NO_WORSE, "met": False,
    }  # fmt: skip


def test_a_void_row_is_not_met_and_says_so() -> None:
    row = {OURS: rounds(50.0, engines_late_ms=9.0), "round_robin": rounds(100.0)}
    assert targets_of({ALONE: row}) == {
        "4+4, no shared prefix: mean TTFT over the best": {
            "value": None, "target": NO_WORSE, "met": False, "void": True,
        }
    }  # fmt: skip
    figures = figures_of({ALONE: row})["4+4, no shared prefix"]
    assert figures[OURS]["ttft_mean_ms"] is None and len(figures[OURS]["void"]) == 1
    assert tables_of({ALONE: row})[0].rows == [["4+4, no shared prefix", "void", "", "", "", ""]]


def test_a_target_is_not_met_with_turns_that_failed() -> None:
    """TTFT is that of answered turns alone, so that it is lower without those that failed."""
    row = {OURS: rounds(50.0, 40.0), "round_robin": rounds(100.0, 100.0)}
    row[OURS].samples[1] = replace(row[OURS].samples[1], failed=3)
    assert targets_of({ALONE: row})["4+4, no shared prefix: mean TTFT over the best"] == {
        "value": 0.45, "target": NO_WORSE, "met": False, "failed": 3,
    }  # fmt: skip
    whole, table = tables_of({ALONE: row})
    assert whole.rows[0][4] == "0.450, not met: 3 turns failed"
    assert table.rows[0][5] == "3"
    row[OURS] = Rounds({0: replace(FINE, ttft_ms=float("inf"), failed=9)})
    assert targets_of({ALONE: row})["4+4, no shared prefix: mean TTFT over the best"] == {
        "value": None, "target": NO_WORSE, "met": False, "void": True, "failed": 9,
    }  # fmt: skip


def test_a_rival_is_compared_by_the_rounds_in_which_it_answered_every_turn() -> None:
    row = {OURS: rounds(50.0, 50.0), "round_robin": rounds(100.0, 100.0), "random": rounds(60.0, 10.0)}
    row["random"].samples[1] = replace(row["random"].samples[1], failed=2)
    name, found = "4+4, no shared prefix: mean TTFT over the best", figures_of({ALONE: row})["4+4, no shared prefix"]
    assert found["over_the_best_mean"] == {"best": "random", "ratio": 0.833, "by_round": (50.0 / 60.0,)}
    assert targets_of({ALONE: row})[name]["value"] == 0.833
    whole, table = tables_of({ALONE: row})
    assert whole.rows[0][2:5] == ["60.0", "random", "0.833"]
    assert table.rows[2][5] == "2; not compared in 1 round"
    row["random"].samples[0] = replace(row["random"].samples[0], failed=1)
    assert targets_of({ALONE: row})[name] == {"value": 0.5, "target": NO_WORSE, "met": True}
    assert tables_of({ALONE: row})[1].rows[2][5] == "3; not compared in 2 rounds"
    del row["round_robin"]
    assert targets_of({ALONE: row})[name] == {"value": None, "target": NO_WORSE, "met": False, "void": True}


def test_without_vllm_router_there_are_no_targets() -> None:
    assert targets_of({ALONE: {OURS: rounds(1.0), PLAIN: rounds(1.0)}}) == {}


def test_rounds_are_kept_by_their_sources(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "KEPT", tmp_path / "x" / "defaults.jsonl")  # type: ignore[operator]
    samples = {OURS: {"sessions, cold": FINE}}
    defaults.keep("old", FLEETS[0], 0, samples)
    defaults.keep("new", FLEETS[0], 1, samples)
    assert list(defaults.kept("new")) == [("4+4", 1, samples)]


def test_a_phase_without_answers_is_a_sample_all_the_same() -> None:
    found = defaults.sample_of(Seen(failed=["HTTP 500"]), computed=0.0, engines_late_ms=0.0, cpu_ms=0.0, waited_ms=0.0)
    assert found.failed == 1 and found.void() == "no answer came"
