"""Baton's own programs as children of this process: started in their own session, read line by line, stopped in order.

A child gets our end of a pipe as its stdin (`--lifeline`): when this process dies, even by SIGKILL, the pipe ends and
the child stops by itself, with everything below it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]

STDERR_LINES_KEPT = 40
"""Last words of a child that are shown when it fails."""

LINE_BYTES_MAX = 1 << 20
"""Longest line read from a child."""

LOG_BYTES_MAX = 20 << 20
"""At a start, a child's log longer than this becomes ``NAME.log.1``."""


def baton_words(*words: str) -> list[str]:
    """The command line of one of our own commands, with the same Python, under our lifeline."""
    return [sys.executable, "-m", "baton", *words, "--json", "--lifeline"]


class Program:
    """One child. `run` may be called again once it has ended."""

    def __init__(self, name: str, argv: Sequence[str], on_event: Callable[[str, Event], None], log: Path) -> None:
        self.name = name
        self.argv = list(argv)
        self.log = log
        self._on_event = on_event
        self._process: asyncio.subprocess.Process | None = None
        self.last_words: deque[str] = deque(maxlen=STDERR_LINES_KEPT)

    async def run(self) -> int:
        """Start it and read it to its end; return its exit code (negative: killed by that signal)."""
        self.last_words.clear()
        self._process = process = await asyncio.create_subprocess_exec(
            *self.argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
            start_new_session=True,  # Ctrl-C reaches us alone; we decide who stops when
        )
        assert process.stdout is not None
        assert process.stderr is not None
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_events(process.stdout), name=f"{self.name}-stdout")
            group.create_task(self._read_words(process.stderr), name=f"{self.name}-stderr")
        return await process.wait()

    async def _read_events(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                event = None
            if isinstance(event, dict):
                self._on_event(self.name, event)
            else:
                self.last_words.append(line.decode(errors="replace").rstrip())

    async def _read_words(self, stream: asyncio.StreamReader) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES_MAX:
            self.log.replace(self.log.with_suffix(".log.1"))
        with self.log.open("ab", buffering=0) as log:
            async for line in stream:
                log.write(line)
                self.last_words.append(line.decode(errors="replace").rstrip())

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    def stop(self) -> None:
        """Ask it to drain and end."""
        self._signal(signal.SIGTERM)

    def close(self) -> None:
        """Let go of its lifeline: it ends without a drain, but in order."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """End it now; its own children notice and end too."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port(host: str, first: int, taken: set[int], *, step: int = 1) -> int:
    """The first port from `first` on that nobody listens on and that is not in `taken`, to which it is added."""
    for port in range(first, 65536, step):
        if port not in taken and is_free(host, port):
            taken.add(port)
            return port
    raise OSError(f"no free port from {first} on")
