"""All mock instances of one process: opened together, closed in order. A shell.

`async with MockFleet(...) as fleet` opens the ports and waits until every engine is ready. At its end it accepts no
more connections, lets answers end for up to `drain_s` seconds, and closes all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

from cluster.ids import InstanceId, rank_of
from engine.mock.instance import MockInstance
from engine.mock.peers import HttpPeers
from engine.mock.settings import MockSettings

LOOK_EVERY_S = 0.05
"""How often a drain looks whether the last answer is out."""


class MockFleet:
    """Mocks on one host, on ports from `port` on; 0 = free ones. `UsageError`: a port is taken."""

    def __init__(
        self, settings: Sequence[MockSettings], *, host: str = "127.0.0.1", port: int = 0, drain_s: float = 0.0
    ) -> None:
        self._settings = settings
        self._host = host
        self._port = port
        self._drain_s = drain_s
        self._peers = HttpPeers()
        self._tasks: set[asyncio.Task[None]] = set()
        self._at_once = asyncio.Event()
        self.instances: dict[str, MockInstance] = {}

    async def __aenter__(self) -> Self:
        try:
            number = 0
            for each in self._settings:
                behind = (rank_of(InstanceId(each.name)) or 0) > 0  # such a rank's own port serves pulls alone
                port = 0 if behind else self._port and self._port + number
                number += not behind
                self.instances[each.name] = MockInstance(
                    each, self._host, port, self._peers, self._spawn, self.instances
                )
            for instance in self.instances.values():
                instance.begin()
            for instance in self.instances.values():
                await instance.ready.wait()
        except BaseException:  # a cancellation too: no port stays open
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._drain()
        finally:
            await self._close()

    def hurry(self) -> None:
        """Make the drain end now: wait for no more answers."""
        self._at_once.set()

    async def _drain(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._drain_s
        for instance in self.instances.values():
            instance.listener.shut()
        while any(instance.listener.answering for instance in self.instances.values()):
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0 or self._at_once.is_set():
                return
            for instance in self.instances.values():
                instance.listener.close_idle()
            await asyncio.sleep(min(LOOK_EVERY_S, left_s))

    async def _close(self) -> None:
        for instance in self.instances.values():
            instance.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._peers.close()
        await asyncio.sleep(0)  # connections that were dropped learn of it

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that this fleet ends. Its failure is a bug, and is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler({"message": "a mock's task failed", "exception": error})
