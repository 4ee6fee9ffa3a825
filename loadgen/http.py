"""HTTP/1.1 to one endpoint, for the sender only: keep-alive connections that deliver answers piece by piece.

It uses a callback per piece instead of a reader per request: no task wakes up for a token, and the time stamp is taken
where the bytes arrive. So one core handles 50,000 chunks per second (docs/load.md has the measurement).
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from cluster.errors import UsageError

CONNECT_S = 10.0
"""Time limit for a connection to be accepted; after it the connection counts as refused."""

IDLE_S = 4.0
"""Idle connections are dropped before uvicorn drops them (5 s), so that a reused one is rarely closed already."""

_OWN_LIMITS = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}


class Failed(Exception):
    """No answer. `kind` is `connect` (the server does not accept) or `own_limit` (this machine has no file or port
    left).
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Listener(Protocol):
    """Receives an answer. Exactly one of `ended` and `broke` is called, last, unless the sender cuts the connection."""

    def piece(self, status: int, data: bytes, now: float) -> None:
        """Bytes of the body came, at `now` of `time.perf_counter()`."""

    def ended(self, status: int, now: float) -> None:
        """The answer is complete."""

    def broke(self, why: str, now: float, *, stale: bool) -> None:
        """The connection ended early. `stale`: it was a reused one, and no byte of the answer had come."""


class Connection(asyncio.Protocol):
    """One connection, one answer at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._listener: Listener | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._used = 0
        self._heard = False
        self._now = 0.0
        self._length_known = False
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by descent
        self._pool.opened.add(self)

    def send(self, request: bytes, listener: Listener) -> None:
        """Write a request; `listener` receives the answer."""
        assert self._listener is None
        self._listener = listener
        self._used += 1
        self._heard = self._length_known = False
        if self._transport is None:
            self._tell_broke("the server closed the connection at once")
        else:
            self._transport.write(request)

    def cut(self) -> None:
        """Close the connection at once; the listener is not called."""
        self._listener = None
        if self._transport is not None:
            self._transport.abort()

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._heard = True
        try:
            self._parser.feed_data(data)
        except (
            httptools.HttpParserError,
            httptools.HttpParserUpgrade,
        ) as error:  # the second: a status 101
            self._tell_broke(f"no HTTP answer: {error}")
            self.cut()

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in {b"content-length", b"transfer-encoding"}:
            self._length_known = True

    def on_body(self, body: bytes) -> None:
        if self._listener is not None:
            self._listener.piece(self._parser.get_status_code(), body, self._now)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # an informational answer: the real one follows
            self._length_known = False
            return
        listener, self._listener = self._listener, None
        keep = self._parser.should_keep_alive() and self._length_known
        status = self._parser.get_status_code()
        if keep and self.usable:
            self._pool.give_back(self, self._now)
        elif self._transport is not None:
            self._transport.close()
        if listener is not None:
            listener.ended(status, self._now)

    # the end

    def eof_received(self) -> bool:
        """An answer without a length ends with the connection."""
        if self._listener is not None and self._heard and not self._length_known:
            self._now = time.perf_counter()
            listener, self._listener = self._listener, None
            listener.ended(self._parser.get_status_code(), self._now)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        self._now = time.perf_counter()
        self._transport = None
        self._tell_broke(str(exc) if exc else "the server closed the connection")

    def _tell_broke(self, why: str) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.broke(why, self._now, stale=self._used > 1 and not self._heard)


class Pool:
    """Connections to one endpoint, opened as needed."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"{url}: {error}") from None
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise UsageError(f"{url!r} is not a URL; write http://HOST:PORT")
        self.host = parts.hostname
        self.port = port or (443 if parts.scheme == "https" else 80)
        self.netloc = parts.netloc.rpartition("@")[2]
        self.base = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{self.netloc}{self.base}"
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._idle: list[Connection] = []
        self.opened: set[Connection] = set()

    def idle(self) -> Connection | None:
        """A free connection, the one used last; older ones may then time out."""
        now = time.perf_counter()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and now - connection.idle_since < IDLE_S:
                return connection
            connection.cut()
        return None

    async def connect(self) -> Connection:
        """A new connection. Raises `Failed`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: Connection(self), self.host, self.port, ssl=self._ssl
                )
        except TimeoutError:
            raise Failed("connect", f"no connection within {CONNECT_S:g} s") from None
        except OSError as error:
            kind = "own_limit" if error.errno in _OWN_LIMITS else "connect"
            raise Failed(kind, error.strerror or str(error)) from None
        return connection

    def give_back(self, connection: Connection, now: float) -> None:
        connection.idle_since = now
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        self.opened.discard(connection)

    def close(self) -> None:
        """Cut every connection."""
        for connection in list(self.opened):
            connection.cut()
        self._idle.clear()
