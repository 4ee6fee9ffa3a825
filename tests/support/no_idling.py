"""Lets a running event loop skip idle time: while nothing arrives, the loop's clock jumps to the next timer.

For tests whose clients and servers run in one process and talk over loopback. Written bytes can be read at once, so if
there is nothing to read, the next event is a timer. The clock does not jump while a thread of the loop's pool is busy:
that work takes real time.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

GRACE_S = 0.0005
"""For how many real seconds nothing may arrive before the loop's clock jumps."""


class _Impatient:
    """A selector that waits at most `GRACE_S`, and lets the clock jump over the rest of the time."""

    def __init__(self, real: selectors.BaseSelector, skip: Callable[[float], bool]) -> None:
        self._real, self._skip = real, skip

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= GRACE_S:
            return self._real.select(timeout)
        found = self._real.select(GRACE_S)
        if found or self._skip(timeout):
            return found
        return self._real.select(timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextmanager
def no_idling() -> Iterator[Callable[[], float]]:
    """Let the running loop jump over idle time. Yields a function that returns Unix time by the same clock.

    Raises:
        TypeError: the loop has no selector that could be replaced.
    """
    loop: Any = asyncio.get_running_loop()
    if not isinstance(loop, asyncio.SelectorEventLoop):
        raise TypeError(f"{type(loop).__name__} is no loop of asyncio's own")
    skipped, busy = [0.0], [0]
    real_selector, real_time, real_run = loop._selector, loop.time, loop.run_in_executor

    def skip(wait_s: float) -> bool:
        if busy[0]:
            return False
        skipped[0] += wait_s
        return True

    def run_in_executor(executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = real_run(executor, func, *args)
        busy[0] += 1
        future.add_done_callback(lambda _: busy.__setitem__(0, busy[0] - 1))
        return future

    loop._selector = _Impatient(real_selector, skip)
    loop.time = lambda: real_time() + skipped[0]
    loop.run_in_executor = run_in_executor
    try:
        yield lambda: time.time() + skipped[0]
    finally:  # the clock stays ahead, since pending timers were set by it
        loop._selector = real_selector
        loop.run_in_executor = real_run
