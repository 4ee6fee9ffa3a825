"""How long an instance takes to start, learned from those that did. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from cluster.ids import InstanceId
from goodput.observation import InstanceSeen
from goodput.pools import ScalingPool

KEPT: Final = 20
"""Newest starts of a pool that count."""
QUANTILE: Final = 0.9


class StartUps:
    """Observed start-up times, by pool."""

    def __init__(self, pools: Mapping[str, ScalingPool]) -> None:
        self._pools: Final = pools
        self._took_s: Final[dict[str, deque[float]]] = {}
        self._known: Final[set[InstanceId]] = set()
        """Instances whose start is counted: each starts once, and may restart in place."""

    def saw(self, instances: Iterable[InstanceSeen]) -> None:
        """Count the starts that have ended."""
        seen: set[InstanceId] = set()
        for each in instances:
            seen.add(each.id)
            if each.asked_s is None or each.ready_s is None or each.id in self._known:
                continue
            self._known.add(each.id)
            took_s = each.ready_s - each.asked_s
            if took_s > 0:
                self._took_s.setdefault(each.pool, deque(maxlen=KEPT)).append(took_s)
        self._known.intersection_update(seen)

    def horizon_s(self, pool: str) -> float:
        """The 90th percentile of a pool's start-up times, in seconds; without any, the pool's `startup_s`."""
        took = sorted(self._took_s.get(pool, ()))
        if not took:
            return self._pools[pool].startup_s
        return took[min(len(took) - 1, math.ceil(QUANTILE * len(took)) - 1)]

    def longest_s(self) -> float:
        """The largest `horizon_s` of all pools."""
        return max((self.horizon_s(pool) for pool in self._pools), default=0.0)
