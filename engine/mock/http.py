"""The mock's HTTP/1.1: one connection as an asyncio protocol, with what engines' clients use. A shell.

It is made for thousands of open streams on one core: a token costs one `write` of bytes that are ready. Requests of one
connection are answered one after the other. The listener closes a connection that is idle for about `IDLE_S`, as vLLM's
own server does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol, cast

from cluster.errors import ApiError
from cluster.http.requests import Request, RequestReader
from engine.mock.answers import LAST_CHUNK, encode

logger = logging.getLogger("baton.mock")

IDLE_S = 5.0
"""A connection without a request is closed after this (uvicorn's ``timeout_keep_alive``, which vLLM leaves at 5 s). A
request that has begun to come may take as long as it likes, as in uvicorn."""

BODY_BYTES_MAX = 256 << 20
"""Largest body of a request."""

_STREAM = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


class MockHandler(Protocol):
    """Answers requests."""

    def handle(self, request: Request, exchange: Exchange) -> None:
        """Answer now, or keep the exchange and answer later."""


class Exchange:
    """One request's answer: `respond`, or `begin`, any number of `write`s and `end`; `drop` at any time.

    `on_lost` is called once if the client leaves before the end.
    """

    __slots__ = ("_connection", "_keep_alive", "on_lost", "over")

    def __init__(self, connection: MockConnection, *, keep_alive: bool) -> None:
        self._connection = connection
        self._keep_alive = keep_alive
        self.on_lost: Callable[[], None] | None = None
        self.over = False

    def respond(self, status: int, body: bytes = b"", content_type: str = "application/json") -> None:
        """Send the whole answer."""
        if self.over:
            return
        kind = f"content-type: {content_type}\r\n" if body else ""
        close = "" if self._keep_alive else "connection: close\r\n"
        status_line = f"HTTP/1.1 {status} {_phrase(status)}\r\nserver: uvicorn\r\n"
        head = f"{status_line}content-length: {len(body)}\r\n{kind}{close}\r\n"
        self._connection.write(head.encode() + body)
        self._finish()

    def begin(self) -> None:
        """Send the head of a stream of events."""
        if not self.over:
            self._connection.write(_STREAM)

    def write(self, data: bytes) -> None:
        """Send chunks that are framed already (`engine.mock.answers.chunk`)."""
        if not self.over:
            self._connection.write(data)

    def end(self, data: bytes = LAST_CHUNK) -> None:
        """Send the last bytes of a stream, its last chunk among them."""
        if not self.over:
            self._connection.write(data)
            self._finish()

    def drop(self) -> None:
        """Break the connection off."""
        self.over, self.on_lost = True, None
        self._connection.abort()

    def _finish(self) -> None:
        self.over, self.on_lost = True, None
        self._connection.answered(keep_alive=self._keep_alive)

    def lost(self) -> None:
        """The client has left."""
        if not self.over:
            self.over = True
            if self.on_lost is not None:
                self.on_lost()


class MockConnection(asyncio.Protocol):
    """One client's connection. It is in `open_ones` while it is open. `too_late`: whether the listener has dropped all
    connections meanwhile; then this one is broken off at once.
    """

    def __init__(self, handler: MockHandler, open_ones: set[MockConnection], too_late: Callable[[], bool]) -> None:
        self._handler = handler
        self._open = open_ones
        self._too_late = too_late
        self._reader = RequestReader(BODY_BYTES_MAX)
        self._waiting: deque[Request] = deque()
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self.idle_sweeps = 0
        """How many times in a row the listener has found it without a request, also one that is still coming."""

    # -- asyncio --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self._open.add(self)
        if self._too_late():
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        self._transport = None
        self._waiting.clear()
        if self._exchange is not None:
            exchange, self._exchange = self._exchange, None
            exchange.lost()

    def data_received(self, data: bytes) -> None:
        try:
            found = self._reader.feed(data)
        except ApiError as problem:
            Exchange(self, keep_alive=False).respond(problem.status, encode(problem.body()))
            return
        self._waiting.extend(found)
        if self._reader.asked_to_go_on():
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._exchange is None:
            self._next()

    # -- exchanges --

    @property
    def answering(self) -> bool:
        """Whether an answer is under way."""
        return self._exchange is not None

    @property
    def midway(self) -> bool:
        """Whether a request is still coming."""
        return self._reader.midway

    def _next(self) -> None:
        while self._waiting and self._exchange is None and self._transport is not None:
            request = self._waiting.popleft()
            self.idle_sweeps = 0
            exchange = self._exchange = Exchange(self, keep_alive=request.keep_alive)
            try:
                self._handler.handle(request, exchange)
            except Exception:  # one broken answer must not end the server
                logger.exception("%s %s", request.method, request.path)
                self.abort()

    def answered(self, *, keep_alive: bool) -> None:
        """The answer is complete."""
        self._exchange = None
        if not keep_alive:
            self.close()
        elif self._waiting:
            self._next()

    def write(self, data: bytes) -> None:
        """Send bytes to the client, if the connection is open."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection once everything is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Break the connection off; bytes that are not sent yet are lost."""
        if self._transport is not None:
            self._transport.abort()


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Status"
