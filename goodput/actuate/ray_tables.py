"""Placement groups and actors of one cluster: read from Ray's own tables, made and removed. A shell.

Every call here waits for Ray: make it in the thread of `ray_connection`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from cluster.ids import InstanceId
from goodput.actuate.ray_actor import EngineActor, Launch
from goodput.actuate.ray_connection import CALL_S

LABEL: Final = "baton.io/gpu"
"""Label of a node: the type of its GPUs, as the cluster file names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPool:
    """What an instance of one pool asks of Ray."""

    gpu: str = ""
    """Type of its GPUs; empty: any."""
    gpus: int = 1
    cpus: float = 1.0
    label: str = LABEL


@dataclass(frozen=True, slots=True)
class RayGroup:
    """One placement group, as Ray's table has it."""

    id: str
    pool: str
    instance: InstanceId
    state: str
    scheduling: str


@dataclass(slots=True)
class RayLook:
    """What one look at Ray's tables found."""

    groups: list[RayGroup] = field(default_factory=list)
    states: dict[InstanceId, dict[str, Any] | None] = field(default_factory=dict)
    """By instance: the answer of its actor (`EngineActor.state`). Missing: the actor is being placed, or did not answer
    in time."""
    orphans: list[RayGroup] = field(default_factory=list)


class RayTables:
    """The instances of one cluster in a Ray cluster. Other clusters' groups are left alone."""

    def __init__(self, cluster: str) -> None:
        self.namespace: Final = f"baton-{cluster}"
        self._prefix: Final = f"baton:{cluster}:"
        self._gone_before: set[str] = set()
        """Groups without an actor at the last look, by id."""

    def look(self) -> RayLook:
        """Read groups and ask their actors; remove groups whose actor was gone at the look before, too: a group is made
        before its actor, perhaps by another controller.
        """
        look = RayLook(groups=self.groups())
        asked: dict[Any, RayGroup] = {}
        for group in look.groups:
            if group.state in {"CREATED", "RESCHEDULING"}:
                actor = self.actor(group.instance)
                if actor is None:
                    look.orphans.append(group)
                else:
                    asked[actor.state.remote()] = group
        self._hear(asked, look)
        gone, self._gone_before = self._gone_before, {group.id for group in look.orphans}
        look.orphans = [group for group in look.orphans if group.id in gone]
        for group in look.orphans:
            self.remove(group)
        dead = {group.id for group in look.orphans}
        look.groups = [group for group in look.groups if group.id not in dead]
        return look

    @staticmethod
    def _hear(asked: dict[Any, RayGroup], look: RayLook) -> None:
        import ray

        if not asked:
            return
        done, _ = ray.wait([*asked], num_returns=len(asked), timeout=CALL_S)
        for reference in done:
            group = asked[reference]
            try:
                look.states[group.instance] = ray.get(reference, timeout=CALL_S)
            except ray.exceptions.ActorUnavailableError:
                continue  # it may be well, and cannot be reached from here: as one that did not answer in time
            except ray.exceptions.RayActorError:
                look.orphans.append(group)

    def groups(self) -> list[RayGroup]:
        """All groups of this cluster, without asking their actors."""
        import ray

        found = []
        for key, row in ray.util.placement_group_table().items():
            name = str(row.get("name", ""))
            if row["state"] == "REMOVED" or not name.startswith(self._prefix):
                continue
            pool, _, instance = name.removeprefix(self._prefix).partition(":")
            scheduling = str((row.get("stats") or {}).get("scheduling_state", ""))
            found.append(RayGroup(key, pool, InstanceId(instance), row["state"], scheduling))
        return found

    def actor(self, instance: InstanceId) -> Any:
        """The handle of an instance's actor; None if Ray has none of that name."""
        import ray

        try:
            return ray.get_actor(str(instance), namespace=self.namespace)
        except ValueError:
            return None

    @staticmethod
    def remove(group: RayGroup) -> None:
        """Remove the group: Ray then ends what still runs in it and frees its GPUs."""
        from ray._raylet import PlacementGroupID
        from ray.util.placement_group import PlacementGroup, remove_placement_group

        remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group.id)))

    def group_of(self, instance: InstanceId) -> RayGroup | None:
        """The group of one instance; None if there is none."""
        return next((group for group in self.groups() if group.instance == instance), None)

    def place(self, instance: InstanceId, name: str, pool: RayPool, launch: Launch) -> None:
        """Make a group and the actor that Ray runs once it has placed the group. `name`: the name of the pool."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group(
            [{"GPU": pool.gpus, "CPU": pool.cpus}],
            strategy="STRICT_PACK",
            name=f"{self._prefix}{name}:{instance}",
            lifetime="detached",
            bundle_label_selector=[{pool.label: pool.gpu}] if pool.gpu else None,
        )
        ray.remote(EngineActor).options(
            name=str(instance),
            namespace=self.namespace,
            lifetime="detached",
            max_restarts=0,
            max_task_retries=0,
            num_gpus=pool.gpus,
            num_cpus=pool.cpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        ).remote(launch)
