"""A driver's connection to a Ray cluster: each call to Ray runs in a thread of its own, with a deadline. A shell."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

from cluster.errors import UsageError
from goodput.actuate.protocol import Unobservable

logger = logging.getLogger("baton.controller")

INSTALL: Final = "pip install 'baton-serve[ray]'"
CONNECT_TRIES: Final = 6
CONNECT_AGAIN_S: Final = 1.0
"""Seconds between two tries. The server for clients (`ray://`) of a Ray head forks a process for each client. With Ray
2.60 on two cores that process died before its first line in two of four starts ("Initialization failure from server");
the next try succeeded."""

CALL_S: Final = 2.0
"""Longest wait for the answers of all actors at one look, in seconds; Ray's own tables answer in milliseconds."""

CLOSE_S: Final = 5.0
"""Longest wait for Ray at this process' end, in seconds."""

T = TypeVar("T")


class _Work(Generic[T]):
    """A call for Ray's thread, and its result."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Final = work
        self.result: Final[Future[T]] = Future()

    def do(self) -> None:
        """Make the call, unless its result is not wanted any more."""
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self._work())
        except BaseException as error:  # noqa: BLE001 - `call` raises it
            self.result.set_exception(error)


class RayConnection:
    """Joins a Ray cluster, and runs work in the thread that has joined it."""

    def __init__(self, address: str, namespace: str) -> None:
        """`address`: ``auto`` for the Ray cluster that this machine is part of, or ``ray://HOST:PORT``."""
        self._address: Final = address
        self._namespace: Final = namespace
        self._works: Final[SimpleQueue[_Work[Any] | None]] = SimpleQueue()
        # Not an executor's: the interpreter waits for such threads at its end, and a call to Ray may never return.
        self._thread: Final = threading.Thread(target=self._run, name="ray", daemon=True)
        self._joined = False
        self._thread.start()

    async def connect(self) -> None:
        """Join the Ray cluster.

        Raises:
            UsageError: Ray is not installed, or no cluster answers there.
        """
        try:
            import ray  # noqa: F401 - only whether it is there
        except ImportError:
            raise UsageError(f"--on ray: Ray is not installed in this Python: {INSTALL}") from None
        try:
            await self.call(self._init, within_s=60.0)
        except Unobservable as error:
            raise UsageError(
                f"--on ray: no Ray cluster at {self._address} ({error}); start one with `ray start --head`, "
                "or name it: --on ray://HOST:10001"
            ) from None

    def _init(self) -> None:
        for left in reversed(range(CONNECT_TRIES)):
            try:
                return self._join()
            except ConnectionAbortedError as error:
                if not left:
                    raise
                logger.warning("ray: %s; trying again", str(error).strip().partition("\n")[0].rstrip(":"))
                self._shutdown()
                time.sleep(CONNECT_AGAIN_S)
        raise AssertionError("unreachable")

    def _join(self) -> None:
        import ray

        ray.init(
            address=self._address,
            namespace=self._namespace,
            log_to_driver=False,
            ignore_reinit_error=True,
            configure_logging=False,
        )
        self._joined = True

    def close(self) -> None:
        """Leave the Ray cluster; instances go on. A call that hangs is waited for for `CLOSE_S`."""
        self._works.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work.do()
        if self._joined:
            self._shutdown()

    @staticmethod
    def _shutdown() -> None:
        import ray

        ray.shutdown()

    async def call(self, work: Callable[[], T], within_s: float = 2 * CALL_S) -> T:
        """Run `work` in Ray's thread, within `within_s` seconds.

        Raises:
            Unobservable: Ray does not answer in time, or `work` raised an error.
            UsageError: as `work` raised it.
        """
        asked = _Work(work)
        self._works.put(asked)
        try:
            async with asyncio.timeout(within_s):
                return await asyncio.wrap_future(asked.result)
        except TimeoutError:
            raise Unobservable(f"Ray does not answer within {within_s:g} s") from None
        except UsageError:
            raise
        except Exception as error:  # Ray raises errors of many libraries; each of them holds the fleet
            first = str(error).strip().partition("\n")[0]
            raise Unobservable(f"Ray: {type(error).__name__}: {first[:200]}") from error
