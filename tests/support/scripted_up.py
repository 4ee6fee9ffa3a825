"""`baton`, with a script in the place of the controller: six instances while requests arrive, two before and after.

`python -m support.scripted_up up FILE ...`. How a controller decides is tested on virtual time; here are the processes.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from baton import compiled

compiled.use()  # before anything that is compiled is imported, as `baton` itself does

from support.scaling import Scripted  # noqa: E402 - see above

from baton import cli, scaling  # noqa: E402
from goodput.actuate.scaler import ScaledFleet  # noqa: E402
from goodput.observation import Observation, Phase  # noqa: E402

UP_AT = 10
"""Arrivals from which on six are wanted..."""

SERVED_LOOKS = int(os.environ.get("SCRIPT_LOOKS", "6"))
"""... until all of them have been ready for so many looks, two a second."""


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
