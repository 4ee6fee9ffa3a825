"""Whether other routers have taken over a silent router's load: found where it had much load, never by chance."""

from __future__ import annotations

import numpy as np
import pytest

from goodput.failover import RecentArrivals


def judged(rate: float, share: float, seed: int, *, crashes: bool, lasts_s: float = 900.0) -> float | None:
    """After how many seconds a router that had a share of the load is taken to be dead; None: never."""
    rng, recent = np.random.default_rng(seed), RecentArrivals()
    for now in range(0, 300, 3):
        recent.add({"a": rng.poisson(rate * (1 - share) * 3), "b": rng.poisson(rate * share * 3)}, now - 3.0, now)
    for now in range(300, 300 + round(lasts_s), 3):
        recent.add({"a": rng.poisson((rate if crashes else rate * (1 - share)) * 3)}, now - 3.0, now)
        if now >= 320 and recent.taken_over({"b": 297.0}, now):
            return now - 297.0
    return None


@pytest.mark.parametrize(("rate", "share"), [(2.0, 0.5), (20.0, 0.33), (200.0, 0.1)])
def test_a_crash_is_found_within_two_minutes(rate: float, share: float) -> None:
    found = [judged(rate, share, seed, crashes=True) for seed in range(20)]
    assert all(each is not None and 70.0 <= each <= 120.0 for each in found), found


@pytest.mark.parametrize("rate", [0.2, 2.0, 20.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_router_that_lives_is_not_taken_to_be_dead(rate: float, share: float) -> None:
    assert [judged(rate, share, seed, crashes=False) for seed in range(20)] == [None] * 20


def test_the_loss_of_the_only_busy_router_is_found_by_any_load_elsewhere() -> None:
    found = judged(2.0, 1.0, 1, crashes=True)
    assert found is not None and found <= 75.0


def test_a_router_without_load_is_missing_as_long_as_it_is_not_heard() -> None:
    assert judged(20.0, 0.0, 3, crashes=True) is None


def test_arrivals_of_a_time_without_complete_looks_are_not_those_of_its_last_minute() -> None:
    """Another router was not heard for 110 s, so no look was complete: the next one has all arrivals of that time."""
    recent = RecentArrivals()
    for now in range(3, 300, 3):
        recent.add(dict.fromkeys("abc", 15), now - 3.0, now)
    recent.add(dict.fromkeys("ab", 5 * 113), 297.0, 410.0)
    for now in range(413, 600, 3):
        assert not recent.taken_over({"c": 297.0}, now), now
        recent.add(dict.fromkeys("ab", 15), now - 3.0, now)


def test_a_controller_that_has_not_seen_the_time_before_a_loss_tells_nothing() -> None:
    recent = RecentArrivals()
    for now in range(3, 300, 3):
        recent.add({"a": 15}, now - 3.0, now)
        assert not recent.taken_over({"b": 0.0}, now)
