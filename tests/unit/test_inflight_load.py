"""The load in flight, of this router's requests: all that a request adds is taken out again at its end."""

import math

import numpy as np
import pytest

from costs import shipped
from costs.cost import costs_of
from costs.hardware import gpu_named
from router.predict.inflight_load import (
    DUTY_S,
    IDLE_MIN,
    SPREAD,
    InflightLoad,
    InflightRequest,
)
from router.predict.stall_limits import NEARLY, OVER_MAX, SHORT_ONES, STEPS_WITHIN
from router.predict.step_model import UNKNOWN, Make, make_of

MAKE = make_of(costs_of(shipped.models()["meta-llama/Llama-3.1-8B"], gpu_named("H100"), profiles=shipped.profiles()))


def inflight(rows: int = 2) -> InflightLoad:
    made = InflightLoad()
    made.reach(rows)
    for row in range(rows):
        made.know(row, MAKE)
    made.step_model.look(np.arange(rows))
    return made


def booking(prompt: int = 1000, mean: float = 200.0, tpot: float = math.inf) -> InflightRequest:
    return InflightRequest(
        prompt_tokens=prompt, mean_tokens=mean, short_tokens=50.0, middle_tokens=50.0, variance=100.0, tpot_ms=tpot
    )


def several(answers: int) -> InflightRequest:
    return InflightRequest(
        prompt_tokens=1000, mean_tokens=200.0, short_tokens=50.0, middle_tokens=50.0, variance=100.0, tpot_ms=40.0,
        answers=answers,
    )  # fmt: skip


def place(here: InflightLoad, one: InflightRequest, row: int, ms: float, now: float) -> None:
    here.prompt_placed(one, row, ms, ms / 2, now)
    here.answer_placed(one, row, now)


def passed(here: InflightLoad, ms: float, now: float) -> float:
    """How many answers at row 0 reach their limit within `ms` more of prompts."""
    here.harmed(0, 1.0, 50.0, 50.0, now)
    at = here.rows[0]
    short, middle = (sum(0 < limit - at.stalled <= ms for limit in limits) for limits in at.limits.by_length)
    return SHORT_ONES * short + (1 - SHORT_ONES) * middle


FIRST_S = MAKE.first_ms / 1000


def test_several_answers_to_one_prompt_are_booked_as_so_many_and_taken_back() -> None:
    """Before, a request with `n` of 16 counted as one answer: its memory and its steps were too short by 15."""
    here, many, other = inflight(), several(16), several(1)
    place(here, other, 0, 30.0, 10.0)
    at = here.rows[0]
    before = (at.decoding, at.kv_mean, at.kv_variance, at.answer_context, at.step, at.kv_free, here.answers)
    place(here, many, 0, 30.0, 10.0)
    assert (at.decoding, here.answers) == (17, 17)
    assert (at.kv_mean, at.kv_variance) == (2000.0 + 17 * 200.0, 17 * 100.0), "the prompt is there once"
    assert at.step == pytest.approx(here.step_model.rows[0].decode_ms(17, 2000.0 + 17 * 100.0))
    assert at.targets == {40.0: 2}
    here.opened(many, 10.1)
    here.answer_over(many, 12.0, 200)
    assert (at.decoding, at.kv_mean, at.kv_variance, at.answer_context) == before[:4]
    assert (at.targets, here.answers) == ({40.0: 1}, 1)
    here.answer_over(other, 12.0)
    assert (at.decoding, at.kv_mean, here.answers) == (0, 0.0, 0)
    here.answer_placed(many, 1, 13.0)
    here.know(1, MAKE)
    here.answer_over(many, 14.0)
    assert here.answers == 0, "its instance was replaced"


