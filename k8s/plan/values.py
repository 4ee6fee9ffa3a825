"""The values of a plan: wanted pools, present instances, limits, moves and actions. Pure."""

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
    """The beginning of its instances' names (`cluster.spec.plan.stems`)."""
    role: Role
    count: int
    floor: int
    """Fewest instances that serve at any time."""
    revision: str
    """Digest of its pods' template."""
    family: str
    """Digest of what two instances must share to use each other's KV cache (`k8s.plan.pods.family_of`)."""
    gpu: str = ""
    """Type of GPU; empty: any."""
    gpus: int = 1
    """GPUs of one instance."""
    because: str = ""
    """Why `count` instances are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedModel:
    """One model and its pools."""

    key: str
    """Digest of the model's name in the API: identifies the model in labels."""
    pools: tuple[WantedPool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedObject:
    """The workload object of an instance and its pod, as they are now. It has many attributes: labels of the workload,
    conditions of the pod and the agent's answer each give some.
    """

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
    """Seconds that its engine took to come up; None: it is not up, or the time is unknown."""
    started: bool = False
    """Its engine has come up: the startup probe has passed and the container runs."""
    healthy: bool = False
    """Its containers are ready."""
    ready: bool = False
    """Its pod is Ready: healthy, and let in by the readiness gate."""
    draining_since: float | None = None
    """Unix time at which its drain began, by the workload's label; None: it does not drain."""
    drained: bool = False
    """Its agent has no stream and no hold left."""
    deleting: bool = False
    """Its workload is being deleted."""
    disrupted: bool = False
    """Its pod is about to be taken: an eviction, a node that is drained or given notice, a preemption."""

    @property
    def serving(self) -> bool:
        """Whether it takes requests and is not about to stop."""
        return self.ready and not self.leaving and not self.disrupted

    @property
    def leaving(self) -> bool:
        """Whether it drains or is being deleted."""
        return self.deleting or self.draining_since is not None

    @property
    def holds_gpus(self) -> bool:
        """Whether it has GPUs, or gets them once a node is found."""
        return not self.parked


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """What a plan may not exceed."""

    drain_s: float = 600.0
    """An instance that drains for longer is deleted; its pod's own grace period follows."""
    gang_s: float = 120.0
    """How long instances of the smallest fleet keep GPUs while the rest finds none."""
    keys_s: float = 180.0
    """How long a Secret's new content takes to reach every pod that has mounted it: a kubelet looks once a minute and
    its cache may be a minute old (kubernetes.io, "Secrets"), and a minute more."""
    free_gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs that are free, by type. A type that is not named: unknown, so it is tried."""


@dataclass(frozen=True, slots=True)
class Start:
    """Make an instance."""

    pool: str
    name: str
    because: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Let an instance take no new work."""

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
    """Set an instance's workload to no replicas, so that it has no GPUs until the rest of its fleet finds some."""

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
    """Make a Secret with random content: passwords and keys. Never overwrites one."""

    name: str
    because: str


@dataclass(frozen=True, slots=True)
class RenewUsers:
    """Write the registry's list of users again, with the passwords that the Secret has."""

    name: str
    because: str


class KeyStage(StrEnum):
    """Stages of the replacement of a fleet's key."""

    NONE = ""
    """No replacement is under way: the first key signs."""
    ADDED = "added"
    """The old key signs; all programs get the new one, too."""
    SIGNS = "signs"
    """The new key signs; signatures of the old one are still accepted."""


@dataclass(frozen=True, slots=True)
class Rekey:
    """Take the replacement of a fleet's key one step on. Plans never read the keys themselves; `k8s.operator` does."""

    name: str
    """Name of the fleet's key Secret."""
    stage: KeyStage
    because: str


@dataclass(frozen=True, slots=True)
class Derive:
    """Write one instance's key Secret, which is derived from the fleet's."""

    name: str
    """Name of the instance."""
    because: str


@dataclass(frozen=True, slots=True)
class Admit:
    """Open a pod's readiness gate."""

    pod: str
    because: str


Move = Start | Drain | Resume | Remove | Park | Unpark
Action = Move | Apply | Delete | Generate | RenewUsers | Rekey | Derive | Admit
