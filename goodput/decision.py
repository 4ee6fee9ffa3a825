"""What goes into the controller and what comes out: events, effects, decisions. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cluster.instance import Role
from goodput.actions import Action
from goodput.observation import Observation
from goodput.sizing import RecentLengths


@dataclass(frozen=True, slots=True)
class Observed:
    """One look at routers and instances."""

    seen: Observation


@dataclass(frozen=True, slots=True)
class Answered:
    """What the actuator says of an action: an empty text, or why it is not carried out."""

    action: Action
    refusal: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a `Check`."""

    number: int
    holds: bool | None
    """None: it could not be told in its time. The bounds decide then."""
    because: str = ""


@dataclass(frozen=True, slots=True)
class Resize:
    """An operator wants so many instances of a role; None: the controller decides again."""

    role: Role
    count: int | None
    who: str = "an operator"


@dataclass(frozen=True, slots=True)
class Pause:
    """An operator stops the controller, or lets it go on. A paused one goes on to look, and does nothing."""

    paused: bool
    who: str = "an operator"


Event = Observed | Answered | Checked | Resize | Pause


class What(StrEnum):
    """The kinds of decisions."""

    HOLD = "hold"
    FLIP = "flip"
    UP = "up"
    DOWN = "down"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Of one role."""

    now: int
    """Instances that the present load needs."""
    ahead: int
    """Instances that the forecast load needs by the time that an instance started now serves."""
    keep: int
    """Instances below which none may end."""
    have: float
    """Instances that exist or start, in instances of the preferred pool."""
    ready: float
    because: str = ""
    """Which term says `ahead`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision with its reasons: what the log, `explain` and the metrics are made of."""

    at_s: float
    what: What
    because: str
    actions: tuple[Action, ...] = ()
    needs: Mapping[Role, Need] = field(default_factory=dict)
    rate: float | None = None
    """Arrivals a second now."""
    expected: float | None = None
    """The quantile after the start-up time."""
    forecaster: str = ""
    horizon_s: float = 0.0
    conditions: tuple[str, ...] = ()
    """What prevents a change: no GPU, a budget, missing metrics."""
    dry: bool = False


@dataclass(frozen=True, slots=True)
class Act:
    """To be given to the actuator; its answer comes back as `Answered`."""

    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Simulate this fleet on requests like recent ones, in at most 2 CPU seconds; the verdict comes back as `Checked`.
    Routers publish distributions, no single requests: these are to be drawn from.
    """

    number: int
    fleet: Mapping[str, Mapping[Role, int]]
    """Instances by pool and role."""
    rate: float
    """Requests a second: what capacity is kept for."""
    lengths: Mapping[str, RecentLengths]
    """By class."""
    dispersion: float
    because: str


@dataclass(frozen=True, slots=True)
class Told:
    """A decision for the log."""

    decision: Decision


Effect = Act | Check | Told
