"""The transfer model of one instance: it learns how fast a network is, also while no pull ends."""

from __future__ import annotations

import math

import pytest

from router.predict.transfer_model import CLIP, CLIP_MS, FADES_S, ExpectedTransfer, TransferModel

UNMOVED_MS = 20.0


def pull(here: TransferModel, told_ms: float, now: float, *, near: bool = False) -> ExpectedTransfer:
    moving_ms = here.expects_ms(told_ms, now, near=near)
    return ExpectedTransfer(
        told_ms=told_ms, moving_ms=moving_ms, unmoved_ms=UNMOVED_MS, pause_ms=UNMOVED_MS + moving_ms, near=near
    )


def one_by_one(
    here: TransferModel, times_ms: list[tuple[float, float]], *, near: bool = False, now: float = 100.0
) -> float:
    """Pulls one after another, each as (told ms, taken ms); returns the time one second after the last end."""
    for told_ms, took_ms in times_ms:
        each = pull(here, told_ms, now, near=near)
        here.begin(each, now)
        now += (UNMOVED_MS + took_ms) / 1000
        here.end(each, now, done=True)
        now += 1.0
    return now


def together(here: TransferModel, told: list[tuple[float, bool]], took_ms: float, times: int) -> float:
    """`times` rounds of pulls that begin and end together, each as (told ms, near); returns as `one_by_one`."""
    now = 100.0
    for _ in range(times):
        some = [pull(here, told_ms, now, near=near) for told_ms, near in told]
        for each in some:
            here.begin(each, now)
        now += (UNMOVED_MS + took_ms) / 1000
        for each in some:
            here.end(each, now, done=True)
        now += 1.0
    return now


def test_without_a_pull_the_costs_are_believed() -> None:
    here = TransferModel()
    assert here.expects_ms(7.0, 5.0, near=False) == 7.0
    assert (here.slower(5.0), here.ends_ms(5.0)) == (1.0, -math.inf)


@pytest.mark.parametrize("factor", [0.5, 1.0, 10.0])
def test_the_real_speed_of_a_network_is_learned(factor: float) -> None:
    here = TransferModel()
    sizes = [2.0, 9.0, 4.0, 20.0, 6.0] * 12
    now = one_by_one(here, [(told, factor * told) for told in sizes])
    for told in (3.0, 15.0):
        assert here.expects_ms(told, now, near=False) == pytest.approx(factor * told, rel=0.15, abs=0.5)


def test_three_pulls_say_a_good_deal() -> None:
    here = TransferModel()
    now = one_by_one(here, [(5.0, 50.0)] * 3)
    assert here.expects_ms(5.0, now, near=False) == pytest.approx(50.0, rel=0.1)


def test_what_was_learned_fades_while_no_pull_runs() -> None:
    here = TransferModel()
    now = one_by_one(here, [(5.0, 50.0)] * 20) - 1.0
    assert here.expects_ms(5.0, now + FADES_S, near=False) == pytest.approx(5.0 + 45.0 / math.e, rel=0.05)
    assert here.expects_ms(5.0, now + 20 * FADES_S, near=False) == pytest.approx(5.0, abs=0.01)


def test_the_same_machine_is_another_network() -> None:
    here = TransferModel()
    now = one_by_one(here, [(5.0, 50.0)] * 20)
    assert here.expects_ms(5.0, now, near=True) == 5.0
    now = one_by_one(here, [(5.0, 1.0)] * 20, near=True, now=now)
    assert here.expects_ms(5.0, now, near=True) < 2.0
    assert here.expects_ms(5.0, now, near=False) > 40.0


def test_an_engine_that_stood_still_for_half_a_minute_says_little() -> None:
    here = TransferModel()
    now = one_by_one(here, [(5.0, 5.0)] * 100)
    now = one_by_one(here, [(5.0, 30_000.0), (5.0, 5.0)], now=now)
    assert max(CLIP_MS, CLIP * 25.0) == CLIP_MS
    assert here.expects_ms(5.0, now, near=False) < 5.0 + 0.04 * CLIP_MS


def test_pulls_that_share_a_network_are_not_taken_for_slow_ones() -> None:
    """Four pulls at once end together, each after the time of all four."""
    here = TransferModel()
    now = together(here, [(told_ms, False) for told_ms in (4.0, 4.0, 10.0, 6.0)], took_ms=24.0, times=50)
    assert here.expects_ms(24.0, now, near=False) == pytest.approx(24.0, rel=0.05)
    assert here.expects_ms(12.0, now, near=False) == pytest.approx(12.0, rel=0.2)


def test_two_networks_that_end_together_are_two_observations() -> None:
    here = TransferModel()
    now = together(here, [(10.0, False), (10.0, True)], took_ms=30.0, times=30)
    assert here.expects_ms(10.0, now, near=False) == pytest.approx(30.0, rel=0.05)
    assert here.expects_ms(10.0, now, near=True) < 1.0, "nothing was seen of the second network's own time"


def test_a_pull_waits_for_those_before_it() -> None:
    here = TransferModel()
    first, second = pull(here, 30.0, 1.0), pull(here, 50.0, 1.0)
    here.begin(first, 1.0)
    here.begin(second, 1.0)
    assert here.ends_ms(1.01) == pytest.approx(1000.0 + UNMOVED_MS + 80.0)
    here.end(first, 1.05, done=True)
    assert here.ends_ms(1.06) == pytest.approx(1050.0 + 50.0)
    here.end(second, 1.06, done=False)
    assert here.ends_ms(1.07) == -math.inf
    assert here.moving_ms == 0.0


def test_while_no_pull_ends_a_network_is_at_least_as_slow_as_that() -> None:
    here = TransferModel()
    for told_ms in (10.0, 40.0, 5.0):
        here.begin(pull(here, told_ms, 1.0), 1.0)
    assert here.slower(1.0 + (UNMOVED_MS + 29.0) / 1000) == 1.0, "three of 10 ms may have moved"
    late = 1.0 + (UNMOVED_MS + 300.0) / 1000
    assert here.slower(late) == pytest.approx(10.0)
    assert here.ends_ms(late) == pytest.approx(1000.0 + UNMOVED_MS + 550.0)


def test_a_little_late_is_no_slow_network() -> None:
    here = TransferModel()
    here.begin(pull(here, 0.01, 1.0), 1.0)
    assert here.slower(1.0 + (UNMOVED_MS + 5.0) / 1000) == 1.0


def test_a_pull_that_is_cut_short_teaches_nothing() -> None:
    here, now = TransferModel(), 1.0
    for _ in range(10):
        each = pull(here, 5.0, now)
        here.begin(each, now)
        here.end(each, now + 3.0, done=False)
        here.end(each, now + 3.0, done=True)  # a pull ends only once
        now += 4.0
    assert here.expects_ms(5.0, now, near=False) == 5.0
