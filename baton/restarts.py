"""Limits how often a dead process of Baton is started again before all processes end."""

from __future__ import annotations

from collections import deque
from typing import Final

RESTARTS_MAX: Final = 5
WITHIN_S: Final = 600.0
"""More restarts than this within this time: another start does not help, and hides the fault."""


class Restarts:
    """The restarts of one program, or of all processes of one server."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=RESTARTS_MAX)

    def may(self, now: float) -> bool:
        """Whether a process that died at this time, in seconds, may be started once more; a yes counts as that
        restart.
        """
        if len(self._latest) == RESTARTS_MAX and now - self._latest[0] < WITHIN_S:
            return False
        self._latest.append(now)
        return True
