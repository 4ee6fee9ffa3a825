"""Routing policies: plain functions from a view of the fleet to a decision with its reason.

A new policy is one function and one line in `POLICIES`. A policy reads the fleet's columns and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.scheduler.scoring.least_load import least_load
from router.scheduler.scoring.workload import workload

Policy = Callable[[FleetSnapshot, Wanted], Chosen]

POLICIES: dict[str, Policy] = {"least_load": least_load, "workload": workload}
"""Policies by their names on the command line."""

FORESEEING: frozenset[Policy] = frozenset({workload})
"""Policies that read the load in flight (`FleetSnapshot.inflight`). Keeping it costs some 50 µs a request; the other
policies do not use it."""
