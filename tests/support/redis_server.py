"""A registry server of its own for a test: redis-server from PATH, or the stand-in; killed and started again."""

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
        """Returns when it listens."""
        self._process = start(self.command.argv)
        line = wait_for_line(self._process, self.command.ready_line)
        assert line, "the registry server ended before it was ready"

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate(timeout=10)
            self._process = None

    def pause(self) -> None:
        """It stays connected and says nothing any more, not even on another core."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def resume(self) -> None:
        """It goes on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def start(argv: tuple[str, ...], **more: object) -> subprocess.Popen[bytes]:
    """A child that does not outlive a killed test run."""
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def die_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(argv, preexec_fn=die_with_parent, **{**streams, **more})  # noqa: PLW1509 - one thread here


def wait_for_line(process: subprocess.Popen[bytes], wanted: str) -> str | None:
    """The first line of its output that holds `wanted`; None if its output ends before."""
    assert process.stdout is not None
    begun = time.monotonic()
    for line in process.stdout:
        if wanted in line.decode():
            return line.decode()
        assert time.monotonic() - begun < START_MAX_S
    return None
