"""Callbacks for "there may be a place" and "the instance is lost". A shell: the scheduler names the requests to call.

Callers may be inside a state change, so callbacks run on the next loop turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.ids import InstanceId

Heard = Callable[[], None]


class Waiters:
    """One callback for each waiting request. A call that comes before the request waits is kept for it."""

    def __init__(self) -> None:
        self._waiting: dict[object, Heard] = {}
        self._called: set[object] = set()

    def wait(self, who: object, heard: Heard) -> None:
        """`heard` is called once, when the request is called."""
        if who in self._called:
            self._called.discard(who)
            asyncio.get_running_loop().call_soon(heard)
        else:
            self._waiting[who] = heard

    def call(self, whom: tuple[object, ...]) -> None:
        """These requests are to ask again."""
        for who in whom:
            heard = self._waiting.pop(who, None)
            if heard is None:
                self._called.add(who)
            else:
                asyncio.get_running_loop().call_soon(heard)

    def forget(self, who: object) -> None:
        """The request will not wait again."""
        self._waiting.pop(who, None)
        self._called.discard(who)


class Losses:
    """The requests with legs on each instance, which are called when a leg can no longer end well: the instance is
    gone, down, or restarted.
    """

    def __init__(self) -> None:
        self._watching: dict[InstanceId, dict[object, Heard]] = {}

    def watch(self, instance: InstanceId, who: object, heard: Heard) -> None:
        """`heard` is called once if the instance is lost."""
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
        """Call all requests that watch this instance."""
        loop = asyncio.get_running_loop()
        for heard in self._watching.pop(instance, {}).values():
            loop.call_soon(heard)
