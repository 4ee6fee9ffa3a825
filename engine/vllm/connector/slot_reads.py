"""A worker's reads of producers' slots: the memory that slots arrive in, and the thread that follows reads to the end.

Runs inside vLLM's workers. What a slot's content means is decided in `decode.reads`.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from decode.reads import Landings, Reads, try_to_read
from engine.vllm.connector.pages import PagedMemory
from kvtransfer.hold_marks import SLOT_BYTES

LANDINGS: Final = 1024
"""The number of slots that may be read at one time (pulls times the ranks they read from); more pulls wait."""

POLL_S: Final = 0.0002
"""The interval at which reads under way are polled."""

PATIENCE_S: Final = 0.001
"""How long a step that only waits for pulls waits for one to end. Without this wait, a pull that ends during the step
is reported with the next one: on two slow cores 3 to 4 ms later."""

FIRST_READ_S: Final = 2.0
"""How long a handshake waits for the first read of a peer's slot: UCX connects with that read."""


class SlotReads:
    """The reads of slots by one NIXL agent."""

    def __init__(self, nixl: Any) -> None:
        self._nixl: Final = nixl
        self._landing: Final = PagedMemory(LANDINGS * SLOT_BYTES)
        self._first: Final = PagedMemory(mmap.PAGESIZE)
        """The common target of the first reads of new peers: its content is never used."""

    @property
    def memory(self) -> tuple[PagedMemory, PagedMemory]:
        """The memory to register."""
        return self._landing, self._first

    def landings(self) -> Landings:
        """The places for slots' contents, all free. Make them once."""
        return Landings(self._landing.view, self._landing.address)

    def prepare(self, agent: str, address: int, landing: int) -> Any:
        """The transfer that reads one slot. It is not posted yet."""
        here = self._nixl.get_xfer_descs([(landing, SLOT_BYTES, 0)], "DRAM")
        there = self._nixl.get_xfer_descs([(address, SLOT_BYTES, 0)], "DRAM")
        return self._nixl.initialize_xfer("READ", here, there, agent)

    def readable(self, agent: str, address: int) -> bool:
        """Read a slot of a new peer, so that the connection exists and no request waits for it."""
        pauses = int(FIRST_READ_S / POLL_S)
        return try_to_read(
            self._nixl, lambda: self.prepare(agent, address, self._first.address), lambda: time.sleep(POLL_S), pauses
        )


class Follower:
    """The thread that follows reads, so that they end and are confirmed while the engine computes other requests."""

    def __init__(self, reads: Reads, begin: Callable[[], None], ended: Callable[[int], None]) -> None:
        """`begin` is called on the thread before its first step, `ended` with the number of pulls that have ended."""
        self._reads: Final = reads
        self._begin: Final = begin
        self._ended: Final = ended
        self._some_ended: Final = threading.Condition()
        self._work: Final = threading.Condition()
        self._over: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name="baton-pulls", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Reads were added."""
        with self._work:
            self._work.notify()

    def wait(self, seconds: float) -> None:
        """Wait for the end of a pull, if one is under way and none has ended since the last was taken."""
        with self._some_ended:
            self._some_ended.wait_for(lambda: self._reads.ended or not len(self._reads), seconds)

    def stop(self) -> None:
        """End the thread, whatever is under way. Waits at most a second."""
        self._over.set()
        self.wake()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        begun = False
        while not self._over.is_set():
            with self._work:
                while not len(self._reads) and not self._over.is_set():
                    self._work.wait()
            if not begun:
                self._begin()
                begun = True
            before = self._reads.ended_total
            under_way = self._reads.step()
            if ended := self._reads.ended_total - before:
                self._ended(ended)
                with self._some_ended:
                    self._some_ended.notify()
            if under_way:
                time.sleep(POLL_S)
