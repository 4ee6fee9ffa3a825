"""Reads a key file, and reads it again when the file has changed. A shell; standard library only, as it runs inside
vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

T = TypeVar("T")

logger = logging.getLogger("baton.tickets")

FILE_BYTES_MAX = 65_536
"""A file of eight keys has about a thousand bytes."""

AGAIN_S: Final = 1.0
"""Seconds until a changed file that could not be opened is tried again: descriptors may have run out for a moment."""


class KeyFile(Generic[T]):
    """The current content of a key file. If a changed file cannot be read, the error is logged and the former keys
    stay, until the file can be opened or has changed again.
    """

    def __init__(self, path: Path, read: Callable[[str], T], *, bytes_max: int = FILE_BYTES_MAX) -> None:
        """Read the file. A file larger than `bytes_max` is refused.

        Raises:
            OSError: the file cannot be opened.
            ValueError: the file is not a valid key file.
        """
        self.path = path
        self._read = read
        self._bytes_max = bytes_max
        self._seen = self._mark()
        self._again_at: float | None = None
        """When to open the file once more, in monotonic seconds; None: what it has now was read."""
        self._keys = self._load()

    def get(self) -> T:
        """The keys. Costs one `stat`."""
        mark = self._mark()
        if mark != self._seen or (self._again_at is not None and time.monotonic() >= self._again_at):
            self._read_again(mark)
        return self._keys

    def _read_again(self, mark: tuple[int, int, int] | None) -> None:
        """Take the keys of a file that has changed, or that could not be opened; log once for each change."""
        told = mark == self._seen
        self._seen, self._again_at = mark, None
        try:
            self._keys = self._load()
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and mark is not None:
                self._again_at = time.monotonic() + AGAIN_S
            if not told:
                logger.warning("%s cannot be read, its former keys stay: %s", self.path, error)
        else:
            logger.info("%s has changed: its keys are in use", self.path)

    def _mark(self) -> tuple[int, int, int] | None:
        """What changes when the file's content changes; None if the file does not exist."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _load(self) -> T:
        with self.path.open(encoding="utf-8-sig") as file:
            try:
                text = file.read(self._bytes_max + 1)
            except UnicodeDecodeError:
                raise ValueError("no key file: its text is not UTF-8; save it as UTF-8") from None
        if len(text) > self._bytes_max:
            raise ValueError(f"larger than {self._bytes_max} bytes")
        return self._read(text)
