"""Carries out work that comes in steps (`cluster.scan.Steps`) beside everything else that a router does. A shell.

One piece of work at a time, in order of arrival: others run between its steps, and however many large bodies come at
once, nobody waits for more than one step of one of them.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final, TypeVar

from cluster.errors import no_instance
from cluster.scan import Steps

STEP_S: Final = 0.004
"""Steps that take less together are done without a pause: letting others run costs some ten microseconds."""

WAITING_MAX: Final = 128
"""Bodies that wait to be read: 4 GiB at the usual limit. More are refused."""

_Found = TypeVar("_Found")


class Slices:
    """Of one router."""

    def __init__(self) -> None:
        self._turn: Final = asyncio.Lock()
        self._waiting = 0

    async def through(self, steps: Steps[_Found]) -> _Found:
        """Do all of it, and give back what it found.

        Raises:
            ApiError: 503 where too much waits already; and whatever the work raises.
        """
        if self._waiting >= WAITING_MAX:
            raise no_instance(f"{WAITING_MAX} large bodies wait to be read")
        self._waiting += 1
        try:
            async with self._turn:
                return await _through(steps)
        finally:
            self._waiting -= 1
            steps.close()


async def _through(steps: Steps[_Found]) -> _Found:
    due = time.monotonic() + STEP_S
    while True:
        try:
            next(steps)
        except StopIteration as done:
            found: _Found = done.value
            return found
        if time.monotonic() >= due:
            await asyncio.sleep(0)
            due = time.monotonic() + STEP_S
