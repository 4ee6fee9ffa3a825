"""Which sizes of prompts are given up: shares by size, and when a size has had enough."""

from __future__ import annotations

import pytest

from router.core.values import Wanted
from router.scheduler.flow_control.queue import FlowControlQueue
from router.scheduler.flow_control.sizes import MEMORY, GivenUp, size_of


def test_sizes_are_half_octaves() -> None:
    assert size_of(1) == 0 and size_of(0) == 0
    assert size_of(1024) == 20 and size_of(1448) == 21 and size_of(2048) == 22


def known(long_gone: int, short_gone: int, given_up: GivenUp | None = None) -> GivenUp:
    """Twenty long prompts and eighty short ones, some of each given up."""
    found = GivenUp() if given_up is None else given_up
    for at in range(80):
        found.add(500, gone=at < short_gone)
    for at in range(20):
        found.add(8000, gone=at < long_gone)
    return found


@pytest.mark.parametrize(("within", "enough"), [(0.1, True), (0.3, True), (0.5, False), (1.0, False)])
def test_a_size_has_had_enough_beyond_its_bound(within: float, enough: bool) -> None:
    given_up = known(long_gone=10, short_gone=0)  # half of the long ones, a tenth of all
    assert given_up.enough(8000, within) == enough
    assert not given_up.enough(500, within)
    assert not given_up.enough(100_000, within), "nothing is known of that size"


def test_old_requests_fade_and_weights_stay_small() -> None:
    given_up = known(long_gone=20, short_gone=0)
    assert given_up.enough(8000, 0.2)
    for _ in range(int(40 * MEMORY)):
        given_up.add(8000, gone=False)
        given_up.add(500, gone=False)
    assert not given_up.enough(8000, 0.01)
    assert given_up._weight < 1e13


def wanted(tokens: int, within: float) -> Wanted:
    return Wanted(
        model="m", hand_over=False, prompt_tokens=tokens, ttft_ms=1000.0, arrived=0.0, now=0.0, lengths_within=within
    )


@pytest.mark.parametrize(("within", "first_to_go"), [(1.0, "long"), (0.2, "short")])
def test_the_longest_go_first_until_they_have_had_enough(within: float, first_to_go: str) -> None:
    """One instance, a target of 1 s, 1.2 s of work: one of the two requests must be given up."""
    queue = FlowControlQueue()
    known(long_gone=10, short_gone=0, given_up=queue.given_up)
    queue.enter("long", wanted(8000, within), 700.0)
    queue.enter("short", wanted(500, within), 500.0)
    assert queue.hopeless(wanted(0, 1.0), 1) == [first_to_go]


def test_a_request_that_cannot_be_in_time_takes_no_other_with_it() -> None:
    queue = FlowControlQueue()
    queue.enter("too late", wanted(500, 1.0), 1100.0)
    queue.enter("in time", wanted(8000, 1.0), 300.0)
    assert queue.hopeless(wanted(0, 1.0), 1) == ["too late"]
