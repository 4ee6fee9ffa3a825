"""`baton` with a router that hands over wherever a pair can serve: the policy `workload` with a low price for pairs.

    python -m bench.pairs_router router FLAGS            it chooses between early legs and pulls, as it starts
    python -m bench.pairs_router early router FLAGS      each leg that could be early is; `pull`: none is

With the model that ships, `workload` itself usually chooses one instance. The two forced ways run interpreted
(``BATON_COMPILED=0``), as they replace what the scheduler has found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from baton import compiled

compiled.use()  # before any compiled module is imported, as `baton` itself does

from baton import cli  # noqa: E402 - see above
from cluster.ids import InstanceId  # noqa: E402
from router.api import server  # noqa: E402
from router.core.journey import Chosen  # noqa: E402
from router.core.values import Wanted  # noqa: E402
from router.fleet.snapshot import FleetSnapshot  # noqa: E402
from router.predict.early_cost import LegChoice  # noqa: E402
from router.scheduler import scheduler  # noqa: E402
from router.scheduler.scoring.policies import POLICIES  # noqa: E402
from router.scheduler.scoring.workload import weighed  # noqa: E402

PAIRS: Final = -0.99
"""What a pair's price counts for, less one."""
FORCED: Final = ("early", "pull")


def pairs_only(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """Choose the cheapest pair; choose one instance only where no pair can serve."""
    return weighed(fleet, wanted, PAIRS, PAIRS)


class OneWay:
    """In place of `router.predict.early_cost.EarlyLegCosts`: always the same answer."""

    def __init__(self, way: str) -> None:
        self.early: Final = way == "early"
        self.pulled: Final[dict[str, int]] = {}

    def choose(self, prefill: InstanceId, due_s: float, *, near: bool, queued: bool, counts: bool) -> LegChoice:
        """As `EarlyLegCosts.choose`."""
        return LegChoice(self.early, "", None)

    def forget(self, knows: Callable[[InstanceId], bool]) -> None:
        """It has found nothing."""

    def found(self) -> Iterator[tuple[InstanceId, bool, bool, float]]:
        """It has found nothing."""
        return iter(())


def main(words: Sequence[str]) -> int:
    """`baton` with these words, but for a first one that forces a way."""
    POLICIES["workload"] = pairs_only
    vars(server)["FORESEEING"] = frozenset({pairs_only})
    if words[0] in FORCED:
        if compiled.in_use():
            raise SystemExit(f"{words[0]}: what is compiled cannot be replaced; set {compiled.OFF}=0")
        vars(scheduler)["EarlyLegCosts"] = partial(OneWay, words[0])
        words = words[1:]
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
