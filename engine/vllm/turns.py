"""Engines that share a GPU start one after the other: a lock file for each GPU. A shell.

While vLLM starts, it compares the GPU's free memory before its weights and after its largest step, and takes the whole
difference for its own (vLLM 0.32, `vllm/utils/mem_utils.py`, ``total_consumed``). What another engine allocates in
between makes its KV cache smaller, or leaves none, so that it ends. If another engine frees more than that, it ends,
too ("Error in memory profiling"). An engine that is ready allocates and frees nothing of that size.

So each start and each restart takes the locks of its GPUs first, whoever asks for it, and gives them back when the
engine is ready or has ended. An engine whose KV cache has a given size measures nothing: such engines share the lock
(`flock`, LOCK_SH) and start together. The engine's processes inherit the locks. If its agent is killed, the kernel
frees them when the last of these processes has ended.

Not covered: an engine that dies or is told to leave frees its memory while a neighbour starts. The neighbour may then
end ("Error in memory profiling"). If it was ready before, its agent starts it again. In its first start it has failed
for good: `baton up` ends, or leaves it to the controller if there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

logger = logging.getLogger("baton.engine")

LOOK_EVERY_S: Final = 0.25
"""Seconds between two looks: less than the pause before a restart (`SuperviseLimits.pause_first_s`), so that an engine
whose restarts fail one after the other leaves room for others in between."""

_HOLDER_BYTES_MAX: Final = 256
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9._-]")


class StartTurns:
    """The locks of one engine's GPUs. Engines meet that have the same folder and machine, and the same ids of GPUs."""

    def __init__(self, folder: Path, name: str, gpus: Sequence[str], *, measures: bool) -> None:
        """`name`: the engine's, for those that wait for it. `measures`: whether vLLM measures the GPU's memory."""
        host = os.uname().nodename  # some machines share a home folder
        self._paths: Final = [folder / f"{_NO_NAME.sub('_', f'{host}-{gpu}')}.lock" for gpu in sorted({*gpus})]
        self._name: Final = name
        self._how: Final = fcntl.LOCK_NB | (fcntl.LOCK_EX if measures else fcntl.LOCK_SH)
        self._held: list[int] = []
        self._count = 0

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The locks that are held, for processes to inherit."""
        return tuple(self._held)

    def take(self) -> str:
        """Take all locks, or none. Returns which start is in the way: an engine's name, and a mark of that start.
        Empty: the engine may start. Locks that cannot be used (a read-only folder) keep no engine from its start.
        """
        self._count += 1
        told = f"{self._name} {os.getpid()}.{self._count}".encode()
        try:
            for path in self._paths:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._held.append(descriptor)
                fcntl.flock(descriptor, self._how)
                os.ftruncate(descriptor, os.pwrite(descriptor, told, 0))
        except BlockingIOError:
            holder = os.pread(self._held[-1], _HOLDER_BYTES_MAX, 0).decode(errors="replace")
            self.release()
            return holder or "another engine"
        except OSError as error:
            self.release()
            logger.warning("%s starts without a turn on its GPU: %s", self._name, error)
        return ""

    async def comes(self, wait_max_s: float, ends: Callable[[], bool], waits: Callable[[str], None]) -> bool:
        """Wait for the locks. False: `ends` has said that the engine is to start no more.

        One start is waited for `wait_max_s` at most, as its agent may hang: then this engine starts without the locks.
        `waits` is called at each look, with news for people or an empty text.
        """
        holder, since, clock = "", 0.0, asyncio.get_running_loop().time
        while not ends():
            before = self.take()
            if not before:
                if holder:
                    waits("its turn has come")
                return True
            name, news = before.partition(" ")[0], ""
            if before != holder:
                holder, since = before, clock()
                news = f"after {name}, which starts on the same GPU"
                logger.warning("%s waits: %s starts on the same GPU", self._name, name)
            elif clock() - since >= wait_max_s:
                waits(f"beside {name}, which starts on the same GPU for {clock() - since:.0f} s")
                logger.warning("%s waited %.0f s for %s, and starts beside it", self._name, clock() - since, name)
                return True
            waits(news)
            await asyncio.sleep(LOOK_EVERY_S)
        return False

    def release(self) -> None:
        """Give the locks back, also where the engine's processes have inherited them."""
        held, self._held = self._held, []
        for descriptor in held:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
