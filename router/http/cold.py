"""aiohttp's side of a port: errors as JSON, time limits, connection limits, turns of uploads, one request at a time. A
shell.

aiohttp by itself answers unreadable requests and expectations in plain text, waits for ever for a first request, and
takes any number of connections. The classes here change that. (It begins no request before the last answer is written
out: `tests/contract/test_hostile.py`.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final, cast

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from cluster.errors import ApiError, bad_request, no_room, retry_after_s
from cluster.http.framing import Chunks
from cluster.http.heads import HEADERS_MAX, LINE_BYTES_MAX, RequestHead, check_expectation, too_long
from router.http.client_transport import KEEPALIVE_S
from router.http.doors import ConnectionPlace, Doors
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

COLD_LOOKS_S: Final = 0.01
"""aiohttp does not report when it has answered: while that is awaited, the connection is polled this often at first,
and each time a fifth later, so that a long answer costs a sixth of its time in delay."""

COLD_LOOKS_MAX_S: Final = 0.5
"""The longest pause between two looks: clients may make many connections wait behind long answers."""

_TUNNEL: Final = b"CONNECT "
_LATE: Final = ApiError(408, "RequestTimeoutError", "The request head did not arrive in time.")


class AiohttpConnection(RequestHandler):
    """One connection that aiohttp serves."""

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
        again_s = retry_after_s(problem.status, problem.retry_after_s)
        lines = [
            f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}",
            "Content-Type: application/json",
            "Connection: close",
            f"Content-Length: {len(body)}",
            *([] if again_s is None else [f"Retry-After: {again_s}"]),
        ]
        transport.write("\r\n".join([*lines, "", ""]).encode() + body)
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
    return json_response(problem.body(), problem.status)


def json_response(value: object, status: int = 200) -> web.Response:
    """A value as an aiohttp answer."""
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


class UploadTurn:
    """An upload that aiohttp reads, among all others (`uploads.Upload`)."""

    def __init__(self, uploads: Uploads, client: str | None = None) -> None:
        """`client`: the upload's client (`Uploads.add`)."""
        self._uploads = uploads
        self._client = client
        self._go: asyncio.Future[None] | None = None
        self.waited = False
        """The upload waited for others: if it is late, that is not its client's fault."""

    async def brought(self, count: int) -> None:
        """`count` more bytes have arrived. Returns when more may be read. Raises ApiError: 503 if too many wait."""
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


def framing_of(head: RequestHead, data: bytes, bytes_max: int) -> Chunks | int | None:
    """How the body of a request for aiohttp ends: with its chunks, or after a number of bytes. `data`: the request's
    beginning. None: the client asks for another protocol, so all further bytes are aiohttp's.

    Raises:
        ApiError: aiohttp would read this request in another way, or it expects something unknown.
    """
    if data.startswith(_TUNNEL):  # aiohttp would read the bytes behind such a head as a body; other readers see none
        raise ApiError(405, "MethodNotAllowedError", "`CONNECT` is not allowed here: this is no proxy.")
    framing = Chunks(bytes_max, keeps=False) if head.comes_in_chunks() else head.length()
    expects = head.headers.get("expect")
    if expects is not None:
        check_expectation(expects)
    return None if "upgrade" in head.headers else framing


class ColdRequests:
    """The requests of one client's connection that aiohttp answers: it gets the bytes of one at a time."""

    def __init__(self, handler: RequestHandler, transport: asyncio.Transport, again: Callable[[], None]) -> None:
        """`again`: called after `has_answered` was false, to ask once more."""
        self.handler: Final = handler
        self._again: Final = again
        self._framing: Chunks | int | None = 0
        """See `framing_of`; a number counts the bytes that are still to come."""
        self._pause_s = COLD_LOOKS_S
        self._looking = False
        handler.connection_made(transport)

    @property
    def whole(self) -> bool:
        """Whether the client need not send more for aiohttp to answer, as far as is known here."""
        return not isinstance(self._framing, Chunks) and not self._framing

    @property
    def at_rest(self) -> bool:
        """Whether aiohttp has answered all that has begun."""
        return self.whole and self._waits

    @property
    def _waits(self) -> bool:
        waiter = self.handler._waiter  # noqa: SLF001 - only there aiohttp says it
        return waiter is not None and not waiter.done()

    def begin(self, data: bytes, end: int, framing: Chunks | int | None) -> bytes:
        """Give aiohttp the head ``data[:end]``. Returns the bytes behind it, which `feed` takes."""
        self._framing = framing
        if framing is None:
            end = len(data)
        self.handler.data_received(data[:end])
        return data[end:]

    def feed(self, data: bytes) -> bytes:
        """Give aiohttp those of the next bytes that belong to its request. Returns the others.

        Raises:
            ApiError: as `Chunks.feed`.
        """
        framing = self._framing
        if framing is None:
            used = len(data)
        elif isinstance(framing, Chunks):
            used = framing.feed(data)
            if framing.done:
                self._framing = 0
        else:
            used = min(framing, len(data))
            self._framing = framing - used
        if used:
            self.handler.data_received(data[:used])
        return data[used:]

    def has_answered(self) -> bool:
        """Whether the next request may begin. If not, `again` is called soon."""
        if not self._waits:
            if not self._looking:
                self._looking = True
                asyncio.get_running_loop().call_later(self._pause_s, self._look)
                self._pause_s = min(COLD_LOOKS_MAX_S, 1.2 * self._pause_s)
            return False
        self._pause_s = COLD_LOOKS_S
        return True

    def _look(self) -> None:
        self._looking = False
        self._again()

    def leave(self) -> None:
        """Keep aiohttp from closing this connection when it finds it idle."""
        self.handler.transport = None
        self.handler.connection_lost(None)
