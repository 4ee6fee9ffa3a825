"""`baton` with a router that hands over wherever a pair can serve: the policy `workload` with a low price for pairs.

`python -m support.pairs_only router FLAGS`. With the model that ships, `workload` itself usually chooses one instance.
"""

from __future__ import annotations

import sys

from baton import compiled

compiled.use()  # before any compiled module is imported, as `baton` itself does

from baton import cli  # noqa: E402 - see above
from router.api import server  # noqa: E402
from router.core.journey import Chosen  # noqa: E402
from router.core.values import Wanted  # noqa: E402
from router.fleet.snapshot import FleetSnapshot  # noqa: E402
from router.scheduler.scoring.policies import POLICIES  # noqa: E402
from router.scheduler.scoring.workload import weighed  # noqa: E402

PAIRS = -0.99
"""What a pair's price counts for, less one."""


def pairs_only(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """Choose the cheapest pair; choose one instance only where no pair can serve."""
    return weighed(fleet, wanted, PAIRS, PAIRS)


if __name__ == "__main__":
    POLICIES["workload"] = pairs_only
    vars(server)["FORESEEING"] = frozenset({pairs_only})
    sys.exit(cli.main())
