"""The process that simulates a fleet before an instance leaves it. `baton.scaling_check` starts it.

`python -m baton.scaling_simulation [compiled]`: one job on stdin, its verdict on stdout, an error on stderr.
Imports nothing that may be compiled before it knows whether to use compiled modules.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from typing import Final

from baton import compiled
from baton.packing import packed, unpacked

CPU_S: Final = 2
"""Most CPU seconds of the simulation. The process needs about one more to start."""
COMPILED: Final = "compiled"


def main() -> None:
    """Carry out one job. SIGXCPU ends the process after `CPU_S` seconds of CPU."""
    os.nice(10)
    if sys.argv[1:] == [COMPILED] and (because := compiled.use()):
        sys.exit(f"the compiled modules of its parent cannot be used: {because}")
    from sim.checked import checker

    members, goals, asked = unpacked(sys.stdin.buffer.read())
    limit = math.ceil(time.process_time()) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    sys.stdout.buffer.write(packed(checker(members, goals, next(iter(goals)))(asked)))


if __name__ == "__main__":
    main()
