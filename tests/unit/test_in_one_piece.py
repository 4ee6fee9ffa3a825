"""Which of an engine's own times count for an answer in one piece, that is, not streamed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from router.fleet.events import EngineMs
from router.request.in_one_piece import AnswerInOnePiece


class Timers:
    """In place of an event loop: its timers fire when the test says so."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        """Of every timer, in seconds."""
        self._waiting: dict[int, Callable[[], object]] = {}

    def call_later(self, delay: float, callback: Callable[[], object]) -> Any:
        number = len(self.delays)
        self.delays.append(delay)
        self._waiting[number] = callback
        return SimpleNamespace(cancel=lambda: self._waiting.pop(number, None))

    def fire(self) -> None:
        """Fire every timer that was not cancelled."""
        for number in list(self._waiting):
            self._waiting.pop(number)()


def answer(timers: Timers, presumed: list[int]) -> AnswerInOnePiece:
    """Engines say: 0.25 s for the prompt, 1 s for the tokens after the first, 0.125 s in the queue."""
    scheduled: Any = SimpleNamespace(
        context=SimpleNamespace(ttft_ms=40.0), foretold=True, prompt_presumed=lambda: presumed.append(1)
    )
    parts: Any = SimpleNamespace(engines=SimpleNamespace(loop=timers))
    request: Any = SimpleNamespace(arrived=100.0)
    trace: Any = SimpleNamespace(times=SimpleNamespace(generation_s=1.0, first_s=0.25, queue_s=0.125))
    return AnswerInOnePiece(parts, request, scheduled, trace)


@pytest.mark.interpreted
def test_a_prompt_counts_as_computed_once_the_predicted_time_is_over() -> None:
    timers, presumed = Timers(), list[int]()
    answer(timers, presumed).presume(100.01)
    answer(timers, presumed).presume(100.5)  # the time is over already
    assert timers.delays == [pytest.approx(0.03), 0.0] and not presumed
    timers.fire()
    assert presumed == [1, 1]


@pytest.mark.interpreted
def test_the_answering_engines_prompt_time_counts_where_no_other_has_computed_it() -> None:
    timers, presumed = Timers(), list[int]()
    made = answer(timers, presumed)
    made.presume(100.0)
    made.presume_no_more()  # the answer has come
    assert made.engine_said(11) == EngineMs(250.0, 100.0, 375.0)
    handed_over = answer(timers, presumed)
    assert handed_over.engine_said(11) == EngineMs(0.0, 100.0, 375.0)
    timers.fire()
    assert len(timers.delays) == 1 and not presumed


@pytest.mark.interpreted
def test_after_a_failed_leg_the_next_one_may_have_its_prompt_from_another_engine() -> None:
    """The request was first served aggregated, then handed over. Formerly, P was credited with D's time."""
    timers, presumed = Timers(), list[int]()
    made = answer(timers, presumed)
    made.presume(100.0)
    made.leg_closed()
    assert made.engine_said(11) == EngineMs(0.0, 100.0, 375.0)
    made.presume(100.0)
    assert made.engine_said(11) == EngineMs(250.0, 100.0, 375.0)
    timers.fire()
    assert len(timers.delays) == 2 and presumed == [1], "the first leg's timer was cancelled"