def test_a_prompt_waits_for_those_before_it_and_no_longer() -> None:
    here, one, two = inflight(), booking(), booking()
    here.prompt_placed(one, 0, 30.0, 30.0, 10.0)
    here.prompt_placed(two, 0, 50.0, 50.0, 10.0)
    assert here.waits_ms(10.0)[0] == pytest.approx(80.0 + MAKE.first_ms)
    assert here.waits_ms(10.0 + FIRST_S + 0.06)[0] == pytest.approx(20.0)
    late_ms = 10_000.0 - 80.0 - MAKE.first_ms
    assert here.waits_ms(20.0)[0] == pytest.approx(late_ms), "overdue: probably for as long again as it is late"
    here.prompt_over(one, 10.04, done=True)
    assert here.waits_ms(10.04)[0] == pytest.approx(50.0), "the next one begins when the one before has ended"
    assert here.waits_ms(10.04)[1] == 0.0
    here.prompt_over(two, 10.09, done=True)
    assert here.waits_ms(10.09)[0] == 0.0 and here.rows[0].prompts == 0


def test_an_answer_leaves_its_place_whatever_happens_to_what_is_learned_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen: an error in learning left 49 answers of 25,000 tokens in an empty engine, which then had no room."""
    here, one = inflight(1), booking(prompt=25_000)
    free = here.rows[0].kv_free
    place(here, one, 0, 1.0, 10.0)
    here.opened(one, 10.1)
    assert here.rows[0].decoding == 1 and here.rows[0].kv_free < free

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(here.step_model, "steps_took", fails)
    with pytest.raises(ZeroDivisionError):
        here.answer_over(one, 10.2, 16)
    assert here.rows[0].decoding == 0 and here.rows[0].kv_free == free and here.answers == 0


def test_a_prompt_leaves_its_row_whatever_happens_to_what_is_learned_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    here, one, two = inflight(1), booking(), booking()
    here.prompt_placed(one, 0, 30.0, 30.0, 10.0)
    here.prompt_placed(two, 0, 30.0, 30.0, 10.0)
    here.prompt_over(one, 10.1, done=True)  # what is learned of a prompt is known when the next one has ended

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(here.step_model, "prompt_took", fails)
    with pytest.raises(ZeroDivisionError):
        here.prompt_over(two, 10.2, done=True)
    assert here.rows[0].prompts == 0 and here.rows[0].ends == -math.inf


def test_a_prompt_is_over_once() -> None:
    here, one, two = inflight(), booking(), booking()
    here.prompt_placed(one, 0, 30.0, 30.0, 0.0)
    here.prompt_placed(two, 0, 30.0, 30.0, 0.0)
    for _ in range(3):
        here.prompt_over(one, 0.1, done=False)
    assert here.rows[0].prompts == 1 and here.rows[0].backlog == 30.0


def test_prompts_that_count_as_computed_leave_no_wait_behind() -> None:
    """Answers in one piece overlap, since a burst of two: no engine reports when a prompt ends. Formerly, the predicted
    wait grew to 80 s within 82 s.
    """
    here, gap_s, ms = inflight(), 0.055, 43.0
    here.prompt_placed(booking(), 0, ms, ms, -gap_s)
    due: list[tuple[float, InflightRequest]] = []
    for number in range(1500):
        now = number * gap_s
        while due and due[0][0] <= now:
            ends, over = due.pop(0)
            here.prompt_over(over, ends, done=False, presumed=True)
        one = booking()
        wait_ms = here.waits_ms(now)[0]
        here.prompt_placed(one, 0, ms, ms, now)
        due.append((now + (wait_ms + ms + here.step_model.rows[0].lead) / 1000, one))
        assert wait_ms <= 3 * ms


def test_a_prompt_that_is_given_up_before_it_began_takes_no_time() -> None:
    here, one, two = inflight(), booking(), booking()
    here.prompt_placed(one, 0, 30.0, 30.0, 10.0)
    here.prompt_placed(two, 0, 50.0, 50.0, 10.0)
    here.prompt_over(two, 10.0, done=False)
    assert here.waits_ms(10.0)[0] == pytest.approx(30.0 + MAKE.first_ms)


def test_a_request_that_is_placed_again_leaves_its_former_instance() -> None:
    here, one = inflight(), booking()
    here.prompt_placed(one, 0, 30.0, 30.0, 0.0)
    here.prompt_placed(one, 1, 40.0, 40.0, 0.1)
    assert [row.prompts for row in here.rows[:2]] == [0, 1]
    here.answer_placed(one, 0, 0.0)
    here.answer_placed(one, 1, 0.0)
    assert [row.decoding for row in here.rows[:2]] == [0, 1]


def test_answers_are_counted_with_the_memory_that_they_will_need() -> None:
    here = inflight()
    many = [booking(prompt=1000, mean=300.0) for _ in range(4)]
    for each in many:
        here.answer_placed(each, 0, 0.0)
    assert here.answers == here.rows[0].decoding == 4
    assert here.rows[0].step == pytest.approx(here.step_model.rows[0].decode_ms(4, 4 * 1150.0))
    needed = 4 * 1300 + SPREAD * math.sqrt(4 * 100)
    assert here.rows[0].kv_free == pytest.approx(MAKE.capacity_tokens - needed)
    here.holds(0, 9000)
    assert here.rows[0].kv_free == pytest.approx(9000 - needed)
    for each in many:
        here.answer_over(each, 0.0)
    assert here.answers == here.rows[0].decoding == here.rows[0].kv_mean == here.rows[0].beside == 0
    assert here.rows[0].step == pytest.approx(here.step_model.rows[0].decode_ms(0, 0))
    assert here.rows[0].kv_free == math.inf, "one answer always fits"


def test_the_strictest_target_is_the_least_of_those_there() -> None:
    here, strict, loose = inflight(), booking(tpot=20.0), booking(tpot=80.0)
    assert here.rows[0].strictest == math.inf
    here.answer_placed(loose, 0, 0.0)
    here.answer_placed(strict, 0, 0.0)
    assert here.rows[0].strictest == 20.0
    here.answer_over(strict, 0.0)
    assert here.rows[0].strictest == 80.0
    here.answer_over(loose, 0.0)
    assert here.rows[0].strictest == math.inf


def test_an_answer_that_would_miss_its_target_is_counted_and_not_twice() -> None:
    here = inflight()
    strict, loose = booking(tpot=10.0), booking(tpot=100.0)
    for each in (strict, loose):
        here.answer_placed(each, 0, 0.0)
    for each in (strict, loose):
        here.opened(each, 1.0)
    slack_ms = (NEARLY * 10.0 - here.rows[0].step) * 49
    assert 0 < slack_ms < 150
    assert passed(here, slack_ms * 0.99, 1.0) == 0
    assert passed(here, slack_ms * 1.01, 1.0) == 1
    assert passed(here, 1e6, 1.0) == 2
    here.prompt_placed(booking(), 0, slack_ms * 1.1, slack_ms * 1.1, 1.0)
    assert passed(here, 1.0, 1.0) == 0, "the strict one has missed it already"
    here.answer_over(strict, 2.0, 50)
    assert passed(here, 1e6, 1.0) == 1
    here.answer_over(loose, 2.0, 50)
    assert passed(here, 1e6, 1.0) == 0


def test_longer_steps_may_use_up_the_slack_of_an_answer() -> None:
    here, one = inflight(), booking(tpot=20.0)
    here.answer_placed(one, 0, 0.0)
    here.opened(one, 1.0)
    left_ms, besides_ms = (NEARLY * 20.0 - here.rows[0].step) * 49, STEPS_WITHIN * here.rows[0].step * 50
    assert left_ms > 2 * besides_ms
    assert here.harmed(0, 10.0, 50.0, 50.0, 1.0) == here.harmed(0, 0.0, 50.0, 50.0, 1.0) == 0.0
    assert here.harmed(0, left_ms, 50.0, 50.0, 1.0) == pytest.approx(left_ms / (left_ms + besides_ms))
    here.prompt_placed(booking(), 0, left_ms - besides_ms, left_ms - besides_ms, 1.0)
    soon = 1.0 + left_ms / 1000
    assert here.harmed(0, 10.0, 50.0, 50.0, soon) > 0.0
    assert passed(here, 10.0, soon) == 0.0, "the target is not missed if no other prompt comes"


def test_prompts_at_the_recent_rate_may_use_up_the_slack_of_an_answer() -> None:
    here, one = inflight(), booking(tpot=20.0)
    here.answer_placed(one, 0, 0.0)
    here.opened(one, 1.0)
    assert here.harmed(0, 10.0, 50.0, 50.0, 1.0) == 0.0
    here.rows[0].recent = 0.8 / here.faded(1.0)
    assert 0.0 < here.harmed(0, 10.0, 50.0, 50.0, 1.0) < 1.0
    here.rows[0].recent = 0.4 / here.faded(1.0)
    assert here.harmed(0, 10.0, 50.0, 50.0, 1.0) == 0.0, "so few prompts leave enough time"


def test_an_answer_that_has_outlived_a_length_is_not_held_to_it() -> None:
    """The waits of a long answer are spread over all its tokens: it passes the limit of a short one unharmed."""
    here, one = inflight(), booking(tpot=10.0)
    here.answer_placed(one, 0, 0.0)
    here.opened(one, 1.0)
    step_ms = float(here.rows[0].step)
    slack_ms = (NEARLY * 10.0 - step_ms) * 49
    soon, later = 1.0 + 49 * step_ms / 1000, 1.0 + 51 * step_ms / 1000
    assert passed(here, slack_ms * 1.01, soon) == 1, "it may yet be as short as predicted"
    assert passed(here, slack_ms * 1.01, later) == 0, "it has more than 50 tokens now"
    twice_ms = (NEARLY * 10.0 - step_ms) * 99
    assert passed(here, twice_ms * 0.99, later) == 0
    assert passed(here, twice_ms * 1.01, later) == 1
    here.prompt_placed(booking(), 0, 100.0, 100.0, later)
    assert passed(here, twice_ms * 0.99, later) == 1, "what it has waited counts"
    here.answer_over(one, later, 60)
    assert passed(here, 1e6, later + 100.0) == 0, "and it is forgotten with the answer"


def test_answers_do_not_outlive_a_length_while_prompts_run() -> None:
    here, one = inflight(), booking(tpot=10.0)
    here.answer_placed(one, 0, 0.0)
    here.opened(one, 1.0)
    step_ms = float(here.rows[0].step)
    here.prompt_placed(booking(), 0, 60.0, 60.0, 1.0)
    later = 1.0 + 51 * step_ms / 1000
    left_ms = (NEARLY * 10.0 - step_ms) * 49 - 60.0
    assert passed(here, left_ms * 1.01, later) == 1, "for 60 ms of this time it made no token"
    assert passed(here, left_ms * 1.01, later + 0.06) == 0


def test_ended_answers_leave_nothing_behind_where_prompts_take_less_than_predicted() -> None:
    """Prompts are predicted to keep answers waiting for longer than all the time there is, so the clock on which
    answers outlive their lengths goes back.
    """
    here, stays = inflight(), booking(tpot=50.0)
    place(here, stays, 0, 100.0, 0.0)
    here.opened(stays, 0.01)
    for number in range(1, 400):
        one, now = booking(tpot=50.0), number * 0.05
        place(here, one, 0, 200.0, now)
        here.prompt_over(one, now, done=False, presumed=True)
        here.opened(one, now + 0.01)
        here.answer_over(one, now + 0.04, 3)
    limits = here.rows[0].limits
    assert len(limits.living) == 2
    assert len(limits.outlived) <= OVER_MAX + 4 * 4
    assert {id(limit) for _, _, limit in limits.outlived} >= {id(limit) for limit in limits.living}


def test_prompts_leave_less_time_to_answers_for_a_while() -> None:
    here = inflight()
    assert here.idle(0.0)[0] == 1.0
    here.prompt_placed(booking(), 0, 1000.0, 1000.0, 0.0)
    assert here.idle(0.0)[0] == pytest.approx(1 - 1000 / (DUTY_S * 1000))
    assert here.idle(DUTY_S)[0] == pytest.approx(1 - 1000 / (DUTY_S * 1000) / math.e)
    here.prompt_placed(booking(), 0, 1e6, 1e6, DUTY_S)
    assert here.idle(DUTY_S)[0] == IDLE_MIN


@pytest.mark.parametrize(("began", "left"), [(-1.0, 1.0), (0.0, 1.0), (0.25, 0.75), (1.0, 0.0), (3.0, 0.0)])
def test_answers_do_not_wait_for_the_rest_of_a_prompt_that_is_dropped(began: float, left: float) -> None:
    """`began`: how much of the prompt's time has passed when it is dropped. It was counted as computed in full, so
    predicted steps were up to ten times too long: for a prompt that its engine refused at once, too.
    """
    here, answer, prompt = inflight(), booking(tpot=10.0), booking()
    here.answer_placed(answer, 0, 1.0)
    here.opened(answer, 1.0)
    here.prompt_placed(prompt, 0, 1000.0, 800.0, 2.0)
    at, dropped_s = here.rows[0], 2.0 + FIRST_S + began
    before = at.stalled, at.recent
    here.prompt_over(prompt, dropped_s, done=False)
    assert at.stalled == pytest.approx(before[0] - left * 800.0, abs=1e-6)
    assert at.recent == pytest.approx(before[1] * (1 - left), abs=1e-9 * before[1])
    assert at.recent >= 0.0
    here.prompt_over(prompt, dropped_s, done=False)
    assert at.stalled == pytest.approx(before[0] - left * 800.0, abs=1e-6), "once"


def test_a_prompt_that_is_dropped_behind_others_has_not_begun() -> None:
    here, one, two = inflight(), booking(), booking()
    here.prompt_placed(one, 0, 1000.0, 1000.0, 1.0)
    here.prompt_placed(two, 0, 200.0, 200.0, 1.1)
    here.prompt_over(two, 1.5, done=False)
    assert here.rows[0].stalled == pytest.approx(1000.0)
    here.prompt_placed(two, 0, 200.0, 200.0, 1.6)
    here.prompt_over(one, 1.8, done=True)
    here.prompt_over(two, 1.85, done=False)
    assert here.rows[0].stalled == pytest.approx(1050.0), "it began early, as the one before it ended early"


def harm_after(*, dropped: bool) -> list[float]:
    """The harm of prompts of several lengths to answers that were opened, or promised a place, while two prompts waited
    behind a third (`dropped`: they were there, and were given up before they began).
    """
    here, first, two, three = inflight(), booking(), booking(), booking()
    here.prompt_placed(first, 0, 5000.0, 100.0, 1.0)
    times = iter((1.1, 1.2, 1.3, 1.4, 1.5, 1.6))

    def answers() -> None:
        now = next(times)
        here.answer_placed(booking(tpot=10.0), 0, now)
        here.answer_placed(opened := booking(tpot=12.0), 0, now)
        here.opened(opened, now)

    answers()
    if dropped:
        here.prompt_placed(two, 0, 1000.0, 800.0, 1.15)
    answers()
    if dropped:
        here.prompt_placed(three, 0, 600.0, 500.0, 1.25)
    answers()
    if dropped:
        here.prompt_over(two, 1.35, done=False)
    answers()
    if dropped:
        here.prompt_over(three, 1.45, done=False)
    answers()
    here.prompt_over(first, 1.5, done=True)
    lengths_ms = (20.0, 100.0, 200.0, 400.0, 2000.0)
    return [here.harmed(0, ms, 50.0, 50.0, now) for now in (1.5, 1.7, 1.9, 2.1) for ms in lengths_ms]


def test_answers_that_opened_before_a_prompt_was_dropped_have_no_more_time_than_without_it() -> None:
    """Their limits began at a clock that was ahead by the prompt's whole stall, and then the clock was set back."""
    assert harm_after(dropped=True) == pytest.approx(harm_after(dropped=False))
    assert max(harm_after(dropped=False)) > 1.0


