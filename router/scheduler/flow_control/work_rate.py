"""The rate at which the fleet takes waiting work, as it was seen. Pure."""

from __future__ import annotations

import math
from typing import Final

RATE_S: Final = 2.0
"""The time over which the rate is averaged."""


class WorkRate:
    """Milliseconds of work a second."""

    __slots__ = ("_at", "_rate")

    def __init__(self) -> None:
        self._rate = 0.0
        """0: not seen yet."""
        self._at = -1.0
        """When work was taken last while more was waiting, in seconds; -1: nothing was waiting since."""

    def took(self, work_ms: float, now: float, *, waiting: bool) -> None:
        """The fleet has taken a prompt. It says something of the rate only while more work is `waiting`."""
        if not waiting:
            self._at = -1.0
            return
        if self._at >= 0:
            gap_s = max(1e-6, now - self._at)
            part = 1.0 - math.exp(-gap_s / RATE_S)
            self._rate += part * (work_ms / gap_s - self._rate)
        self._at = now

    def of(self, servers: float) -> float:
        """The rate of `servers` instances: as seen, and at least a quarter of what all could do."""
        return max(self._rate, 250.0 * servers) if self._rate else 1000.0 * servers
