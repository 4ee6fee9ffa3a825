"""The controller's events, effects and decisions. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cluster.instance import Role
from goodput.actions import Action
from goodput.demand import ClassPromise
from goodput.observation import Observation
from goodput.sizing import RecentLengths


@dataclass(frozen=True, slots=True)
class Observed:
    """One look at routers and instances."""

    seen: Observation


@dataclass(frozen=True, slots=True)
class Answered:
    """The actuator's answer to an action: an empty text, or why it is not carried out."""

    action: Action
    refusal: str
    unsure: bool = False
    """No answer came in time: the action may be under way all the same."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a `Check`."""

    number: int
    holds: bool | None
    """Whether the fleet meets its targets; None: no verdict in time, so the formulas decide."""
    because: str = ""


@dataclass(frozen=True, slots=True)
class Resize:
    """An operator wants so many instances of a role; None: the controller decides again."""

    role: Role
    count: int | None
    who: str = "an operator"


@dataclass(frozen=True, slots=True)
class Pause:
    """An operator stops the controller, or lets it go on. A paused controller goes on observing and acts on nothing."""

    paused: bool
    who: str = "an operator"


@dataclass(frozen=True, slots=True)
class Renewed:
    """The cluster file was edited: its classes have these targets from now on."""

    promises: Mapping[str, ClassPromise]
    """By class."""


Event = Observed | Answered | Checked | Resize | Pause | Renewed


class What(StrEnum):
    """The kinds of decisions."""

    HOLD = "hold"
    FLIP = "flip"
    UP = "up"
    DOWN = "down"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one role needs, and what it has."""

    now: int
    """Instances that the present load needs."""
    ahead: int
    """Instances that the forecast load needs by the time that an instance started now serves."""
    keep: int
    """Instances below which none may end."""
    have: float
    """Instances that exist or start, in instances of the preferred pool."""
    ready: float
    """Those of them that serve now, in the same unit."""
    because: str = ""
    """The term that decides on `ahead`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision with its reasons, for the log, `GET /scaling` and the metrics."""

    at_s: float
    what: What
    because: str
    actions: tuple[Action, ...] = ()
    needs: Mapping[Role, Need] = field(default_factory=dict)
    rate: float | None = None
    """Arrivals a second now."""
    expected: float | None = None
    """Forecast arrivals a second after `horizon_s`, at the quantile that adds capacity."""
    forecaster: str = ""
    horizon_s: float = 0.0
    """Seconds that a start takes, until its instance serves."""
    conditions: tuple[str, ...] = ()
    """What prevents a change: no GPU, a budget, missing metrics."""
    dry: bool = False
    """Whether the actions are not carried out: a dry run, a pause, or another controller leads."""


@dataclass(frozen=True, slots=True)
class Act:
    """Give this action to the actuator; its answer comes back as `Answered`."""

    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Simulate this fleet on requests like recent ones, in at most 2 CPU seconds; the verdict comes back as `Checked`.
    Requests are drawn from the distributions that routers publish.
    """

    number: int
    fleet: Mapping[str, Mapping[Role, int]]
    """Instances by pool and role."""
    rate: float
    """Requests a second for which capacity is kept."""
    lengths: Mapping[str, RecentLengths]
    """By class."""
    dispersion: float
    """Variance over mean of arrivals in a bin."""
    because: str


@dataclass(frozen=True, slots=True)
class Told:
    """Keep this decision for people."""

    decision: Decision


Effect = Act | Check | Told
