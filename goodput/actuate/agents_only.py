"""An actuator without a launcher: flips through agents. For fleets that other programs start. A shell.

What is ended here could not be started again, so instances keep running: their owners change the fleet's size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from cluster.ids import InstanceId
from cluster.registry.membership import Heartbeat
from goodput.actions import Drain, Flip, Start, Stop
from goodput.actuate.agents import Agents
from goodput.actuate.existing import Existing, ExistingFleet, InstanceLife

_CANNOT: Final = "nothing here can {what} instances: this controller speaks to agents alone (--on ray, or `baton up`)"


class AgentsOnly:
    """See `protocol.Actuator`. Flips alone are carried out; starts and ends are refused."""

    def __init__(self, pools: Iterable[str], beats: Callable[[], Mapping[str, Heartbeat]], agents: Agents) -> None:
        """`pools`: names of pools; an instance `POOL-…` is of that pool. `beats`: last heartbeats, by instance."""
        self._pools: Final = tuple(pools)
        self._beats: Final = beats
        self._agents: Final = agents

    async def observe(self) -> ExistingFleet:
        beats = self._beats()
        found = [
            Existing(instance=InstanceId(name), pool=pool, life=InstanceLife.RUNNING)
            for name in beats
            if (pool := self._pool(name)) is not None
        ]
        return ExistingFleet(now_s=time.monotonic(), instances=tuple(found))

    def _pool(self, name: str) -> str | None:
        fits = [pool for pool in self._pools if name.startswith(f"{pool}-")]
        return max(fits, key=len, default=None)

    async def start(self, action: Start) -> str:
        return _CANNOT.format(what="start")

    async def flip(self, action: Flip) -> str:
        beat = self._beats().get(action.instance)
        if beat is None:
            return f"{action.instance} is not in the registry"
        return "" if beat.role is action.role else await self._agents.flip(beat, action.role)

    async def drain(self, action: Drain) -> str:
        return _CANNOT.format(what="end")

    async def stop(self, action: Stop) -> str:
        return _CANNOT.format(what="end")
