"""The controller's numbers, each with where it is from. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from goodput.actions import DRAIN_S
from goodput.budget import NO_BUDGET, Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRules:
    """What an operator may set."""

    budget: Budget = NO_BUDGET
    every_s: float = 3.0
    """Seconds between two looks …"""
    hurry_s: float = 1.0
    """… and while more prompts wait than instances compute: a burst is answered by a flip within seconds."""
    quantile: float = 0.75
    """Of the load's forecast, at which capacity is added. What a forecast misses is paid from the share of misses that
    `spent` leaves over."""
    keep_quantile: float = 0.95
    """Of the same, that the fleet without an instance must carry before that instance ends."""
    spent: float = 0.4
    """Share of the misses that the targets allow (5 of 100 at an attainment of 95 %) which a steady load may use
    up; the rest is for what no forecast says."""
    room: float = 0.05
    """An instance leaves only where the fleet without it would carry so much more than the forecast: the gap between
    the thresholds of up and down, three standard deviations of a level that is known from 3,600 arrivals."""
    flip_every_s: float = 5.0
    flip_back_s: float = 60.0
    """An instance keeps a role at least so long."""
    flips_hour: float = 0.75
    """For each instance of the fleet, at most: six an hour where there are eight. A load that goes on and off flips the
    same instances to and fro, and each flip costs a drain."""
    up_every_s: float = 5.0
    down_every_s: float = 15.0
    hold: float = 1.0
    """An instance must have been too many for so many start-up times before it leaves: to keep it that long costs what
    starting it again would (the rule for a ski that is rented or bought: at most twice the best that can be)."""
    hold_least_s: float = 45.0
    hold_most_s: float = 300.0
    drain_s: float = max(DRAIN_S, 120.0)
    """Time for an instance's requests to end before it is ended."""
    samples: int = 30
    """Arrivals without which nothing is decided."""
    answers: int = 20
    """Complete answers without which decode instances are left as they are."""
    pending_s: float = 90.0
    """An instance that waits longer for a GPU is cancelled …"""
    blocked_s: float = 300.0
    """… and its pool is not asked again for so long."""
    unseen_s: float = 30.0
    """An action whose effect is not seen after so long is taken to be lost."""
    manual_s: float = 1800.0
    """How long a fleet is left as an operator has resized it."""
    clear_s: float = 90.0
    """Prompts that wait are to be computed after so long, where instances are to be started for it …"""
    flip_clear_s: float = 20.0
    """… and where instances only have to take another role, which they can give back a minute later."""
    dry: bool = False
    """Decide, and carry nothing out."""
    checks: bool = False
    """Whether an instance leaves only once a simulation of recent requests has agreed (`goodput.decision.Check`)."""
    holds: frozenset[str] = field(default_factory=frozenset)
    """Pools that are left alone."""
