"""The port of one instance: taken at the start, open while an engine is ready, closed when it dies. A shell."""

from __future__ import annotations

import asyncio
import socket

from cluster.accepting import close_server
from cluster.errors import UsageError
from engine.mock.http import IDLE_S, MockConnection, MockHandler

BACKLOG = 4096
"""Connections that may wait to be accepted."""
_SWEEPS = 2
"""Sweeps in `IDLE_S`. A connection that is idle at more than so many sweeps in a row is closed: after 1 to 1.5 times
`IDLE_S`."""


class MockListener:
    """A port and its connections. Until it is opened, connections are refused, as while vLLM loads its model."""

    def __init__(self, host: str, port: int, handler: MockHandler) -> None:
        self.host = host
        self._handler = handler
        self._socket: socket.socket | None = _bound(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._server: asyncio.Server | None = None
        self._opening = asyncio.Lock()
        self._open: set[MockConnection] = set()
        self._dropped = False
        """Whether a connection that is accepted, but has not reached its protocol yet, must be broken off."""
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def answering(self) -> int:
        """The number of requests whose answers are under way."""
        return sum(connection.answering for connection in self._open)

    async def open(self) -> None:
        """Accept connections.

        Raises:
            UsageError: another program has taken the port meanwhile.
        """
        async with self._opening:  # of two callers, the second finds it open
            if self._server is not None:
                return
            taken, self._socket = self._socket or _bound(self.host, self.port), None
            self._dropped = False
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(
                lambda: MockConnection(self._handler, self._open, lambda: self._dropped), sock=taken, backlog=BACKLOG
            )
            self._sweep()

    def shut(self) -> None:
        """Accept no more connections; open ones go on."""
        if self._server is not None:
            close_server(self._server)
            self._server = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def drop_all(self) -> None:
        """Break every connection off."""
        self._dropped = True
        for connection in list(self._open):
            connection.abort()

    def close(self) -> None:
        """Close the port and all connections, for good."""
        self.shut()
        self.drop_all()
        if self._sweeper is not None:
            self._sweeper.cancel()

    def close_idle(self) -> None:
        """Close connections on which no answer is under way."""
        for connection in list(self._open):
            if not connection.answering:
                connection.close()

    def _sweep(self) -> None:
        """Close connections that have been idle for too many sweeps, and set the timer of the next sweep."""
        for connection in list(self._open):
            busy = connection.answering or connection.midway
            connection.idle_sweeps = 0 if busy else connection.idle_sweeps + 1
            if connection.idle_sweeps > _SWEEPS:
                connection.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._sweeper = asyncio.get_running_loop().call_later(IDLE_S / _SWEEPS, self._sweep)


def _bound(host: str, port: int) -> socket.socket:
    """A socket that is bound to this address.

    Raises:
        UsageError: the address is taken, or not this machine's.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(
            f"--host {host}: {(error.strerror or str(error)).lower()}; give this machine's address"
        ) from None
    family, kind, protocol, _, address = found[0]
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError as error:
        made.close()
        said = (error.strerror or str(error)).lower()
        raise UsageError(f"--port {port} on {host}: {said}; choose another port, or 0 for free ones") from None
    return made
