"""A producer whose pulls fail is set aside, tested now and then, and pulled from again once a test succeeds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.peers import ASIDE_S, ASIDE_S_MAX, BROKEN, FAILURES, ProducerPeers

READ = "a read failed"


def failing(times: int = FAILURES, now: float = 100.0) -> ProducerPeers:
    peers = ProducerPeers()
    peers.met("p", "p", 0.0)
    for _ in range(times):
        peers.began("p", now)
        peers.ended("p", READ, now)
    return peers


def test_a_few_failures_do_not_set_a_producer_aside() -> None:
    peers = failing(FAILURES - 1)
    assert peers.may_pull("p", 100.0) and not peers.of("p").aside
    peers.ended("p", "", 101.0)
    peers.ended("p", READ, 102.0)
    assert peers.may_pull("p", 102.0) and (peers.of("p").pulled, peers.of("p").failed) == (1, FAILURES)


def test_several_failures_in_a_row_set_it_aside_and_a_good_test_ends_that() -> None:
    peers = failing()
    assert peers.of("p").aside and not peers.may_pull("p", 100.0 + ASIDE_S - 0.01)
    now = 100.0 + ASIDE_S
    assert peers.may_pull("p", now) and peers.may_pull("p", now), "asking starts no test"
    peers.began("p", now)
    assert not peers.may_pull("p", now), "one test at a time"
    peers.ended("p", "", now + 0.1)
    assert peers.may_pull("p", now + 0.1) and not peers.of("p").aside


def test_a_request_that_waits_for_its_hold_waits_during_a_test() -> None:
    peers = failing()
    assert not peers.may_wait("p", 100.0) and not peers.may_wait("stranger", 100.0)
    now = 100.0 + ASIDE_S
    peers.began("p", now)
    assert peers.may_wait("p", now) and not peers.may_pull("p", now)
    peers.ended("p", READ, now + 0.1)
    assert not peers.may_wait("p", now + 0.1)


def test_each_test_that_fails_makes_the_next_one_later() -> None:
    peers, now, waits = failing(), 100.0, []
    for _ in range(9):
        before = now
        while not peers.may_pull("p", now):
            now += ASIDE_S / 4
        waits.append(now - before)
        peers.began("p", now)
        peers.ended("p", READ, now)
    assert waits == [min(ASIDE_S * 2**n, ASIDE_S_MAX) for n in range(9)]


def test_pulls_that_fail_together_make_the_pause_no_longer() -> None:
    """Eight pulls were under way when the cable was pulled out."""
    peers = ProducerPeers()
    peers.met("p", "p", 0.0)
    for _ in range(8):
        peers.began("p", 99.0)
    for _ in range(8):
        peers.ended("p", READ, 100.0)
    assert peers.of("p").failed == 8 and peers.may_pull("p", 100.0 + ASIDE_S)


def test_a_test_without_a_result_is_followed_by_another() -> None:
    peers = failing()
    peers.began("p", 100.0 + ASIDE_S)
    assert not peers.may_pull("p", 100.0 + 1.9 * ASIDE_S) and peers.may_pull("p", 100.0 + 2 * ASIDE_S)


@pytest.mark.parametrize("because", ["the hold did not outlive the read", "something else"])
def test_failures_that_are_not_the_connections_do_not_count(because: str) -> None:
    peers = ProducerPeers()
    peers.met("p", "p", 0.0)
    for _ in range(20):
        peers.ended("p", because, 100.0)
    assert peers.may_pull("p", 100.0) and peers.of("p").failed == 0


def test_a_new_life_begins_anew_and_unknown_producers_are_not_kept() -> None:
    peers = failing()
    peers.forgotten("p")
    peers.ended("p", READ, 101.0)
    peers.forgotten("never")
    peers.met("p", "p", 0.0)
    assert peers.may_pull("p", 101.0) and peers.of("p").failed == 0
    for _ in range(9):
        peers.ended("stranger", READ, 101.0)
    assert peers.may_pull("stranger", 101.0)


@given(st.lists(st.tuples(st.sampled_from(["", *sorted(BROKEN), "else"]), st.floats(0, 50)), max_size=60))
def test_a_producer_that_is_well_again_is_pulled_from_within_the_longest_pause(script: list[tuple[str, float]]) -> None:
    peers, now = ProducerPeers(), 0.0
    peers.met("p", "p", 0.0)
    for because, later in script:
        now += later
        if peers.may_pull("p", now):
            peers.began("p", now)
            peers.ended("p", because, now)
    assert peers.may_pull("p", now + ASIDE_S_MAX)
    peers.began("p", now + ASIDE_S_MAX)
    peers.ended("p", "", now + ASIDE_S_MAX)
    assert peers.may_pull("p", now + ASIDE_S_MAX) and not peers.of("p").aside
