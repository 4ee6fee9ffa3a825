"""A cluster file that may be edited while programs use it: read again after a change, ignored while it is bad."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Final

from baton.clusterfile import read
from cluster.errors import UsageError
from cluster.spec import Spec


class Changing:
    """One cluster file. `read` it first: what is edited afterwards is a change. Call `look` from time to time; it costs
    one system call while the file does not change.
    """

    def __init__(self, file: str, read_file: Callable[[str], Spec] | None = None) -> None:
        """`read_file`: parses the file; raises UsageError if the file has errors. None: `read(file).usable()`."""
        self._file: Final = file
        self._read: Final = read_file or (lambda name: read(name).usable())
        self._stamp = self._stat()
        self._digest = self._content()
        self._told = False
        """It was said that the changed file cannot be opened."""

    def read(self) -> Spec:
        """The file as it is now.

        Raises:
            UsageError: the file cannot be read, or has errors.
        """
        self._stamp, self._digest = self._stat(), self._content()  # before it is read: an edit in between is a change
        return self._read(self._file)

    def look(self) -> Spec | str | None:
        """The changed file; or, once, a line for people that says why it cannot be used; None: no change."""
        stamp = self._stat()
        if stamp is None or stamp == self._stamp:
            return None  # an editor that replaces the file leaves a moment without one
        digest = self._content()
        if not digest:
            told, self._told = self._told, True
            return None if told else f"{self._file} has changed and cannot be opened; it is tried again"
        self._stamp, self._told = stamp, False
        if digest == self._digest:
            return None
        self._digest = digest
        try:
            return self._read(self._file)
        except UsageError as error:
            return f"{self._file} has changed and is not used, as it has errors: {error}"

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = Path(self._file).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _content(self) -> bytes:
        """A digest of its content; empty: it cannot be opened, perhaps as no descriptor is free."""
        try:
            return blake2b(Path(self._file).read_bytes()).digest()
        except OSError:
            return b""
