"""When a router looks for reference cycles: the generation that is due, and an idle router's look frees a cycle."""

from __future__ import annotations

import subprocess
import sys

import pytest

from router.api.reference_cycles import ALL_AFTER, OLDER_BUSY, OLDER_IDLE, older_look


@pytest.mark.parametrize(
    ("young", "older", "idle", "due"),
    [
        (OLDER_IDLE - 1, ALL_AFTER, True, None),
        (OLDER_IDLE, 0, True, 1),
        (OLDER_IDLE, ALL_AFTER, True, 2),
        (OLDER_BUSY - 1, ALL_AFTER, False, None),
        (OLDER_BUSY, 0, False, 1),
        (OLDER_BUSY, ALL_AFTER, False, 2),
    ],
)
def test_older_objects_wait_for_an_idle_moment_but_not_for_ever(
    young: int, older: int, idle: bool, due: int | None
) -> None:
    assert older_look(young, older, idle=idle) == due


IN_A_PROCESS = """
import asyncio, gc, weakref
from router.api import reference_cycles

class Cycle:
    pass

async def main():
    reference_cycles.begin()
    reference_cycles.LOOK_S = 0.001
    one = Cycle()
    one.self, gone = one, weakref.ref(one)
    kept = [[] for _ in range(40 * reference_cycles.YOUNG)]  # looked at while `one` is in use: it is older now
    del one
    assert gone() is not None
    assert gc.get_count()[1] >= reference_cycles.OLDER_IDLE and gc.get_count()[2] == 0
    looks = asyncio.ensure_future(reference_cycles.look_forever(lambda: True))
    while gone() is not None:
        await asyncio.sleep(0.001)
    looks.cancel()
    print("freed", len(kept))

asyncio.run(asyncio.wait_for(main(), 20))
"""


def test_a_cycle_that_has_become_old_is_freed_while_the_router_is_idle() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("freed"), done.stderr
