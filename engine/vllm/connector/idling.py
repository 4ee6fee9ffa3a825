"""Pauses of an engine core without work: it rests while it only holds blocks, and wakes for events.

vLLM steps an engine that holds blocks once a millisecond, and does not step an engine that has nothing to do. The rule
of the pauses is in `prefill.rests`. Runs inside vLLM's engine core.
"""

from __future__ import annotations

import logging
import queue
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from vllm.v1.engine import EngineCoreRequestType

from decode.early import ASK_AGAIN_S
from prefill.rests import Rest

logger = logging.getLogger("vllm.baton.scheduler")

LISTEN_EVERY_S: Final = 0.0005
"""The longest time that an engine without work lets a notice wait, while one is expected."""

PULLING_S: Final = 0.002
"""The longest pause of an engine that only waits for pulls. A pull that ends, ends the pause. A handshake does not, nor
does a read that vLLM's own code follows. vLLM's own pause is a millisecond."""

_CORES: Final[dict[str, Idling]] = {}
"""By engine id: the pauses of the engine cores of this process."""

_WORKERS: Final[set[str]] = set()
"""Engine ids of the workers of this process. On a GPU the only worker of an engine runs in its core's process; several
workers do not, nor does a worker on a CPU."""


class Idling:
    """The pauses of one engine core, and the way to wake it."""

    def __init__(self, engine_id: str = "") -> None:
        self.core: Final = _engine_core()
        """vLLM's engine core; None: it was not found."""
        self._rests: Final = Rest()
        self._engine_id: Final = engine_id
        self._unreported = 0
        """Ended pulls that were not reported to the scheduler yet. With asynchronous scheduling vLLM queues the outputs
        of steps, and the report comes a step later."""
        _CORES[engine_id] = self
        if self.core is None:
            logger.warning("The engine's core was not found: what comes to an idle engine waits for its next request.")

    def wake(self) -> None:
        """Make a step soon. May be called from any thread."""
        if self.core is not None:
            self.core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def pulled(self, ended: int) -> None:
        """`ended` pulls have ended: their end is reported with the next step. May be called from any thread."""
        if self.core is not None:
            not_empty = self.core.input_queue.not_empty
            with not_empty:
                self._unreported += ended
                not_empty.notify()

    def reported(self, ended: int) -> None:
        """The end of `ended` pulls has been reported. This may be called before `pulled` is."""
        if self.core is not None and ended and self._engine_id in _WORKERS:
            with self.core.input_queue.not_empty:
                self._unreported -= ended

    def pause(
        self,
        *,
        busy: bool,
        pulls: int,
        awaited: int,
        begins: bool,
        early: int,
        listens: Callable[[], bool],
        hear: Callable[[], bool],
    ) -> bool:
        """Wait before a step, as long as it would have nothing to do.

        Args:
            busy: whether the step has work: it is made at once.
            pulls: the number of pulls that are under way, or begin with this step.
            awaited: how many of them a request waits for.
            begins: whether a pull begins.
            early: the number of requests that wait for a notice.
            listens: as in `rest`.
            hear: as in `rest`.

        Returns whether the step has nothing to do but to wait for pulls.
        """
        if not busy and not pulls and not begins:
            self.rest(early, listens, hear)
            return False
        self.news()
        if busy or early or self.core is None or _must_step(self.core, awaited) or not self.core.is_running():
            return False
        if begins or self._engine_id not in _WORKERS:
            queued = getattr(self.core, "batch_queue", None)  # outputs of earlier steps: a wait would keep them back
            return not queued
        return self._rest_pulling()

    def _rest_pulling(self) -> bool:
        """Wait for the end of a pull, or for a request. Returns whether none has come.

        A step reports what has ended before it. Without this wait it would be made up to a millisecond too early, and
        the next one a millisecond and an empty step later.
        """
        arrived = self.core.input_queue
        with arrived.not_empty:
            if not arrived.queue and self._unreported <= 0:
                arrived.not_empty.wait(PULLING_S)
            return not arrived.queue and self._unreported <= 0

    def news(self) -> None:
        """Something was done, or a hold has ended."""
        self._rests.news(time.monotonic())

    def rest(self, waiting: int, listens: Callable[[], bool], hear: Callable[[], bool]) -> None:
        """Wait, in a step without work, for the next request or for a notice.

        The ranks of a mixture of experts make each step together, also those without work (vLLM's `DPEngineCoreProc`).
        They never wait while any of them has a request: all others would wait for this one.

        Args:
            waiting: the number of requests that wait for a notice. If the engine has more requests than these, it makes
                its step at once.
            listens: whether a notice may come at any moment.
            hear: takes the notices; returns whether one of them is work.
        """
        core, now = self.core, time.monotonic()
        if core is None or _must_step(core, waiting) or not core.is_running():
            self._rests.news(now)
            return
        pause_s = self._rests.pause_s(now)
        if waiting:
            pause_s = min(pause_s, ASK_AGAIN_S)  # each step asks for what they wait for
        arrived, until = core.input_queue, now + pause_s
        while listens() and (left_s := until - time.monotonic()) > 0:
            with arrived.not_empty:
                if arrived.queue or arrived.not_empty.wait(min(LISTEN_EVERY_S, left_s)):
                    return
            if hear():
                return
        with arrived.not_empty:
            if not arrived.queue and (left_s := until - time.monotonic()) > 0:
                arrived.not_empty.wait(left_s)


def worker_here(engine_id: str) -> None:
    """A worker of this engine runs in this process, and calls `pulled`."""
    _WORKERS.add(engine_id)


def pulled(engine_id: str, ended: int) -> None:
    """`ended` of a worker's pulls have ended. Wakes its engine core, if that runs in this process."""
    core = _CORES.get(engine_id)
    if core is not None:
        core.pulled(ended)


def _must_step(core: Any, waiting: int) -> bool:
    """Whether this engine core, or a rank that steps together with it, has more requests than `waiting`."""
    together = getattr(core, "dp_group", None) is not None
    if together and core.engines_running:
        return True
    return bool(core.scheduler.get_num_unfinished_requests() > (0 if together else waiting))


def _engine_core() -> Any:
    """The engine core that makes this scheduler: vLLM gives a connector no other way to it, nor to a wake-up.

    It is the `self` of one of the callers, recognised by the attributes that are needed. None: no caller has them
    (another executor).
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to a function's callers
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(getattr(caller, "input_queue", None), queue.Queue) and hasattr(caller, "is_running"):
            return caller
        frame = frame.f_back
    return None
