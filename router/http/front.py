"""Clients' connections: the router answers generation requests here, and hands every other request to aiohttp. A shell.

A connection reads heads itself, so it knows where each request begins and ends. It reads a generation request whole and
answers it through an `Outlet`; the bytes of any other request go to an aiohttp handler that shares the connection. One
request is under way at a time: bytes that a client sends before its answer is complete wait, within bounds. They also
wait until the answer is written out: a client that does not read its answers gets no further ones.

All state of a client is bounded: its head (`cluster.http.heads`), the framing of a body (`cluster.http.framing`),
bodies that are being read (`uploads`), connections (`doors`). A request counts from its head on, and a closed
connection leaves nothing behind: no object here refers back to itself, over however many steps.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from io import BytesIO
from typing import Final, Protocol, cast

from aiohttp.web_protocol import RequestHandler

from cluster.errors import ApiError, body_timeout, no_room, too_large
from cluster.http.framing import Chunks
from cluster.http.headers import Headers
from cluster.http.heads import HEAD_BYTES_MAX, RequestHead, check_expectation, read_head, too_long
from router.core.eligibility import CHAT, COMPLETIONS
from router.http.doors import ConnectionPlace, Doors
from router.http.outlet import Outlet
from router.http.uploads import Uploads, client_of, no_room_for_bodies

KEEPALIVE_S: Final = 75.0
"""Idle client connections are kept this long, as common proxies do."""

AHEAD_BYTES_MAX: Final = 1 << 16
"""The bytes that may arrive before an answer is complete; then the connection is not read until it is."""

LINGER_S: Final = 10.0
"""How long a refused client may continue to send: if the connection were closed at once, the client would never read
why."""

REFUSAL_S: Final = 2.0
"""How long a connection above the limit may take to send its request, and as long again to read the refusal."""

COLD_LOOKS_S: Final = 0.01
"""aiohttp does not report when it has answered: while that is awaited, the connection is polled this often."""

_HOT: Final = {f"POST {path}{end}".encode(): path for path in (COMPLETIONS, CHAT) for end in " ?"}
_HOT_LONGEST: Final = max(map(len, _HOT))
_HEAD_TIMEOUT: Final = ApiError(408, "RequestTimeoutError", "The request head did not arrive in time.")
_LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,9})\r\n")
_DIGITS_MAX: Final = 9
"""As there."""
_TUNNEL: Final = b"CONNECT "
_SPECIAL: Final = frozenset({"upgrade", "transfer-encoding", "expect"})
"""Headers of requests that are always read anew."""


class FrontHandler(Protocol):
    """The part that answers requests."""

    def admit(self, headers: Mapping[str, str]) -> str:
        """The tenant of this request, whose body is not read yet. From now on the request is open. Raises
        `ApiError`.
        """

    def leave(self, tenant: str) -> None:
        """An admitted request has ended before it could be answered."""

    def answer(self, outlet: Outlet, path: str, headers: Headers, raw: bytes, tenant: str) -> None:
        """Answer an admitted request, now or later; it is open until then, or until this raises `ApiError`."""

    def refuse(self, outlet: Outlet, problem: Exception, *, close: bool = False) -> None:
        """Answer with the raised error."""


class Front:
    """The state that all clients' connections of a process share."""

    def __init__(
        self,
        answers: FrontHandler,
        cold: Callable[[], RequestHandler],
        *,
        body_bytes_max: int,
        body_timeout_s: float,
        head_timeout_s: float,
        doors: Doors,
        uploads: Uploads,
    ) -> None:
        self.doors: Final = doors
        self.uploads: Final = uploads
        self.answers: Final = answers
        self.cold: Final = cold
        self.body_bytes_max: Final = body_bytes_max
        self.body_timeout_s: Final = body_timeout_s
        self.head_timeout_s: Final = head_timeout_s
        self.loop: Final = asyncio.get_running_loop()
        self.open: Final[set[ClientConnection]] = set()
        self.drains = False
        self._empty: asyncio.Future[None] | None = None

    def connect(self) -> ClientConnection:
        """A client's connection."""
        return ClientConnection(self)

    async def drain(self, timeout_s: float) -> None:
        """Close idle connections, let begun answers end within this time, and cut the others off."""
        self.drains = True
        for connection in list(self.open):
            connection.close_if_idle()
        if any(each.answering for each in self.open):
            self._empty = self.loop.create_future()
            await asyncio.wait({self._empty}, timeout=timeout_s)
        for connection in list(self.open):
            if not connection.cold:
                connection.cut()

    def closed(self, connection: ClientConnection) -> None:
        """A connection is gone."""
        self.open.discard(connection)
        if self._empty is not None and not self._empty.done() and not any(each.answering for each in self.open):
            self._empty.set_result(None)