@pytest.mark.parametrize("presumed", [True, False])
def test_a_prompt_that_counts_as_computed_has_taken_its_time(presumed: bool) -> None:
    here, one = inflight(), booking()
    here.prompt_placed(one, 0, 100.0, 100.0, 1.0)
    here.prompt_over(one, 1.01, done=not presumed, presumed=presumed)
    assert here.rows[0].stalled == 100.0


def test_a_prompt_may_be_dropped_however_long_ago_it_was_placed() -> None:
    here, old = inflight(), booking()
    here.prompt_placed(old, 0, 1e10, 1e10, 1.0)
    here.prompt_placed(booking(), 1, 10.0, 10.0, 1e6)  # the times of all rows are counted from here on
    here.prompt_over(old, 1e6, done=False)
    assert here.rows[0].recent == 0.0
    assert here.rows[0].stalled == pytest.approx(1e9, rel=1e-3), "a tenth of its time has passed"


def test_prompts_that_are_refused_at_once_do_not_make_steps_look_fast() -> None:
    """A client sends a prompt every second that its engine refuses within some milliseconds."""
    here = inflight()
    step_ms = None
    for second in map(float, range(1, 31)):
        here.prompt_placed(refused := booking(), 0, 7500.0, 7250.0, second)
        here.prompt_over(refused, second + 0.005, done=False)
        here.answer_placed(answer := booking(), 0, second + 0.01)
        step_ms = here.rows[0].step if step_ms is None else step_ms
        here.opened(answer, second + 0.01)
        here.answer_over(answer, second + 0.01 + 0.1 * step_ms, 101)
    assert here.step_model.rows[0].decode_factor == pytest.approx(1.0, rel=0.01)
    assert here.rows[0].progress(31.0) == pytest.approx(31_000.0)


