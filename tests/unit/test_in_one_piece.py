"""Which of an engine's own times count for an answer in one piece, that is, not streamed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from router.fleet.events import EngineMs
from router.request.in_one_piece import AnswerInOnePiece


def answer(presumed: list[int]) -> AnswerInOnePiece:
    """Engines say: 0.25 s for the prompt, 1 s for the tokens after the first, 0.125 s in the queue."""
    scheduled: Any = SimpleNamespace(
        context=SimpleNamespace(ttft_ms=1.0), foretold=True, prompt_presumed=lambda: presumed.append(1)
    )
    parts: Any = SimpleNamespace(engines=SimpleNamespace(loop=asyncio.get_running_loop()))
    request: Any = SimpleNamespace(arrived=0.0)
    trace: Any = SimpleNamespace(times=SimpleNamespace(generation_s=1.0, first_s=0.25, queue_s=0.125))
    return AnswerInOnePiece(parts, request, scheduled, trace)


@pytest.mark.interpreted
async def test_the_answering_engines_prompt_time_counts_where_no_other_has_computed_it() -> None:
    presumed: list[int] = []
    made = answer(presumed)
    made.presume(0.0)
    made.presume_no_more()  # the answer has come
    assert made.engine_said(11) == EngineMs(250.0, 100.0, 375.0)
    handed_over = answer(presumed)
    assert handed_over.engine_said(11) == EngineMs(0.0, 100.0, 375.0)
    await asyncio.sleep(0.01)
    assert not presumed


@pytest.mark.interpreted
async def test_after_a_failed_leg_the_next_one_may_have_its_prompt_from_another_engine() -> None:
    """The request was first served aggregated, then handed over. Formerly, P was credited with D's time."""
    presumed: list[int] = []
    made = answer(presumed)
    made.presume(0.0)
    made.leg_closed()
    assert made.engine_said(11) == EngineMs(0.0, 100.0, 375.0)
    made.presume(0.0)
    assert made.engine_said(11) == EngineMs(250.0, 100.0, 375.0)
    await asyncio.sleep(0.01)
    assert presumed == [1]
