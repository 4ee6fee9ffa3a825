"""HTTP/1.1 to one endpoint, for the sender only: keep-alive connections that deliver answers piece by piece. A shell.

It uses a callback per piece instead of a reader per request. No task wakes up for a token, and the time stamp is taken
where the bytes arrive. So one core handles 50,000 chunks per second (docs/load.md has the measurement).
"""

from __future__ import annotations

import asyncio
import errno
import time
from typing import Protocol, cast
from urllib.parse import urlsplit

from cluster.errors import UsageError
from cluster.http import pool
from cluster.http.answers import AnswerReader

CONNECT_S = 10.0
"""Seconds for a connection to be accepted; after that it counts as refused."""

_OWN_LIMITS = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}


class Failed(Exception):
    """No answer. `kind` is `connect` (the server does not accept) or `own_limit` (this machine has no file or port
    left).
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class AnswerListener(Protocol):
    """Receives an answer. Exactly one of `ended` and `broke` is called, last, unless the sender cuts the connection."""

    def piece(self, status: int, data: bytes, now: float) -> None:
        """Bytes of the body came, at `now` of `time.perf_counter()`."""

    def ended(self, status: int, now: float) -> None:
        """The answer is complete."""

    def broke(self, why: str, now: float, *, stale: bool) -> None:
        """The connection ended early. `stale`: it was a reused one, and no byte of the answer had come."""


class LoadConnection(asyncio.Protocol):
    """One connection, one answer at a time."""

    def __init__(self, kept: pool.Pool[LoadConnection]) -> None:
        self._pool = kept
        self._transport: asyncio.Transport | None = None
        self._listener: AnswerListener | None = None
        self._reader = AnswerReader()
        self._used = 0
        self._now = 0.0
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class does not inherit from it
        self._pool.opened.add(self)

    def send(self, request: bytes, listener: AnswerListener) -> None:
        """Write a request; `listener` receives the answer."""
        assert self._listener is None
        self._listener = listener
        self._used += 1
        self._reader.reset()
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
        if self._listener is None:
            self.cut()  # an answer to no request
            return
        reader = self._reader
        fault = reader.feed(data)
        for piece in reader.bodies:
            if self._listener is not None:
                self._listener.piece(reader.status, piece, self._now)
        reader.bodies.clear()
        if fault:
            self._tell_broke(f"no HTTP answer: {fault}")
            self.cut()
        elif reader.complete and self._listener is not None:
            self._end(keep=reader.keep and self.usable)

    def _end(self, *, keep: bool) -> None:
        listener, self._listener = self._listener, None
        if keep:
            self.idle_since = self._now
            self._pool.give_back(self)
        elif self._transport is not None:
            self._transport.close()
        if listener is not None:
            listener.ended(self._reader.status, self._now)

    def eof_received(self) -> bool:
        """An answer without a length ends with the connection."""
        if self._reader.ends_with_connection:
            self._now = time.perf_counter()
            self._end(keep=False)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        self._now = time.perf_counter()
        self._transport = None
        self._reader.close()
        self._tell_broke(str(exc) if exc else "the server closed the connection")

    def _tell_broke(self, why: str) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.broke(why, self._now, stale=self._used > 1 and not self._reader.heard)


class LoadConnections:
    """Connections to one endpoint, opened as needed."""

    def __init__(self, url: str) -> None:
        """`url`: the endpoint's; UsageError says what is wrong with it."""
        try:
            parts = urlsplit(url)
            if parts.scheme not in {"http", "https"} or not parts.hostname:
                raise UsageError(f"{url!r} is not a URL; write http://HOST:PORT")
            _check_host(parts.hostname)
            self._kept = pool.Pool(url, LoadConnection)
        except ValueError as error:
            raise UsageError(f"{url}: {error}") from None
        self.netloc = self._kept.netloc
        self.base = self._kept.base.removesuffix("/v1")
        self.url = f"{parts.scheme}://{self.netloc}{self.base}"

    def idle(self) -> LoadConnection | None:
        """A free connection; None: there is none."""
        return self._kept.idle(time.perf_counter())

    async def connect(self) -> LoadConnection:
        """A new connection. Raises `Failed`."""
        try:
            async with asyncio.timeout(CONNECT_S):
                return await self._kept.connect()
        except TimeoutError:
            raise Failed("connect", f"no connection within {CONNECT_S:g} s") from None
        except OSError as error:
            kind = "own_limit" if error.errno in _OWN_LIMITS else "connect"
            raise Failed(kind, error.strerror or str(error)) from None

    def close(self) -> None:
        """Cut every connection."""
        self._kept.close()


def _check_host(name: str) -> None:
    """Refuse a host name that `socket.getaddrinfo` cannot encode: it would raise UnicodeError at each connection."""
    try:
        name.encode("idna")
    except UnicodeError:
        why = "each part between its dots must have 1 to 63 characters that host names may have"
        raise UsageError(f"{name!r} is no host name: {why}; write http://HOST:PORT") from None
