"""Keeps a program's background work running: heartbeats, reading the registry, probes, KV events. A shell: it waits and
logs.

A program serves on without any one of these. So a fault in one ends no other: it is logged, and the work begins anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

AGAIN_S: Final = 1.0
"""Seconds until failed work begins anew. They double with each further failure. A name outlasts a few of them without a
heartbeat (`cluster.registry.membership.TTL_S`)."""
AGAIN_S_MAX: Final = 60.0
"""Seconds of the longest pause. Work that has run for as long as its longest pause is taken to be well again."""


def _never(_: Exception) -> bool:
    return False


async def keep_running(
    work: Callable[[], Awaitable[None]],
    name: str,
    logger: logging.Logger,
    *,
    pauses_s: tuple[float, float] | None = None,
    gives_up: Callable[[Exception], bool] = _never,
) -> None:
    """Run this work until it ends or is cancelled. If it fails, log why, and begin it anew after a pause.

    Args:
        work: begins the work.
        name: for the log.
        logger: the program's.
        pauses_s: seconds of the first and of the longest pause; None: `AGAIN_S` and `AGAIN_S_MAX`.
        gives_up: whether a failure is passed on to the caller instead.
    """
    loop = asyncio.get_running_loop()
    first_s, longest_s = pauses_s or (AGAIN_S, AGAIN_S_MAX)
    pause_s = first_s
    while True:
        began = loop.time()
        try:
            # Awaited here, in a task of its own: before Python 3.13 a failed TaskGroup leaves its task counted as
            # cancelled.
            return await asyncio.ensure_future(work())  # noqa: TID251
        except (Exception, asyncio.CancelledError) as error:  # a bug: what else this program does goes on
            # A cancellation without a request for one is a fault too: a library's time limit that came out wrong.
            task = asyncio.current_task()
            if (task is not None and task.cancelling()) or (isinstance(error, Exception) and gives_up(error)):
                raise  # if it was cancelled, its clean-up has failed: a cancelled work does not begin anew
            if loop.time() - began >= longest_s:
                pause_s = first_s
            logger.exception("%s: a fault of Baton's; this work begins anew in %g s", name, pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