def test_a_row_that_goes_to_another_instance_keeps_nothing() -> None:
    here, one = inflight(), booking(tpot=10.0)
    place(here, one, 0, 30.0, 0.0)
    here.opened(one, 0.1)
    here.know(0, MAKE)
    assert here.answers == 0 and passed(here, 1e9, 1.0) == 0
    here.prompt_over(one, 0.2, done=True)
    here.answer_over(one, 0.2, 10)
    assert here.rows[0].prompts == here.rows[0].decoding == here.answers == 0, "its end changes nothing here"


def test_prompts_of_one_step_are_one_observation() -> None:
    here = inflight()
    for turn in range(60):
        pair = [booking(), booking()]
        plain = [20.0, 40.0 + turn % 5 * 10]
        for each, ms in zip(pair, plain, strict=True):
            here.prompt_placed(each, 0, ms * here.step_model.rows[0].prefill_factor, 0.0, float(turn))
        ends = turn + FIRST_S + sum(plain) / 1000
        for each in pair:
            here.prompt_over(each, ends, done=True)
    assert here.step_model.rows[0].prefill_factor == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("make", [MAKE, UNKNOWN], ids=["told", "unknown"])
@pytest.mark.parametrize("apart_ms", [0.5, 1.5, 3.0])
def test_first_tokens_of_one_step_that_come_one_after_the_other_make_no_engine_look_fast(
    make: Make, apart_ms: float
) -> None:
    """Eight prompts of one step at a time, whose first tokens come `apart_ms` after each other. Formerly, with 1.5 ms,
    a prompt was taken to last an eighth of its time, as if the engine had become faster.
    """
    here = InflightLoad()
    here.know(0, make)
    here.step_model.look(np.arange(1))
    at, plain_ms = here.step_model.rows[0], make.prompt_ms(1000)
    for turn in range(30):
        burst, now = [booking() for _ in range(8)], 2.0 * turn
        for each in burst:
            here.prompt_placed(each, 0, plain_ms * at.prefill_factor, 0.0, now)
        ends = now + (8 * plain_ms + make.first_ms) / 1000
        for number, each in enumerate(burst):
            here.prompt_over(each, ends + number * apart_ms / 1000, done=True)
        assert at.prefill_factor * plain_ms + at.overhead == pytest.approx(plain_ms, rel=0.15)


