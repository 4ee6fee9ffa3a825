"""Writes a decision log where the disk may be full: decides what is left out, and records it. A shell: its clock.

`LogWriter` never raises and never waits. A write that fails loses its entries. They are counted, and once a write
succeeds again, a `Missing` entry in the log says how many are lost. A line that was cut by the failure is completed
first, so that each line of the file is an entry, also on files that cannot be truncated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from router.fleet.events import Missing, line_of

logger = logging.getLogger("baton.router")

BATCH_BYTES: Final = 8 << 10
"""Entries are written together once they have this length: a system call for each would cost more than the entry."""

FLUSH_S: Final = 1.0
"""The interval at which waiting entries are written (`LogWriter.flush`), and at which a failed log is tried again."""


class LogWriter:
    """One router's decision log."""

    def __init__(
        self,
        write: Callable[[bytes], object],
        dropped: Callable[[int], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Entries go to `write` only.

        Args:
            write: takes bytes, raises OSError or ValueError if it cannot, and returns how many it took; None: all.
            dropped: called with the number of lost entries, each time some are lost.
            clock: monotonic seconds.
        """
        self._write: Final = write
        self._dropped: Final = dropped
        self._clock: Final = clock
        self._batch: list[bytes] = []
        self._bytes = 0
        self._cut = b""
        """The end of a line whose beginning is written."""
        self._missing = 0
        """Lost entries that the log does not mention yet."""
        self._failing = False
        self._retry_at = 0.0

    def add(self, line: bytes) -> None:
        """Add an entry, with its line feed."""
        if self._failing and self._clock() < self._retry_at:
            self._lose(1)
            return
        self._batch.append(line)
        self._bytes += len(line)
        if self._bytes >= BATCH_BYTES or self._failing:
            self.flush()

    def flush(self) -> None:
        """Write the waiting entries. To be called every `FLUSH_S`, and at the end."""
        if self._failing:
            if self._clock() < self._retry_at:
                return
        elif not self._batch:
            return
        lines, self._batch, self._bytes = self._batch, [], 0
        gap = [line_of(Missing(self._missing))] if self._missing else []
        pieces = [self._cut, *gap, *lines]
        error, taken = self._put(b"".join(pieces))
        begun, self._cut = _begun(pieces, taken)
        if gap and begun > 1:
            told, self._missing = self._missing, 0
        else:
            told = 0
        if error is None:
            if self._failing:
                self._failing = False
                logger.warning("the decision log is written again; %d entries are missing from it", told)
            return
        self._retry_at = self._clock() + FLUSH_S
        if not self._failing:
            self._failing = True
            logger.error("the decision log cannot be written (%s): entries are left out until it can", error)
        self._lose(len(lines) - max(0, begun - 1 - len(gap)))

    def _lose(self, entries: int) -> None:
        self._missing += entries
        if entries:
            self._dropped(entries)

    def _put(self, data: bytes) -> tuple[Exception | None, int]:
        """Returns the error, if any, and how many bytes were written."""
        at = 0
        try:
            while at < len(data):
                took = self._write(data[at:] if at else data)
                at = at + took if isinstance(took, int) else len(data)
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            return error, at
        return None, at


def _begun(pieces: list[bytes], taken: int) -> tuple[int, bytes]:
    """How many of `pieces` were written at least in part when `taken` bytes were, and the rest of the last one.

    The first piece always counts as begun: it is the end of a line.
    """
    left = taken
    for number, piece in enumerate(pieces):
        if left < len(piece):
            return (number + 1, piece[left:]) if left or not number else (number, b"")
        left -= len(piece)
    return len(pieces), b""
