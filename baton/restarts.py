"""Limits how often a dead process of Baton is started again before all processes end."""

from __future__ import annotations

from collections import deque
from typing import Final

RESTARTS_MAX: Final = 5
WITHIN_S: Final = 600.0
"""More restarts than `RESTARTS_MAX` within this time: another start would not help, and would hide the fault."""


class Restarts:
    """The restarts of one program, or of all processes of one server."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=RESTARTS_MAX)

    def may(self, now: float) -> bool:
        """Whether a process that died at `now` (monotonic seconds) may be started again; True counts as a restart."""
        if len(self._latest) == RESTARTS_MAX and now - self._latest[0] < WITHIN_S:
            return False
        self._latest.append(now)
        return True