def test_steps_are_learned_and_what_prompts_take_of_them_is_expected() -> None:
    here = inflight()
    for turn in range(80):
        now = 20.0 * turn
        quiet, disturbed = booking(), booking()
        here.answer_placed(quiet, 0, now)
        here.opened(quiet, now)
        plain_ms = float(here.rows[0].step / here.step_model.rows[0].decode_factor)
        here.answer_over(quiet, now + 1.3 * plain_ms * 99 / 1000, 100)
        here.prompt_placed(booking(), 1, 2500.0, 2500.0, now)  # takes half of row 1's time for a while
        here.answer_placed(disturbed, 1, now)
        here.opened(disturbed, now)
        expected_ms = plain_ms / here.idle(now)[1]
        here.answer_over(disturbed, now + expected_ms * 9 / 1000, 10)
    assert here.step_model.rows[0].decode_factor == pytest.approx(1.3, rel=0.02)
    assert here.step_model.rows[1].decode_factor == pytest.approx(1.0, rel=0.02)


def answered(here: InflightLoad, row: int, times: float, now: float) -> None:
    """An answer of 100 tokens; each takes `times` times as long as is assumed without costs."""
    one = booking()
    here.answer_placed(one, row, now)
    here.opened(one, now)
    here.answer_over(one, now + times * here.step_model.make(row).decode.decode_ms * 99 / 1000, 100)


