"""When a router looks for reference cycles: among few new objects at a time, and among older ones while it is idle.

Each look stops the event loop, for some 0.5 to 1 ms per 1,000 objects (measured under load: the objects are not in the
processor's caches). With 10,000 new objects a look, the loop stood still for 5 to 11 ms about every second and a half
at 1,000 requests a second. An object is looked at once while it is new, however many there are at a time. Finished
requests leave no cycles, so what is older can wait.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Final

YOUNG: Final = 500
"""New objects between two looks at the new ones."""

OLDER_IDLE: Final = 20
"""Looks at the new objects until the older ones are looked at, if no request is open."""
OLDER_BUSY: Final = 200
"""The same while requests are open."""
ALL_AFTER: Final = 10
"""Looks at the older objects until all objects are looked at."""

LOOK_S: Final = 1.0
_NEVER: Final = 1 << 30


def begin() -> None:
    """For this process and those that it forks: what exists now stays, and only new objects are looked at without
    being asked (`look_forever` asks).
    """
    gc.freeze()
    gc.set_threshold(YOUNG, _NEVER, _NEVER)


def older_look(young_looks: int, older_looks: int, *, idle: bool) -> int | None:
    """The generation to look at now; None: none.

    Args:
        young_looks: looks at the new objects since the last look at older ones.
        older_looks: looks at older objects since the last look at all.
        idle: no request is open.
    """
    if young_looks < (OLDER_IDLE if idle else OLDER_BUSY):
        return None
    return 2 if older_looks >= ALL_AFTER else 1


async def look_forever(idle: Callable[[], bool]) -> None:
    """Look at older objects when that is due; `idle`: whether no request is open."""
    while True:
        await asyncio.sleep(LOOK_S)
        _, young_looks, older_looks = gc.get_count()
        generation = older_look(young_looks, older_looks, idle=idle())
        if generation is not None:
            gc.collect(generation)
