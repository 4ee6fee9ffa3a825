"""A child's lifeline: its standard input, a pipe that its parent holds. When it ends, the parent is gone."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

from cluster.errors import UsageError

END_S = 7.0
"""Longest time of an orderly end after the parent is gone. Then the process ends at once: a killed `baton up` leaves
nothing behind after 10 s, whatever any library does with a cancelled task."""


def watch_lifeline(on_end: Callable[[], None]) -> None:
    """Call `on_end` when the parent is gone; `END_S` later end this process, if it still runs.

    Raises:
        UsageError: standard input is not a pipe.
    """
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if os.read(0, 4096):
            return
        loop.remove_reader(0)  # else it stays readable, and the loop spins
        timer = threading.Timer(END_S, os._exit, (1,))
        timer.daemon = True
        timer.start()
        on_end()

    try:
        loop.add_reader(0, readable)
    except OSError as error:
        raise UsageError("--lifeline: standard input must be a pipe that the parent holds") from error
