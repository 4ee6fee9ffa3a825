"""Callbacks for "there may be a place" and "the instance is lost". A shell: the scheduler says which to call.

Nobody is told at once, but as soon as the loop comes to it: who tells is often in the middle of something.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.ids import InstanceId

Heard = Callable[[], None]


class Waiters:
    """One callback for each who waits. A call that comes before he does is kept for him."""

    def __init__(self) -> None:
        self._waiting: dict[object, Heard] = {}
        self._called: set[object] = set()

    def wait(self, who: object, heard: Heard) -> None:
        """`heard` is called once, when he is."""
        if who in self._called:
            self._called.discard(who)
            asyncio.get_running_loop().call_soon(heard)
        else:
            self._waiting[who] = heard

    def call(self, whom: tuple[object, ...]) -> None:
        """These are to ask again."""
        for who in whom:
            heard = self._waiting.pop(who, None)
            if heard is None:
                self._called.add(who)
            else:
                asyncio.get_running_loop().call_soon(heard)

    def forget(self, who: object) -> None:
        """It will not wait again."""
        self._waiting.pop(who, None)
        self._called.discard(who)


class Losses:
    """Who has a leg on which instance, and is to hear when it can no longer end well: gone, down, or started anew."""

    def __init__(self) -> None:
        self._watching: dict[InstanceId, dict[object, Heard]] = {}

    def watch(self, instance: InstanceId, who: object, heard: Heard) -> None:
        """`heard` is called when it is lost, once."""
        watching = self._watching.get(instance)
        if watching is None:
            watching = self._watching[instance] = {}
        watching[who] = heard

    def unwatch(self, instance: InstanceId, who: object) -> None:
        """The leg has ended."""
        watching = self._watching.get(instance)
        if watching is not None:
            watching.pop(who, None)

    def announce(self, instance: InstanceId) -> None:
        """Everybody who watches it hears of it."""
        loop = asyncio.get_running_loop()
        for heard in self._watching.pop(instance, {}).values():
            loop.call_soon(heard)
