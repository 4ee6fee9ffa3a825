"""Additions to aiohttp's side of a port: errors as JSON, time limits, connection limits, turns of uploads. A shell.

aiohttp by itself answers unreadable requests and expectations in plain text, waits for ever for a first request, and
takes any number of connections. These classes change that. (It begins no request before the last answer is written out:
`tests/contract/test_hostile.py`.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from cluster.errors import ApiError, bad_request, no_room
from cluster.http.heads import HEADERS_MAX, LINE_BYTES_MAX, check_expectation, too_long
from router.http.doors import ConnectionPlace, Doors
from router.http.front import KEEPALIVE_S
from router.http.uploads import Uploads, no_room_for_bodies

Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]

SETTINGS: Final[dict[str, Any]] = {
    "access_log": None,
    "keepalive_timeout": KEEPALIVE_S,
    "max_line_size": LINE_BYTES_MAX,
    "max_field_size": LINE_BYTES_MAX,
    "max_headers": HEADERS_MAX,
}
"""aiohttp's limits, on every port: it reads no larger heads than the clients' front does."""

_LATE: Final = ApiError(408, "RequestTimeoutError", "The request head did not arrive in time.")


class AiohttpConnection(RequestHandler):
    """One connection of aiohttp's."""

    __slots__ = ("_doors", "_first_s", "_patience")

    def __init__(
        self, server: web.Server, *, doors: Doors | None = None, first_s: float | None = None, **settings: Any
    ) -> None:
        """`doors`: counts the connection. `first_s`: the time for its first request; None: another part limits and
        counts it.
        """
        super().__init__(server, loop=asyncio.get_running_loop(), **settings)
        self._doors = doors
        self._first_s = first_s
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        if self._first_s is not None:
            self._patience = loop.call_later(self._first_s, self._cut_off_if_silent)
        if self._doors is not None and self._doors.enter(self, loop.time()) is not ConnectionPlace.TAKEN:
            self._end(no_room(f"its admin side has {self._doors.guests_max} connections open"))

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._doors is not None:
            self._doors.leave(self)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        super().connection_lost(exc)

    def make_room(self) -> bool:
        """Another connection needs this one's place (`doors.Guest`). False: a request is under way."""
        waiter, transport = self._waiter, self.transport
        if waiter is None or waiter.done():
            return False
        if transport is not None:
            transport.close()
        return True

    def _cut_off_if_silent(self) -> None:
        self._patience = None
        if self._request_count == 0:
            self._end(_LATE)

    def _end(self, problem: ApiError) -> None:
        transport = self.transport
        if transport is None:
            return
        body = msgspec.json.encode(problem.body())
        reason = "Request Timeout" if problem.status == 408 else "Service Unavailable\r\nRetry-After: 1"
        transport.write(
            b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
            % (problem.status, reason.encode(), len(body), body)
        )
        transport.close()

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """An unreadable body is the client's fault, and the client has been told."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """For requests that aiohttp could not read, and for bugs: the same answer as everywhere. Only bugs are
        logged.
        """
        if isinstance(exc, ConnectionResetError):
            raise exc  # the client has left: aiohttp takes this for the connection's end
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        if isinstance(exc, LineTooLong):
            problem = too_long()
        else:
            said = (message or "").split("\n", 1)[0].rstrip(":")
            problem = bad_request(f"This is not a request of HTTP/1.1: {said[:200]}")
        response = as_response(problem)
        response.force_close()
        return response


def handlers(server: web.Server, **more: Any) -> Callable[[], RequestHandler]:
    """The factory of a server's connections. `more`: arguments for each `AiohttpConnection`."""
    server.request_handler = _expecting(cast("Handle", server.request_handler))  # type: ignore[assignment]
    return lambda: AiohttpConnection(server, **SETTINGS, **more)


def _expecting(handle: Handle) -> Handle:
    async def handled(request: web.Request) -> web.StreamResponse:
        """Handle a request with no expectation, or with one that the router supports."""
        expectation = request.headers.get("Expect")
        try:
            if expectation is not None:
                check_expectation(expectation)
        except ApiError as problem:
            return as_response(problem)
        return await handle(request)

    return handled


def as_response(problem: ApiError) -> web.Response:
    """A problem as an aiohttp answer."""
    body = msgspec.json.encode(problem.body())
    return web.Response(status=problem.status, body=body, content_type="application/json")


class UploadTurn:
    """An upload that aiohttp reads, among all others (`uploads.Upload`)."""

    def __init__(self, uploads: Uploads, client: str | None = None) -> None:
        """`client`: the upload's client (`Uploads.add`)."""
        self._uploads = uploads
        self._client = client
        self._go: asyncio.Future[None] | None = None
        self.waited = False
        """Other uploads were before it, so it is not its client's fault if it is late."""

    async def brought(self, count: int) -> None:
        """`count` more bytes have arrived. Returns when more may. Raises ApiError: 503."""
        if not self._uploads.add(self, count, self._client):
            raise no_room_for_bodies()
        if self._go is not None:
            await self._go

    def hold(self) -> None:
        """Stop reading the body for now."""
        self.waited = True
        self._go = asyncio.get_running_loop().create_future()

    def go_on(self) -> None:
        """Read on."""
        go, self._go = self._go, None
        if go is not None and not go.done():
            go.set_result(None)
