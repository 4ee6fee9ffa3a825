"""SIGINT and SIGTERM of a server: they ask it to stop, and cannot turn an orderly end into a killed process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Final

STOPPING: Final = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stopping_signals(ask: Callable[[], None]) -> Iterator[None]:
    """In this block, each SIGINT or SIGTERM calls `ask` in the running loop; after it both are ignored.

    After the block a process only ends, and its result is known: `ask` may have been called twice, and a third signal
    would turn the exit code into 143 although nothing was lost. (A closing loop of asyncio sets both signals to their
    defaults until the interpreter's end; a closing uvloop leaves them alone.) Enter it on the main thread; nothing may
    be started after it.
    """
    loop = asyncio.get_running_loop()
    for number in STOPPING:
        loop.add_signal_handler(number, ask)
    try:
        yield
    finally:
        ignore_stopping_signals()
        if isinstance(loop, asyncio.SelectorEventLoop):  # its close() would undo the handlers
            for number in STOPPING:
                loop.remove_signal_handler(number)
            ignore_stopping_signals()


def end_in_order() -> None:
    """Until `stopping_signals`, let SIGTERM end this process as an exception does: what was begun is cleaned up, such
    as a folder with a password.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def ignore_stopping_signals() -> None:
    """Ignore SIGINT and SIGTERM: from here on the process only ends."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
