"""Tasks with a name and an owner: a failure is logged, never lost. A shell: asyncio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from cluster.background import keep_running

logger = logging.getLogger("baton.router")

_Result = TypeVar("_Result")

FOREVER: Final = "probe-"
"""The prefix of the names of tasks that run until they are cancelled; all others end by themselves."""
PAUSES_S: Final = (1.0, 5.0)
"""Seconds of the first and of the longest pause after a fault: a heartbeat lives for six (`membership.TTL_S`), and a
router that reads or sends none for longer loses the fleet, or the fleet the router."""


RELEASE: Final = "release-"
GIVE_UP: Final = "give-up-"
"""The names of tasks that free what engines hold begin so: they go on for a moment at the router's end."""


class Tasks:
    """All tasks of one router."""

    def __init__(self) -> None:
        self._tasks: Final[set[asyncio.Task[Any]]] = set()

    def spawn(self, work: Coroutine[Any, Any, _Result], name: str) -> asyncio.Task[_Result]:
        """Start a task."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def keep(self, work: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
        """Start work that runs until it is cancelled. If it fails, it begins anew: the router would go on without it,
        blind to the fleet, say, and nobody would start it again.
        """
        kept = keep_running(work, f"router: {name}", logger, pauses_s=PAUSES_S)
        return self.spawn(kept, f"{FOREVER}{name}")

    def ending(self) -> set[asyncio.Task[Any]]:
        """The tasks that end by themselves."""
        return {task for task in self._tasks if not task.get_name().startswith(FOREVER)}

    def cancel(self, *but: str) -> None:
        """Cancel all tasks, but those whose names begin so."""
        for task in self._tasks:
            if not task.get_name().startswith(but):
                task.cancel()

    async def end(self, within_s: float) -> None:
        """After `cancel`, wait for the ends of all tasks, so long at most: what they use can be closed then. What was
        begun after `cancel`, or as a task ended (a hold is given up), may end by itself in that time.
        """
        until = asyncio.get_running_loop().time() + within_s
        while self._tasks and (left_s := until - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(tuple(self._tasks), timeout=left_s)
        self.cancel()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("task %s failed", task.get_name(), exc_info=task.exception())
