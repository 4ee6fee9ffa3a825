"""Runs an agent's background work: heartbeats, readings of its engine, introductions, KV events. A shell: it waits and
logs.

Engine and agent serve on without any one of these. So a fault in one ends no other: it is logged, and the work begins
anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

logger = logging.getLogger("baton.agent")

AGAIN_S: Final = 1.0
"""Seconds until failed work begins anew. They double with each further failure. A name outlasts a few of them without a
heartbeat (`cluster.registry.membership.TTL_S`)."""
AGAIN_S_MAX: Final = 60.0
"""Seconds of the longest pause. Work that has run for as long as this is taken to be well again."""


async def keep_running(work: Callable[[], Awaitable[None]], name: str) -> None:
    """Run this work until it ends or is cancelled. If it fails, log why, and begin it anew after a pause. `name` is for
    the log.
    """
    loop = asyncio.get_running_loop()
    pause_s = AGAIN_S
    while True:
        began = loop.time()
        try:
            # Awaited here, in a task of its own: before Python 3.13 a failed TaskGroup leaves its task counted as
            # cancelled.
            return await asyncio.ensure_future(work())  # noqa: TID251
        except Exception:  # a bug: what else this agent does goes on
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # its clean-up failed: a cancelled work does not begin anew
            if loop.time() - began >= AGAIN_S_MAX:
                pause_s = AGAIN_S
            logger.exception("%s: a fault of the agent's; this work begins anew in %g s", name, pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, AGAIN_S_MAX)
