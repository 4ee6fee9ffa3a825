"""Carries actions out on a Ray cluster. A shell; every call of Ray's runs in one thread of its own, with a deadline.

An instance is a placement group named ``baton:CLUSTER:POOL:INSTANCE`` and in it a detached actor (`ray_actor`), which
never restarts: Baton replaces an instance that ends. Both exist from `start` on; Ray runs the actor once it has placed
the group. So everything there is to know stands in Ray's own tables, and another driver finds it there:

    group pending                     the instance waits for a GPU; Ray says whether they are busy or do not exist
    group placed, its actor alive     it runs, or leaves where the actor was told to
    group placed, no actor            what is left of an instance whose actor died, or of a `start` that was cut off:
                                      removed at the next look

Ray places, counts GPUs and brings nodes. It carries no request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from cluster.errors import UsageError
from cluster.ids import InstanceId
from cluster.registry.membership import Heartbeat
from goodput.actions import Drain, Flip, Resume, Start, Stop
from goodput.actuate.agents import Agents
from goodput.actuate.existing import Existing, ExistingFleet, InstanceLife
from goodput.actuate.protocol import Unobservable
from goodput.actuate.ray_actor import EngineActor, Launch

logger = logging.getLogger("baton.controller")

INSTALL: Final = "pip install 'baton-serve[ray]'"
CONNECT_TRIES: Final = 6
CONNECT_AGAIN_S: Final = 1.0
"""A head's server for clients (`ray://`) forks a process for each, which died before its first line in two of four
starts seen with Ray 2.60 on two cores ("Initialization failure from server"): the next one lives."""

CALL_S: Final = 2.0
"""Longest wait for what one look asks of all actors; Ray's own tables answer in milliseconds."""

FAILED_KEPT_S: Final = 60.0
"""So long an instance that ended by itself is told as failed."""

LABEL: Final = "baton.io/gpu"
"""Of nodes: the type of their GPUs, by the cluster file's name. Ray's own label of it is looked at, too."""

RAY_LABEL: Final = "ray.io/accelerator-type"

