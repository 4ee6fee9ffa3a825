"""Baton's own programs as children of this process: started in their own session, read line by line, stopped in order.

A child gets one end of a pipe as its stdin (`--lifeline`). If this process dies, even by SIGKILL, the pipe ends and the
child stops by itself, with everything below it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

Event = dict[str, Any]

STDERR_LINES_KEPT = 40
"""Last lines of a child that are shown when it fails."""

LINE_BYTES_MAX = 1 << 20
"""Longest line that is read as one; a longer line of a child is read as several."""

READ_BYTES = 1 << 16

LOG_BYTES_MAX = 20 << 20
"""A child's log longer than this becomes ``NAME.log.1``, and a new one begins: two files at most."""


def baton_words(*words: str) -> list[str]:
    """The command line of one of Baton's commands, with the same Python; the child ends when this process does."""
    return [sys.executable, "-m", "baton", *words, "--json", "--lifeline"]


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Every line to the stream's end, with its newline; lines from `LINE_BYTES_MAX` on in parts.

    A pipe that is not read to its end would block the child.
    """
    rest = b""
    while data := await stream.read(READ_BYTES):
        *lines, rest = (rest + data).splitlines(keepends=True) or [b""]
        if rest.endswith(b"\n") or len(rest) >= LINE_BYTES_MAX:
            lines.append(rest)
            rest = b""
        for line in lines:
            yield line
    if rest:
        yield rest


class BoundedLog:
    """A child's log: two files of `LOG_BYTES_MAX` at most. A full disk loses lines and stops no child."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def write(self, line: bytes) -> None:
        """Append the line; begin a new file if this one is full."""
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
            if self._file.tell() > LOG_BYTES_MAX:
                self._file.close()
                self._file = None
                self._path.replace(self._path.with_suffix(".log.1"))
                self._file = self._path.open("ab", buffering=0)
            self._file.write(line)
        except OSError:
            self.close()

    def close(self) -> None:
        """Close the file; the next `write` opens it again."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


class Program:
    """One child. `run` may be called again after the child has ended."""

    def __init__(self, name: str, argv: Sequence[str], on_event: Callable[[str, Event], None], log: Path) -> None:
        self.name = name
        self.argv = list(argv)
        self.log = log
        self._on_event = on_event
        self._process: asyncio.subprocess.Process | None = None
        self._starting = False
        self._when_started: Callable[[], None] | None = None
        """What was asked of the child while it was being started, last."""
        self.last_words: deque[str] = deque(maxlen=STDERR_LINES_KEPT)

    async def run(self) -> int:
        """Start the child and read it to its end; return its exit code (negative: killed by that signal)."""
        self.last_words.clear()
        self._starting, self._when_started = True, None
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self.argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches this process only, which decides the order of stopping
            )
        finally:
            self._starting = False
        self._do_postponed()
        assert process.stdout is not None
        assert process.stderr is not None
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_events(process.stdout), name=f"{self.name}-stdout")
            group.create_task(self._read_words(process.stderr), name=f"{self.name}-stderr")
        return await process.wait()

    async def _read_events(self, stream: asyncio.StreamReader) -> None:
        async for line in lines_of(stream):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                event = None
            if isinstance(event, dict):
                self._on_event(self.name, event)
            else:
                self.last_words.append(line.decode(errors="replace").rstrip())

    async def _read_words(self, stream: asyncio.StreamReader) -> None:
        with contextlib.closing(BoundedLog(self.log)) as log:
            async for line in lines_of(stream):
                log.write(line)
                self.last_words.append(line.decode(errors="replace").rstrip())

    @property
    def running(self) -> bool:
        """Whether the child was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    def stop(self) -> None:
        """Ask the child to drain and end."""
        if not self._postponed(self.stop):
            self._signal(signal.SIGTERM)

    def close(self) -> None:
        """Close the pipe to the child (its lifeline): it ends without a drain, but in order."""
        if self._postponed(self.close):
            return
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """End the child now; its own children notice and end too."""
        if not self._postponed(self.kill):
            self._signal(signal.SIGKILL)

    def _do_postponed(self) -> None:
        if self._when_started is not None:
            self._when_started()

    def _postponed(self, ask: Callable[[], None]) -> bool:
        """Whether the child is being started: it is asked once it is there."""
        if self._starting:
            self._when_started = ask
        return self._starting

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)
