"""Runs simulations in parallel: in processes of this machine, or on a Ray cluster. The results are the same.

A `Fanout` runs calls of module-level functions, each with one large *context* that is sent once, and returns their
results. `in_order` runs a search with it. The search gets results in the order in which one process alone would get
them, so that neither the number of processes nor their speed changes an answer. Tasks that run ahead of that order are
guesses, and are thrown away if the search does not want them.

Processes are forked: the context costs nothing, a task costs 0.3 to 0.9 ms. Ray costs 0.9 to 1.9 ms a task, and the
context is sent once to each node and unpacked once in each of its processes. The task of a process that dies is run
again, on both; if it dies again after `RETRIES` more tries, the search ends with a UsageError.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Final, Generic, Protocol, TypeVar

from cluster.errors import UsageError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
K = TypeVar("K", bound=Hashable)

RETRIES: Final = 3
"""How often the task of a dead process is run again. More deaths have a cause that stays, such as too little memory."""


class Pending(Protocol[T_co]):
    """A submitted task."""

    def result(self) -> T_co:
        """Wait for the result.

        Raises:
            UsageError: every process that tried it died, or Ray cannot run it.
        """
        ...

    def cancel(self) -> bool:
        """Give the result up. True: the task had not begun, and will not run."""
        ...


class Fanout(Protocol):
    """Runs tasks in other processes, each with the same context."""

    @property
    def width(self) -> int:
        """How many tasks run at a time."""
        ...

    def submit(self, call: Callable[..., T], *args: Any) -> Pending[T]:
        """Run `call(context, *args)`; both must pickle.

        Raises:
            whatever the call raises, from `Pending.result`.
        """
        ...

    def close(self, *, at_once: bool = False) -> None:
        """Take no more tasks. Tasks that run are waited for; `at_once` ends them."""
        ...


Search = Generator[Sequence[K], T, None]
"""Yields the keys of tasks that it would try, most wanted first; then gets the result of the first, by `send`."""


def in_order(fanout: Fanout, search: Search[K, T], start: Callable[[K], Pending[T]], seen: Callable[[], None]) -> None:
    """Run a search to its end.

    Args:
        fanout: says how many tasks run at a time.
        search: yields keys of tasks.
        start: submits the task of a key.
        seen: called after each result that the search got.

    Raises:
        UsageError: a task cannot be run (`Pending.result`).
    """
    running: dict[K, Pending[T]] = {}
    try:
        todo = next(search)
        while True:
            for key in set(running).difference(todo):
                if running[key].cancel():
                    del running[key]
            for key in todo[: fanout.width]:
                if key not in running:
                    running[key] = start(key)
            todo = search.send(running.pop(todo[0]).result())
            seen()
    except StopIteration:
        return


@contextlib.contextmanager
def opened(context: Any, *, on: str | None = None, processes: int | None = None) -> Iterator[Fanout]:
    """Runs tasks for as long as the block lasts. If an exception leaves the block, running tasks are ended.

    Args:
        context: first argument of every call.
        on: None: this machine; `ray`: the cluster that this machine is part of; `ray://HOST:PORT`: Ray's client.
        processes: on this machine; None: one a core.

    Raises:
        UsageError: there is no such cluster, or no Ray.
    """
    fanout = _opened(context, on, processes)
    try:
        yield fanout
    except BaseException:  # an interrupt too: no task runs on
        fanout.close(at_once=True)
        raise
    fanout.close()


def _opened(context: Any, on: str | None, processes: int | None) -> Fanout:
    if on is None:
        return ForkedProcesses(context, processes)
    from baton.fanout_ray import RayCluster

    return RayCluster(context, on)


# --- processes of this machine ----------------------------------------------------------------------------------------

_context: list[Any] = []
"""The context of this worker process, alone in a list; empty in the parent."""


def _begin(context: Any) -> None:
    """Set the signals and the context of a new process. The parent handles Ctrl-C. SIGTERM ends this process.

    A fork inherits the parent's handling of SIGTERM: a wake-up of an event loop that does not run here, or SIG_IGN if
    the parent is ending. Either would keep this process alive.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _context[:] = [context]


def _here(call: Callable[..., T], args: tuple[Any, ...]) -> T:
    """One task, in a worker process."""
    return call(_context[0], *args)


class ForkedProcesses:
    """Processes forked from this one."""

    def __init__(self, context: Any, count: int | None = None) -> None:
        self.width: Final = count or max(1, len(os.sched_getaffinity(0)))
        self._given: Final = context
        self._pool = self._opened()

    def _opened(self) -> ProcessPoolExecutor:
        fork = multiprocessing.get_context("fork")
        return ProcessPoolExecutor(self.width, mp_context=fork, initializer=_begin, initargs=(self._given,))

    def submit(self, call: Callable[..., T], *args: Any) -> Pending[T]:
        """As `Fanout.submit`."""
        return _LocalTask(self, call, args)

    def start(self, call: Callable[..., T], args: tuple[Any, ...]) -> tuple[ProcessPoolExecutor, Future[T]]:
        """Submit a task to the pool; to a new pool if a process of the last one died. Returns the pool that took it."""
        try:
            return self._pool, self._pool.submit(_here, call, args)
        except BrokenProcessPool:
            self.replace(self._pool)
            return self._pool, self._pool.submit(_here, call, args)

    def replace(self, broken: ProcessPoolExecutor) -> None:
        """Replace a broken pool once, however many tasks it had."""
        if broken is self._pool:
            broken.shutdown(wait=False, cancel_futures=True)
            self._pool = self._opened()

    def close(self, *, at_once: bool = False) -> None:
        """As `Fanout.close`."""
        children = list((self._pool._processes or {}).values())  # noqa: SLF001 - a task may take minutes
        self._pool.shutdown(wait=not at_once, cancel_futures=True)
        for child in children if at_once else ():
            child.terminate()


class _LocalTask(Generic[T]):
    """One task on this machine."""

    def __init__(self, owner: ForkedProcesses, call: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._owner: Final = owner
        self._call: Final = call
        self._args: Final = args
        self._pool, self._future = owner.start(call, args)

    def result(self) -> T:
        """As `Pending.result`."""
        for _ in range(RETRIES):
            try:
                return self._future.result()
            except (BrokenProcessPool, CancelledError):
                self._owner.replace(self._pool)
                self._pool, self._future = self._owner.start(self._call, self._args)
        try:
            return self._future.result()
        except (BrokenProcessPool, CancelledError):
            raise UsageError(_DIED.format(1 + RETRIES)) from None

    def cancel(self) -> bool:
        """As `Pending.cancel`."""
        return self._future.cancel()


_DIED: Final = (
    "{} processes died, one after the other, that simulated the same fleet: memory may be too small; "
    "try fewer at a time (--processes) or fewer requests"
)
