"""`baton` with a script in place of the controller: first two instances, six after `UP_AT` requests, then two again.

`python -m support.scripted_up up FILE ...`. Other tests check the controller's decisions on virtual time; this program
is for tests of the processes.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from baton import compiled

compiled.use()  # before any compiled module is imported, as `baton` itself does

from support.scaling import Scripted  # noqa: E402 - see above

from baton import cli, scaling  # noqa: E402
from goodput.actuate.scaler import ScaledFleet  # noqa: E402
from goodput.observation import Observation, Phase  # noqa: E402

UP_AT = 10
"""After so many requests the script wants six instances."""

SERVED_LOOKS = int(os.environ.get("SCRIPT_LOOKS", "6"))
"""After so many looks with six ready instances the script wants two again. It looks twice a second."""


class Script:
    def __init__(self) -> None:
        self.looks = 0

    def __call__(self, seen: Observation) -> dict[str, int]:
        arrivals = sum(counts.arrivals for router in seen.routers for counts in router.classes.values())
        ready = [each for each in seen.instances or () if each.phase is Phase.READY]
        self.looks += len(ready) == 6
        count = 3 if arrivals >= UP_AT and self.looks < SERVED_LOOKS else 1
        return {"prefill": count, "decode": count}


def fleets_of(plan: Any) -> tuple[ScaledFleet, ...]:
    pools = {pool.name: (pool.role, pool.flips) for pools in plan.pools.values() for pool in pools}
    return (ScaledFleet(model="", pools=pools, machine=Scripted(Script(), every_s=0.5)),)


if __name__ == "__main__":
    scaling.fleets_of = fleets_of
    sys.exit(cli.main())
