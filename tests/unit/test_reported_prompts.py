"""Prompts' times as engines report them with whole answers."""

from __future__ import annotations

from router.predict.reported_prompts import ReportedPrompts


def test_prompts_of_one_step_are_one_observation() -> None:
    """Four prompts of 60 ms each are each reported with 240 ms; the front end was slow for the last one."""
    reported = ReportedPrompts()
    for late_ms in (0.0, 3.0, 1.0, 40.0):
        assert reported.add(60.0, 240.0, 1000.0 + late_ms) is None
    assert reported.add(60.0, 61.0, 1200.0) == (240.0, 240.0)
    assert reported.add(60.0, 61.0, 1300.0) == (60.0, 61.0)


def test_prompts_one_after_the_other_are_each_their_own() -> None:
    """They wait for each other, and are reported without that wait."""
    reported = ReportedPrompts()
    seen = [reported.add(45.0, 45.0 + number % 2, 100.0 * number) for number in range(1, 8)]
    assert seen[0] is None
    assert [each for each in seen if each] == [(45.0, 46.0), (45.0, 45.0)] * 3


def test_a_prompt_that_began_beside_another_one_took_what_is_left() -> None:
    """The step had room for a part of it: it is reported with two steps, of which the first was not its own."""
    reported = ReportedPrompts()
    reported.add(50.0, 50.0, 100.0)
    reported.add(50.0, 100.0, 150.0)
    assert reported.add(50.0, 50.0, 400.0) == (50.0, 50.0)


def test_a_report_that_comes_late_shows_nothing() -> None:
    """Its answer was longer than that of a prompt after it."""
    reported = ReportedPrompts()
    reported.add(50.0, 55.0, 500.0)
    assert reported.add(50.0, 55.0, 400.0) is None
    assert reported.add(50.0, 55.0, 700.0) == (50.0, 55.0)
