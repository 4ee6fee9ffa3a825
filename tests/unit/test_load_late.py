"""A sender that is late: it reads answers between its sends, whichever part of the load it has."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from loadgen.arrival import Arrival
from loadgen.body import Asking
from loadgen.http import LoadConnections
from loadgen.replay import BURST, LoadShard, Replay, Sending


class AnswersAtOnce(LoadConnections):
    """Connections on which each answer comes as soon as the sender lets the loop run."""

    def idle(self) -> Any:
        return self

    def send(self, _: bytes, exchange: Any) -> None:
        asyncio.get_running_loop().call_soon(exchange.ended, 429, time.perf_counter())


@pytest.mark.parametrize("concurrency_max", [None, 3])
@pytest.mark.parametrize(("first", "step"), [(0, 1), (0, 2), (1, 2), (3, 8), (2, 3)])
async def test_answers_are_read_after_a_burst(first: int, step: int, concurrency_max: int | None) -> None:
    passed: list[int] = []
    """The number of arrivals that the sender has taken, at each answer's end."""
    sending = Sending(asking=Asking("fake"), concurrency_max=concurrency_max)
    replay = Replay(
        AnswersAtOnce("http://127.0.0.1:1"), sending, lambda _: passed.append(replay.load.open + replay.load.held_back)
    )
    late = LoadShard(first, step, time.perf_counter() - 60)
    load = await replay.run([Arrival(at_s=0.0, input_tokens=1, output_tokens=1)] * (10 * BURST), late)
    assert len(load.records) == 10 * BURST
    assert passed[0] <= BURST
    assert concurrency_max is not None or max(passed) <= BURST
