"""Carries actions out on one machine: engines are child processes of `baton up`. A shell.

`baton up` owns the processes: it starts them, restarts killed ones and ends them. This module only decides whether the
machine has room for one more, and keeps the instances that wait for room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from cluster.errors import BatonError
from cluster.ids import InstanceId
from cluster.registry.membership import Heartbeat
from engine.vllm.placement import MachineShare
from goodput.actions import Drain, Flip, Start, Stop
from goodput.actuate.agents import Agents
from goodput.actuate.existing import Existing, ExistingFleet, InstanceLife
from goodput.actuate.places import Places

READING_S: Final = 1.5
"""Longest wait for a reading of the GPUs' memory in use, in seconds: less than an action may take. Without persistence
mode nvidia-smi takes several seconds."""
OLD_S: Final = 15.0
"""A reading of memory that began so many seconds ago, and that no call has used yet, is not used any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """One engine's process."""

    name: InstanceId
    pool: str
    asked_s: float
    leaving: bool = False
    failed: str = ""
    """Why it has ended for good; empty: it runs."""
    share: MachineShare = field(default_factory=MachineShare)


class Children(Protocol):
    """The processes of `baton up`."""

    def listed(self) -> Iterable[Child]:
        """All processes that have not ended, and those that failed."""

    def begin(self, name: InstanceId, pool: str, share: MachineShare) -> None:
        """Start an engine on this part of the machine.

        Raises:
            BatonError, OSError, ValueError: it is not started.
        """

    def drain(self, name: InstanceId, deadline_s: float) -> None:
        """Let it drain, then end; no effect if it does so already."""

    def end(self, name: InstanceId) -> None:
        """End it now, in order; one that has failed is only forgotten."""


@dataclass(frozen=True, slots=True)
class LocalPool:
    """What the instances of one pool take of the machine."""

    gpu: str
    """Type of their GPUs; empty: any."""
    gpus: int
    takes: bool
    """Whether they take GPUs or cores at all; mocks do not."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    pool: str
    asked_s: float
    because: str


class LocalActuator:
    """See `protocol.Actuator`."""

    def __init__(
        self,
        children: Children,
        kinds: Mapping[str, LocalPool],
        places: Places,
        beats: Callable[[], Mapping[str, Heartbeat]],
        agents: Agents,
        *,
        used_mib: Callable[[], Mapping[str, int]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`beats`: instances' last heartbeats, by name; `used_mib`: memory in use on each GPU, by its id."""
        self._children: Final = children
        self._kinds: Final = kinds
        self._places: Final = places
        self._beats: Final = beats
        self._agents: Final = agents
        self._used_mib: Final = used_mib
        self._clock: Final = clock
        self._waiting: Final[dict[InstanceId, _Waiting]] = {}
        self._reading: asyncio.Future[Mapping[str, int]] | None = None
        """The reading of memory in use that runs, or whose result is not used yet."""
        self._read_s = 0.0
        """When that reading began."""
        self._failed: set[tuple[InstanceId, float]] = set()
        """Failed processes that are counted in `places`: names, and when they were asked for."""

    async def observe(self) -> ExistingFleet:
        """Also starts instances that waited for room, oldest first, as far as there is room now."""
        self._recount()
        await self._place(*self._waiting)
        children = tuple(self._running(each) for each in self._children.listed() if each.pool in self._kinds)
        pending = tuple(
            self._existing(name, each.pool, InstanceLife.PENDING, each.asked_s, each.because)
            for name, each in self._waiting.items()
        )
        return ExistingFleet(now_s=self._clock(), instances=children + pending)

    async def start(self, action: Start) -> str:
        if action.pool not in self._kinds:
            return f"there is no pool {action.pool!r}; there is {', '.join(self._kinds) or 'none'}"
        known = {each.name: each for each in self._children.listed()}
        found = known.get(action.instance)
        if found is not None and not found.failed:
            return "" if found.pool == action.pool else f"{action.instance} exists, in pool {found.pool}"
        if action.instance in self._waiting:
            return ""
        if found is not None:
            self._recount()  # it has failed, which is forgotten now
            self._children.end(action.instance)
        self._waiting[action.instance] = _Waiting(action.pool, self._clock(), "")
        await self._place(action.instance)
        return ""

    async def flip(self, action: Flip) -> str:
        beat = self._beats().get(action.instance)
        if beat is None:
            return f"{action.instance} is not in the registry"
        return "" if beat.role is action.role else await self._agents.flip(beat, action.role)

    async def drain(self, action: Drain) -> str:
        if self._waiting.pop(action.instance, None) is not None:
            return ""
        self._children.drain(action.instance, action.deadline_s)
        return ""

    async def stop(self, action: Stop) -> str:
        if self._waiting.pop(action.instance, None) is None:
            self._children.end(action.instance)
        return ""

    async def _place(self, *names: InstanceId) -> None:
        """Start those of these waiting instances that find room, in this order."""
        takes = any(self._kinds[self._waiting[name].pool].takes for name in names)
        used = await self._used() if takes else {}
        for name in names:
            waiting = self._waiting.get(name)
            if waiting is None:
                continue  # cancelled meanwhile
            because = self._begin(name, waiting.pool, used)
            if because:
                self._waiting[name] = replace(waiting, because=because)
            else:
                del self._waiting[name]

    def _begin(self, name: InstanceId, pool: str, used: Mapping[str, int] | None) -> str:
        """Start an instance; empty, or why it cannot start yet."""
        share = self._part(self._kinds[pool], used)
        if isinstance(share, str):
            return share
        try:
            self._children.begin(name, pool, share)
        except (BatonError, OSError, ValueError) as error:  # no port is free, or its key file cannot be written
            return str(error)
        return ""

    def _part(self, kind: LocalPool, used: Mapping[str, int] | None) -> MachineShare | str:
        """A free part of the machine, or why there is none."""
        if not kind.takes:
            return MachineShare()
        if used is None:
            return "the GPUs' memory in use is being read (nvidia-smi is slow)"
        self._recount()
        return self._places.part(kind.gpus, used, kind.gpu or None)

    async def _used(self) -> Mapping[str, int] | None:
        """Memory in use on each GPU, by its id; None: the driver is slow, and a later call gets this reading."""
        now = self._clock()
        if self._reading is None or (self._reading.done() and now - self._read_s > OLD_S):
            self._reading = asyncio.get_running_loop().run_in_executor(None, self._used_mib)
            self._read_s = now
        reading = self._reading
        await asyncio.wait({reading}, timeout=READING_S)
        if not reading.done():
            return None
        if self._reading is reading:
            self._reading = None
        return reading.result()

    def _recount(self) -> None:
        """GPUs and cores count as taken while the process that has them exists."""
        listed = tuple(self._children.listed())
        failed = {(each.name, each.asked_s): each.share for each in listed if each.failed}
        for new in failed.keys() - self._failed:
            self._places.failed(failed[new])
        self._failed = set(failed)
        self._places.taken({str(each.name): each.share for each in listed if not each.failed})

    def _running(self, child: Child) -> Existing:
        life = InstanceLife.FAILED if child.failed else InstanceLife.LEAVING if child.leaving else InstanceLife.RUNNING
        return self._existing(child.name, child.pool, life, child.asked_s, child.failed)

    def _existing(self, name: InstanceId, pool: str, life: InstanceLife, asked_s: float, because: str) -> Existing:
        kind = self._kinds[pool]
        return Existing(
            instance=name, pool=pool, life=life, asked_s=asked_s, gpu=kind.gpu, gpus=kind.gpus, because=because
        )
