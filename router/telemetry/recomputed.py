"""How many handed-over tokens each instance computed itself nevertheless: engines' reports as counters. Pure.

An engine's report (`Load.recomputed_tokens`) begins at zero with each start of the engine, and may be too high for a
moment (`cluster.instance.SettledTokens`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from cluster.ids import InstanceId
from cluster.instance import SettledTokens
from router.fleet.columns import InstanceView
from router.fleet.snapshot import FleetSnapshot

LATELY: Final = 60
"""The number of looks that count as recent."""


class RecomputedCounts:
    """The counters of one instance."""

    __slots__ = ("_before", "_epoch", "_last", "_pulled", "_settled", "_totals")

    def __init__(self) -> None:
        self._before = (0, 0)
        """Recomputed and pulled tokens of earlier lives."""
        self._settled: Final = SettledTokens()
        self._pulled = 0
        """`_settled`, `_pulled`: the same of this life."""
        self._epoch = 0
        self._last = 0
        """Tokens pulled in this life, by the last report."""
        self._totals: deque[int] = deque(maxlen=LATELY + 1)

    def hear(self, seen: InstanceView) -> None:
        """Take one report of the instance's engine."""
        load, epoch = seen.load, seen.instance.epoch
        if self._settled.begun and (epoch != self._epoch or load.external_kv_tokens < self._last):
            self._before, self._pulled = (self.recomputed, self.pulled), 0
            self._settled.restart()
        self._epoch, self._last = epoch, load.external_kv_tokens
        if self._settled.hear(load.recomputed_tokens):
            self._pulled = load.external_kv_tokens
            self._totals.append(self.recomputed)

    @property
    def known(self) -> bool:
        """Whether there are figures."""
        return bool(self._totals)

    @property
    def recomputed(self) -> int:
        """Prompt tokens that were to be pulled and were computed instead."""
        return self._before[0] + self._settled.tokens

    @property
    def pulled(self) -> int:
        """Prompt tokens whose KV came from another instance."""
        return self._before[1] + self._pulled

    @property
    def lately(self) -> int:
        """The recomputed tokens that were counted within the last `LATELY` looks."""
        return self._totals[-1] - self._totals[0] if self._totals else 0


class Recomputed:
    """The counters of all present instances."""

    def __init__(self) -> None:
        self._counted: dict[InstanceId, RecomputedCounts] = {}

    def look(self, fleet: FleetSnapshot) -> None:
        """Take every instance's report, once a second."""
        for seen in fleet:
            if seen.load.kv_tokens or seen.load.prompt_tokens:  # else its engine has not reported yet
                self._counted.setdefault(seen.id, RecomputedCounts()).hear(seen)
        for gone in self._counted.keys() - fleet.by_id.keys():
            del self._counted[gone]

    def of(self, instance: InstanceId) -> RecomputedCounts | None:
        """The counters of one instance; None: it has no figures yet."""
        found = self._counted.get(instance)
        return found if found is not None and found.known else None

    def __iter__(self) -> Iterator[tuple[InstanceId, RecomputedCounts]]:
        return ((name, each) for name, each in self._counted.items() if each.known)
