"""The controller's thresholds and times, each with its reason. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from goodput.actions import DRAIN_S
from goodput.budget import NO_BUDGET, Budget

START_MAX_S: Final = 1800.0
"""How long an agent lets its engine start: the default of `baton engine --start-timeout` and `kubernetes.start_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRules:
    """What an operator may set. It has many attributes: each number of the controller's rules can be set by itself.

    Names that end in `_s` are in seconds.
    """

    budget: Budget = NO_BUDGET
    every_s: float = 3.0
    """Seconds between two looks …"""
    hurry_s: float = 1.0
    """… and between two looks while more prompts wait than instances compute: a burst needs a flip within seconds."""
    quantile: float = 0.75
    """Quantile of the load's forecast at which capacity is added. Loads above it cost misses, from the share that
    `spent` leaves over."""
    keep_quantile: float = 0.95
    """Quantile of the same forecast that the fleet without an instance must carry before that instance ends."""
    spent: float = 0.4
    """Part of the misses that the targets allow (5 of 100 at an attainment of 95 %) which a steady load may use up; the
    rest is for changes that no forecast foresees."""
    room: float = 0.05
    """An instance ends only if the fleet without it would carry the forecast and this share more: the gap between the
    thresholds of up and down, three standard deviations of a level that is known from 3,600 arrivals."""
    flip_every_s: float = 5.0
    """Least time between two flips."""
    flip_back_s: float = 60.0
    """Least time for which an instance keeps a role."""
    flips_hour: float = 0.75
    """Most flips an hour, for each instance of the fleet: six with eight instances, and always two. A load that goes
    on and off flips the same instances to and fro, and each flip costs a drain."""
    up_every_s: float = 5.0
    """Least time between two decisions to start."""
    down_every_s: float = 15.0
    """Least time between two ends."""
    hold: float = 1.0
    """Start-up times for which an instance must have been superfluous before it ends. To keep it that long costs as
    much as to start it again (the ski-rental rule: at most twice the cost of the best decision in hindsight)."""
    hold_least_s: float = 45.0
    """Lower bound of that time."""
    hold_most_s: float = 300.0
    """Upper bound of that time."""
    drain_s: float = max(DRAIN_S, 120.0)
    """Time that an instance's requests have to end before it is ended."""
    samples: int = 30
    """Arrivals that must have been counted before anything is decided from the load."""
    answers: int = 20
    """Complete answers that must have been counted before anything is decided from the load."""
    pending_s: float = 90.0
    """An instance that waits longer for a GPU is cancelled …"""
    node_s: float = 900.0
    """… after this time if its role has no other pool: a cluster that adds nodes takes minutes for one."""
    blocked_s: float = 300.0
    """The pool of a cancelled instance gets no other start for so long."""
    start_max_s: float = START_MAX_S
    """An instance that starts for longer is cancelled: the limit of its own agent (`baton engine --start-timeout`)."""
    unseen_s: float = 30.0
    """An action whose effect is not observed after so long is taken to be lost."""
    manual_s: float = 1800.0
    """How long a role keeps a size that was changed by hand, without an order (`goodput.manual`)."""
    clear_s: float = 90.0
    """Time in which waiting prompts are to be computed if instances have to be started for it …"""
    flip_clear_s: float = 20.0
    """… and if instances only have to take another role, which they can give back a minute later."""
    dry: bool = False
    """Decide, and carry nothing out."""
    checks: bool = False
    """Whether an instance leaves only once a simulation of recent requests has agreed (`goodput.decision.Check`)."""
    holds: frozenset[str] = field(default_factory=frozenset)
    """Pools in which no instance is started, flipped or ended, except to fill their `min`."""
