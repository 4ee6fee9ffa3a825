"""Runs one server as several processes that share its port: forked from this process, watched, started again.

The kernel spreads new connections over them (`SO_REUSEPORT`). The parent serves no client. It holds the port, so that
the port stays the same after a restart, and the children's lifeline: they end when the parent does, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from baton.ports import hold_name, server_name
from baton.restarts import Restarts
from baton.signals import STOPPING, ignore_stopping_signals
from cluster.errors import UsageError, cannot_listen

logger = logging.getLogger("baton.router")

ENDS_S = 5.0
"""Seconds that a process may take to end, after its drain time; then it is killed."""

SIGNALS: Final = (*STOPPING, signal.SIGCHLD)

Serve = Callable[[int, int, Callable[[str, str], None]], None]
"""Serves until SIGTERM, SIGINT, or the end of its standard input. Gets the number of its process, the port, and a
function to call with the endpoint and the admin URL once it is ready.
"""


@dataclass(slots=True)
class _Process:
    """One child process."""

    number: int
    pid: int
    word: int
    """Descriptor of the pipe on which it reports that it is ready; -1 once that is closed."""
    said: dict[str, str] | None = None
    """Its endpoint and admin URL; None: it is not ready."""


class ServerProcesses:
    """The processes of one server. `run` returns when all have ended.

    It has many attributes, as it holds the settings, the children, and the descriptors on which it waits for them.
    """

    def __init__(self, count: int, serve: Serve, announce: Callable[[str, str], None], drain_s: float) -> None:
        """`announce` gets the endpoint and the admin URL of process 0, once all are ready. `drain_s`: seconds that a
        process may take to end in order.
        """
        self._count, self._serve, self._announce, self._drain_s = count, serve, announce, drain_s
        self._port = 0
        self._names: list[socket.socket] = []
        """Sockets that hold the port's name, for this process alone: its children may outlive it and listen no more."""
        self._running: dict[int, _Process] = {}
        """The children by process id."""
        self._restarts = Restarts()
        self._selector = selectors.DefaultSelector()
        self._lifeline = self._wakeup = (-1, -1)
        self._stopping_at: float | None = None
        self._code = 0
        self._announced = False

    def run(self, host: str, port: int, *, lifeline: bool) -> int:
        """Run until stopped; return the exit code: 0, 1 if a process failed for good, 2 if its usage was wrong.

        `lifeline`: the end of standard input is a stop, too.

        Raises:
            UsageError: the port is taken.
        """
        with held_port(host, port, self._names) as self._port, self._signals():
            self._lifeline = os.pipe()
            if lifeline:
                self._selector.register(0, selectors.EVENT_READ)
            for number in range(self._count):
                self._start(number)
            while self._running:
                self._turn()
        return self._code

    # -- events --

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Let signals wake the loop of `run`; after the block ignore them."""
        self._wakeup = os.pipe()
        for end in self._wakeup:
            os.set_blocking(end, False)
        self._selector.register(self._wakeup[0], selectors.EVENT_READ)
        for number in SIGNALS:
            signal.signal(number, _heard)
        fd = signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        try:
            yield
        finally:
            ignore_stopping_signals()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.set_wakeup_fd(fd)
            self._selector.close()

    def _turn(self) -> None:
        """Wait for an event, and handle it."""
        left_s = None if self._stopping_at is None else max(0.0, self._stopping_at - time.monotonic())
        ready = self._selector.select(left_s)
        if left_s is not None and not ready:
            self._kill(signal.SIGKILL)
            self._stopping_at = time.monotonic() + ENDS_S
        for key, _ in ready:
            if key.fd == self._wakeup[0]:
                self._hear(os.read(key.fd, 4096))
            elif key.fd == 0:
                self._parent_says()
            else:
                self._ready(key.data)

    def _hear(self, signals: bytes) -> None:
        if signal.SIGTERM in signals or signal.SIGINT in signals:
            self._stop()
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in self._running:
                self._ended(self._running.pop(pid), os.waitstatus_to_exitcode(status))

    def _parent_says(self) -> None:
        if not os.read(0, 4096):
            self._selector.unregister(0)
            os.close(self._lifeline[1])  # ends the standard input of all children
            self._lifeline = (self._lifeline[0], -1)
            self._stop()

    def _ready(self, process: _Process) -> None:
        if process.word < 0:  # it has ended in this turn
            return
        said = os.read(process.word, 65536)
        self._forget_word(process)
        if said:  # nothing was written: it ends, and SIGCHLD comes
            process.said = json.loads(said)
        by_number = {each.number: each.said for each in self._running.values() if each.said is not None}
        if len(by_number) == self._count and not self._announced:
            self._announced = True
            self._announce(by_number[0]["endpoint"], by_number[0]["admin"])

    def _ended(self, process: _Process, code: int) -> None:
        self._forget_word(process)
        if self._stopping_at is not None:
            return
        if code == 2 or not self._announced or not self._restarts.may(time.monotonic()):
            self._code = 2 if code == 2 else 1
            logger.error("process %d ended with %d: all end", process.number, code)
            self._stop()
            return
        logger.warning("process %d ended with %d: it is started again", process.number, code)
        self._start(process.number)

    # -- processes --

    def _start(self, number: int) -> None:
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the child has reset its handlers
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            self._be(number, writing)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.close(writing)
        process = self._running[pid] = _Process(number, pid, reading)
        self._selector.register(reading, selectors.EVENT_READ, process)

    def _be(self, number: int, word: int) -> None:
        """Run child process `number` to its end; `word`: the pipe for its report. Does not return."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for each in SIGNALS:
                signal.signal(each, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            self._selector.close()
            for fd in (*self._wakeup, *(each.word for each in self._running.values() if each.word >= 0)):
                os.close(fd)
            for name in self._names:
                name.close()
            os.close(self._lifeline[1])
            os.dup2(self._lifeline[0], 0)
            self._running.clear()

            def tell(endpoint: str, admin: str) -> None:
                os.write(word, json.dumps({"endpoint": endpoint, "admin": admin}).encode())
                os.close(word)

            self._serve(number, self._port, tell)
            code = 0
        except UsageError as error:
            print(f"baton: {error}", file=sys.stderr)
            code = 2
        except BaseException:  # noqa: BLE001 - reported, and the process ends with 1
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _forget_word(self, process: _Process) -> None:
        if process.word >= 0:
            self._selector.unregister(process.word)
            os.close(process.word)
            process.word = -1

    def _stop(self) -> None:
        if self._stopping_at is None:
            self._stopping_at = time.monotonic() + self._drain_s + ENDS_S
        self._kill(signal.SIGTERM)

    def _kill(self, number: signal.Signals) -> None:
        for pid in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _heard(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the wakeup descriptor has the signal."""


@contextlib.contextmanager
def held_port(host: str, port: int, names: list[socket.socket] | None = None) -> Iterator[int]:
    """Keep a port for processes that listen on it with `SO_REUSEPORT`; connections go to those that listen. `names`
    gets the sockets that hold its name, which only the process that keeps the port is to have open.

    Yields:
        The port: a free one for 0.

    Raises:
        UsageError: another server listens there, or the address is not of this machine. Without this check, a server of
            the same user that also shares its port would get half of the clients.
    """
    held: list[socket.socket] = []
    names = [] if names is None else names
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            where: Any = (address[0], port, *address[2:])
            with socket.socket(family, kind, protocol) as look:
                _bind(look, family, where, socket.SO_REUSEADDR)
            mine = socket.socket(family, kind, protocol)
            held.append(mine)
            _bind(mine, family, where, socket.SO_REUSEADDR, socket.SO_REUSEPORT)
            port = mine.getsockname()[1]
            names.append(_named(server_name(str(address[0]), port)))
    except OSError as error:
        for each in (*held, *names):
            each.close()
        raise cannot_listen(host, port, error, "--port") from None
    try:
        yield port
    finally:
        for each in (*held, *names):
            each.close()


def _named(name: str) -> socket.socket:
    """Hold the name of an address. Without it, a second server of the same user could share the port before the first
    one's processes listen.
    """
    holder = hold_name(name)
    if holder is None:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    return holder


def _bind(bound: socket.socket, family: int, where: Any, *options: int) -> None:
    for option in options:
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
    if family == socket.AF_INET6:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    bound.bind(where)
