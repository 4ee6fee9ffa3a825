"""Which instances exist, as an actuator reports them: values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cluster.ids import InstanceId


class InstanceLife(StrEnum):
    """What an actuator knows of an instance. Heartbeats of its agent say whether it is ready for requests."""

    PENDING = "pending"
    """Asked for; waits for a GPU, cores or a node."""
    RUNNING = "running"
    """Its agent's process exists: the engine starts, serves or drains."""
    LEAVING = "leaving"
    """Told to drain and end, or to end."""
    FAILED = "failed"
    """Ended by itself, with a fault. It holds nothing any more; listed until `Stop` or a `Start` of the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Existing:
    """One instance that was asked for and is not gone."""

    instance: InstanceId
    pool: str
    """Which pool's settings it was started with: the stem of its name in the cluster file (``prefill``)."""
    life: InstanceLife
    asked_s: float | None = None
    """When it was asked for, on the clock of `ExistingFleet.now_s`; None: unknown."""
    gpu: str = ""
    """Type of its GPUs, by the name that the budget uses."""
    gpus: int = 1
    """GPUs that it has; while it is pending, that it wants."""
    node: str = ""
    because: str = ""
    """Why it is pending or failed, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExistingFleet:
    """What exists at one moment."""

    now_s: float
    """When they were observed, in seconds of the actuator's own monotonic clock."""
    instances: tuple[Existing, ...]
