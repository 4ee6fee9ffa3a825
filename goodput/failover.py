"""Tells whether the other routers have the load of a missing router by now: then the missing one serves nothing. Pure.

When a router dies, its clients come to the others within seconds. When it lives and only has lost the registry, its
clients stay. So the arrivals at the others tell which of the two it is, if the missing router had enough arrivals.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Final

WINDOW_S: Final = 60.0
"""Arrivals of so many seconds before the loss are compared with those of so many seconds until now."""
SETTLED_S: Final = 10.0
"""Seconds that clients take to come to another router, at most."""
SURE: Final = 4.0
"""Standard deviations of a steady Poisson load by which arrivals must have risen: less than one error in 30,000
windows."""
FEW: Final = 4
"""Arrivals that are added before the deviation is taken: counts of a few vary by more than their root."""
KEPT_S: Final = 1100.0
"""Arrivals are kept for so many seconds: a router is missing for 15 minutes at most."""


class RecentArrivals:
    """Arrivals of the last minutes, by router."""

    def __init__(self) -> None:
        self._looks: Final[deque[tuple[float, float, dict[str, int]]]] = deque()
        """From when until when, and what came then."""

    def add(self, came: Mapping[str, int], since_s: float, now: float) -> None:
        """Note the arrivals by router between the last complete look, at `since_s`, and this one, at `now`."""
        self._looks.append((since_s, now, dict(came)))
        while self._looks[0][1] < now - KEPT_S:
            self._looks.popleft()

    def taken_over(self, missing: Mapping[str, float], now: float) -> bool:
        """Whether arrivals at the other routers have risen by what the missing ones had. Also False as long as this
        cannot be told: the loss is too recent, or no look goes back far enough before it.

        Args:
            missing: the missing routers, one at least, and when each was last heard.
            now: seconds of the controller's clock.
        """
        first_s, last_s = min(missing.values()), max(missing.values())
        if now - WINDOW_S < last_s + SETTLED_S or not self._looks or self._looks[0][0] > first_s - WINDOW_S:
            return False
        before = self._between(first_s - WINDOW_S, first_s)
        theirs = sum(before.get(name, 0) for name in missing)
        others = sum(before.values()) - theirs
        rise = sum(self._between(now - WINDOW_S, now).values()) - others
        return rise > 0 and rise >= max(theirs / 2, SURE * math.sqrt(2 * (others + FEW)))

    def _between(self, since_s: float, until_s: float) -> dict[str, float]:
        """The arrivals of that time, by router. Those of a look that lies in it for a part count for that part: after a
        time without complete looks, one look has the arrivals of all of it.
        """
        found: dict[str, float] = {}
        for from_s, to_s, came in self._looks:
            within_s = min(to_s, until_s) - max(from_s, since_s)
            if within_s > 0:
                for name, count in came.items():
                    found[name] = found.get(name, 0.0) + count * within_s / (to_s - from_s)
        return found
