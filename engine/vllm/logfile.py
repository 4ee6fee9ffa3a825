"""An engine's log on disk: where it is, a header for each start, its last lines. A shell (files)."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger("baton.engine")

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})
"""Errors of a full or failing disk. An engine runs without its log then."""

ROTATE_BYTES = 20 * 1024 * 1024
"""At a start, a log longer than this replaces `NAME.log.1`: two files at most."""

HEAD_BYTES = 1024 * 1024
"""If a start writes more than `ROTATE_BYTES`, this much of its beginning stays in its log, with its settings."""

CUT = b"--- cut: "
"""Begins the line where a log was cut while the engine ran."""

TAIL_BYTES = 256 * 1024
"""The most that is read from a log's end at once."""


def default_path(instance: str, environ: Mapping[str, str]) -> Path:
    """``$XDG_STATE_HOME/baton/logs/INSTANCE.log``; the home folder's ``.local/state`` where it is not set."""
    state = environ.get("XDG_STATE_HOME", "")
    home = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return home / "baton" / "logs" / f"{instance}.log"


class _Descriptor:
    """A file descriptor of Baton's own. It is closed once nothing refers to it: a thread may use it longer than a start
    lasts.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class LogFile:
    """A log file. The engine itself appends to it (its standard output and error). Baton reads and cuts the file that
    the engine writes to, also if that file has been moved or deleted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0  # where this start's part begins
        self._file: _Descriptor | None = None  # the file that this start writes to; None: there is none
        self._warned = False  # whether this start's log could not be cut
        self._read = 0
        self._rest = b""

    def open(self, header: str) -> int:
        """Rotate if due, write the header, and return a descriptor for a child's output.

        A disk that is full or failing stops no engine: its lines are lost while that lasts, and a file that cannot even
        be opened is replaced by ``/dev/null`` until the next start. The child writes to the file itself, so that a full
        disk fails its writes, and never blocks them as a pipe without a reader would.

        Raises:
            OSError: the path cannot be a log's: not a folder, not allowed.
        """
        self._rest = b""
        self._file, self._warned = None, False
        try:
            descriptor = self._opened()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            logger.warning("%s: %s: this start has no log", self.path, error.strerror)
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, f"--- {header}\n".encode())
        except OSError as error:
            logger.warning("%s: %s: lines of this log are lost", self.path, error.strerror)
        try:
            self._file = _Descriptor(os.dup(descriptor))
        except OSError:
            os.close(descriptor)
            raise
        self._start = self._read = os.fstat(descriptor).st_size
        return descriptor

    def bound(self) -> bool:
        """Cut the log of a running engine if it is too long; True if it was cut. Everything beyond this start's first
        `HEAD_BYTES` goes to `NAME.log.1`, at most `ROTATE_BYTES` of its end. The engine goes on writing behind the cut,
        because its descriptor appends. Lines that it writes at this very moment may be lost.
        """
        keep, file = self._start + HEAD_BYTES, self._file
        if file is None:
            return False
        try:
            size = os.fstat(file.number).st_size
            if size <= keep + ROTATE_BYTES:
                return False
            because = self._put_aside(file, max(keep, size - ROTATE_BYTES))
            os.ftruncate(file.number, keep)
            os.write(file.number, b"\n%b%d bytes, %b\n" % (CUT, size - keep, because))
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("%s: %s: it cannot be cut", self.path, error.strerror)
            return False
        if self._read > keep:
            self._read, self._rest = keep, b""
        return True

    def _put_aside(self, file: _Descriptor, begin: int) -> bytes:
        """Copy the log from the offset `begin` on into `NAME.log.1`. Returns words about the copy, for the log."""
        aside = self.path.with_name(self.path.name + ".1")
        try:
            if aside.exists() and os.path.samestat(aside.stat(), os.fstat(file.number)):
                return f"lost: the log itself was moved to {aside.name}".encode()
            with _reading(file) as log, open(aside, "wb", opener=_private) as copy:
                log.seek(begin)
                shutil.copyfileobj(log, copy, TAIL_BYTES)
        except OSError as error:
            aside.unlink(missing_ok=True)
            return f"lost: {error.strerror}".encode()
        return f"the last of them are in {aside.name}".encode()

    def _opened(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > ROTATE_BYTES:
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def new_lines(self) -> list[str]:
        """Whole lines that came since the last call. A progress bar's carriage returns count as line ends."""
        if self._file is None:
            return []
        try:
            with _reading(self._file) as log:
                log.seek(self._read)
                fresh = log.read(TAIL_BYTES)
        except OSError:
            return []
        self._read += len(fresh)
        *lines, self._rest = (self._rest + fresh).replace(b"\r", b"\n").split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def this_start(self) -> list[str]:
        """Every line of this start, or the last `TAIL_BYTES` of them."""
        if self._file is None:
            return []
        try:
            with _reading(self._file) as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._start, size - TAIL_BYTES))
                text = log.read()
        except OSError:
            return []
        return text.decode(errors="replace").replace("\r", "\n").splitlines()


def _reading(file: _Descriptor) -> BinaryIO:
    """The same file, opened for reading: its descriptor only appends, and its name may be gone."""
    return Path(f"/proc/self/fd/{file.number}").open("rb")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # prompts may stand in it
