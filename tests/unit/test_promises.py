"""Service levels: the targets of classes, and when a request met them."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.spec import SloClass, WhenMissed
from router.core.slo import ClientSeen, judge, late_by, promises_of, seen_in
from router.core.values import Promise
from router.telemetry.timing import RequestTimeline, Stage

SLO = SloClass(ttft_ms=500, tt2t_ms=100, tpot_ms=40, e2e_ms=5000)


def seen(**more: Any) -> ClientSeen:
    return ClientSeen(
        **{"ttft_ms": 400, "tt2t_ms": 50, "tpot_ms": 30, "e2e_ms": 3000, "tokens": 50, "streamed": True, **more}
    )


def test_a_promise_has_the_targets_that_admission_keeps() -> None:
    classes = {
        "now": SloClass(ttft_ms=500, tpot_ms=40, when_missed=WhenMissed.SHED),
        "soon": SloClass(ttft_ms=100, when_missed=WhenMissed.DEGRADE, degrade_to="now"),
        "once": SloClass(e2e_ms=900),
    }
    now = Promise(ttft_ms=500, tpot_ms=40, sheds=True)
    assert promises_of(classes) == {"now": now, "soon": Promise(ttft_ms=100, degraded=now), "once": Promise()}


def test_classes_that_degrade_to_each_other_end_after_one_round() -> None:
    round_about = {
        name: SloClass(ttft_ms=at, when_missed=WhenMissed.DEGRADE, degrade_to=other)
        for at, name, other in ((1.0, "a", "b"), (2.0, "b", "a"))
    }
    assert promises_of(round_about)["a"] == Promise(ttft_ms=1, degraded=Promise(ttft_ms=2))


@pytest.mark.parametrize(
    ("what", "outcome", "result"),
    [
        ({}, "served", "met"),
        ({"ttft_ms": 501}, "served", "missed"),
        ({"tt2t_ms": 101}, "served", "missed"),
        ({"tt2t_ms": None, "tpot_ms": None, "tokens": 1}, "served", "met"),
        ({"tpot_ms": 41}, "served", "missed"),
        ({"e2e_ms": 5001}, "served", "missed"),
        ({}, "shed", "shed"),
        ({}, "refused", "refused"),
        ({}, "failed", "missed"),
        ({}, "expired", "missed"),
        ({}, "client_left", "left"),
        ({"ttft_ms": 501}, "client_left", "missed"),
        ({"ttft_ms": None, "tt2t_ms": None, "tpot_ms": None, "e2e_ms": 300}, "client_left", "left"),
        ({"ttft_ms": None, "tt2t_ms": None, "tpot_ms": None, "e2e_ms": 600}, "client_left", "missed"),
    ],
)
def test_every_target_counts(what: dict[str, Any], outcome: str, result: str) -> None:
    assert judge(SLO, seen(**what), outcome) == result


@pytest.mark.parametrize(
    ("what", "late"),
    [
        ({}, (False, False)),
        ({"ttft_ms": 501}, (True, False)),
        ({"tpot_ms": 41, "tt2t_ms": 101}, (False, True)),
        ({"ttft_ms": None, "tpot_ms": None, "e2e_ms": 501}, (True, False)),
        ({"ttft_ms": None, "tpot_ms": None, "e2e_ms": 501, "streamed": False}, (False, False)),
    ],
)
def test_which_tokens_were_late(what: dict[str, Any], late: tuple[bool, bool]) -> None:
    assert late_by(SLO, seen(**what)) == late
    assert late_by(SloClass(), seen(**what)) == (False, False)


@pytest.mark.parametrize(
    ("total_ms", "tokens", "result"),
    [(400, None, "met"), (600, None, "unknown"), (1460, 25, "met"), (1461, 25, "missed")],
)
def test_an_answer_in_one_piece_is_judged_by_its_last_token(total_ms: float, tokens: int | None, result: str) -> None:
    slo = SloClass(ttft_ms=500, tpot_ms=40)
    unseen = seen(ttft_ms=None, tt2t_ms=None, tpot_ms=None, e2e_ms=total_ms, tokens=tokens, streamed=False)
    assert judge(slo, unseen, "served") == result


def test_times_are_the_clients() -> None:
    timeline = RequestTimeline(10.0, stream=True)
    timeline.enter(Stage.AGGREGATED_LEG, 10.1)
    timeline.enter(Stage.RELAY, 10.4)
    timeline.first(10.5, Stage.STEP)
    timeline.second(10.6)
    timeline.end(12.5)
    found = seen_in(timeline.totals(99.0), 21, streamed=True)
    assert (found.ttft_ms, found.tt2t_ms, found.tpot_ms, found.e2e_ms) == pytest.approx((500, 100, 100, 2500))
