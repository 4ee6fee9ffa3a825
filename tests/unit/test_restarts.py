"""A program that dies again and again is not restarted without end."""

from __future__ import annotations

from baton.restarts import RESTARTS_MAX, WITHIN_S, Restarts


def test_five_restarts_in_ten_minutes_and_no_sixth() -> None:
    restarts = Restarts()
    assert all(restarts.may(float(second)) for second in range(RESTARTS_MAX))
    assert not restarts.may(WITHIN_S - 1.0)
    assert restarts.may(WITHIN_S), "the first restart is 600 s ago"
    assert not restarts.may(WITHIN_S + 0.5), "the second restart is not"


def test_rare_deaths_are_no_reason_to_give_up() -> None:
    restarts = Restarts()
    assert all(restarts.may(number * WITHIN_S / RESTARTS_MAX) for number in range(100))
