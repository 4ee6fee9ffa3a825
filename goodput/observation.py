"""What the controller observes at one instant: values without behaviour. Pure.

A field is None if its value is unknown. *Unknown is not zero*: a controller that reads a missing queue as an empty
one removes the instances that would have emptied it.

Routers publish counters that only grow, each since its own start; a restarted router begins at zero under another
`life`. So what happened between two readings is known even if readings in between were missed, and two routers' counts
add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput.sketch import EMPTY, Sketch


class Phase(StrEnum):
    """The phases of an instance's life that a controller distinguishes."""

    PENDING = "pending"
    """Asked for; waits for a GPU."""
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """Takes no new work; with `InstanceSeen.leaving` it ends afterwards."""
    FAILED = "failed"
    """Its agent or its engine has given up; it still counts until it is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassCounts:
    """Counts of one SLO class at one router, since the router's start."""

    arrivals: int = 0
    """Requests that reached the router, before admission: shed and waiting ones count, too."""
    prompts: Sketch = EMPTY
    """Prompt tokens of these arrivals."""
    cached_tokens: int = 0
    """Tokens of computed prompts that came out of a prefix cache."""
    computed_tokens: int = 0
    """The other tokens of these prompts."""
    answers: Sketch = EMPTY
    """Tokens of answers that are complete."""
    ended: int = 0
    """Requests that are over and count for attainment (a client that left in time does not)."""
    met: int = 0
    """Ended requests that met every target of the class."""
    late_first: int = 0
    """Ended requests that missed a target of the first token, were shed or failed."""

    def __add__(self, other: ClassCounts) -> ClassCounts:
        return ClassCounts(
            arrivals=self.arrivals + other.arrivals,
            prompts=self.prompts + other.prompts,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            computed_tokens=self.computed_tokens + other.computed_tokens,
            answers=self.answers + other.answers,
            ended=self.ended + other.ended,
            met=self.met + other.met,
            late_first=self.late_first + other.late_first,
        )

    def since(self, before: ClassCounts) -> ClassCounts:
        """The growth since an earlier reading of the same counters; 0 for a counter that is behind it."""
        return ClassCounts(
            arrivals=max(0, self.arrivals - before.arrivals),
            prompts=self.prompts.since(before.prompts),
            cached_tokens=max(0, self.cached_tokens - before.cached_tokens),
            computed_tokens=max(0, self.computed_tokens - before.computed_tokens),
            answers=self.answers.since(before.answers),
            ended=max(0, self.ended - before.ended),
            met=max(0, self.met - before.met),
            late_first=max(0, self.late_first - before.late_first),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCounts:
    """What one router publishes."""

    router: str
    life: str
    """Changes with every start of the router."""
    at_s: float
    """When the controller heard it, in seconds of the controller's clock."""
    classes: Mapping[str, ClassCounts]
    waiting: int | None = None
    """Requests without a first token that no instance computes yet: in the router's queue, or in an engine's."""
    oldest_wait_s: float | None = None
    """Seconds that the oldest of them has waited; 0: none waits."""
    left: bool = False
    """Whether it has just said goodbye; these are its last counts."""
    address: str = ""
    """Where it listens: no two routers listen there at once. Empty: unknown."""
    began_s: float | None = None
    """This life began then or earlier, in seconds of the controller's clock; None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSeen:
    """One instance, as the actuator and its heartbeat report it."""

    id: InstanceId
    pool: str
    """Which pool's settings it was started with."""
    role: Role
    """The role that it has now."""
    phase: Phase
    asked_s: float | None = None
    """When it was asked for, in seconds of the controller's clock; None: unknown."""
    ready_s: float | None = None
    """When it became ready for the first time; None: it is not ready, or this was not observed."""
    flips: bool = False
    """Whether it may take another role."""
    leaving: bool = False
    """Whether it drains or ends."""
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """Share of its KV blocks in use, 0 to 1."""
    because: str = ""
    """Why it is pending or failed."""

    def waited_s(self, now: float) -> float:
        """Seconds for which it has waited for a GPU; 0: it does not wait, or since when is unknown."""
        return now - self.asked_s if self.phase is Phase.PENDING and self.asked_s is not None else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One look at everything."""

    at_s: float
    routers: tuple[RouterCounts, ...]
    """Every router that is heard, and those that have left since the last look; empty: the registry could not be read,
    or no router is in it."""
    instances: tuple[InstanceSeen, ...] | None
    """None: the actuator could not say."""
    leads: bool = True
    """Whether this controller leads; one that does not only observes."""
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    """GPUs that other models' instances use, by type: the budget is of all models together."""


NO_COUNTS: Final = ClassCounts()
