"""Reads a key file, and reads it again when the file has changed. A shell; standard library only, as it runs inside
vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

logger = logging.getLogger("baton.tickets")

FILE_BYTES_MAX = 65_536
"""A file of eight keys has about a thousand bytes."""


class KeyFile(Generic[T]):
    """The current content of a key file. If a changed file cannot be read, the error is logged and the former keys
    stay.
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
        self._keys = self._load()

    def get(self) -> T:
        """The keys. Costs one `stat`."""
        mark = self._mark()
        if mark != self._seen:
            self._seen = mark
            try:
                self._keys = self._load()
            except (OSError, ValueError) as error:
                logger.warning("%s cannot be read, its former keys stay: %s", self.path, error)
            else:
                logger.info("%s has changed: its keys are in use", self.path)
        return self._keys

    def _mark(self) -> tuple[int, int, int] | None:
        """What changes when the file's content changes; None if the file does not exist."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _load(self) -> T:
        with self.path.open(encoding="utf-8") as file:
            text = file.read(self._bytes_max + 1)
        if len(text) > self._bytes_max:
            raise ValueError(f"larger than {self._bytes_max} bytes")
        return self._read(text)
