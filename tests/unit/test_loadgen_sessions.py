"""Conversations in a closed loop: times of turns, the history in each turn, and what a seed determines."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.body import Asking, turn_body
from loadgen.lengths import FixedLength, Uniform
from loadgen.sessions import FAILED_WAIT_S, Due, SessionPlan, Sessions, Turn, TurnAnswered, think_of


def talks(**more: object) -> Sessions:
    plan = {"sessions": 2, "turns": 3, "think": think_of("1"), "inputs": FixedLength(8), "outputs": FixedLength(4)}
    return Sessions(SessionPlan(**{**plan, **more}))  # type: ignore[arg-type]


def answered(turn: Turn, text: str = " yes", *, well: bool = True) -> TurnAnswered:
    return TurnAnswered(turn, text, turn.arrival.input_tokens + 4, well=well)


def run(sessions: Sessions, answer_s: float, *, well: bool = True) -> list[Turn]:
    """All turns; each is answered `answer_s` seconds of virtual time after its sending."""
    turns: list[Turn] = []
    open_turns: list[tuple[float, Turn]] = []
    now = 0.0
    while not sessions.over:
        due = sessions.next_wakeup()
        ends = open_turns[0][0] if open_turns else None
        now = min(each for each in (due, ends) if each is not None)
        if ends is not None and ends <= now:
            sessions.handle(answered(open_turns.pop(0)[1], well=well), now)
        for turn in sessions.handle(Due(), now):
            turns.append(turn)
            open_turns.append((now + answer_s, turn))
        assert len(open_turns) <= 2  # never more than the two users: a closed loop has no backlog
    return turns


def test_history_grows_with_the_real_answers() -> None:
    turns = [turn for turn in run(talks(requests=6), 0.5) if turn.talk.number == 0]
    assert [len(turn.said) for turn in turns] == [1, 3, 5]
    assert turns[2].said[:4] == (*turns[1].said, " yes")
    assert [turn.arrival.input_tokens for turn in turns] == [8, 20, 32]
    assert [turn.arrival.turn for turn in turns] == [1, 2, 3]
    assert [turn.arrival.at_s for turn in turns] == [1.0, 2.5, 4.0]  # think, answer and think, answer and think


def test_a_slow_server_is_asked_less_and_a_new_user_takes_a_place() -> None:
    fast, slow = (run(talks(requests=None, until_s=30.0), answer_s) for answer_s in (0.5, 9.0))
    assert len(fast) == 40 and len(slow) == 6
    assert {turn.arrival.session for turn in fast} == {str(number) for number in range(14)}
    assert max(turn.arrival.at_s for turn in fast) < 30.0


def test_a_load_ends_after_its_requests_and_failures_do_not_spin() -> None:
    turns = run(talks(requests=7, think=think_of("0")), 0.0, well=False)
    assert [turn.number for turn in turns] == list(range(7))
    assert {turn.arrival.turn for turn in turns} == {1}  # a failed conversation is not continued
    assert turns[-1].arrival.at_s >= 3 * FAILED_WAIT_S


def test_the_seed_determines_texts_and_lengths_whatever_the_server_does() -> None:
    def told(seed: int, answer_s: float) -> dict[tuple[str | None, int | None], tuple[str, int]]:
        more = {"think": think_of("exponential:2"), "inputs": Uniform(4, 90), "outputs": Uniform(1, 50)}
        turns = run(talks(requests=20, seed=seed, **more), answer_s)
        return {(each.arrival.session, each.arrival.turn): (each.said[-1], each.output_tokens) for each in turns}

    one, other = told(1, 0.1), told(1, 7.0)
    common = set(one) & set(other)
    assert len(common) > 10
    assert all(one[key] == other[key] for key in common)
    assert one != told(2, 0.1)


def test_bodies_of_a_turn() -> None:
    said = ("hello", " you", "again")
    assert b'"messages":[{"role":"user","content":"hello"},{"role":"assistant","content":" you"},{"role":"user"' in (
        turn_body(said, 5, Asking("m", chat=True))
    )
    assert b'"prompt":"hello youagain"' in turn_body(said, 5, Asking("m"))


@pytest.mark.parametrize(("text", "low", "high"), [("2", 2, 2), ("uniform:1-5", 1, 5), ("exponential:3", 0, 100)])
def test_think_times(text: str, low: float, high: float) -> None:
    rng = np.random.default_rng(0)
    values = [think_of(text)(rng) for _ in range(2000)]
    assert low <= min(values) <= max(values) <= high
    assert np.mean(values) == pytest.approx(3.0 if text != "2" else 2.0, rel=0.1)


@pytest.mark.parametrize("text", ["", "-1", "nan", "uniform:5-1", "uniform:1", "gamma:3", "exponential:x", "1e9"])
def test_bad_think_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|not a number"):
        think_of(text)
