"""Instances that do not become ready: an image that cannot be pulled, a volume that does not come. Pure.

An agent gives up a start after its own limit, and its instance fails. Where no agent runs yet, nothing but this does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cluster.ids import InstanceId
from goodput.observation import InstanceSeen, Phase
from goodput.startups import StartUps

STARTS: Final = 3.0
"""Start-up times of its pool that an instance has at least."""


class Overdue:
    """Since when instances start, and which of them take too long. A restart in place counts as a start of its own."""

    def __init__(self, startups: StartUps, start_max_s: float) -> None:
        """`start_max_s`: an agent's own limit."""
        self._startups: Final = startups
        self._start_max_s: Final = start_max_s
        self._since_s: Final[dict[InstanceId, float]] = {}
        """By instance that starts: when this was first seen, without a look at which it did not."""
        self._served: Final[set[InstanceId]] = set()
        """Instances that were seen ready: when they were asked for says nothing of a later restart."""

    def saw(self, instances: Mapping[InstanceId, InstanceSeen], now: float) -> None:
        """Fold one look in."""
        self._served.intersection_update(instances)
        self._served.update(each.id for each in instances.values() if each.phase is Phase.READY)
        starts = {each.id for each in instances.values() if each.phase is Phase.STARTING}
        for name in self._since_s.keys() - starts:
            del self._since_s[name]
        for name in starts:
            self._since_s.setdefault(name, now)

    def late_s(self, each: InstanceSeen, now: float) -> float:
        """Seconds for which an instance has started, if that is too long; else 0. One that was asked for long ago may
        have restarted just before this controller began, so each is watched for one start-up time.
        """
        since_s = self._since_s.get(each.id)
        if since_s is None or each.phase is not Phase.STARTING:
            return 0.0
        usual_s = self._startups.horizon_s(each.pool)
        began_s = since_s if each.asked_s is None or each.id in self._served else min(since_s, each.asked_s)
        late = now - since_s > usual_s and now - began_s > max(STARTS * usual_s, self._start_max_s)
        return now - began_s if late else 0.0
