"""A controller for models whose costs are unknown: it keeps pools at the sizes of the cluster file. Pure.

An instance that failed is stopped, and another one is started in its place. Instances beyond the file's size are left
alone: an operator has started them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from goodput import actions as do
from goodput.decision import Act, Decision, Effect, Event, Observed, Pause, Told, What
from goodput.observation import Observation, Phase

EVERY_S: Final = 2.0
AGAIN_S: Final = 30.0
"""Least seconds between two starts in one pool, for an engine that ends as soon as it has started."""


class FixedPools:
    """Keeps the sizes of one model's pools."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """`sizes`: instances by pool."""
        self._sizes: Final = sizes
        self._started_s: Final[dict[str, float]] = {}
        self._paused = False
        self._due_s: float | None = None
        self._names = 0

    def next_wakeup(self) -> float | None:
        """Time of the next look; None: before the first look."""
        return self._due_s

    def handle(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Fold one event in."""
        if isinstance(event, Pause):
            self._paused = event.paused
        if not isinstance(event, Observed):
            return ()
        self._due_s = now + EVERY_S
        if event.seen.instances is None or not event.seen.leads or self._paused:
            return ()
        actions = (*self._stops(event.seen), *self._starts(event.seen, now))
        if not actions:
            return ()
        because = "; ".join(action.because for action in actions)
        what = What.UP if isinstance(actions[-1], do.Start) else What.CANCEL
        told = Decision(at_s=now, what=what, because=because, actions=actions)
        return (Told(told), *map(Act, actions))

    @staticmethod
    def _stops(seen: Observation) -> list[do.Action]:
        return [
            do.Stop(instance=each.id, because=f"{each.id} has failed: {each.because or 'it does not say why'}")
            for each in seen.instances or ()
            if each.phase is Phase.FAILED
        ]

    def _starts(self, seen: Observation, now: float) -> list[do.Action]:
        found: list[do.Action] = []
        for pool, count in self._sizes.items():
            there = [each for each in seen.instances or () if each.pool == pool and each.phase is not Phase.FAILED]
            staying = [each for each in there if not each.leaving]
            if len(staying) >= count or now - self._started_s.get(pool, -AGAIN_S) < AGAIN_S:
                continue
            self._started_s[pool] = now
            because = f"{pool}: {len(staying)} of {count} are there"
            for _ in range(count - len(staying)):
                self._names += 1
                name = do.new_name(pool, now, self._names)
                found.append(do.Start(instance=name, pool=pool, because=because))
        return found
