"""Processes of a benchmark: started on cores of their own, measured by their CPU time, ended with their parent."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.ports import HeldPorts

ROOT = Path(__file__).resolve().parent.parent
BATON_COMMAND = (sys.executable, "-m", "baton")
"""Of this very tree: everything is started in its root."""

READY_S = 60.0
STOP_S = 5.0

_PORTS = HeldPorts()
"""Held until this process ends."""
atexit.register(_PORTS.__exit__, None, None, None)

_LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of a benchmark: the measured process has a core that no other process of it shares."""

    measured: frozenset[int]
    engines: frozenset[int]
    sender: frozenset[int]

    def __str__(self) -> str:
        return ", ".join(f"{name} on core {min(getattr(self, name))}" for name in ("measured", "engines", "sender"))


def cores() -> Cores:
    """One core each if there are three; with two, engines and sender share one."""
    usable = sorted(os.sched_getaffinity(0))
    first, second, third = usable[0], usable[min(1, len(usable) - 1)], usable[min(2, len(usable) - 1)]
    return Cores(frozenset({first}), frozenset({second}), frozenset({third}))


class Failed(Exception):
    """A process that was to be measured did not start; with its last lines."""


class Running:
    """One process. `stop()` ends it; the kernel ends it when the benchmark itself is killed."""

    def __init__(self, name: str, words: Sequence[str], on: frozenset[int]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        mine = os.sched_getaffinity(0)
        os.sched_setaffinity(0, on)  # a child inherits it, and so do its first threads
        try:
            self.process = subprocess.Popen(
                words,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - a benchmark has no threads
            )
        finally:
            os.sched_setaffinity(0, mine)

    def line(self) -> str:
        """The next line that it prints: what is ready, and where."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"{self.name} did not start: {self.said()}")
        return line.strip()

    def wait_for(self, url: str) -> None:
        """Until this URL answers 200."""
        end = time.monotonic() + READY_S
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1) as answer:  # noqa: S310 - ours
                if answer.status == 200:
                    return
            time.sleep(0.1)
        raise Failed(f"{self.name} did not answer at {url}: {self.said()}")

    def said(self) -> str:
        """The end of its log."""
        self._log.seek(0)
        return self._log.read()[-2000:]

    def cpu_s(self) -> float:
        """CPU time so far, of all its threads, ended ones too, and of its children."""
        return sum(map(_cpu_s, _family(self.process.pid)))

    def waited_s(self) -> float:
        """How long threads of the process and its children that live now have waited for a core; 0 where the kernel
        does not tell.
        """
        return sum(map(_waited_s, _family(self.process.pid)))

    def memory_mb(self) -> float:
        """Resident memory of the process and its children."""
        return sum(map(_memory_mb, _family(self.process.pid)))

    def stop(self) -> None:
        """End the process, in order if it can."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()


def _cpu_s(pid: int) -> float:
    """From the process' own CPU clock, in nanoseconds; /proc counts in hundredths of a second.

    How a pid becomes a clock's number is Linux' (clock_getcpuclockid(3); CPUCLOCK_SCHED is 2).
    """
    return time.clock_gettime((~pid << 3) | 2)


def _waited_s(pid: int) -> float:
    """From /proc/PID/task/*/schedstat: nanoseconds on a core, nanoseconds runnable without one, turns."""
    found = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended, or a kernel without these figures
            found += int((thread / "schedstat").read_text().split()[1])
    return found / 1e9


def _family(pid: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            for child in (thread / "children").read_text().split():
                yield from _family(int(child))


def _memory_mb(pid: int) -> float:
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) / 1000 if found else 0.0


def _die_with_parent() -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def stopping(running: list[Running]) -> Iterator[None]:
    """End all of them, whatever happens, the last started first."""
    try:
        yield
    finally:
        for each in reversed(running):
            each.stop()


def page(url: str) -> str:
    """A page of one of the benchmark's processes, as text."""
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - ours
        return str(answer.read().decode())


def asked(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON answer of one of the benchmark's processes; a body is posted."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(url, data=data, timeout=10) as answer:  # noqa: S310 - ours
        found: dict[str, Any] = json.load(answer)
    return found


def free_port() -> int:
    """A port for a program that cannot choose one itself. No other connection takes it before the program listens."""
    return _PORTS.take_any()
