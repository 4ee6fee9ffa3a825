"""What can be done to a fleet: values that a planner or controller makes and an actuator carries out. Pure.

Every actuator (local processes, Ray, Kubernetes, the simulator) takes the actions of a controller (`Action`), so that
what is rehearsed is what is done. Scripts of the simulator (`sim.changes`) may also let an instance rest and resume. An
actuator answers an action with an empty text, or with why it does not carry the action out.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.ids import InstanceId
from cluster.instance import Role

DRAIN_S = 30.0
"""How long an instance may take to finish what it has, in seconds, unless an action says otherwise: the default of
`limits.drain_s` in the cluster file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start one more instance of a pool."""

    instance: InstanceId
    """A name that no instance of this fleet ever had."""
    pool: str
    """Which pool's settings it has (GPU type, shape, flags of the engine)."""
    because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Take no new work, and end once everything is finished, or at the deadline.

    An instance that has not become ready yet, or still waits for a GPU, is cancelled at once.
    """

    instance: InstanceId
    deadline_s: float = DRAIN_S
    leave: bool = True
    """False: it stays, until it resumes. The simulator alone takes that."""
    because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Take work again: ends a drain that is not to leave. The simulator alone takes it."""

    instance: InstanceId
    because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """Take another role. The engine runs on with the batch settings that it was started with."""

    instance: InstanceId
    role: Role
    because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End now, whatever is unfinished."""

    instance: InstanceId
    because: str = ""


Action = Start | Drain | Flip | Stop
"""What a controller may want."""

ScriptedAction = Action | Resume
"""What a script of the simulator may hold."""
