"""The futures behind the waiting line, and the news that an instance is lost. A shell; who is called is `waiting`'s."""

from __future__ import annotations

import asyncio

from cluster.ids import InstanceId


class Line:
    """One future for each who waits. A call that comes before its future is kept for it."""

    def __init__(self) -> None:
        self._waiting: dict[object, asyncio.Future[None]] = {}

    async def wait(self, who: object, timeout_s: float | None) -> bool:
        """Until called; False when it took longer than `timeout_s`."""
        call = self._of(who)
        try:
            async with asyncio.timeout(timeout_s):
                await call
        except TimeoutError:
            return False
        finally:
            self._waiting.pop(who, None)
        return True

    def call(self, whom: tuple[object, ...]) -> None:
        """These are to ask again."""
        for who in whom:
            future = self._of(who)
            if not future.done():
                future.set_result(None)

    def forget(self, who: object) -> None:
        """It will not wait again."""
        self._waiting.pop(who, None)

    def _of(self, who: object) -> asyncio.Future[None]:
        if who not in self._waiting:
            self._waiting[who] = asyncio.get_running_loop().create_future()
        return self._waiting[who]


class Losses:
    """One future for each instance, done when legs on it can no longer end well: gone, down, or started anew."""

    def __init__(self) -> None:
        self._futures: dict[InstanceId, asyncio.Future[None]] = {}

    def of(self, instance: InstanceId) -> asyncio.Future[None]:
        """The future to wait on beside a leg."""
        if instance not in self._futures:
            self._futures[instance] = asyncio.get_running_loop().create_future()
        return self._futures[instance]

    def announce(self, instance: InstanceId) -> None:
        """Everybody who waits on it hears now; later legs wait on a new one."""
        future = self._futures.pop(instance, None)
        if future is not None and not future.done():
            future.set_result(None)
