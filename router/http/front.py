"""Clients' connections: generation is answered here, every other request is handed to aiohttp. A shell.

A connection reads heads itself, so that it knows where each request begins and ends. One for generation is read whole
and answered through an `Outlet`; the bytes of any other go to a handler of aiohttp's that shares the connection. One
request is under way at a time: what a client sends before its answer is complete waits, within bounds.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Final, NamedTuple, Protocol, cast

import httptools
from aiohttp.web_protocol import RequestHandler

from cluster.errors import ApiError, bad_request, body_timeout, too_large
from router.exact import CHAT, COMPLETIONS
from router.http.headers import Headers
from router.http.outlet import Outlet

LINE_BYTES_MAX: Final = 16384
"""Longest request line and longest header: room for long tokens and trace states, none for abuse."""

HEAD_BYTES_MAX: Final = 4 * LINE_BYTES_MAX
"""And all of a head."""

KEEPALIVE_S: Final = 75.0
"""Idle client connections are kept this long, as common proxies do."""

AHEAD_BYTES_MAX: Final = 1 << 16
"""So much may come before the answer to what came first; then the connection is not read until that is complete."""

LINGER_S: Final = 10.0
"""A client that is refused while it sends may go on for so long: closed at once, it would never read why."""

COLD_LOOKS_S: Final = 0.01
"""aiohttp does not say when it has answered: where something waits for that, it is looked at this often."""

_HOT: Final = {f"POST {path}{end}".encode(): path for path in (COMPLETIONS, CHAT) for end in " ?"}
_HOT_LONGEST: Final = max(map(len, _HOT))
_HEAD_TIMEOUT: Final = ApiError(408, "RequestTimeoutError", "The request head did not arrive in time.")
_LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,9})\r\n")
_UPGRADED: Final = ("upgrade", "transfer-encoding")
"""Headers after which nobody but aiohttp knows where a request ends."""

_SPECIAL: Final = frozenset({*_UPGRADED, "expect"})
"""Headers of requests that are always read anew."""


class Answers(Protocol):
    """Who answers."""

    def admit(self, headers: Mapping[str, str]) -> str:
        """The tenant whose request this is; its body is not read yet. Raises `ApiError`."""

    def answer(self, outlet: Outlet, path: str, headers: Headers, raw: bytes, tenant: str) -> None:
        """Answer it, now or later. Raises `ApiError`."""

    def refuse(self, outlet: Outlet, problem: Exception, *, close: bool = False) -> None:
        """Answer with what was raised."""


class Front:
    """What all clients' connections of a process share."""

    def __init__(
        self,
        answers: Answers,
        cold: Callable[[], RequestHandler],
        *,
        body_bytes_max: int,
        body_timeout_s: float,
        head_timeout_s: float,
    ) -> None:
        self.answers: Final = answers
        self.cold: Final = cold
        self.body_bytes_max: Final = body_bytes_max
        self.body_timeout_s: Final = body_timeout_s
        self.head_timeout_s: Final = head_timeout_s
        self.loop: Final = asyncio.get_running_loop()
        self.open: Final[set[Connection]] = set()
        self.drains = False
        self._empty: asyncio.Future[None] | None = None

    def connect(self) -> Connection:
        """A client's connection."""
        return Connection(self)

    async def drain(self, timeout_s: float) -> None:
        """Close what is idle, let answers that have begun end within this time, and cut the others off."""
        self.drains = True
        for connection in list(self.open):
            connection.close_if_idle()
        if any(each.answering for each in self.open):
            self._empty = self.loop.create_future()
            await asyncio.wait({self._empty}, timeout=timeout_s)
        for connection in list(self.open):
            if not connection.cold:
                connection.cut()

    def closed(self, connection: Connection) -> None:
        """One is gone."""
        self.open.discard(connection)
        if self._empty is not None and not self._empty.done() and not any(each.answering for each in self.open):
            self._empty.set_result(None)


class _Phase(Enum):
    HEAD = auto()
    """Idle, or a head is coming."""
    BODY = auto()
    ANSWERING = auto()
    COLD = auto()
    """aiohttp has it."""
    COLD_FOR_GOOD = auto()
    LINGERING = auto()
    """Refused: what still comes is thrown away."""


