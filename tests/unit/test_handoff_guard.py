"""The handoff guard: hand-overs are turned off where they surely lose, for that class alone, and not for ever."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from router.scheduler.scoring.budget import MISS, OWN
from router.scheduler.scoring.handoff_guard import (
    FEW,
    FORGIVEN,
    OVERDUE_S,
    SLOWEST,
    TRIED_MOST,
    TRIES,
    WORST,
    Foretold,
    HandoffGuard,
)

pytestmark = pytest.mark.interpreted
"""These tests pass stand-ins for prices, which a compiled guard does not take."""

TTFT_MS, TPOT_MS, PAUSE_MS = 100.0, 10.0, 30.0
UNIT_TTFT, UNIT_TPOT, MIDDLE = 400.0, 40.0, 101.0
TOLD_S = (TTFT_MS + PAUSE_MS) / 1000


def prices(
    slo_class: str = "",
    *,
    promised: bool = False,
    arrived: float = 10.0,
    expected: float = 4.0,
    learns: bool = True,
    waits: bool = False,
    streamed: bool = True,
) -> Any:
    """The prices of one choice, as far as the guard reads them."""
    return SimpleNamespace(
        wanted=SimpleNamespace(arrived=arrived, slo_class=slo_class, streamed=streamed),
        ttft_at=lambda _row: TTFT_MS,
        tpot_at=lambda _row: TPOT_MS,
        used_at=lambda _row: TPOT_MS / UNIT_TPOT,
        ttft_unit=UNIT_TTFT,
        tpot_unit=UNIT_TPOT,
        ttft_ms=UNIT_TTFT if promised else 0.0,
        tpot_ms=UNIT_TPOT if promised else 0.0,
        middle=MIDDLE,
        told_pause_ms=lambda _prefill, _decode: PAUSE_MS,
        pause_ms=lambda _prefill, _decode: expected * PAUSE_MS,
        learns=lambda _decode: learns,
        waits=lambda _decode: waits,
    )


def foretold(*, pair: bool = True, gains: float | None = None, **given: Any) -> Foretold:
    return Foretold(prices(**given), 0, 1 if pair else 0, gains)


class Life:
    """Random requests, one after the other."""

    def __init__(self) -> None:
        self.guard = HandoffGuard()
        self.rng = Random(1)
        self.now = 10.0
        self.told: dict[str, Any] = {}

    def request(self, *, pair: bool, pause_ms: float, gains: float, late_ms: float = 0.0, slo_class: str = "") -> bool:
        """One more request: whether it was handed over, as `pair` wants and the guard allows."""
        self.now += 0.01
        allowed = self.guard.allows(slo_class, self.now)
        handed = pair and allowed
        known = gains if handed and self.guard.wonders(slo_class) else None
        each = foretold(pair=handed, gains=known, slo_class=slo_class, arrived=self.now, **self.told)
        first_s = self.now + (TTFT_MS + late_ms + self.rng.uniform(-20, 20)) / 1000
        if handed:
            self.guard.computed(each, first_s)
            first_s += pause_ms * self.rng.uniform(0.7, 1.3) / 1000
        self.guard.came(each, first_s)
        return handed

    def many(self, count: int, **given: Any) -> float:
        """The policy serves every third request aggregated. The share of the others that were handed over."""
        handed = [self.request(pair=at % 3 > 0, **given) for at in range(count)]
        return sum(handed) / (count * 2 / 3)


# --- what one request says --------------------------------------------------------------------------------------------


def test_a_hand_over_as_predicted_is_neither_dearer_nor_cheaper() -> None:
    each = foretold()
    each.computed_s = 10.0 + TTFT_MS / 1000
    assert each.dearer(10.0 + TOLD_S) == pytest.approx(0.0, abs=1e-9)
    assert each.slower(10.0 + TOLD_S) == pytest.approx(1.0)
    whole = foretold(pair=False)
    assert whole.dearer(10.0 + TTFT_MS / 1000) == pytest.approx(0.0, abs=1e-9)


def test_where_the_client_waits_for_d_a_longer_pause_makes_its_first_token_late() -> None:
    each = foretold(waits=True)
    each.computed_s = 10.0 + TTFT_MS / 1000
    assert each.dearer(10.0 + TOLD_S) == pytest.approx(0.0, abs=1e-9)
    told, came = ((TTFT_MS + PAUSE_MS + more) / UNIT_TTFT for more in (0.0, 150.0))
    assert each.dearer(10.0 + TOLD_S + 0.15) == pytest.approx(OWN.of(came) - OWN.of(told))


def test_a_longer_pause_is_spread_over_an_answer_in_the_middle() -> None:
    each = foretold()
    each.computed_s = 10.0 + TTFT_MS / 1000
    found = each.dearer(10.0 + TOLD_S + 0.5)
    used = [(TPOT_MS + (PAUSE_MS + more) / (MIDDLE - 1)) / UNIT_TPOT for more in (0.0, 500.0)]
    assert found == pytest.approx(OWN.of(used[1]) - OWN.of(used[0]))


def test_a_target_that_is_missed_counts_as_in_prices() -> None:
    each = foretold(promised=True)
    each.computed_s = 10.0 + TTFT_MS / 1000
    assert MISS < each.dearer(10.0 + TOLD_S + 10.0) <= WORST
    assert each.slower(20.0) == SLOWEST
    late = foretold(pair=False, promised=True)
    assert MISS < late.dearer(11.0) <= WORST


def test_an_answer_in_one_piece_began_before_it_came() -> None:
    each = foretold()
    each.computed_s = 10.2
    assert each.began_s(15.0, 101, 12.0) == pytest.approx(15.0 - 100 * 12.0 / 1000)
    assert each.began_s(10.5, 101, 12.0) == 10.2, "not before its prompt was computed"


# --- turning it off ---------------------------------------------------------------------------------------------------


def test_hand_overs_as_predicted_stay_on_even_where_a_pair_gains_nothing() -> None:
    life = Life()
    assert life.many(6000, pause_ms=PAUSE_MS, gains=-1.0) == 1.0


def test_hand_overs_that_are_late_and_still_worth_it_stay_on() -> None:
    life = Life()
    assert life.many(3000, pause_ms=10 * PAUSE_MS, gains=0.5) == 1.0
    assert life.guard.wonders(""), "the guard asks what hand-overs gain"


def test_hand_overs_that_are_late_by_more_than_they_gain_are_turned_off() -> None:
    life = Life()
    life.many(300, pause_ms=10 * PAUSE_MS, gains=0.001)
    assert life.guard.off() == {"": True}
    assert life.many(600, pause_ms=10 * PAUSE_MS, gains=0.001) == pytest.approx(1 / TRIES, abs=0.02)


def test_hand_overs_that_are_a_little_late_are_left_to_the_prices() -> None:
    life = Life()
    assert life.many(3000, pause_ms=2 * PAUSE_MS, gains=-1.0) == 1.0
    assert not life.guard.wonders("")


def test_a_slow_fleet_is_not_the_handoffs_fault() -> None:
    """Aggregated requests are late by more than the pauses of hand-overs are longer than predicted."""
    life = Life()
    assert life.many(3000, pause_ms=5 * PAUSE_MS, gains=-20.0, late_ms=250.0) == 1.0


def test_aggregated_requests_that_are_as_late_are_no_better() -> None:
    """Pairs that were to gain a little came out dearer by more than that, and so did aggregated requests."""
    life, pause_ms = Life(), 30 * PAUSE_MS
    each = foretold()
    each.computed_s = 10.0
    dearer = each.dearer(10.0 + pause_ms / 1000)
    late_ms = 60.0
    whole = foretold(pair=False).dearer(10.0 + (TTFT_MS + late_ms) / 1000)
    assert 0 < whole < dearer
    assert life.many(3000, pause_ms=pause_ms, gains=dearer - 0.8 * whole, late_ms=late_ms) == 1.0
    assert life.guard.wonders("")


def test_what_is_about_to_be_learned_is_left_to_learning() -> None:
    """One bad network among good ones: the policy did not know of it at these hand-overs, and will learn it."""
    life = Life()
    life.told = {"expected": 1.0}
    assert life.many(600, pause_ms=20 * PAUSE_MS, gains=-1.0) == 1.0
    life.told = {"expected": 1.0, "learns": False}
    life.many(300, pause_ms=20 * PAUSE_MS, gains=-1.0)
    assert life.guard.off() == {"": True}, "where D computes prompts nothing is learned"


def test_how_long_p_takes_is_not_the_guards_business() -> None:
    life = Life()
    for _ in range(300):
        life.request(pair=True, pause_ms=PAUSE_MS, gains=-1.0, late_ms=2000.0)
    assert life.guard.off() == {"": False}


def test_a_request_that_p_never_computed_does_not_count() -> None:
    guard, each = HandoffGuard(), foretold(gains=0.0)
    guard.came(each, 30.0)
    assert guard.off() == {}


def test_where_nothing_is_served_aggregated_lateness_counts_in_full() -> None:
    life = Life()
    for _ in range(200):
        life.request(pair=True, pause_ms=20 * PAUSE_MS, gains=0.0)
    assert life.guard.off() == {"": True}


def test_classes_do_not_answer_for_each_other() -> None:
    life = Life()
    for _ in range(300):
        life.request(pair=True, pause_ms=20 * PAUSE_MS, gains=0.0, slo_class="long")
        life.request(pair=True, pause_ms=PAUSE_MS, gains=0.0, slo_class="short")
    assert life.guard.off() == {"long": True, "short": False}
    assert life.guard.allows("short", life.now)
    assert life.guard.allows("never seen", life.now)


def test_answers_that_never_begin_count_as_well() -> None:
    guard, handed = HandoffGuard(), 0
    for at in range(2000):
        now = 10.0 + at * 0.01
        if guard.allows("", now):
            handed += 1
            guard.computed(foretold(gains=0.0 if guard.wonders("") else None, arrived=now), now + TTFT_MS / 1000)
    assert guard.off() == {"": True}
    assert handed < 2 * (OVERDUE_S + TOLD_S) / 0.01 + 2 * FEW + 2000 / TRIES


def test_a_request_whose_client_left_does_not_count() -> None:
    guard = HandoffGuard()
    for at in range(200):
        each = foretold(arrived=10.0 + at)
        guard.computed(each, 10.5 + at)
        guard.gone(each)
        guard.allows("", 10.0 + at)
    assert guard.off() == {}


def test_an_overdue_request_counts_once() -> None:
    guard, each = HandoffGuard(), foretold(gains=0.0)
    guard.computed(each, 10.2)
    guard.allows("", each.due_s + 1)
    guard.came(each, each.due_s + 5)
    assert guard._classes[""].handed.count == 1


def test_answers_in_one_piece_count_at_their_end_and_are_never_overdue() -> None:
    """Formerly, each answer that took longer than 2 s counted as a pause of 2 s."""
    guard = HandoffGuard()
    for at in range(100):
        each = foretold(gains=0.0, arrived=10.0 + at, streamed=False)
        computed_s = 10.0 + at + TTFT_MS / 1000
        guard.computed(each, computed_s)
        assert guard.allows("", computed_s + 60.0)
        guard.came(each, each.began_s(computed_s + 60.0 + PAUSE_MS / 1000, 1001, 60.0))
        guard.gone(each)
    seen = guard._classes[""]
    assert seen.handed.count == seen.slower.count == 100 and not seen.off
    assert seen.slower.value == pytest.approx(1.0) and seen.handed.value == pytest.approx(0.0, abs=1e-9)
    never = foretold(streamed=False)
    guard.came(never, 500.0)
    assert seen.handed.count == 100, "P has not computed it"


# --- and on again -----------------------------------------------------------------------------------------------------


def off(life: Life) -> None:
    while not life.guard.off().get("", False):
        life.request(pair=True, pause_ms=20 * PAUSE_MS, gains=0.0)


def test_hand_overs_are_turned_on_again_when_the_network_is_well() -> None:
    life = Life()
    off(life)
    life.many(FEW * TRIES * 2, pause_ms=PAUSE_MS, gains=-1.0)
    assert life.guard.off() == {"": False}


def test_hand_overs_are_turned_on_again_when_they_gain_more_than_they_cost() -> None:
    life = Life()
    off(life)
    life.many(FEW * TRIES * 2, pause_ms=20 * PAUSE_MS, gains=2.0)
    assert life.guard.off() == {"": False}


def test_hand_overs_stay_off_while_tries_still_lose() -> None:
    life = Life()
    off(life)
    life.many(FEW * TRIES * 10, pause_ms=20 * PAUSE_MS, gains=0.0)
    assert life.guard.off() == {"": True}


def tried(life: Life) -> int:
    """The number of hand-overs until they were turned on again."""
    handed = 0
    while life.guard.off()[""]:
        handed += life.request(pair=True, pause_ms=PAUSE_MS, gains=0.0)
    return handed


def test_each_failure_doubles_the_tries_until_hand_overs_are_well_for_long() -> None:
    life, needed = Life(), []
    for _ in range(7):
        off(life)
        needed.append(tried(life))
    assert needed == [min(TRIED_MOST, FEW << at) for at in range(7)]
    for _ in range(FORGIVEN):
        life.request(pair=True, pause_ms=PAUSE_MS, gains=0.0)
    off(life)
    assert tried(life) == FEW
