"""Ports that Baton chooses, and that a program takes later: those of engines, agents and the registry.

A program takes its ports a second to a minute after Baton has chosen them. Until then no other process of Baton on this
machine may choose them: each holds its ports by name. Other programs do not know these names. If one of them takes a
port meanwhile, `baton up` begins the engine anew with other ports (`baton.members.Members.move`).

A server of several processes holds its port in the same way until they listen (`baton.processes.held_port`).
"""

from __future__ import annotations

import errno
import socket
from types import TracebackType
from typing import Final, Self

LOOPBACK: Final = "127.0.0.1"

FREE_PORTS: Final = range(20000, 32000)
"""Ports to choose from if none is asked for: below Linux's ephemeral range. An engine opens its port half a minute
after Baton chose it; until then an outgoing connection of any program could take an ephemeral port."""


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


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


class HeldPorts:
    """The ports that this process has chosen on the loopback address. Use as a context; its end gives all back."""

    def __init__(self) -> None:
        self._names: Final[dict[int, socket.socket]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.give_back(*self._names)

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

    def give_back(self, *ports: int) -> None:
        """Let others choose these ports again."""
        for port in ports:
            name = self._names.pop(port, None)
            if name is not None:
                name.close()

    def hold(self, port: int) -> bool:
        """Hold this port; False: this process or another one of Baton's holds it already."""
        if port in self._names:
            return False
        name = hold_name(f"port-{port}")
        if name is None:
            return False
        self._names[port] = name
        return True
