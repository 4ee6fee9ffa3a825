"""A driver's connection to a Ray cluster: each call to Ray runs in a thread of its own, with a deadline. A shell."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

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

T = TypeVar("T")


class RayConnection:
    """Joins a Ray cluster, and runs work in the thread that has joined it."""

    def __init__(self, address: str, namespace: str) -> None:
        """`address`: ``auto`` for the Ray cluster that this machine is part of, or ``ray://HOST:PORT``."""
        self._address: Final = address
        self._namespace: Final = namespace
        self._thread: Final = ThreadPoolExecutor(1, thread_name_prefix="ray")

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

    def close(self) -> None:
        """Leave the Ray cluster; instances go on."""
        self._thread.submit(self._shutdown)
        self._thread.shutdown(wait=True)

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
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(within_s):
                return await loop.run_in_executor(self._thread, work)
        except TimeoutError:
            raise Unobservable(f"Ray does not answer within {within_s:g} s") from None
        except UsageError:
            raise
        except Exception as error:  # Ray raises errors of many libraries; each of them holds the fleet
            first = str(error).strip().partition("\n")[0]
            raise Unobservable(f"Ray: {type(error).__name__}: {first[:200]}") from error
