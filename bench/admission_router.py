"""`baton router` without the two rules that `bench.admission` measures: margins stay the widest, and answers that a
prompt makes late count once.

python -m bench.admission_router router …        with the words of `baton router`
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from baton import cli, compiled

if TYPE_CHECKING:
    from router.scheduler.scheduler import Scheduler


def without_rules(scheduler: Scheduler) -> None:
    """Take both rules from a scheduler, as `sim.experiments.overload.run` does."""
    inflight = scheduler.view.all().inflight
    inflight.margins.shed.step = inflight.first_margins.step = 0.0
    scheduler.scoring.shed_weight = 1.0


def main() -> int:
    """Run the command line; routers that it starts have no rules."""
    from router.api import server  # noqa: PLC0415 - when it is known whether compiled modules are used

    made = vars(server)["scheduler_of"]

    def scheduler_of(*args: Any, **settings: Any) -> Any:
        scheduler, scheduling = made(*args, **settings)
        without_rules(scheduler)
        return scheduler, scheduling

    vars(server)["scheduler_of"] = scheduler_of
    return cli.main()


if __name__ == "__main__":
    compiled.use()
    sys.exit(main())