class _Phase(Enum):
    HEAD = auto()
    """Idle, or a head is arriving."""
    BODY = auto()
    ANSWERING = auto()
    COLD = auto()
    """aiohttp has the connection."""
    COLD_FOR_GOOD = auto()
    LINGERING = auto()
    """Refused: further bytes are dropped."""


class _KnownHead:
    """A head for generation as it was read, and all of its bytes but the digits of its length: most clients send the
    same again and again. Other digits there make no other head.
    """

    __slots__ = ("head", "path", "rest", "start")

    def __init__(self, start: bytes, rest: bytes, path: str, head: RequestHead) -> None:
        """`start`, `rest`: what stands before and after the digits."""
        self.start: Final = start
        self.rest: Final = rest
        self.path: Final = path
        self.head: Final = head

    def digits_end(self, data: bytes) -> int:
        """Where the digits end, if this begins with the same head; else -1."""
        if not data.startswith(self.start):
            return -1
        begin = len(self.start)
        end = data.find(b"\r", begin, begin + _DIGITS_MAX + 1)
        return end if end > begin and data[begin:end].isdigit() and data.startswith(self.rest, end) else -1


class ClientConnection(asyncio.Protocol):
    """One client's connection. The class is long because callbacks of the transport, of its timer and of answers move
    one state machine.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._transport: asyncio.Transport | None = None
        self._phase = _Phase.HEAD
        self._buffer = b""
        """Bytes that have arrived and are not read yet."""
        self._head: RequestHead | None = None
        """The head of the request whose body is arriving."""
        self._known: _KnownHead | None = None
        self._path = self._tenant = ""
        self._admitted = False
        """A request of this tenant is open, and is not answered yet."""
        self._left = 0
        """Bytes of a body that are still to come; -1: it comes in chunks."""
        self._body = BytesIO()
        """Its value is the written buffer, without a copy: copying 33 MB takes 15 ms."""
        self._chunks: Chunks | None = None
        self._cold: RequestHandler | None = None
        self.outlet: Outlet | None = None
        """The way of the answer in progress."""
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._unwritten = 0
        """Bytes of answers that the client had not taken at the last look."""
        self._served = self._surplus = self._unheard = self._waited = False
        self._looking = self._paused = self._body_awaited = self._full = False

    @property
    def answering(self) -> bool:
        """Whether a request is under way."""
        return self._phase in {_Phase.BODY, _Phase.ANSWERING}

    @property
    def cold(self) -> bool:
        """Whether aiohttp has the connection, and will end it."""
        return self._phase in {_Phase.COLD, _Phase.COLD_FOR_GOOD}

    # -- bytes --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        front = self._front
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass
        front.open.add(self)
        place = front.doors.enter(self, front.loop.time())
        if place is ConnectionPlace.NONE:
            self._transport.abort()
            return
        self._surplus = place is ConnectionPlace.REFUSAL
        self._limit(min(REFUSAL_S, front.head_timeout_s) if self._surplus else front.head_timeout_s)

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
        """Read on, as far as the arrived bytes allow."""
        try:
            if self._phase is _Phase.COLD:
                self._go_on_cold()
            if self._phase is _Phase.HEAD and self._buffer and not self._full:
                self._read_head()
            elif self._phase is _Phase.BODY:
                data, self._buffer = self._buffer, b""
                self._read_body(data)
            elif len(self._buffer) > AHEAD_BYTES_MAX:
                self._pause()
        except ApiError as problem:
            self._refuse(problem)

    def _read_head(self) -> None:
        data, known = self._buffer, self._known
        digits_end = -1 if known is None or self._surplus else known.digits_end(data)
        if known is not None and digits_end >= 0:
            self._front.doors.busy(self)
            self._path, self._left = known.path, int(data[len(known.start) : digits_end])
            self._take(known.head, data[digits_end + len(known.rest) :], None)
        else:
            self._read_new_head(data)

    def _read_new_head(self, data: bytes) -> None:
        end = data.find(b"\r\n\r\n") + 4
        if self._surplus and (end >= 4 or len(data) > HEAD_BYTES_MAX):
            raise no_room(f"it has {self._front.doors.guests_max} connections open (--connections-max)")
        if end < 4:
            if len(data) > HEAD_BYTES_MAX:
                raise too_long()
            if self._deadline > self._front.loop.time() + self._front.head_timeout_s:
                self._limit(self._front.head_timeout_s)
            return
        if end > HEAD_BYTES_MAX:
            raise too_long()
        self._front.doors.busy(self)
        self._path = _hot(data)
        head = read_head(data, end)
        if not self._path:
            self._go_cold(head, end)
            return
        self._chunks = Chunks(self._front.body_bytes_max) if head.comes_in_chunks() else None
        self._left = -1 if self._chunks is not None else head.length()
        found = _LENGTH.search(data, 0, end)
        if found is not None and _SPECIAL.isdisjoint(head.headers):
            head.headers.drop("content-length")
            self._known = _KnownHead(data[: found.start(1)], data[found.end(1) : end], self._path, head)
        self._take(head, data[end:], head.headers.get("expect"))

    def _take(self, head: RequestHead, rest: bytes, expects: str | None) -> None:
        """A head for generation is read; these bytes came after it."""
        if self._cold is not None:
            self._leave_cold()
        self._buffer = b""
        self._head = head
        self._begin(head, rest, expects)

    def _begin(self, head: RequestHead, rest: bytes, expects: str | None) -> None:
        """A generation request: its head is complete, and `rest` follows it."""
        front = self._front
        try:
            self._tenant = front.answers.admit(head.headers)
        except ApiError as problem:
            if expects is not None or not 0 <= self._left <= len(rest):
                raise
            self._turn_away(problem, head, rest)
            return
        self._admitted = True
        if self._left > front.body_bytes_max:
            raise too_large(front.body_bytes_max)
        self._phase = _Phase.BODY
        if expects is not None:
            self._meet(expects, all_here=len(rest) >= (self._left if self._left >= 0 else 1))
        self._read_body(rest)

    def _turn_away(self, problem: ApiError, head: RequestHead, rest: bytes) -> None:
        """A complete request is refused: its connection may continue."""
        self._phase, self._deadline, self._head = _Phase.ANSWERING, math.inf, None
        self._buffer, self._left = rest[self._left :], 0
        self._served = True
        outlet = self._outlet(chunked=head.chunks, keep=head.keep and not self._front.drains)
        self._front.answers.refuse(outlet, problem)

    def _meet(self, expectation: str, *, all_here: bool) -> None:
        """`all_here`: the client has not waited for the router's 100 Continue."""
        check_expectation(expectation)
        assert self._transport is not None
        if not all_here:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _read_body(self, data: bytes) -> None:
        chunks = self._chunks
        if chunks is not None:
            used = chunks.feed(data) if data else 0
            if chunks.done:
                # Two readers could disagree on where the next request begins: the bytes after this are not read.
                self._unheard = used < len(data)
                self._answer(chunks.body.getvalue(), keep=not self._unheard)
                return
        elif not self._body.tell() and len(data) >= self._left:
            self._buffer = data[self._left :]
            self._answer(data[: self._left] if self._buffer else data, keep=True)
            return
        else:
            took = len(data)
            self._body.write(data if took <= self._left else data[: self._left])
            self._buffer = data[self._left :]
            self._left = max(0, self._left - took)
            if not self._left:
                self._answer(self._body.getvalue(), keep=True)
                return
        if data and not self._front.uploads.add(self, len(data), self._client()):
            raise no_room_for_bodies()
        if not self._body_awaited:
            self._body_awaited = True
            self._limit(self._front.body_timeout_s)

    def _client(self) -> str:
        """The client of the upload: a tenant, or without tenants an address."""
        assert self._transport is not None
        return client_of(self._tenant, self._transport.get_extra_info("peername"))

    def _answer(self, raw: bytes, *, keep: bool) -> None:
        head = self._head
        assert head is not None
        self._end_body()
        self._phase, self._deadline, self._admitted = _Phase.ANSWERING, math.inf, False
        self._served = True
        outlet = self._outlet(chunked=head.chunks, keep=keep and head.keep and not self._front.drains)
        try:
            self._front.answers.answer(outlet, self._path, head.headers, raw, self._tenant)
        except Exception as problem:  # noqa: BLE001 - the one boundary where faults become answers
            self._front.answers.refuse(outlet, problem)

    def _end_body(self) -> None:
        """This body is over, in whatever way it has ended."""
        self._head = self._chunks = None
        if self._body.tell():
            self._body = BytesIO()
        if self._body_awaited:
            self._body_awaited = self._waited = False
            self._front.uploads.end(self)
            self._resume()

    def _outlet(self, *, chunked: bool, keep: bool) -> Outlet:
        assert self._transport is not None
        outlet = self.outlet = Outlet(self._transport, self._answered, chunked=chunked, keep=keep)
        return outlet

    def _answered(self, outlet: Outlet, keep: bool) -> None:  # noqa: FBT001 - the outlet's one call
        """All of an answer is given to the transport."""
        self.outlet = None
        if self._transport is None:
            return
        if not keep or self._front.drains:
            self._linger_or_close()
            return
        self._phase = _Phase.HEAD
        self._front.doors.idles(self, self._front.loop.time())
        self._limit(KEEPALIVE_S)
        if self._buffer:
            self._front.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Continue with the bytes that came meanwhile, once the former answer is on its way."""
        if self._full or self._transport is None:
            return
        self._resume()
        if self._phase is not _Phase.ANSWERING:
            self._advance()

    # -- bodies that wait for their turn (`uploads.Upload`) --

    def hold(self) -> None:
        """Read no more of this body for now."""
        self._waited = True
        self._pause()

    def go_on(self) -> None:
        """Read on."""
        self._resume()

    # -- refusals --

    def _refuse(self, problem: ApiError) -> None:
        """The arrived bytes cannot be read further."""
        if self._cold is not None:
            self._leave_cold()
        self._phase, self._buffer = _Phase.ANSWERING, b""
        self._let_go()
        self._unheard = True
        self._front.answers.refuse(self._outlet(chunked=True, keep=False), problem, close=True)

    def _let_go(self) -> None:
        """End a request that gets no answer."""
        self._end_body()
        if self._admitted:
            self._admitted = False
            self._front.answers.leave(self._tenant)

    def _linger_or_close(self) -> None:
        """The last answer is on its way."""
        assert self._transport is not None
        # If a socket is closed with unread bytes, it is reset, and the client may never read its answer.
        unheard, self._unheard = self._unheard or bool(self._buffer), False
        self._phase, self._buffer = _Phase.LINGERING, b""
        self._front.doors.idles(self, self._front.loop.time())
        self._limit(REFUSAL_S if self._surplus else LINGER_S)
        if not unheard or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._resume()  # further bytes are dropped, and the end must be noticed
        try:
            self._transport.write_eof()
        except OSError:  # the client has reset it meanwhile
            self._transport.abort()

    # -- aiohttp's --

    def _go_cold(self, head: RequestHead, end: int) -> None:
        """Hand the request at the beginning of the arrived bytes to aiohttp."""
        assert self._transport is not None
        if self._buffer.startswith(_TUNNEL):  # some readers see no body after such a head: aiohttp reads on in it
            raise ApiError(405, "MethodNotAllowedError", "`CONNECT` is not allowed here: this is no proxy.")
        chunks = Chunks(self._front.body_bytes_max, keeps=False) if head.comes_in_chunks() else None
        left = -1 if chunks is not None else head.length()
        expects = head.headers.get("expect")
        if expects is not None:
            check_expectation(expects)
        if self._cold is None:
            self._cold = self._front.cold()
            self._cold.connection_made(self._transport)
        self._deadline = math.inf
        self._served = True
        data, self._buffer = self._buffer, b""
        if "upgrade" in head.headers:
            self._phase = _Phase.COLD_FOR_GOOD
            self._cold.data_received(data)
            self._front.doors.idles(self, self._front.loop.time())
            return
        self._phase, self._chunks, self._left = _Phase.COLD, chunks, left
        self._cold.data_received(data[:end])
        self._feed_cold(data[end:])
        self._go_on_cold()

    def _feed_cold(self, data: bytes) -> None:
        """Give aiohttp no more than the one request that it is answering."""
        assert self._cold is not None
        if self._chunks is not None:
            used = self._chunks.feed(data)
            if self._chunks.done:
                self._chunks, self._left = None, 0
        else:
            used = min(self._left, len(data))
            self._left -= used
        mine, self._buffer = data[:used], data[used:]
        if mine:
            self._cold.data_received(mine)
        if not self._left:
            self._front.doors.idles(self, self._front.loop.time())

    def _go_on_cold(self) -> None:
        """More bytes have arrived: of this request, or of the next."""
        assert self._cold is not None
        if self._left and self._buffer:
            data, self._buffer = self._buffer, b""
            self._feed_cold(data)
        if not self._buffer:
            return
        if self._cold_is_idle:
            self._phase = _Phase.HEAD
            if not self._full:
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
        """Keep aiohttp from closing this connection when it finds it idle."""
        cold, self._cold = self._cold, None
        if cold is not None:
            cold.transport = None
            cold.connection_lost(None)

    # -- time --

    def _limit(self, seconds: float) -> None:
        """Set the time within which the next bytes have to arrive."""
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
            self._refuse(no_room_for_bodies() if self._waited else body_timeout(self._front.body_timeout_s))
        elif unwritten := self._transport.get_write_buffer_size():
            if unwritten == self._unwritten:
                self._transport.abort()  # the client does not even read what it was sent
                return
            self._unwritten = unwritten
            self._limit(KEEPALIVE_S)
        elif self._phase is _Phase.HEAD and (self._buffer or not self._served):
            self._refuse(_HEAD_TIMEOUT)
        else:
            self._transport.close()

    # -- other events --

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        if self._cold is not None:
            self._cold.pause_writing()
        self._full = True
        if self.outlet is not None:
            self.outlet.pause()

    def resume_writing(self) -> None:
        """The client has caught up."""
        if self._cold is not None:
            self._cold.resume_writing()
        self._full = False
        if self.outlet is not None:
            self.outlet.resume()
        elif self._phase is _Phase.HEAD:
            self._front.loop.call_soon(self._go_on)

    def _pause(self) -> None:
        if self._transport is not None and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._transport is not None and self._paused:
            self._paused = False
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        """A client that will send nothing more counts as gone."""
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
        self._phase, self._buffer = _Phase.LINGERING, b""
        self._let_go()
        self._known = None
        self._front.doors.leave(self)
        self._front.closed(self)

    def make_room(self) -> bool:
        """Another client's connection needs this one's place (`doors.Guest`). False: a request is under way."""
        if self._transport is None:
            return True
        if self._phase in {_Phase.BODY, _Phase.ANSWERING} or (self.cold and (self._left or not self._cold_is_idle)):
            return False
        if self._phase is _Phase.LINGERING or self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self._transport.close()
        return True

    def close_if_idle(self) -> None:
        """The router is about to stop."""
        idle = self._phase is _Phase.HEAD or (self._phase is _Phase.COLD and not self._left and self._cold_is_idle)
        if idle and self._transport is not None:
            self._transport.close()

    def cut(self) -> None:
        """The router stops now."""
        if self._transport is not None:
            self._transport.abort()


def _hot(data: bytes) -> str:
    """The path of a generation request; empty for any other request."""
    start = data[:_HOT_LONGEST]
    for known, path in _HOT.items():
        if start.startswith(known):
            return path
    return ""