@pytest.mark.parametrize("own", [0, 5], ids=["never timed", "timed before"])
def test_what_an_instance_learns_of_others_is_in_the_steps_that_prices_read(own: int) -> None:
    """Formerly, row 1 kept the step of its own last answer, 28 ms, until its next answer."""
    here, now = InflightLoad(), 0.0
    here.reach(2)
    here.step_model.look(np.arange(2))
    for _ in range(own):
        answered(here, 1, 4.0, now := now + 20.0)
    staying = booking(tpot=9.0)
    here.answer_placed(staying, 1, now)
    for _ in range(200):
        answered(here, 0, 0.9, now := now + 20.0)
    row = here.rows[1]
    assert row.step == here.column("step")[1] == here.step_model.rows[1].decode_ms(row.decoding, row.answer_context)
    assert row.step == pytest.approx(0.9 * here.step_model.make(1).decode.decode_ms, rel=0.05)
    assert row.beside == here.step_model.rows[1].beside_ms(row.decoding, row.answer_context)
    assert row.strictest == 9.0, "an answer alone would meet it at this step"


def test_a_prompt_whose_tokens_were_underestimated_makes_its_engine_no_slower() -> None:
    """A text of 1,150 bytes was taken for 262 tokens; its engine counts 1,150."""
    learned = []
    for counted in (0, 1150):
        here = InflightLoad()
        here.reach(1)
        for number in range(3):
            one, at = booking(262), here.step_model.rows[0]
            here.prompt_placed(one, 0, at.make.prompt_ms(262) * at.prefill_factor, 0.0, float(number))
            here.prompt_over(one, number + 0.1, done=False, presumed=True)
            took_ms = at.make.prompt_ms(1150)
            here.told(one, number + 0.5, took_ms, 8.0, took_ms, counted)
        learned.append(here.step_model.rows[0].prefill_factor)
    assert learned[1] == pytest.approx(1.0, rel=0.05) and learned[0] > 2.0, learned
