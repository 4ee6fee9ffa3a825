"""One answer to one client: its head, its bytes, its end. A shell.

No call waits: the transport keeps what the client's connection cannot take at once, and reports when that is too much
(`Outlet.full`, `Outlet.drained`), so that the leg behind the answer is not read further (backpressure).
"""

from __future__ import annotations

import asyncio
import email.utils
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Final, Protocol

from cluster.http.headers import lines

_REASONS: Final = {each.value: each.phrase for each in HTTPStatus}


class OutletListener(Protocol):
    """The answering side, as far as a connection knows it."""

    def client_left(self) -> None:
        """The client has left."""

    def client_full(self) -> None:
        """The client reads too slowly."""

    def client_drained(self) -> None:
        """The client has caught up."""


class Outlet:
    """The way to one client for one answer. `transport` None, or closing: the client has left."""

    __slots__ = ("_chunked", "_corked", "_head", "_keep", "_over", "_transport", "begun", "exchange", "full")

    def __init__(
        self, transport: asyncio.Transport, over: Callable[[Outlet, bool], None], *, chunked: bool, keep: bool
    ) -> None:
        """An answer that is to be written to `transport`.

        Args:
            transport: the client's connection.
            over: called when all of it is written, with whether the connection may take another request.
            chunked: the client understands chunks (HTTP/1.1); else the connection's end is the answer's.
            keep: the client wants to keep this connection.
        """
        self._transport: asyncio.Transport | None = transport
        self._over = over
        self._chunked = chunked
        self._keep = keep
        self._head = b""
        """Bytes that go out with the next ones: a stream's head, and bytes written while more are known to come at
        once."""
        self._corked = False
        self.begun = False
        """Whether a head has been given."""
        self.full = False
        """The client reads too slowly: the transport keeps too many bytes."""
        self.exchange: OutletListener | None = None
        """Receives the connection's events until the answer has ended."""

    @property
    def gone(self) -> bool:
        """Whether the client has left, or has its whole answer."""
        return self._transport is None or self._transport.is_closing()

    @property
    def address(self) -> object:
        """The client's address from its socket; None: the client has left."""
        return None if self._transport is None else self._transport.get_extra_info("peername")

    @property
    def passes(self) -> bool:
        """Whether chunks may go out unchanged, now."""
        return self._chunked and not self._corked and not self.gone

    # -- writing --

    def whole(self, status: int, headers: Mapping[str, str], body: bytes, *, close: bool = False) -> None:
        """Write a whole answer at once. `close`: the connection ends after it."""
        if self.gone or self.begun:
            return
        self.begun = True
        self._keep = self._keep and not close
        assert self._transport is not None
        head = b"%b%bContent-Length: %d\r\n\r\n" % (self._start(status), lines(headers), len(body))
        self._transport.write(head + body)
        self._end()

    def begin(self, headers: bytes) -> None:
        """Begin a stream with status 200 and these header lines (`cluster.http.headers.lines`). Its head goes out with
        its first bytes.
        """
        self.begun = True
        if self._chunked:
            self._head = b"%b%bTransfer-Encoding: chunked\r\n\r\n" % (self._start(200), headers)
        else:
            self._keep = False
            self._head = b"%b%b\r\n" % (self._start(200), headers)

    def write(self, data: bytes) -> None:
        """Write bytes of a stream."""
        if data and not self.gone:
            self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def passage(self) -> Callable[[bytes], None]:
        """A function that takes whole chunks of a begun stream, unchanged, until the client has left."""
        assert not self._head
        return self._nowhere if self._transport is None else self._transport.write

    def _nowhere(self, data: bytes) -> None:
        """Drop the data: the client has left."""

    def end(self, tail: bytes = b"") -> None:
        """End a stream, after these bytes."""
        if self.gone:
            return
        self._corked = False
        framed = b"%x\r\n%b\r\n" % (len(tail), tail) if tail and self._chunked else tail
        self._write(framed + b"0\r\n\r\n" if self._chunked else framed)
        self._end()

    def cork(self) -> None:
        """More bytes come immediately: keep written bytes, to send them with those, or at `uncork`. Each write is a
        system call, and system calls are a quarter of a short answer's cost.
        """
        self._corked = True

    def uncork(self) -> None:
        """No more bytes come: send those that were kept."""
        self._corked = False
        if self._head and self._transport is not None and not self.gone:
            self._write(b"")

    def abort(self) -> None:
        """Cut the answer off: a broken answer must not look like a finished one."""
        if self._transport is not None:
            self._transport.abort()

    def _write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        if self._corked:
            self._head = data
            return
        if data and self._transport is not None:
            self._transport.write(data)

    def _end(self) -> None:
        self._transport = None
        self.exchange = None
        self._over(self, self._keep)

    def _start(self, status: int) -> bytes:
        """The first lines of a head."""
        connection = b"" if self._keep and self._chunked else b"Connection: close\r\n"
        if self._keep and not self._chunked:
            connection = b"Connection: keep-alive\r\n"
        return b"%b%b%b" % (_status_line(status), _date(), connection)

    # -- events of the connection --

    def left(self) -> None:
        """The client has closed the connection."""
        self._transport = None
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.client_left()

    def pause(self) -> None:
        """The client reads too slowly."""
        self.full = True
        if self.exchange is not None:
            self.exchange.client_full()

    def resume(self) -> None:
        """The client has caught up."""
        self.full = False
        if self.exchange is not None:
            self.exchange.client_drained()


@lru_cache(maxsize=100)
def _status_line(status: int) -> bytes:
    return b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, "Status").encode())


class _Date:
    """The `Date` line, made once a second."""

    def __init__(self) -> None:
        self.second = -1
        self.line = b""


_NOW: Final = _Date()


def _date() -> bytes:
    second = int(time.monotonic())  # asking for the running loop is a system call (CPython 3.11: getpid)
    if second != _NOW.second:
        _NOW.second = second
        _NOW.line = f"Date: {email.utils.formatdate(usegmt=True)}\r\n".encode()
    return _NOW.line
