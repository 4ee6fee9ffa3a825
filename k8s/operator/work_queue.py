"""Which cluster is planned next, and when. A shell: it waits on the event loop's clock."""

from __future__ import annotations

import asyncio
from typing import Final

SETTLE_S: Final = 0.05
"""Changes within so many seconds are planned together."""


class WorkQueue:
    """Clusters that are due, by namespace and name: each once, at the earliest time that was asked for."""

    def __init__(self) -> None:
        self._due: Final[dict[tuple[str, str], float]] = {}
        self._taken: Final[set[tuple[str, str]]] = set()
        """Those that are being planned: `next` does not give them again before `done`."""
        self._wake: Final = asyncio.Event()

    def add(self, namespace: str, name: str, after_s: float = SETTLE_S) -> None:
        """Let a cluster be due in `after_s` seconds, or earlier if that was asked for already."""
        at = asyncio.get_running_loop().time() + after_s
        key = (namespace, name)
        self._due[key] = min(at, self._due.get(key, at))
        self._wake.set()

    async def next(self) -> tuple[str, str]:
        """Wait until a cluster is due that is not planned now, and take it off the queue until `done`. If added again,
        it comes after the others.
        """
        while True:
            now = asyncio.get_running_loop().time()
            free = {key: at for key, at in self._due.items() if key not in self._taken}
            key = next((key for key, at in free.items() if at <= now), None)
            if key is not None:
                del self._due[key]
                self._taken.add(key)
                return key
            self._wake.clear()
            try:
                async with asyncio.timeout_at(min(free.values(), default=None)):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def done(self, key: tuple[str, str]) -> None:
        """A cluster that `next` has given was planned: it may be given again."""
        self._taken.discard(key)
        self._wake.set()
