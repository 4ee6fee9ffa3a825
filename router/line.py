"""The waiting line for places in a full fleet, and the news that an instance is lost. A shell: it holds futures."""

from __future__ import annotations

import asyncio

from cluster.ids import InstanceId


class Line:
    """First come, first served. Who is called and finds no place passes the call on and keeps its position."""

    def __init__(self) -> None:
        self._waiting: dict[object, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, who: object, timeout_s: float | None) -> bool:
        """Until called; False when it took longer than `timeout_s`. `who` keeps its place in line between two waits."""
        call: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[who] = call
        try:
            async with asyncio.timeout(timeout_s):
                await call
        except TimeoutError:
            return False
        return True

    def leave(self, who: object) -> None:
        """It found its place, or gave up."""
        self._waiting.pop(who, None)

    def call_first(self) -> None:
        """One place became free."""
        self._call_after(None)

    def call_next(self, after: object) -> None:
        """`after` was called and the place was not for it: the next in line may want it."""
        self._call_after(after)

    def call_all(self) -> None:
        """The fleet changed: everybody may ask again."""
        for call in self._waiting.values():
            if not call.done():
                call.set_result(None)

    def _call_after(self, after: object | None) -> None:
        passed = after is None
        for who, call in self._waiting.items():
            if passed and not call.done():
                call.set_result(None)
                return
            passed = passed or who is after


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
