"""Starts that fail, and how long their pool is left alone after each. Pure.

What failed once (a wrong flag, an image without the model, a broken node) fails again: without a pause the controller
would start instances of that pool for ever, and never try another pool of the role.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cluster.ids import InstanceId
from goodput.observation import InstanceSeen, Phase


class FailedStarts:
    """Pauses of pools whose instances fail before they are ready: each is twice the one before."""

    def __init__(self, first_s: float, most_s: float) -> None:
        """`first_s`: the first pause of a pool; `most_s`: the longest."""
        self._first_s: Final = first_s
        self._most_s: Final = most_s
        self._pauses: Final[dict[str, tuple[float, float]]] = {}
        """By pool: its last pause, and its end."""
        self._served: Final[set[InstanceId]] = set()
        """Instances that were seen ready: if one of them fails, its start had not."""
        self._failed: Final[set[InstanceId]] = set()
        """Failed instances that have been seen before."""

    def saw(self, instances: Mapping[InstanceId, InstanceSeen], now: float) -> list[tuple[InstanceSeen, float]]:
        """Fold one look in. Returns the instances whose start has failed since the last look, with their pool's pause.
        Starts that fail during a pause began before it: they do not prolong it.
        """
        for known in (self._served, self._failed):
            known.intersection_update(instances)
        found = list[tuple[InstanceSeen, float]]()
        for each in instances.values():
            if each.phase is Phase.READY and each.id not in self._served:
                self._served.add(each.id)
                self._pauses.pop(each.pool, None)
            elif each.phase is Phase.FAILED and each.id not in self._failed:
                self._failed.add(each.id)
                pause_s, until_s = self._pauses.get(each.pool, (self._first_s / 2, now))
                if each.id not in self._served and each.ready_s is None and now >= until_s:
                    pause_s = min(self._most_s, 2 * pause_s)
                    self._pauses[each.pool] = pause_s, now + pause_s
                    found.append((each, pause_s))
        return found
