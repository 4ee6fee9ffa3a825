"""What Kubernetes does with a number of replicas: starts pods, and ends the youngest first. Pure.

A Deployment that is scaled down deletes pods that are not ready before those that are, then the youngest (controller
utilities, `ActivePodsWithRanks`); ours drain before they end, as rivals' pods do with a preStop hook.
"""

from __future__ import annotations

from typing import Final

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput import actions as do
from goodput.budget import Budget, Usage
from goodput.observation import InstanceSeen, Phase
from goodput.pools import ScalingPool
from sim.scaling import Sight


class Pods:
    """Sets the number of replicas of each role."""

    def __init__(self, pools: dict[Role, ScalingPool], budget: Budget, drain_s: float) -> None:
        self._pools: Final = pools
        self._budget: Final = budget
        self._drain_s: Final = drain_s
        self._names = 0

    @staticmethod
    def of(sight: Sight, role: Role) -> list[InstanceSeen]:
        """Pods of a role that are not draining, leaving or failed."""
        return [each for each in sight.instances() if each.role is role and not each.leaving and _lives(each)]

    def set(self, sight: Sight, role: Role, wanted: int, because: str) -> None:
        """Start or drain pods until there are as many as wanted, within the pool's bounds and the budget."""
        pool = self._pools[role]
        wanted = max(1, pool.min, min(pool.max, wanted))
        there = self.of(sight, role)
        for _ in range(wanted - len(there)):
            if self._lacks(sight, pool):
                break
            self._names += 1
            name = InstanceId(f"{pool.name}-{self._names:04d}")
            sight.actuator.start(do.Start(instance=name, pool=pool.name, because=because))
        for each in sorted(there, key=_rank)[: max(0, len(there) - wanted)]:
            sight.actuator.drain(do.Drain(instance=each.id, deadline_s=self._drain_s, because=because))

    def _lacks(self, sight: Sight, pool: ScalingPool) -> str:
        usage = Usage()
        for each in sight.instances():
            usage.add(each.id, self._pools[each.role].footprint)
        return usage.lacks(self._budget, pool.footprint)


def _lives(each: InstanceSeen) -> bool:
    return each.phase not in (Phase.FAILED, Phase.DRAINING)


def _rank(each: InstanceSeen) -> tuple[bool, float]:
    return each.phase is Phase.READY, -(each.asked_s if each.asked_s is not None else -1.0)
