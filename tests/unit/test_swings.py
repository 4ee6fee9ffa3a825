"""Swings of the load: capacity is kept for their return as long as it would break the targets; chance is no swing."""

from __future__ import annotations

import numpy as np
import pytest

from goodput.swings import LONGEST_S, kept_rate


def kept(rates: list[float], horizon_s: float = 240.0, share: float = 0.03) -> float:
    counts = np.array(rates) * 60.0
    return kept_rate(counts, 60.0, horizon_s, 1.0, share, rates[-1])


def test_a_load_that_fell_at_once_is_expected_back() -> None:
    """Δ = 2.5, h = 240 s, a mean of 1.9: kept for 240 · 2.5 / (2 · 0.03 · 1.9) = 5,300 s."""
    assert kept([3.0] * 15 + [0.5] * 12) == pytest.approx(3.0, rel=0.12)


def test_a_swing_is_forgotten_when_its_return_would_not_break_the_targets() -> None:
    fell = [3.0] * 60 + [0.5]
    assert kept(fell + [0.5] * 40) > 2.0
    quick = [3.0] * 100 + [1.5]
    assert kept(quick + [1.5] * 3, horizon_s=40.0) > 2.5
    assert kept(quick + [1.5] * 12, horizon_s=40.0) == 0.0


def test_for_a_slow_change_only_its_rise_during_one_start_is_kept() -> None:
    slow = [3.0 - 0.02 * at for at in range(100)]
    assert kept(slow) == 0.0 or kept(slow) < slow[-1] + 0.3


def test_chance_is_no_swing() -> None:
    rng = np.random.default_rng(1)
    found = [kept_rate(rng.poisson(120.0, 120).astype(float), 60.0, 240.0, 1.0, 0.03, 2.0) for _ in range(40)]
    assert sum(each > 2.3 for each in found) <= 2


def test_no_rate_is_kept_without_arrivals_or_for_an_old_swing() -> None:
    assert kept([1.0] * 2) == 0.0
    assert kept_rate(np.zeros(100), 60.0, 240.0, 1.0, 0.03, 0.0) == 0.0
    old = [3.0] * 5 + [0.5] * (int(LONGEST_S / 60) + 5)
    assert kept(old, horizon_s=3000.0) == 0.0
