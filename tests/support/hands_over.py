"""Routers for tests of what becomes of a handoff: they hand over whenever they can.

By itself a router hands over only where that costs less than one instance (`router.scheduler.scoring.workload`), and
engines that compute in no time make that rare. A test of the default says `policy=POLICY`.
"""

from __future__ import annotations

import sys
from typing import Any, Final

ROUTER: Final = (
    *(sys.executable, "-m", "baton", "router", "--port", "0", "--admin-port", "0"),
    *("--pins", "--policy", "least_load"),
)
"""The command of such a router, on free ports; its engines pin what they hold (`--pins`)."""


def hands_over(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a router with such a policy, where they name none and promise nothing."""
    return settings if settings.get("classes") else {"policy": "least_load", **settings}
