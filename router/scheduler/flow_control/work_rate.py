"""The rates at which instances take waiting work, as they were seen. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from typing import Final

RATE_S: Final = 2.0
"""The time over which the rate is averaged."""

FORGET_S: Final = 30.0
"""A rate that was seen so long ago says nothing any more: that overload may have had another bottleneck, or another
fleet."""


class WorkRate:
    """Milliseconds of work a second.

    The average begins at 0, so that in the first seconds of an overload less is believed than was seen. (An average
    without this bias kept fewer promises in a simulated overload: tests/sim/test_promises.py.)
    """

    __slots__ = ("_at", "_rate", "_seen_at")

    def __init__(self) -> None:
        self._rate = 0.0
        """0: not seen yet."""
        self._at = -1.0
        """When work was taken last while more was waiting, in seconds; -1: nothing was waiting since."""
        self._seen_at = -1.0
        """When the rate was updated last."""

    def begins(self, now: float) -> None:
        """Work waits, and none did before."""
        self._at = -1.0
        if now - self._seen_at > FORGET_S:
            self._rate = 0.0

    def took(self, work_ms: float, now: float, *, waiting: bool) -> None:
        """The instances have taken a prompt. It says something of the rate only while more work is `waiting`."""
        if not waiting:
            self._at = -1.0
            return
        if self._at >= 0:
            gap_s = max(1e-6, now - self._at)
            part = 1.0 - math.exp(-gap_s / RATE_S)
            self._rate += part * (work_ms / gap_s - self._rate)
            self._seen_at = now
        self._at = now

    def of(self, servers: float) -> float:
        """The rate of `servers` instances: as seen, and at least a quarter of what all could do."""
        return max(self._rate, 250.0 * servers) if self._rate else 1000.0 * servers


class WorkRates:
    """The rate, and the number of waiting requests, of each place: instances that the same requests wait for."""

    __slots__ = ("_rates", "_waiting")

    def __init__(self) -> None:
        self._rates: Final[dict[Hashable, WorkRate]] = {}
        self._waiting: Final[Counter[Hashable]] = Counter()

    def entered(self, place: Hashable, now: float) -> None:
        """A request waits for this place."""
        if not self._waiting[place]:
            self._rate(place).begins(now)
        self._waiting[place] += 1

    def left(self, place: Hashable) -> None:
        """A request waits for this place no more."""
        self._waiting[place] -= 1

    def waiting(self, place: Hashable) -> int:
        """The number of requests that wait for this place."""
        return self._waiting[place]

    def took(self, place: Hashable, work_ms: float, now: float) -> None:
        """The place has taken a prompt."""
        self._rate(place).took(work_ms, now, waiting=self._waiting[place] > 0)

    def of(self, place: Hashable, servers: float) -> float:
        """The rate of the place's `servers` instances, in milliseconds of work a second."""
        return self._rate(place).of(servers)

    def _rate(self, place: Hashable) -> WorkRate:
        found = self._rates.get(place)
        if found is None:
            found = self._rates[place] = WorkRate()
        return found
