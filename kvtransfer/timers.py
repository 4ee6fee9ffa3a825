"""Timers: many deadlines behind one wakeup, and a bounded memory of keys with an end time each."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Alarms(Generic[K]):
    """At most one time for each key. Equal times ring in the order in which they were set."""

    __slots__ = ("_heap", "_order", "_when")

    def __init__(self) -> None:
        self._when: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._when)

    def __contains__(self, key: K) -> bool:
        return key in self._when

    def set(self, key: K, when: float) -> None:
        """Ring for `key` at `when` (seconds) and not before; infinite: never."""
        if math.isinf(when):
            self.drop(key)
        elif self._when.get(key) != when:
            self._when[key] = when
            heapq.heappush(self._heap, (when, next(self._order), key))
            if len(self._heap) > 64 + 4 * len(self._when):  # replaced times pile up; keep the heap within a factor
                self._heap = [item for item in self._heap if self._when.get(item[2]) == item[0]]
                heapq.heapify(self._heap)

    def drop(self, key: K) -> None:
        """Never ring for `key`."""
        self._when.pop(key, None)

    def next(self) -> float | None:
        """The earliest time set; None: no time is set."""
        while self._heap and self._when.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float) -> K | None:
        """One key whose time has come, whose timer is then removed; None: no time has come."""
        when = self.next()
        if when is None or when > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._when[key]
        return key


class TimedKeys(Generic[K]):
    """Keys that are known until a time of their own, at most `size` of them."""

    __slots__ = ("_size", "_until")

    def __init__(self, size: int) -> None:
        self._size = size
        self._until: Alarms[K] = Alarms()

    def __len__(self) -> int:
        return len(self._until)

    def knows(self, key: K, now: float) -> bool:
        """Whether `key` was remembered and its time has not come."""
        self._prune(now)
        return key in self._until

    def room(self, now: float) -> int:
        """How many more keys can be remembered."""
        self._prune(now)
        return self._size - len(self._until)

    def remember(self, key: K, until: float, now: float) -> bool:
        """Remember `key` until `until`. Returns False and changes nothing if the memory is full: the caller must then
        refuse.
        """
        if key not in self._until and self.room(now) < 1:
            return False
        self._until.set(key, until)
        return True

    def _prune(self, now: float) -> None:
        while self._until.pop(now) is not None:
            pass
