"""Carries actions out on a Ray cluster (`ray_tables`), over a driver's connection to it (`ray_connection`). A shell.

An instance is a placement group named ``baton:CLUSTER:POOL:INSTANCE`` and in it a detached actor (`ray_actor`), which
never restarts: Baton replaces an instance that ends. Both exist from `start` on; Ray runs the actor once it has placed
the group. So everything there is to know stands in Ray's own tables, and another driver finds it there:

    group pending                     the instance waits for a GPU; Ray says whether they are busy or do not exist
    group placed, its actor alive     it runs, or leaves if the actor was told to drain
    group placed, no actor            the actor died, or a `start` was cut off: the group is removed at the next look

Ray places, counts GPUs and brings nodes. It carries no request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from cluster.errors import BatonError
from cluster.ids import InstanceId
from cluster.registry.membership import Heartbeat
from goodput.actions import Drain, Flip, Start, Stop
from goodput.actuate.agents import Agents
from goodput.actuate.existing import Existing, ExistingFleet, InstanceLife
from goodput.actuate.ray_actor import Launch
from goodput.actuate.ray_connection import CALL_S, RayConnection
from goodput.actuate.ray_tables import RayGroup, RayLook, RayPool, RayTables

logger = logging.getLogger("baton.controller")

FAILED_KEPT_S: Final = 60.0
"""Seconds for which an instance that ended by itself is listed as failed."""

_WAITS: Final = {
    "NO_RESOURCES": "no GPU is free: all that fit are in use",
    "INFEASIBLE": "no node of this Ray cluster has such GPUs, or as many of them",
}


@dataclass(slots=True)
class _KnownInstance:
    """What this driver remembers of one instance: when it was asked for, and how it ended. Another driver begins
    without it: it lists no instance as failed, and ages begin anew.
    """

    pool: str
    asked_s: float
    ran: bool = False
    leaving: bool = False
    failed_s: float | None = None
    because: str = ""


class RayActuator:
    """See `protocol.Actuator`."""

    def __init__(
        self,
        address: str,
        cluster: str,
        pools: Mapping[str, RayPool],
        launch: Callable[[str, str], Launch],
        beats: Callable[[], Mapping[str, Heartbeat]],
        agents: Agents,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """For one cluster.

        Args:
            address: ``auto`` for the Ray cluster that this machine is part of, or ``ray://HOST:PORT``.
            cluster: its name; other clusters' groups are left alone.
            pools: by name.
            launch: returns what the actor of an instance starts, given the instance's name and pool.
            beats: returns instances' last heartbeats, by name.
            agents: sends requests to their agents.
            clock: monotonic seconds.
        """
        self._tables: Final = RayTables(cluster)
        self.connection: Final = RayConnection(address, self._tables.namespace)
        self._pools: Final = pools
        self._launch: Final = launch
        self._beats: Final = beats
        self._agents: Final = agents
        self._clock: Final = clock
        self._known: Final[dict[InstanceId, _KnownInstance]] = {}
        """Belongs to the connection's thread, as looks and actions run there one after another."""

    # --- what exists --------------------------------------------------------------------------------------------------

    async def observe(self) -> ExistingFleet:
        return await self.connection.call(self._look, within_s=3 * CALL_S)

    def _look(self) -> ExistingFleet:
        look = self._tables.look()
        now = self._clock()
        found = [self._existing(group, look, now) for group in look.groups]
        there = {each.instance for each in found}
        for name in [*self._known]:
            if name not in there:
                self._gone(name, now)
        found += [
            self._told(name, each.pool, InstanceLife.FAILED, each.asked_s, each.because)
            for name, each in self._known.items()
            if each.failed_s is not None
        ]
        return ExistingFleet(now_s=now, instances=tuple(found))

    def _gone(self, name: InstanceId, now: float) -> None:
        """Note that no group of this name exists any more."""
        known = self._known[name]
        if known.failed_s is None and known.ran and not known.leaving:
            known.failed_s = now
            known.because = "its engine, its actor or its node ended; the log is in Ray's logs, as baton-NAME.log"
            logger.warning("%s ended by itself", name)
        if known.failed_s is None or now - known.failed_s > FAILED_KEPT_S:
            del self._known[name]

    def _existing(self, group: RayGroup, look: RayLook, now: float) -> Existing:
        known = self._known.get(group.instance)
        if known is None or known.failed_s is not None:
            known = self._known[group.instance] = _KnownInstance(group.pool, now)
        state = look.states.get(group.instance)
        if group.state != "CREATED":
            because = _WAITS.get(group.scheduling, f"Ray is placing it ({group.scheduling.lower() or group.state})")
            return self._told(group.instance, group.pool, InstanceLife.PENDING, known.asked_s, because)
        known.ran = True
        if state is not None:
            known.leaving = known.leaving or bool(state["leaving"])
        life = InstanceLife.LEAVING if known.leaving else InstanceLife.RUNNING
        node = "" if state is None else str(state["node"])
        return self._told(group.instance, group.pool, life, known.asked_s, node=node)

    def _told(
        self, name: InstanceId, pool: str, life: InstanceLife, asked_s: float, because: str = "", node: str = ""
    ) -> Existing:
        kind = self._pools.get(pool, RayPool())
        return Existing(
            instance=name,
            pool=pool,
            life=life,
            asked_s=asked_s,
            gpu=kind.gpu,
            gpus=kind.gpus,
            node=node,
            because=because,
        )

    # --- actions ------------------------------------------------------------------------------------------------------

    async def start(self, action: Start) -> str:
        pool = self._pools.get(action.pool)
        if pool is None:
            return f"there is no pool {action.pool!r}; there is {', '.join(self._pools) or 'none'}"
        try:
            launch = self._launch(str(action.instance), action.pool)
        except (BatonError, OSError, ValueError) as error:  # a file of secrets is missing
            return f"{action.instance} cannot be started: {error}"
        return await self.connection.call(lambda: self._begin(action, pool, launch))

    def _begin(self, action: Start, pool: RayPool, launch: Launch) -> str:
        there = self._tables.group_of(action.instance)
        if there is not None and there.pool != action.pool:
            return f"{action.instance} exists, in pool {there.pool}"
        known = _KnownInstance(action.pool, self._clock())
        if there is None:
            self._tables.place(action.instance, action.pool, pool, launch)
            self._known[action.instance] = known
        else:
            self._known.setdefault(action.instance, known)
        return ""

    async def flip(self, action: Flip) -> str:
        beat = self._beats().get(action.instance)
        if beat is None:
            return f"{action.instance} is not in the registry"
        return "" if beat.role is action.role else await self._agents.flip(beat, action.role)

    async def drain(self, action: Drain) -> str:
        return await self.connection.call(lambda: self._leave(action.instance))

    def _leave(self, instance: InstanceId) -> str:
        group = self._tables.group_of(instance)
        if group is None:
            self._known.pop(instance, None)
            return ""
        known = self._known.setdefault(instance, _KnownInstance(group.pool, self._clock()))
        known.leaving = True
        actor = self._tables.actor(instance)
        if group.state != "CREATED" or actor is None:
            self._tables.remove(group)
        else:
            actor.drain.remote()
        return ""

    async def stop(self, action: Stop) -> str:
        return await self.connection.call(lambda: self._stop(action.instance))

    def _stop(self, instance: InstanceId) -> str:
        group = self._tables.group_of(instance)
        self._known.pop(instance, None)
        if group is not None:
            self._tables.remove(group)
        return ""

    async def stop_all(self) -> None:
        """End every instance of this cluster."""

        def work() -> None:
            for group in self._tables.groups():
                self._tables.remove(group)
            self._known.clear()

        await self.connection.call(work, within_s=5 * CALL_S)
