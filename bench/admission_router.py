"""`baton router` without the two rules that `bench.admission` measures: margins stay the widest, and answers that a
prompt makes late count once.

python -m bench.admission_router router …        with the words of `baton router`
"""

from __future__ import annotations

import sys
from typing import Any

from baton import cli, compiled


def main() -> int:
    """Run the command line; routers that it starts have no rules."""
    # When it is known whether compiled modules are used.
    from router.api import server  # noqa: PLC0415
    from sim.experiments.overload import without_rules  # noqa: PLC0415

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
