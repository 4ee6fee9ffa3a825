"""A run is the same byte for byte in another process, although hashes and the orders of sets differ there.

This file is also the program that these processes run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.simulated import every, members

from cluster.instance import Role
from router.core.values import Promise
from router.fleet import events as d
from router.fleet.view import FleetView
from router.scheduler.decision_log import DecisionLog
from router.scheduler.scoring.policies import POLICIES
from sim.faults import Faults, preset
from sim.settings import SimSettings
from sim.world import World

SEEDS = (1, 5)
"""Seeds of Python's hashes. In this run, a set of the two instances at which a request failed has another order with
each."""


def run() -> tuple[bytes, bytes]:
    """A run whose engines die, restart and are cut off, so that some requests fail at several engines. The router does
    not know their costs. Returns the decision log and the result's rows.
    """
    lines: list[bytes] = []
    log = DecisionLog(lines.append, "workload")
    roles = [Role.PREFILL] * 3 + [Role.DECODE] * 3 + [Role.BOTH] * 2
    instances = members(*roles, start_up_ns=2_000_000_000, config={"lease_s": 3.0, "num_blocks": 400})
    world = World(
        instances,
        SimSettings(first_token_s=20.0, stall_s=2.0, greedy=True),
        policy=POLICIES["workload"],
        promises={"": Promise(ttft_ms=60.0, tpot_ms=6.0)},
        log=log,
        view=FleetView(lambda _: None),
    )
    arrivals = [*every(0.001, 400)]
    Faults(world, preset("chaos", 3, [each.name for each in instances], arrivals[-1].at_s), 3)
    result = world.run(arrivals)
    return b"".join(lines), result.columns.tobytes()


def _in_a_process(seed: int) -> tuple[bytes, bytes]:
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, timeout=60, check=True, env=environ)
    log, _, rows = done.stdout.partition(b"\n\n")
    return log, rows


def test_a_run_is_the_same_byte_for_byte_in_every_process() -> None:
    log, rows = _in_a_process(SEEDS[0])
    asked = [entry for entry in map(d.entry_of, log.splitlines()) if isinstance(entry, d.Asked)]
    assert any(len(entry.effect.excluded) > 1 for entry in asked)  # a set that has several orders
    assert _in_a_process(SEEDS[1]) == (log, rows)


if __name__ == "__main__":
    sys.stdout.buffer.write(b"\n".join(run()))