class _Head:
    """One request's, and its body where that comes in chunks."""

    __slots__ = ("chunks", "complete", "headers", "keep", "longest", "more", "parser", "pieces", "size")

    def __init__(self, known: _Known | None = None) -> None:
        self.pieces: list[bytes] = []
        self.size = 0
        self.longest = 0
        self.complete = self.more = False
        self.parser: httptools.HttpRequestParser | None = None
        if known is not None:
            self.headers, self.keep, self.chunks = known.headers, known.keep, known.chunks
            return
        self.headers = Headers()
        self.keep = self.chunks = False
        """Its connection may go on after it; it knows chunks (HTTP/1.1)."""
        self.parser = httptools.HttpRequestParser(self)

    def on_url(self, url: bytes) -> None:
        self.longest = max(self.longest, len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self.longest = max(self.longest, len(name) + len(value))
        self.headers.add(name, value)

    def on_headers_complete(self) -> None:
        if not self.complete and self.parser is not None:
            self.keep = self.parser.should_keep_alive()
            self.chunks = self.parser.get_http_version() == "1.1"

    def on_message_begin(self) -> None:
        self.more = self.complete

    def on_body(self, data: bytes) -> None:
        if not self.complete:
            self.pieces.append(data)
            self.size += len(data)

    def on_message_complete(self) -> None:
        self.complete = True

    def read(self, data: bytes) -> None:
        """Raises ApiError for what is no HTTP."""
        assert self.parser is not None
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return  # offers of other protocols are not taken up
        except httptools.HttpParserError as error:
            raise bad_request(f"This is not a request of HTTP/1.1: {error}") from None

    def length(self) -> int:
        """Bytes of its body. Raises ApiError."""
        said = self.headers.get("content-length")
        if said is None:
            return 0
        if not said.isascii() or not said.isdigit() or len(said) > 18:
            raise bad_request("Content-Length is not a number.")
        return int(said)


class _Known(NamedTuple):
    """A head for generation as it was read, and all of its bytes but the digits of its length: most clients send the
    same again and again. Other digits there make no other head.
    """

    form: tuple[bytes, bytes]
    path: str
    headers: Headers
    keep: bool
    chunks: bool


class Connection(asyncio.Protocol):
    """One client's."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._transport: asyncio.Transport | None = None
        self._phase = _Phase.HEAD
        self._buffer = b""
        """Came, and is not read yet."""
        self._request: _Head | None = None
        self._known: _Known | None = None
        self._path = self._tenant = ""
        self._left = 0
        """Bytes of a body that are still to come; -1: it comes in chunks."""
        self._cold: RequestHandler | None = None
        self.outlet: Outlet | None = None
        """Where an answer is on its way."""
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._served = False
        self._looking = self._paused = self._body_awaited = False

    @property
    def answering(self) -> bool:
        """A request is under way."""
        return self._phase in {_Phase.BODY, _Phase.ANSWERING}

    @property
    def cold(self) -> bool:
        """aiohttp has it, and ends it."""
        return self._phase in {_Phase.COLD, _Phase.COLD_FOR_GOOD}

    # -- bytes --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by descent
        self._front.open.add(self)
        self._limit(self._front.head_timeout_s)

    def data_received(self, data: bytes) -> None:
        if self._phase is _Phase.COLD_FOR_GOOD:
            assert self._cold is not None
            self._cold.data_received(data)
            return
        if self._phase is _Phase.LINGERING:
            return
        self._buffer = self._buffer + data if self._buffer and self._phase is not _Phase.BODY else data
        self._advance()

    def _advance(self) -> None:
        """Read on, as far as what has come allows."""
        try:
            if self._phase is _Phase.COLD:
                self._go_on_cold()
            if self._phase is _Phase.HEAD and self._buffer:
                self._read_head()
            elif self._phase is _Phase.BODY:
                data, self._buffer = self._buffer, b""
                self._read_body(data)
            elif self._phase is _Phase.ANSWERING and len(self._buffer) > AHEAD_BYTES_MAX:
                self._pause()
        except ApiError as problem:
            self._refuse(problem)

    def _read_head(self) -> None:
        data = self._buffer
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            if len(data) > HEAD_BYTES_MAX:
                raise _too_long()
            if self._deadline > self._front.loop.time() + self._front.head_timeout_s:
                self._limit(self._front.head_timeout_s)
            return
        if end > HEAD_BYTES_MAX:
            raise _too_long()
        found = _LENGTH.search(data, 0, end)
        form = None if found is None else (data[: found.start(1)], data[found.end(1) : end])
        known = self._known
        if known is not None and form == known.form:
            assert found is not None
            request, self._path, self._left = _Head(known), known.path, int(found[1])
            self._request = request
        else:
            known = None
            self._path = _hot(data)
            request = self._request = _Head()
            request.read(data[:end])
            if request.longest > LINE_BYTES_MAX:
                raise _too_long()
            if not self._path:
                self._go_cold(request, end)
                return
        if self._cold is not None:
            self._leave_cold()
        self._buffer = b""
        if known is not None:
            self._begin_known(request, data[end:])
            return
        self._begin(request, data[end:])
        if form is not None and _SPECIAL.isdisjoint(request.headers):
            request.headers.drop("content-length")
            self._known = _Known(form, self._path, request.headers, request.keep, request.chunks)

    def _begin_known(self, request: _Head, rest: bytes) -> None:
        """A request for generation, with the same head as the last one but for its length."""
        self._tenant = self._front.answers.admit(request.headers)
        if self._left > self._front.body_bytes_max:
            raise too_large(self._front.body_bytes_max)
        self._phase = _Phase.BODY
        self._read_body(rest)

    def _begin(self, request: _Head, rest: bytes) -> None:
        """A request for generation: its head is here."""
        front, headers = self._front, request.headers
        self._tenant = front.answers.admit(headers)
        said = headers.get("transfer-encoding")
        if said is None:
            self._left = request.length()
        elif said.lower() == "chunked" and "content-length" not in headers:
            self._left = -1
        else:
            raise bad_request("The body's length is told in a way that is not understood here.")
        if self._left > front.body_bytes_max:
            raise too_large(front.body_bytes_max)
        self._phase = _Phase.BODY
        expects = headers.get("expect")
        if expects is not None and len(rest) < (self._left if self._left >= 0 else 1):
            self._meet(expects)
        self._read_body(rest)

    def _meet(self, expectation: str) -> None:
        if expectation.lower() != "100-continue":
            raise ApiError(417, "BadRequestError", f"`Expect: {expectation[:80]}` is not understood here.")
        assert self._transport is not None
        self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _read_body(self, data: bytes) -> None:
        request = self._request
        assert request is not None
        if self._left < 0:
            if data:
                request.read(data)
            if request.size > self._front.body_bytes_max:
                raise too_large(self._front.body_bytes_max)
            whole = request.complete
        else:
            if not request.pieces and len(data) >= self._left:
                request.pieces.append(data[: self._left] if len(data) > self._left else data)
                self._buffer, self._left = data[self._left :], 0
            else:
                request.pieces.append(data[: self._left])
                self._buffer, self._left = data[self._left :], max(0, self._left - len(data))
            whole = self._left == 0
        if whole:
            self._answer(request)
        elif not self._body_awaited:
            self._body_awaited = True
            self._limit(self._front.body_timeout_s)

    def _answer(self, request: _Head) -> None:
        self._phase, self._deadline, self._request = _Phase.ANSWERING, math.inf, None
        request.parser = None  # the two hold each other
        self._body_awaited = False
        self._served = True
        pieces = request.pieces
        raw = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        # What comes behind a body in chunks has been read with it: it is not known any more where that one ended.
        keep = request.keep and not request.more and not self._front.drains
        outlet = self._outlet(chunked=request.chunks, keep=keep)
        try:
            self._front.answers.answer(outlet, self._path, request.headers, raw, self._tenant)
        except Exception as problem:  # noqa: BLE001 - the one boundary where faults become answers
            self._front.answers.refuse(outlet, problem)

    def _outlet(self, *, chunked: bool, keep: bool) -> Outlet:
        assert self._transport is not None
        outlet = self.outlet = Outlet(self._transport, self._answered, chunked=chunked, keep=keep)
        return outlet

    def _answered(self, outlet: Outlet, keep: bool) -> None:  # noqa: FBT001 - the outlet's one call
        """All of an answer is written."""
        self.outlet = None
        if self._transport is None:
            return
        if not keep or self._front.drains:
            self._linger_or_close()
            return
        self._phase = _Phase.HEAD
        self._limit(KEEPALIVE_S)
        if self._buffer:
            self._front.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """With what came meanwhile."""
        self._resume()
        if self._phase is not _Phase.ANSWERING:
            self._advance()

    # -- refusals --

    def _refuse(self, problem: ApiError) -> None:
        """What came cannot be read on."""
        self._phase, self._buffer = _Phase.ANSWERING, b""
        self._front.answers.refuse(self._outlet(chunked=True, keep=False), problem, close=True)

    def _linger_or_close(self) -> None:
        """The last answer is on its way."""
        assert self._transport is not None
        unread = self._request is not None
        self._request = None
        if not unread or not self._transport.can_write_eof():
            self._phase = _Phase.LINGERING
            self._limit(LINGER_S)
            self._transport.close()
            return
        self._phase = _Phase.LINGERING
        self._limit(LINGER_S)
        self._transport.write_eof()

    # -- aiohttp's --

    def _go_cold(self, request: _Head, end: int) -> None:
        """The request at the beginning of what came is aiohttp's."""
        assert self._transport is not None
        if self._cold is None:
            self._cold = self._front.cold()
            self._cold.connection_made(self._transport)
        self._deadline = math.inf
        self._request = None
        self._served = True
        data, self._buffer = self._buffer, b""
        if any(name in request.headers for name in _UPGRADED):
            self._phase = _Phase.COLD_FOR_GOOD
            self._cold.data_received(data)
            return
        self._phase = _Phase.COLD
        self._left = end + request.length()
        self._feed_cold(data)
        self._go_on_cold()

    def _feed_cold(self, data: bytes) -> None:
        """No more than the one request that it is answering."""
        assert self._cold is not None
        mine = data[: self._left]
        self._buffer = data[self._left :]
        self._left -= len(mine)
        if mine:
            self._cold.data_received(mine)

    def _go_on_cold(self) -> None:
        """More has come: of this request, or of the next."""
        assert self._cold is not None
        if self._left:
            data, self._buffer = self._buffer, b""
            self._feed_cold(data)
        if not self._buffer:
            return
        if self._cold_is_idle:
            self._phase = _Phase.HEAD
            self._resume()
            return
        if len(self._buffer) > AHEAD_BYTES_MAX:
            self._pause()
        if not self._looking and self._transport is not None:
            self._looking = True
            self._front.loop.call_later(COLD_LOOKS_S, self._look)

    @property
    def _cold_is_idle(self) -> bool:
        waiter = None if self._cold is None else self._cold._waiter  # noqa: SLF001 - only there aiohttp says it
        return waiter is not None and not waiter.done()

    def _look(self) -> None:
        self._looking = False
        if self._transport is not None and self._phase is _Phase.COLD:
            self._advance()

    def _leave_cold(self) -> None:
        """aiohttp is not to close this connection when it finds it idle."""
        cold, self._cold = self._cold, None
        if cold is not None:
            cold.transport = None
            cold.connection_lost(None)

    # -- time --

    def _limit(self, seconds: float) -> None:
        """Something has to come within this."""
        loop = self._front.loop
        self._deadline = loop.time() + seconds
        if self._timer is not None and self._due > self._deadline:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._due = self._deadline
            self._timer = loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._transport is None or math.isinf(self._deadline):
            return
        left_s = self._deadline - self._front.loop.time()
        if left_s > 0.001:
            self._limit(left_s)
        elif self._phase is _Phase.LINGERING:
            self._transport.abort()
        elif self._phase is _Phase.BODY:
            self._refuse(body_timeout(self._front.body_timeout_s))
        elif self._phase is _Phase.HEAD and (self._buffer or not self._served):
            self._refuse(_HEAD_TIMEOUT)
        elif self._transport.get_write_buffer_size():
            self._transport.abort()  # he does not even read what he was given
        else:
            self._transport.close()

    # -- what else becomes of it --

    def pause_writing(self) -> None:
        """The client does not keep up."""
        if self._cold is not None:
            self._cold.pause_writing()
        if self.outlet is not None:
            self.outlet.pause()

    def resume_writing(self) -> None:
        """It does again."""
        if self._cold is not None:
            self._cold.resume_writing()
        if self.outlet is not None:
            self.outlet.resume()

    def _pause(self) -> None:
        if self._transport is not None and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._transport is not None and self._paused:
            self._paused = False
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        """A client that will send nothing more has left."""
        if self._cold is not None:
            self._cold.eof_received()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        cold, self._cold = self._cold, None
        if cold is not None:
            cold.connection_lost(exc)
        outlet, self.outlet = self.outlet, None
        if outlet is not None:
            outlet.left()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._phase, self._buffer, self._request = _Phase.LINGERING, b"", None
        self._front.closed(self)

    def close_if_idle(self) -> None:
        """The router is to stop."""
        idle = self._phase is _Phase.HEAD or (self._phase is _Phase.COLD and not self._left and self._cold_is_idle)
        if idle and self._transport is not None:
            self._transport.close()

    def cut(self) -> None:
        """The router stops now."""
        if self._transport is not None:
            self._transport.abort()


def _hot(data: bytes) -> str:
    """The path of a request for generation; empty for any other."""
    start = data[:_HOT_LONGEST]
    for known, path in _HOT.items():
        if start.startswith(known):
            return path
    return ""


def _too_long() -> ApiError:
    return ApiError(431, "BadRequestError", f"A header, or the request line, is longer than {LINE_BYTES_MAX} bytes.")
