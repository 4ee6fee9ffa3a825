"""Times of prompts, as engines report them with answers in one piece."""

from __future__ import annotations

from heapq import heappop, heappush
from random import Random

import pytest

from router.predict.reported_prompts import STEPS_MAX, ReportedPrompts


def sent(*at_ms: float) -> ReportedPrompts:
    """Prompts with the numbers 0, 1, ..., sent at these times."""
    reported = ReportedPrompts()
    for number, each in enumerate(at_ms):
        reported.open[number] = each
    return reported


def test_prompts_of_one_step_are_one_observation() -> None:
    """Four prompts of 60 ms are each reported with 240 ms. The engine's front end sent the last report 40 ms late."""
    reported = sent(700.0, 700.0, 700.0, 700.0, 1130.0)
    for number, late_ms in enumerate((0.0, 3.0, 1.0)):
        assert reported.add(number, 60.0, 240.0, 1000.0 + late_ms) == []
    assert reported.add(3, 60.0, 240.0, 1040.0) == [(240.0, 240.0)]
    assert reported.add(4, 60.0, 61.0, 1200.0) == [(60.0, 61.0)]


def test_prompts_one_after_the_other_are_separate_observations() -> None:
    """Each prompt waits for the one before; the reported times do not include this wait."""
    reported = sent(*[100.0 * number for number in range(7)])
    seen = [reported.add(number, 45.0, 45.0 + number % 2, 100.0 * number + 50.0) for number in range(7)]
    assert seen == [[(45.0, 45.0 + number % 2)] for number in range(7)]


def test_a_prompt_that_began_in_the_step_of_another_took_the_rest_of_its_reported_time() -> None:
    """The first step had room for a part of the second prompt, so the second prompt is reported with the time of two
    steps.
    """
    reported = sent(0.0, 10.0)
    assert reported.add(0, 50.0, 50.0, 100.0) == [], "the second prompt is open, and may have ended in the same step"
    assert reported.add(1, 50.0, 100.0, 150.0) == [(50.0, 50.0), (50.0, 50.0)]


def test_prompts_whose_answers_end_in_another_order_are_separate_observations() -> None:
    reported = sent(0.0, 10.0, 300.0)
    assert reported.add(2, 60.0, 61.0, 400.0) == []
    assert reported.add(1, 50.0, 52.0, 120.0) == []
    assert reported.add(0, 50.0, 51.0, 60.0) == [(50.0, 51.0), (50.0, 52.0), (60.0, 61.0)]


@pytest.mark.parametrize("late", [False, True])
def test_a_step_with_a_prompt_that_is_never_reported_shows_nothing(late: bool) -> None:
    """A prompt has no report if its client left or its answer is a stream. Before, the whole time of its step counted
    for the step's other prompts.
    """
    reported = sent(0.0, 1.0, 500.0)
    if late:
        assert reported.add(1, 60.0, 120.0, 121.0) == []
    assert reported.left(0, 121.0) == []
    if not late:
        assert reported.add(1, 60.0, 120.0, 121.0) == []
    assert reported.add(2, 60.0, 61.0, 600.0) == [(60.0, 61.0)]


def answers(rate_s: float, longest_ms: float) -> float:
    """The observed time of all prompts, divided by their true time. The engine computes up to eight waiting prompts in
    one step. Answers take a second on average, and `longest_ms` at most.
    """
    rng, sent_ms, now = Random(2), list[float](), 0.0
    while now < 120_000.0:
        now += rng.expovariate(rate_s / 1000)
        sent_ms.append(now)
    events: list[tuple[float, int, tuple[float, float] | None]] = [
        (at, number, None) for number, at in enumerate(sent_ms)
    ]
    number, now = 0, 0.0
    while number < len(sent_ms):
        now, first = max(now, sent_ms[number]), number
        while number < len(sent_ms) and sent_ms[number] <= now and number - first < 8:
            number += 1
        took_ms = 60.0 * (number - first)
        now += took_ms
        for each in range(first, number):
            ends = now + min(longest_ms, rng.expovariate(1 / 1000))
            heappush(events, (ends, each, (took_ms, now + rng.random())))
    events.sort(key=lambda each: each[:2])
    reported, plain_ms, observed_ms, count = ReportedPrompts(), 0.0, 0.0, 0
    while events:
        at, number, told = heappop(events)
        if told is None:
            reported.open[number] = at
            continue
        for plain, observed in reported.add(number, 60.0, *told):
            plain_ms, observed_ms, count = plain_ms + plain, observed_ms + observed, count + 1
    assert count > 100
    return observed_ms / plain_ms


@pytest.mark.parametrize("rate_s", [4, 8, 12])
def test_answers_of_all_lengths_show_what_prompts_take(rate_s: float) -> None:
    """Before, the ratio was 1.12 at 8 requests a second and 1.44 at 12: a step's prompts with longer answers were not
    counted.
    """
    assert answers(rate_s, 4000.0) == pytest.approx(1.0, abs=0.01)
    assert answers(rate_s, 1e9) == pytest.approx(1.0, abs=0.01)


def test_streamed_prompts_do_not_spoil_the_observations_of_prompts_after_them() -> None:
    """The first token of each streamed prompt comes before the next prompt is sent, so the next prompt is in a later
    step.
    """
    reported = ReportedPrompts()
    for number in range(6):
        at = 100.0 * number
        reported.open[number] = at
        if number % 2:
            assert reported.left(number, at + 47.0) == []
        else:
            assert reported.add(number, 45.0, 45.0, at + 46.0) == [(45.0, 45.0)]


def test_while_one_long_answer_lasts_at_most_steps_max_steps_are_kept() -> None:
    reported = ReportedPrompts()
    reported.open["long"] = 0.0
    for number in range(1, 5 * STEPS_MAX):
        at = 100.0 * number
        reported.open[number] = at
        assert reported.add(number, 45.0, 45.0, at + 50.0) == []
    assert len(reported.left("long", 5e4)) == STEPS_MAX - 1, "the first prompt after the long one may share its step"
    reported.open["next"] = 1e6
    assert reported.add("next", 45.0, 46.0, 1e6 + 50.0) == [(45.0, 46.0)]
