"""Runs work that comes in steps (`cluster.scan.Steps`) beside everything else that a router does. A shell.

One piece of work runs at a time, and other tasks run between its steps. So no other request waits for more than one
step, however many large bodies arrive at once. Clients take turns: one client's many bodies delay each other, not those
of other clients. Each body counts as one that is being read (`router.http.uploads`) until its work is done.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, TypeVar

from cluster.errors import no_instance
from cluster.scan import Steps
from router.http.uploads import Uploads, share_of

STEP_S: Final = 0.004
"""Steps that together take fewer seconds run without a pause: a pause costs some ten microseconds."""

WAITING_MAX: Final = 128
"""The number of bodies that may wait to be read, whatever their size; one client has at most a share of them. More are
refused."""

_Found = TypeVar("_Found")


class ClientGone(Exception):
    """The work's client has left before it was done."""


class Slices:
    """The work in steps of one router, one piece at a time."""

    def __init__(self, uploads: Uploads | None = None) -> None:
        """`uploads`: counts the bodies; None: they are not counted."""
        self._uploads: Final = uploads
        self._busy = False
        self._lines: Final[dict[str | None, deque[asyncio.Future[None]]]] = {}
        """Waiting work by client; the client whose turn is next comes first."""
        self._of: Final[Counter[str | None]] = Counter()
        """The number of bodies by client, the one that is being read included."""

    async def through(
        self,
        steps: Steps[_Found],
        *,
        size: int = 0,
        client: str | None = None,
        gone: Callable[[], bool] = lambda: False,
    ) -> _Found:
        """Run all steps, and return the result.

        Args:
            steps: the work.
            size: the number of the body's bytes.
            client: the upload's client (`Uploads.add`).
            gone: whether the client has left: then the work stops.

        Raises:
            ApiError: 503 if too much waits already, of all or of this client; and any error of the work.
            ClientGone: `gone` returned true.
        """
        self._let_in(client)
        kept = None if self._uploads is None else self._uploads.keep(size, client)
        try:
            await self._turn(client)
            try:
                return await _through(steps, gone)
            finally:
                self._next()
        finally:
            self._of[client] -= 1
            if not self._of[client]:
                del self._of[client]
            if self._uploads is not None and kept is not None:
                self._uploads.drop(kept)
            steps.close()

    def _let_in(self, client: str | None) -> None:
        if self._of.total() >= WAITING_MAX:
            raise no_instance(f"{WAITING_MAX} large bodies wait to be read")
        most = share_of(WAITING_MAX)
        if client is not None and self._of[client] >= most:
            raise no_instance(f"{most} large bodies of this client wait to be read")
        self._of[client] += 1

    async def _turn(self, client: str | None) -> None:
        """Wait for the client's turn."""
        if not self._busy:
            self._busy = True
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(client, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._next()
            raise

    def _next(self) -> None:
        """The turn is over: the next client's oldest work is next."""
        while self._lines:
            client, line = next(iter(self._lines.items()))
            del self._lines[client]
            waits = line.popleft()
            if line:
                self._lines[client] = line
            if not waits.done():
                waits.set_result(None)
                return
        self._busy = False


async def _through(steps: Steps[_Found], gone: Callable[[], bool]) -> _Found:
    due = time.monotonic() + STEP_S
    if gone():
        raise ClientGone
    while True:
        try:
            next(steps)
        except StopIteration as done:
            found: _Found = done.value
            return found
        if time.monotonic() >= due:
            await asyncio.sleep(0)
            if gone():
                raise ClientGone
            due = time.monotonic() + STEP_S