_WAITS: Final = {
    "NO_RESOURCES": "no GPU is free: all that fit are in use",
    "INFEASIBLE": "no node of this Ray cluster has such GPUs, or as many of them",
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPool:
    """What an instance of one pool asks of Ray."""

    gpu: str = ""
    """Type of its GPUs; empty: any."""
    gpus: int = 1
    cpus: float = 1.0
    label: str = LABEL


@dataclass(slots=True)
class _KnownInstance:
    """What this driver remembers of one instance; used in messages only."""

    pool: str
    asked_s: float
    ran: bool = False
    leaving: bool = False
    failed_s: float | None = None
    because: str = ""


@dataclass(frozen=True, slots=True)
class _Group:
    """One placement group, as Ray's table has it."""

    id: str
    pool: str
    instance: InstanceId
    state: str
    scheduling: str


@dataclass(slots=True)
class _Look:
    """What one look at Ray's tables found."""

    groups: list[_Group] = field(default_factory=list)
    states: dict[InstanceId, dict[str, Any] | None] = field(default_factory=dict)
    """By instance: its actor's word; None: the actor is being placed, or is too busy to answer."""
    orphans: list[_Group] = field(default_factory=list)
    free: dict[str, int] | None = None


class RayActuator:
    """See `protocol.Actuator`.

    Long, as every call to Ray is made in one thread of its own, and what one look sees of groups and actors is what the
    next action goes by.
    """

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
        """Of one cluster.

        Args:
            address: ``auto`` for the Ray cluster that this machine is part of, or ``ray://HOST:PORT``.
            cluster: its name; other clusters' groups are left alone.
            pools: by name.
            launch: what the actor of an instance starts, by its name and pool.
            beats: instances' last heartbeats, by name.
            agents: speaks to their agents.
            clock: monotonic seconds.
        """
        self._address: Final = address
        self._prefix: Final = f"baton:{cluster}:"
        self._namespace: Final = f"baton-{cluster}"
        self._pools: Final = pools
        self._launch: Final = launch
        self._beats: Final = beats
        self._agents: Final = agents
        self._clock: Final = clock
        self._thread: Final = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._known: Final[dict[InstanceId, _KnownInstance]] = {}

    # --- the connection -----------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Join the Ray cluster.

        Raises:
            UsageError: Ray is not installed, or no cluster answers there.
        """
        try:
            import ray  # noqa: F401 - only whether it is there
        except ImportError:
            raise UsageError(f"--on ray: Ray is not installed in this Python: {INSTALL}") from None
        try:
            await self._call(self._init, within_s=60.0)
        except Unobservable as error:
            raise UsageError(
                f"--on ray: no Ray cluster at {self._address} ({error}); start one with `ray start --head`, "
                "or name it: --on ray://HOST:10001"
            ) from None

    def _init(self) -> None:
        for left in reversed(range(CONNECT_TRIES)):
            try:
                return self._join()
            except ConnectionAbortedError as error:
                if not left:
                    raise
                logger.warning("ray: %s; trying again", str(error).strip().partition("\n")[0].rstrip(":"))
                self._shutdown()
                time.sleep(CONNECT_AGAIN_S)
        raise AssertionError("unreachable")

    def _join(self) -> None:
        import ray

        ray.init(
            address=self._address,
            namespace=self._namespace,
            log_to_driver=False,
            ignore_reinit_error=True,
            configure_logging=False,
        )

    def close(self) -> None:
        """Leave the Ray cluster; instances go on."""
        self._thread.submit(self._shutdown)
        self._thread.shutdown(wait=True)

    @staticmethod
    def _shutdown() -> None:
        import ray

        ray.shutdown()

    async def _call(self, work: Callable[[], T], within_s: float = 2 * CALL_S) -> T:
        """Do it in Ray's thread. Raises Unobservable where Ray does not answer, or with an error."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(within_s):
                return await loop.run_in_executor(self._thread, work)
        except TimeoutError:
            raise Unobservable(f"Ray does not answer within {within_s:g} s") from None
        except UsageError:
            raise
        except Exception as error:  # Ray raises errors of many libraries, and the fleet is held whatever it was
            first = str(error).strip().partition("\n")[0]
            raise Unobservable(f"Ray: {type(error).__name__}: {first[:200]}") from error

    # --- what exists --------------------------------------------------------------------------------------------------

    async def observe(self) -> ExistingFleet:
        look = await self._call(self._look, within_s=3 * CALL_S)
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
        return ExistingFleet(now_s=now, instances=tuple(found), free=look.free)

    def _gone(self, name: InstanceId, now: float) -> None:
        """Note that no group of this name exists any more."""
        known = self._known[name]
        if known.failed_s is None and known.ran and not known.leaving:
            known.failed_s = now
            known.because = "its engine, its actor or its node ended; the log is in Ray's logs, as baton-NAME.log"
            logger.warning("%s ended by itself", name)
        if known.failed_s is None or now - known.failed_s > FAILED_KEPT_S:
            del self._known[name]

    def _existing(self, group: _Group, look: _Look, now: float) -> Existing:
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

    def _look(self) -> _Look:
        """In Ray's thread: tables, actors' words, and what is left of dead ones removed."""
        look = _Look(groups=self._groups(), free=self._free())
        asked: dict[Any, _Group] = {}
        for group in look.groups:
            if group.state in {"CREATED", "RESCHEDULING"}:
                actor = self._actor(group.instance)
                if actor is None:
                    look.orphans.append(group)
                else:
                    asked[actor.state.remote()] = group
        self._hear(asked, look)
        for group in look.orphans:
            self._remove(group)
        dead = {group.id for group in look.orphans}
        look.groups = [group for group in look.groups if group.id not in dead]
        return look

    @staticmethod
    def _hear(asked: dict[Any, _Group], look: _Look) -> None:
        import ray

        if not asked:
            return
        done, _ = ray.wait([*asked], num_returns=len(asked), timeout=CALL_S)
        for reference in done:
            group = asked[reference]
            try:
                look.states[group.instance] = ray.get(reference, timeout=CALL_S)
            except ray.exceptions.RayActorError:
                look.orphans.append(group)

    def _groups(self) -> list[_Group]:
        import ray

        found = []
        for key, row in ray.util.placement_group_table().items():
            name = str(row.get("name", ""))
            if row["state"] == "REMOVED" or not name.startswith(self._prefix):
                continue
            pool, _, instance = name.removeprefix(self._prefix).partition(":")
            scheduling = str((row.get("stats") or {}).get("scheduling_state", ""))
            found.append(_Group(key, pool, InstanceId(instance), row["state"], scheduling))
        return found

    def _free(self) -> dict[str, int] | None:
        """Free GPUs by the type that nodes are labelled with; None: a client (`ray://`) cannot ask by node."""
        import ray

        if self._address.startswith("ray://"):
            return None
        free: dict[str, int] = {}
        by_node = ray._private.state.available_resources_per_node()  # noqa: SLF001
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            labels = node.get("Labels", {})
            there = int(by_node.get(node["NodeID"], {}).get("GPU", 0))
            types = {labels.get(LABEL, ""), labels.get(RAY_LABEL, ""), ""}
            for each in types:
                free[each] = free.get(each, 0) + there
        return free

    def _actor(self, instance: InstanceId) -> Any:
        import ray

        try:
            return ray.get_actor(str(instance), namespace=self._namespace)
        except ValueError:
            return None

    @staticmethod
    def _remove(group: _Group) -> None:
        """Remove the group: Ray then ends what still runs in it and frees its GPUs."""
        from ray._raylet import PlacementGroupID
        from ray.util.placement_group import PlacementGroup, remove_placement_group

        remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group.id)))

    def _group_of(self, instance: InstanceId) -> _Group | None:
        return next((group for group in self._groups() if group.instance == instance), None)

    # --- actions ------------------------------------------------------------------------------------------------------

    async def start(self, action: Start) -> str:
        pool = self._pools.get(action.pool)
        if pool is None:
            return f"there is no pool {action.pool!r}; there is {', '.join(self._pools) or 'none'}"
        launch = self._launch(str(action.instance), action.pool)
        because = await self._call(lambda: self._begin(action, pool, launch))
        if not because:
            self._known.setdefault(action.instance, _KnownInstance(action.pool, self._clock()))
        return because

    def _begin(self, action: Start, pool: RayPool, launch: Launch) -> str:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        there = self._group_of(action.instance)
        if there is not None:
            return "" if there.pool == action.pool else f"{action.instance} exists, in pool {there.pool}"
        self._known.pop(action.instance, None)
        group = placement_group(
            [{"GPU": pool.gpus, "CPU": pool.cpus}],
            strategy="STRICT_PACK",
            name=f"{self._prefix}{action.pool}:{action.instance}",
            lifetime="detached",
            bundle_label_selector=[{pool.label: pool.gpu}] if pool.gpu else None,
        )
        ray.remote(EngineActor).options(
            name=str(action.instance),
            namespace=self._namespace,
            lifetime="detached",
            max_restarts=0,
            max_task_retries=0,
            num_gpus=pool.gpus,
            num_cpus=pool.cpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        ).remote(launch)
        return ""

    async def flip(self, action: Flip) -> str:
        beat = self._beats().get(action.instance)
        if beat is None:
            return f"{action.instance} is not in the registry"
        return "" if beat.role is action.role else await self._agents.flip(beat, action.role)

    async def drain(self, action: Drain) -> str:
        if action.leave:
            return await self._call(lambda: self._leave(action.instance))
        beat = self._beats().get(action.instance)
        if beat is None:
            return f"{action.instance} is not in the registry"
        return await self._agents.drain(beat, action.deadline_s)

    def _leave(self, instance: InstanceId) -> str:
        group = self._group_of(instance)
        if group is None:
            self._known.pop(instance, None)
            return ""
        known = self._known.setdefault(instance, _KnownInstance(group.pool, self._clock()))
        known.leaving = True
        actor = self._actor(instance)
        if group.state != "CREATED" or actor is None:
            self._remove(group)
        else:
            actor.drain.remote()
        return ""

    async def resume(self, action: Resume) -> str:
        beat = self._beats().get(action.instance)
        if beat is None:
            return f"{action.instance} is not in the registry"
        return await self._agents.resume(beat)

    async def stop(self, action: Stop) -> str:
        return await self._call(lambda: self._stop(action.instance))

    def _stop(self, instance: InstanceId) -> str:
        group = self._group_of(instance)
        self._known.pop(instance, None)
        if group is not None:
            self._remove(group)
        return ""

    async def cancel(self, action: Stop) -> str:
        return await self._call(lambda: self._cancel(action.instance))

    def _cancel(self, instance: InstanceId) -> str:
        group = self._group_of(instance)
        if group is None:
            return ""
        if group.state == "CREATED":
            return f"{instance} is not pending any more: it runs"
        return self._stop(instance)

    async def stop_all(self) -> None:
        """End every instance of this cluster."""

        def work() -> None:
            for group in self._groups():
                self._remove(group)

        await self._call(work, within_s=5 * CALL_S)
        self._known.clear()
