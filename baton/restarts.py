"""How often a process of ours that died is started again before all end."""

from __future__ import annotations

from collections import deque
from typing import Final

RESTARTS_MAX: Final = 5
WITHIN_S: Final = 600.0
"""More restarts than this within this time: starting again does not help, and hides what is wrong."""


class Restarts:
    """Of one program, or of the processes of one server together."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=RESTARTS_MAX)

    def may(self, now: float) -> bool:
        """Whether what died at this time, in seconds, is started once more; this counts as that restart."""
        if len(self._latest) == RESTARTS_MAX and now - self._latest[0] < WITHIN_S:
            return False
        self._latest.append(now)
        return True
