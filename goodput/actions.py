"""What can be done to a fleet: values that a planner or controller makes and an actuator carries out. Pure.

Every actuator (local processes, Ray, Kubernetes, the simulator) takes the actions of a controller (`Action`), so that
what is rehearsed is what is done. Scripts of the simulator (`sim.changes`) may also let an instance rest and resume. An
actuator answers an action with an empty text, or with why it does not carry the action out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from cluster.ids import InstanceId
from cluster.instance import Role

DRAIN_S = 30.0
"""How long an instance may take to finish what it has, in seconds, unless an action says otherwise: the default of
`limits.drain_s` in the cluster file."""

_NEW_NAME: Final = re.compile(r"(.+)-[1-9a-f][0-9a-f]{10}-[1-9][0-9]*")
"""What `new_name` gives in the years 2004 to 2527. A date in a pool's name (``qwen-20250611``) has fewer digits."""


def new_name(pool: str, now: float, number: int) -> InstanceId:
    """A name that no instance of this fleet ever had: the pool, the time (`now`, UNIX seconds), and the controller's
    `number` of starts.
    """
    return InstanceId(f"{pool}-{round(now * 1000):x}-{number}")


def pool_of_new(name: str) -> str:
    """The pool in a name that `new_name` gave; empty: it gave no such name."""
    found = _NEW_NAME.fullmatch(name)
    return "" if found is None else found[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start one more instance of a pool."""

    instance: InstanceId
    """A name that no instance of this fleet ever had (`new_name`)."""
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
