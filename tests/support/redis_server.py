"""A registry server for one test, which may kill and restart it: `redis-server` from PATH, or the stand-in."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

from cluster.registry.launch import RegistryCommand, registry_command

START_MAX_S = 20.0
PR_SET_PDEATHSIG = 1


class RedisServer:
    """One server; a restart keeps port and password and loses the data."""

    def __init__(self, directory: Path, *, standin: bool) -> None:
        self.command: RegistryCommand = registry_command(directory, standin=standin)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.command.url

    @property
    def password(self) -> str:
        return self.command.password_file.read_text().strip()

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Start the server and wait until it listens."""
        self._process = start(self.command.argv)
        line = wait_for_line(self._process, self.command.ready_line)
        assert line, "the registry server ended before it was ready"

    def kill(self) -> None:
        """SIGKILL the server and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate(timeout=10)
            self._process = None

    def pause(self) -> None:
        """Stop the server (SIGSTOP) and wait until it has stopped: connections stay open, and no answer comes."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def resume(self) -> None:
        """Let a paused server continue (SIGCONT)."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def start(argv: tuple[str, ...], **more: object) -> subprocess.Popen[bytes]:
    """Start a child process that ends with this one, also if this one is killed."""
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def die_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(argv, preexec_fn=die_with_parent, **{**streams, **more})  # noqa: PLW1509 - one thread here


def wait_for_line(process: subprocess.Popen[bytes], wanted: str) -> str | None:
    """The first line of the process's output that contains `wanted`; None: the output ended before."""
    assert process.stdout is not None
    begun = time.monotonic()
    for line in process.stdout:
        if wanted in line.decode():
            return line.decode()
        assert time.monotonic() - begun < START_MAX_S
    return None
