"""How full engines may be so that targets are kept: a margin that follows the share of answers that missed."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from router.predict.margins import (
    FIRST_AIM,
    MISSED_AIM,
    NARROWEST,
    PROMPTLY,
    SERVED_AIM,
    SERVED_NARROWEST,
    STEP,
    WIDEST,
    Margins,
    TpotMargins,
)


def test_margins_begin_at_the_widest_and_never_leave_their_bounds() -> None:
    margins = Margins()
    assert margins.of(40.0) == WIDEST and margins.limit_ms(40.0) == 40.0 * WIDEST
    margins.ended(40.0, WIDEST, 10.0)
    assert margins.of(40.0) == WIDEST and margins.limits_ms(np.array([40.0])).tolist() == [40.0 * WIDEST]
    for _ in range(200):
        margins.ended(40.0, margins.of(40.0), 50.0)
    assert margins.of(40.0) == NARROWEST
    assert margins.of(200.0) == WIDEST, "another target has a margin of its own"


def test_without_a_target_there_is_no_limit() -> None:
    assert Margins().limit_ms(float("inf")) == float("inf")


def test_limits_of_many_targets_are_those_of_each() -> None:
    margins = Margins()
    margins.ended(40.0, WIDEST, 50.0)
    targets = np.array([40.0, 20.0, float("inf"), 40.0])
    assert margins.limits_ms(targets).tolist() == [margins.limit_ms(each) for each in targets.tolist()]
    assert targets.tolist() == [40.0, 20.0, float("inf"), 40.0], "the given column is not changed: others read it"


def test_a_miss_narrows_the_margin_at_once_and_answers_that_keep_it_widen_it_slowly() -> None:
    margins = Margins()
    margins.ended(40.0, WIDEST, 41.0)
    narrowed = margins.of(40.0)
    assert narrowed == pytest.approx(WIDEST * (1 - STEP), rel=0.01)
    margins.ended(40.0, narrowed, 39.0)
    assert narrowed < margins.of(40.0) < narrowed * 1.002
    for _ in range(100):
        margins.ended(40.0, margins.of(40.0), 39.0)
    assert margins.of(40.0) == WIDEST and margins.limits_ms(np.array([40.0])).tolist() == [40.0 * WIDEST]


def test_answers_let_in_under_a_much_wider_margin_do_not_narrow_it_again() -> None:
    """These answers end seconds after the margin was narrowed because of others like them."""
    margins = Margins()
    for _ in range(50):
        margins.ended(40.0, WIDEST, 45.0)
    assert WIDEST * (1 - 5 * STEP) < margins.of(40.0) < WIDEST * (1 - 3 * STEP)


@pytest.mark.parametrize("scatter", [0.03, 0.1])
@pytest.mark.parametrize("off", [1.0, 1.1, 1.2])
def test_the_share_of_misses_settles_at_the_aim_whatever_the_errors_are(off: float, scatter: float) -> None:
    """Fleets filled to the margin, whose answers take `off` times what was predicted, give or take `scatter`."""
    rng, margins, missed = Random(1), Margins(), []
    for at in range(6000):
        margin = margins.of(40.0)
        observed_ms = 40.0 * margin * off * rng.lognormvariate(0.0, scatter)
        margins.ended(40.0, margin, observed_ms)
        if at >= 1000:
            missed.append(observed_ms > 40.0)
    assert sum(missed) / len(missed) <= 1.2 * MISSED_AIM


def test_first_tokens_have_bounds_and_an_aim_of_their_own() -> None:
    margins = Margins(PROMPTLY, FIRST_AIM)
    assert margins.of(2000.0) == PROMPTLY
    rng, late = Random(2), 0
    for at in range(8000):
        margin = margins.of(2000.0)
        observed_ms = 2000.0 * margin + 150.0 + rng.gauss(0.0, 60.0)
        margins.ended(2000.0, margin, observed_ms)
        late += at >= 1000 and observed_ms > 2000.0
    assert late / 7000 <= 1.2 * FIRST_AIM
    for _ in range(100):
        margins.ended(2000.0, margins.of(2000.0), 5000.0)
    assert margins.of(2000.0) == pytest.approx(NARROWEST)


def test_classes_that_serve_late_requests_narrow_their_margin_only_where_many_answers_miss() -> None:
    margins, rng = TpotMargins(), Random(3)
    for _ in range(4000):
        missed = rng.random() < SERVED_AIM / 2
        margins.served.ended(40.0, margins.served.of(40.0), 50.0 if missed else 30.0)
    assert margins.served.of(40.0) > 0.95 * WIDEST
    for _ in range(4000):
        missed = rng.random() < SERVED_AIM * 2
        margins.served.ended(40.0, margins.served.of(40.0), 50.0 if missed else 30.0)
    assert margins.served.of(40.0) == pytest.approx(SERVED_NARROWEST, rel=0.05)
    assert margins.shed.of(40.0) == WIDEST, "what one kind of class learns moves nothing of the other"


def test_an_instance_keeps_the_narrower_margin_of_the_two_kinds_of_classes() -> None:
    margins = TpotMargins()
    margins.shed.ended(40.0, WIDEST, 50.0)
    margins.served.ended(20.0, WIDEST, 30.0)
    assert margins.limit_ms(40.0) == margins.shed.limit_ms(40.0) < 40.0 * WIDEST
    assert margins.limit_ms(20.0) == margins.served.limit_ms(20.0) < 20.0 * WIDEST
    targets = np.array([40.0, 20.0, 7.0])
    assert margins.limits_ms(targets).tolist() == [margins.limit_ms(each) for each in targets.tolist()]
