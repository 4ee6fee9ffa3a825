"""Carries out actions on Kubernetes, through a `KubernetesCluster`: what an operator sees and may do. A shell.

The operator brings pools to their wanted sizes and rolls them; a controller decides the sizes, and which instance
leaves. So every action here writes two facts, in an order that the operator undoes after a crash between the two:

- `start`: the size first, then the workload of this very name. Without the workload the operator makes one of its own;
  where the API server has refused the workload (a quota), the size is taken back.
- `drain`: the mark on the workload first, then the size. Without the size the operator takes the mark back.

The operator makes no plan between the two: it would see one fact without the other, and undo it.

Nothing is remembered here: sizes stand in a child of the cluster (k8s/plan), marks on workloads. The user's resource
is never written. `KubernetesCluster` refuses to resize a pool on which a `BatonPool` decides, and to shrink one during
a rollout.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput.actions import Drain, Flip, Start, Stop
from goodput.actuate.existing import Existing, ExistingFleet, InstanceLife


class KubernetesCluster(Protocol):
    """One cluster, as its operator has it. A refusal is a text, as `goodput.actuate.protocol` says."""

    def alone(self) -> AbstractAsyncContextManager[None]:
        """A lock: while it is held, the operator carries out no plan of this cluster. Not reentrant."""

    async def look(self) -> ExistingFleet:
        """All instances that have a workload.

        Raises:
            Unobservable: the operator does not act on this cluster now.
        """

    async def may_resize(self, pool: str, by: int) -> str:
        """Why `resize` would refuse; empty: it would not."""

    async def resize(self, pool: str, by: int) -> str:
        """Change the wanted size of a pool by `by` instances."""

    async def take_back(self, pool: str) -> None:
        """Give the pool the size that it had before the last `resize`."""

    async def make(self, name: InstanceId, pool: str, because: str) -> str:
        """Make the workload of an instance.

        Raises:
            Unobservable: whether it was made is unknown.
        """

    async def mark(self, name: InstanceId, because: str) -> str:
        """Mark an instance as leaving and tell its agent: the operator deletes it once it is drained."""

    async def flip(self, name: InstanceId, role: Role) -> str:
        """Tell its agent to take another role. The pod is not restarted."""

    async def remove(self, name: InstanceId, because: str) -> str:
        """Delete its workload now."""


class KubernetesActuator:
    """See `protocol.Actuator`."""

    def __init__(self, world: KubernetesCluster) -> None:
        self._world = world

    async def observe(self) -> ExistingFleet:
        return await self._world.look()

    async def start(self, action: Start) -> str:
        async with self._world.alone():
            if await self._find(action.instance) is not None:
                return ""
            because = await self._world.resize(action.pool, +1)
            if because:
                return because
            because = await self._world.make(action.instance, action.pool, action.because)
            if because:
                await self._world.take_back(action.pool)
            return because

    async def flip(self, action: Flip) -> str:
        async with self._world.alone():
            there = await self._find(action.instance)
            if there is None:
                return f"{action.instance} is not there"
            return await self._world.flip(action.instance, action.role)

    async def drain(self, action: Drain) -> str:
        async with self._world.alone():
            there = await self._find(action.instance)
            if there is None or there.life is InstanceLife.LEAVING:
                return ""
            because = await self._world.may_resize(there.pool, -1)  # before the mark: a refusal changes nothing
            because = because or await self._world.mark(action.instance, action.because)
            return because or await self._world.resize(there.pool, -1)

    async def stop(self, action: Stop) -> str:
        async with self._world.alone():
            return await self._stopped(action, await self._find(action.instance))

    async def _stopped(self, action: Stop, there: Existing | None) -> str:
        if there is None:
            return ""
        if there.life is not InstanceLife.LEAVING:
            because = await self._world.resize(there.pool, -1)
            if because:
                return because
        return await self._world.remove(action.instance, action.because)

    async def _find(self, name: InstanceId) -> Existing | None:
        found = await self._world.look()
        return next((each for each in found.instances if each.instance == name), None)
