"""Settings of routers that hand over whenever they can, for tests of hand-overs.

By default a router hands over only where that costs less than one instance (`router.scheduler.scoring.workload`). That
is rare with engines that compute in no time. A test of the default passes `policy=POLICY`.
"""

from __future__ import annotations

import sys
from typing import Any, Final

ROUTER: Final = (
    *(sys.executable, "-m", "baton", "router", "--port", "0", "--admin-port", "0"),
    *("--pins", "--policy", "least_load"),
)
"""The command of such a router, on free ports. `--pins`: its engines can be told an answer's first token."""


def hands_over(settings: dict[str, Any]) -> dict[str, Any]:
    """These settings, with such a policy added if they have no `policy` and no service levels (`classes`)."""
    return settings if settings.get("classes") else {"policy": "least_load", **settings}
