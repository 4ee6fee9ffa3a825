"""Routing policies: plain functions from a view of the fleet to a decision that says why.

Adding a policy is one function and one line in `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable

from router.journey import Chosen
from router.policy.candidates import Wanted
from router.policy.least_load import least_load
from router.view import InstanceView

Policy = Callable[[tuple[InstanceView, ...], Wanted], Chosen]

POLICIES: dict[str, Policy] = {"least_load": least_load}
"""Policies by the name used on the command line."""
