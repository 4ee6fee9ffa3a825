"""Curves of attainment over rate, from which goodput is read."""

from __future__ import annotations

import pytest

from sim.experiments import curves


def test_a_spike_does_not_decide() -> None:
    """An attainment of 0.9 is reached at 46.4, but not at 45 and 46.2. A single bisection might return 46.4."""
    seen = {40.0: 0.96, 42.0: 0.93, 45.0: 0.88, 46.2: 0.89, 46.4: 0.91, 48.0: 0.85, 50.0: 0.82}
    assert 42 < curves.rate_at(seen, 0.9) < 45


def test_the_crossing_lies_between_its_neighbours() -> None:
    seen = {10.0: 0.95, 20.0: 0.85}
    assert curves.rate_at(seen, 0.9) == pytest.approx(200**0.5)
    assert curves.rate_at(seen, 0.95) == pytest.approx(10)
    assert curves.rate_at(seen, 0.99) == 0
    assert curves.rate_at(seen, 0.8) == 20
    assert curves.rate_at({}, 0.9) == 0


def test_falling_is_the_nearest_falling_sequence() -> None:
    assert curves.falling([3, 1, 2, 0]) == [3, 1.5, 1.5, 0]
    assert curves.falling([1, 2, 3]) == [2, 2, 2]
    assert curves.falling([]) == []


@pytest.mark.parametrize("start", [-20, -3, 0, 2, 25])
def test_rates_on_both_sides_of_every_share_are_run_from_any_start(start: int) -> None:
    tried: list[int] = []

    def attained(step: int) -> float:
        tried.append(step)
        return max(0.0, min(1.0, 0.9 - 0.01 * step))

    found = curves.traced(attained, start, (0.9, 0.95, 0.99))
    assert len(tried) == len(set(tried)) == len(found)
    steps = sorted(found)
    assert sum(found[step] < 0.9 for step in steps) >= curves.BESIDE
    if start < 25:
        assert sum(found[step] >= 0.99 for step in steps) >= curves.BESIDE
    if abs(start) < 5:
        assert len(tried) < 16


def test_a_trace_ends_if_no_rate_holds() -> None:
    assert len(curves.traced(lambda _step: 0.0, 0, (0.9, 0.99))) <= 2 * len(curves.STRIDES) + 1
