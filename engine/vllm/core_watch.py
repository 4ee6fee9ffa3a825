"""Asks the cores of one engine for tokens while they show no progress (`canary`). A shell: HTTP and the clock."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final

from engine.vllm.canary import Canary, lacks_memory, progress, tells_nothing
from engine.vllm.metrics import parse_loads
from engine.vllm.probe import Probe, Unwell

LOOK_EVERY_S: Final = 5.0
"""Seconds between two readings of the counters."""


MARGIN_S: Final = 60.0
"""A question waits so much longer than a core may be stuck, in seconds."""


class CoreWatch:
    """Watches the cores of one start of an engine. Use `watching`."""

    def __init__(self, probe: Probe, model: str, ranks: int, stuck_max_s: float, group: asyncio.TaskGroup) -> None:
        self._stuck_max_s = stuck_max_s
        self._probe = probe
        self._model = model
        self._group = group
        now = time.monotonic()
        self._look_at = now + LOOK_EVERY_S
        self._canaries = [Canary(now) for _ in range(ranks)]

    async def look(self) -> None:
        """Read the counters if it is time, and begin to ask where they stand still.

        Raises:
            Unwell: a core stands still. That is `dead`: no time will mend it.
        """
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_EVERY_S
            with contextlib.suppress(Unwell):  # what cannot be read does not move, either
                self._read(await self._probe.metrics())
        now = time.monotonic()
        stuck_s = max(canary.stuck_s(now) for canary in self._canaries)
        if stuck_s >= self._stuck_max_s and not await self._probe.paused():
            raise Unwell(f"its core has made no token and changed no counter for {stuck_s:.0f} s", dead=True)

    def _read(self, text: str) -> None:
        now, silent = time.monotonic(), tells_nothing(text)
        for rank, (canary, load) in enumerate(zip(self._canaries, parse_loads(text, len(self._canaries)), strict=True)):
            canary.reads(progress(load), now)
            if silent or lacks_memory(load):
                canary.answered(now)
            elif canary.asks(now):
                self._group.create_task(self._ask(rank, canary))

    async def _ask(self, rank: int, canary: Canary) -> None:
        """Ask one core for a token; whatever the engine answers, its core may be well. No answer is none: the wait is
        longer than a core may be stuck. If this process cannot ask (it gets no thread, say), that is not its fault.
        """
        try:
            with contextlib.suppress(Unwell, RuntimeError, OSError):
                named = rank if len(self._canaries) > 1 else None
                await self._probe.first_token(self._model, named, self._stuck_max_s + MARGIN_S)
        finally:  # after a stray cancellation, too: a core without an open question is not stuck
            canary.answered(time.monotonic())


@contextlib.asynccontextmanager
async def watching(probe: Probe, model: str, ranks: int, stuck_max_s: float) -> AsyncIterator[CoreWatch]:
    """Watch an engine's cores while inside; afterwards nothing is asked any more. `stuck_max_s`: how long one may show
    nothing after it was asked.
    """
    async with asyncio.TaskGroup() as group:
        yield CoreWatch(probe, model, ranks, stuck_max_s, group)
