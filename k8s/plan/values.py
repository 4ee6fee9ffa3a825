"""What a plan is made of: wanted pools, instances as they are, limits, moves. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cluster.instance import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedPool:
    """One pool as it should be."""

    stem: str
    """What its instances' names begin with (`cluster.spec.plan.stems`)."""
    role: Role
    count: int
    floor: int
    """Fewest instances that serve at any time."""
    revision: str
    """Digest of its pods' template."""
    family: str
    """Digest of what decides whether two instances understand each other's KV cache."""
    gpu: str = ""
    """Type of GPU; empty: whatever is found."""
    gpus: int = 1
    """Of one instance."""
    because: str = ""
    """Why `count`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedModel:
    """One model and its pools."""

    key: str
    """Tells models apart in labels."""
    pools: tuple[WantedPool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedObject:
    """One workload object of an instance and its pod, as they are."""

    name: str
    model: str
    pool: str
    role: Role
    revision: str
    family: str
    gpu: str = ""
    gpus: int = 1
    parked: bool = False
    """Its workload has no replicas, so that it keeps no GPUs."""
    scheduled: bool = False
    """Its pod has a node: it holds GPUs."""
    unschedulable_since: float | None = None
    """Unix time since when its pod finds no node."""
    loading_since: float | None = None
    """Unix time since when its container runs and its engine has not come up."""
    loaded_s: float | None = None
    """How long its engine took to come up, s; None where it is not up, or where that is not told."""
    started: bool = False
    """Its engine has come up: the startup probe has passed and the container runs."""
    healthy: bool = False
    """Its containers are ready."""
    ready: bool = False
    """Its pod is Ready: healthy, and let in by the readiness gate."""
    draining_since: float | None = None
    """Unix time of the drain's begin, by the workload's label."""
    drained: bool = False
    """Its agent has no stream and no hold left."""
    deleting: bool = False
    """Its workload is being deleted."""
    disrupted: bool = False
    """Its pod is about to be taken: an eviction, a node that is drained or given notice, a preemption."""

    @property
    def serving(self) -> bool:
        """Whether it takes requests, and goes on taking them."""
        return self.ready and not self.leaving and not self.disrupted

    @property
    def leaving(self) -> bool:
        """Whether it is on its way out."""
        return self.deleting or self.draining_since is not None

    @property
    def holds_gpus(self) -> bool:
        """Whether GPUs are taken by it, or will be when a node is found."""
        return not self.parked


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """What a plan may not exceed."""

    drain_s: float = 600.0
    """A drain that takes longer ends in a deletion all the same; the pod's own grace follows."""
    gang_s: float = 120.0
    """How long a part of the smallest fleet keeps GPUs while the rest finds none."""
    keys_s: float = 180.0
    """How long a Secret's new content takes to reach every pod that has mounted it: a kubelet looks once a minute and
    its cache may be a minute old (kubernetes.io, "Secrets"), and a minute more."""
    free_gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs that are free, by type. A type that is not named: not known, and tried."""


@dataclass(frozen=True, slots=True)
class Start:
    """Make an instance."""

    pool: str
    name: str
    because: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Let an instance take nothing new."""

    name: str
    because: str


@dataclass(frozen=True, slots=True)
class Resume:
    """End a drain: the instance is wanted again."""

    name: str
    because: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete an instance's workload."""

    name: str
    because: str


@dataclass(frozen=True, slots=True)
class Park:
    """Take an instance's GPUs from it until the rest of its fleet finds some."""

    name: str
    because: str


@dataclass(frozen=True, slots=True)
class Unpark:
    """Give an instance its pod back."""

    name: str
    because: str


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of one object under our field manager."""

    manifest: Mapping[str, Any]
    because: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete one object of ours."""

    api_version: str
    kind: str
    name: str
    uid: str
    because: str


@dataclass(frozen=True, slots=True)
class Generate:
    """Make a Secret whose content is chance: passwords and keys. Never overwrites one."""

    name: str
    because: str


class KeyStage(StrEnum):
    """How far the replacement of a fleet's key is."""

    NONE = ""
    """One key: it signs."""
    ADDED = "added"
    """The old key signs; all programs are given the new one, too."""
    SIGNS = "signs"
    """The new key signs; what the old one signed still counts."""


@dataclass(frozen=True, slots=True)
class Rekey:
    """Take the replacement of a fleet's key one step on. Only the operator's hands read the keys themselves."""

    name: str
    """Of the fleet's key Secret."""
    stage: KeyStage
    because: str


@dataclass(frozen=True, slots=True)
class Derive:
    """Write one instance's key Secret, which follows from the fleet's."""

    name: str
    """Of the instance."""
    because: str


@dataclass(frozen=True, slots=True)
class Admit:
    """Set a pod's readiness gate."""

    pod: str
    ready: bool
    because: str


Move = Start | Drain | Resume | Remove | Park | Unpark
Action = Move | Apply | Delete | Generate | Rekey | Derive | Admit
