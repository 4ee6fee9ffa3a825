"""When an engine core that shows no progress is asked for a token, and when it stands still."""

from __future__ import annotations

import asyncio
import time

import pytest

from cluster.instance import Load
from engine.vllm.canary import STILL_S, STUCK_S, Canary, lacks_memory, progress, tells_nothing
from engine.vllm.core_watch import watching

IDLE = progress(Load(prompt_tokens=5, generation_tokens=1))
LATER = progress(Load(prompt_tokens=5, generation_tokens=2))


def asked() -> Canary:
    """One that has been asked for a token at STILL_S."""
    canary = Canary(0.0)
    canary.reads(IDLE, 0.0)
    assert not canary.asks(STILL_S - 1) and canary.asks(STILL_S)
    return canary


def test_a_core_whose_counters_move_is_asked_for_nothing() -> None:
    canary = Canary(0.0)
    for second in range(1000):
        canary.reads((float(second // 20),), second)
        assert not canary.asks(second) and canary.stuck_s(second) == 0


def test_an_idle_core_is_asked_once_in_a_while_and_is_well_if_it_answers() -> None:
    canary, asks = Canary(0.0), 0
    for second in range(1, 301):
        canary.reads(IDLE, 0.0)
        if canary.asks(second):
            asks += 1
            canary.answered(second)
        assert canary.stuck_s(second) == 0
    assert asks == 300 // STILL_S


def test_a_core_that_does_not_answer_is_stuck_and_is_not_asked_twice() -> None:
    canary = asked()
    assert not canary.asks(STILL_S + 50)
    assert canary.stuck_s(STILL_S + STUCK_S - 1) < STUCK_S
    assert canary.stuck_s(STILL_S + STUCK_S) == STUCK_S


@pytest.mark.parametrize("load", [Load(prompt_tokens=5, generation_tokens=2), Load(prompt_tokens=5, kv_usage=0.4)])
def test_a_token_that_waits_behind_others_is_no_sign(load: Load) -> None:
    """Chunks of a long prompt may fill every step: then the share of the cache in use grows, no counter."""
    canary = asked()
    canary.reads(progress(load), STILL_S + 100)
    assert canary.stuck_s(STILL_S + 150) == 50
    canary.answered(STILL_S + 160)
    assert canary.stuck_s(STILL_S + 400) == 0


COUNTED = 'vllm:num_requests_running{engine="0"} 0.0\n'


@pytest.mark.parametrize(
    ("text", "silent"),
    [
        (COUNTED + 'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 0.0\n', True),
        ('# TYPE x gauge\nvllm:engine_sleep_state{sleep_state="awake"} 0', True),
        (COUNTED + 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0\n', False),
        (COUNTED + 'vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 0.0\n', False),
        (COUNTED, False),
        ("python_info 1\n", True),  # --disable-log-stats
    ],
)
def test_whether_an_engine_tells_anything_of_its_cores(text: str, silent: bool) -> None:
    assert tells_nothing(text) is silent


@pytest.mark.parametrize(
    ("load", "lacks"),
    [
        (Load(waiting=1, kv_usage=0.9), True),  # holds have the memory that the canary's own token waits for
        (Load(waiting=1, running=1, kv_usage=0.9), False),
        (Load(waiting=1), False),  # all memory is free: a core that is well would begin it
        (Load(kv_usage=0.9), False),
    ],
)
def test_whether_requests_wait_for_memory_alone(load: Load, lacks: bool) -> None:
    assert lacks_memory(load) is lacks


class NoThreads:
    """A probe of a process that gets no thread more, so that no name can be resolved."""

    async def first_token(self, *_: object) -> None:
        raise RuntimeError("can't start new thread")


async def test_a_question_that_this_process_cannot_ask_ends_no_watch() -> None:
    """Before, it ended the watch, and with it a healthy engine."""
    canary = Canary(0.0)
    async with watching(NoThreads(), "m", 1, STUCK_S) as watch:  # type: ignore[arg-type]
        await watch._ask(0, canary)
    assert canary.stuck_s(STUCK_S * 2) == 0.0


class Strays:
    """A probe that is cancelled, and nobody asked for that."""

    async def first_token(self, *_: object) -> None:
        raise asyncio.CancelledError


async def test_a_question_that_is_cancelled_leaves_no_core_waiting_for_its_answer() -> None:
    canary = asked()
    async with watching(Strays(), "m", 1, STUCK_S) as watch:  # type: ignore[arg-type]
        with pytest.raises(asyncio.CancelledError):
            await watch._ask(0, canary)
    assert canary.stuck_s(time.monotonic() + STUCK_S * 2) == 0.0
