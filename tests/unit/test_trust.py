"""A producer whose blocks do not come is set aside, tried now and then, and pulled from again once it is well."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.trust import ASIDE_S, ASIDE_S_MAX, BROKEN, FAILURES, Trust

READ = "a read failed"


def failing(times: int = FAILURES, now: float = 100.0) -> Trust:
    trust = Trust()
    trust.met("p")
    for _ in range(times):
        trust.began("p", now)
        trust.ended("p", READ, now)
    return trust


def test_some_failures_are_nothing() -> None:
    trust = failing(FAILURES - 1)
    assert trust.may_pull("p", 100.0) and not trust.of("p").aside
    trust.ended("p", "", 101.0)
    trust.ended("p", READ, 102.0)
    assert trust.may_pull("p", 102.0) and (trust.of("p").pulled, trust.of("p").failed) == (1, FAILURES)


def test_several_in_a_row_set_it_aside_and_a_try_that_is_good_lets_it_in() -> None:
    trust = failing()
    assert trust.of("p").aside and not trust.may_pull("p", 100.0 + ASIDE_S - 0.01)
    now = 100.0 + ASIDE_S
    assert trust.may_pull("p", now) and trust.may_pull("p", now), "asking is no try"
    trust.began("p", now)
    assert not trust.may_pull("p", now), "one is enough"
    trust.ended("p", "", now + 0.1)
    assert trust.may_pull("p", now + 0.1) and not trust.of("p").aside


def test_each_try_that_fails_makes_the_next_one_later() -> None:
    trust, now, waits = failing(), 100.0, []
    for _ in range(9):
        before = now
        while not trust.may_pull("p", now):
            now += ASIDE_S / 4
        waits.append(now - before)
        trust.began("p", now)
        trust.ended("p", READ, now)
    assert waits == [min(ASIDE_S * 2**n, ASIDE_S_MAX) for n in range(9)]


def test_others_that_end_with_it_make_it_no_worse() -> None:
    """Eight were under way when the cable was pulled."""
    trust = Trust()
    trust.met("p")
    for _ in range(8):
        trust.began("p", 99.0)
    for _ in range(8):
        trust.ended("p", READ, 100.0)
    assert trust.of("p").failed == 8 and trust.may_pull("p", 100.0 + ASIDE_S)


def test_a_try_of_which_nothing_is_heard_is_not_the_last() -> None:
    trust = failing()
    trust.began("p", 100.0 + ASIDE_S)
    assert not trust.may_pull("p", 100.0 + 1.9 * ASIDE_S) and trust.may_pull("p", 100.0 + 2 * ASIDE_S)


@pytest.mark.parametrize("because", ["the hold did not outlive the read", "something else"])
def test_what_is_not_the_ways_fault_does_not_count(because: str) -> None:
    trust = Trust()
    trust.met("p")
    for _ in range(20):
        trust.ended("p", because, 100.0)
    assert trust.may_pull("p", 100.0) and trust.of("p").failed == 0


def test_a_new_life_begins_anew_and_strangers_leave_nothing() -> None:
    trust = failing()
    trust.forgotten("p")
    trust.ended("p", READ, 101.0)
    trust.forgotten("never")
    trust.met("p")
    assert trust.may_pull("p", 101.0) and trust.of("p").failed == 0
    for _ in range(9):
        trust.ended("stranger", READ, 101.0)
    assert trust.may_pull("stranger", 101.0)


@given(st.lists(st.tuples(st.sampled_from(["", *sorted(BROKEN), "else"]), st.floats(0, 50)), max_size=60))
def test_who_is_well_again_is_pulled_from_again_within_the_longest_pause(script: list[tuple[str, float]]) -> None:
    trust, now = Trust(), 0.0
    trust.met("p")
    for because, later in script:
        now += later
        if trust.may_pull("p", now):
            trust.began("p", now)
            trust.ended("p", because, now)
    assert trust.may_pull("p", now + ASIDE_S_MAX)
    trust.began("p", now + ASIDE_S_MAX)
    trust.ended("p", "", now + ASIDE_S_MAX)
    assert trust.may_pull("p", now + ASIDE_S_MAX) and not trust.of("p").aside
