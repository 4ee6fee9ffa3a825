"""Ports that Baton chooses, and that a program takes later: those of engines, agents and the registry.

A program takes its ports a second to a minute after Baton has chosen them. Until then no other process of Baton on this
machine may choose them: each holds its ports by name. Other programs do not know these names. If one of them takes a
port meanwhile, `baton up` begins the engine anew with other ports (`baton.members.Members.move`).

Two processes of one user may listen on one port if both allow it, as vLLM and servers of several processes do: each
then gets some of the other's clients. So a server also holds the name of its address (`server_name`), before it or its
processes listen.
"""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

LOOPBACK: Final = "127.0.0.1"

TRIES: Final = 100
"""Free ports that are looked for, at random, before there is none."""

FREE_PORTS: Final = range(20000, 32000)
"""Ports to choose from if none is asked for: below Linux's ephemeral range. An engine opens its port half a minute
after Baton chose it; until then an outgoing connection of any program could take an ephemeral port."""


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now, and none of Baton starts that will."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return not _is_held(server_name(host, port))


def _is_held(name: str) -> bool:
    """Whether a process of Baton holds this name, as far as /proc shows it: to try would hold it for a moment."""
    try:
        lines = Path("/proc/self/net/unix").read_text().splitlines()
    except OSError:
        return False
    return any(line.endswith(f" @baton-{name}") for line in lines)


def hold_name(name: str) -> socket.socket | None:
    """A socket that holds this name until it is closed; None: it is held already, here or in another process of Baton.

    The name is that of an abstract Unix socket. The kernel keeps such names for each network namespace, as it does
    ports, for all users, and frees them when their processes end. On a machine that forbids such names nothing is held.
    """
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0baton-{name}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            holder.close()
            return None
    return holder


def server_name(address: str, port: int) -> str:
    """The name that a server of Baton holds for as long as it may listen there."""
    return f"server-{address}-{port}"


class HeldPorts:
    """The ports that this process has chosen on the loopback address. Use as a context; its end gives all back."""

    def __init__(self) -> None:
        self._names: Final[dict[int, socket.socket]] = {}
        self._servers: Final[list[socket.socket]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.give_back(*self._names)
        for server in self._servers:
            server.close()

    def take(self, first: int, *, step: int = 1) -> int:
        """The first of `first`, `first + step` and so on that is free and that no process of Baton on this machine
        holds; it is held from now on.

        Raises:
            OSError: there is none.
        """
        for port in range(first, 65536, step):
            if self.hold(port):
                if is_free(LOOPBACK, port):
                    return port
                self.give_back(port)
        raise OSError(f"no free port from {first} on")

    def take_any(self, can_listen: Callable[[int], bool] = lambda port: is_free(LOOPBACK, port)) -> int:
        """A port of `FREE_PORTS` on which a server can listen and that no process of Baton on this machine holds; it is
        held from now on.

        Raises:
            OSError: `TRIES` ports were looked at, and none of them is free.
        """
        for _ in range(TRIES):
            port = secrets.choice(FREE_PORTS)
            if self.hold(port):
                if can_listen(port):
                    return port
                self.give_back(port)
        raise OSError(f"no free port from {FREE_PORTS.start} to {FREE_PORTS.stop - 1}")

    def give_back(self, *ports: int) -> None:
        """Let others choose these ports again."""
        for port in ports:
            name = self._names.pop(port, None)
            if name is not None:
                name.close()

    def serve(self, address: str, port: int) -> bool:
        """Hold the name of an address for a server of this process, to the end; False: another server holds it."""
        server = hold_name(server_name(address, port))
        if server is not None:
            self._servers.append(server)
        return server is not None

    def hold(self, port: int) -> bool:
        """Hold this port; False: this process or another one of Baton's holds it already."""
        if port in self._names:
            return False
        name = hold_name(f"port-{port}")
        if name is None:
            return False
        self._names[port] = name
        return True
