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
from router.core.clients import client_of
from router.core.eligibility import CHAT, COMPLETIONS
from router.http.client_transport import KEEPALIVE_S, ClientTransport
from router.http.cold import ColdRequests, framing_of
from router.http.doors import ConnectionPlace, Doors
from router.http.outlet import Outlet
from router.http.uploads import Uploads, no_room_for_bodies

AHEAD_BYTES_MAX: Final = 1 << 16
"""The bytes that may arrive before an answer is complete; then the connection is not read until it is."""

LINGER_S: Final = 10.0
"""Seconds for which a refused client may continue to send: if the connection were closed at once, the client might not
read the refusal."""

REFUSAL_S: Final = 2.0
"""Seconds in which a connection above the limit must send its request, and as many again to read the refusal."""

DRAIN_LOOKS_S: Final = 0.05
"""Seconds between two looks at the connections of a router that is about to stop."""

_HOT: Final = {f"POST {path}{end}".encode(): path for path in (COMPLETIONS, CHAT) for end in " ?"}
_HOT_LONGEST: Final = max(map(len, _HOT))
_HEAD_TIMEOUT: Final = ApiError(408, "RequestTimeoutError", "The request head did not arrive in time.")
_LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,9})\r\n")
_DIGITS_MAX: Final = 9
"""The most digits that `_LENGTH` matches."""
_SPECIAL: Final = frozenset({"upgrade", "transfer-encoding", "expect"})
"""Headers of requests that are always read anew."""
_NO_HEAD: Final = RequestHead(b"", b"", Headers(), keep=False, chunks=True)
"""In place of a head that is not read: its refusal may be sent in chunks, and ends the connection."""


class FrontHandler(Protocol):
    """The part that answers requests."""

    def admit(self, headers: Mapping[str, str]) -> str:
        """The tenant of this request, whose body is not read yet. From now on the request is open.

        Raises:
            ApiError: the request is refused, and not open.
        """

    def leave(self, tenant: str) -> None:
        """An admitted request has ended before it could be answered."""

    def answer(self, outlet: Outlet, path: str, headers: Headers, raw: bytes, tenant: str) -> None:
        """Answer an admitted request, now or later; it is open until then, or until this raises `ApiError`."""

    def refuse(self, outlet: Outlet, problem: Exception, client_id: str | None, *, close: bool = False) -> None:
        """Answer with the raised error. `client_id`: the request's ``X-Request-Id`` as it came."""


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

    def connect(self) -> ClientConnection:
        """A client's connection."""
        return ClientConnection(self)

    async def drain(self, timeout_s: float) -> None:
        """Close idle connections, let begun answers reach their clients within this time, and cut the others off. Those
        that aiohttp answers are not cut off.
        """
        self.drains = True
        end = self.loop.time() + timeout_s
        while True:
            for connection in list(self.open):
                connection.close_if_idle()
            left_s = end - self.loop.time()
            if left_s <= 0 or not any(map(_unfinished, self.open)):
                break
            await asyncio.sleep(min(left_s, DRAIN_LOOKS_S))
        for connection in list(self.open):
            connection.cut()


def _unfinished(connection: ClientConnection) -> bool:
    """Whether a request is under way, or the client has not taken all of an answer."""
    return connection.busy or connection._transport.untaken  # noqa: SLF001 - of this module


class _Phase(Enum):
    HEAD = auto()
    """Idle, or a head is arriving."""
    BODY = auto()
    ANSWERING = auto()
    COLD = auto()
    """aiohttp has the connection."""
    LINGERING = auto()
    """Refused: further bytes are dropped."""


class _KnownHead:
    """The head of a generation request as it was read, and its bytes without the digits of the body's length. Most
    clients send the same head again and again, with other digits.
    """

    __slots__ = ("head", "path", "rest", "start")

    def __init__(self, start: bytes, rest: bytes, path: str, head: RequestHead) -> None:
        """`start`, `rest`: the bytes before and after the digits."""
        self.start: Final = start
        self.rest: Final = rest
        self.path: Final = path
        self.head: Final = head

    def digits_end(self, data: bytes) -> int:
        """The end of the digits in `data`, if `data` begins with the same head; else -1."""
        if not data.startswith(self.start):
            return -1
        begin = len(self.start)
        end = data.find(b"\r", begin, begin + _DIGITS_MAX + 1)
        return end if end > begin and data[begin:end].isdigit() and data.startswith(self.rest, end) else -1


class RequestIntake:
    """Takes in one client's generation requests: a head, its admission, then its body, among all uploads. Bytes behind
    a request are the caller's. It has many attributes: all that is known of a request before it is answered.
    """

    __slots__ = (
        "_body", "_chunks", "_expects", "_front", "_known", "_transport", "_uploads", "head", "left", "open", "path",
        "tenant", "waited",
    )  # fmt: skip

    def __init__(self, front: Front, transport: ClientTransport) -> None:
        self._front: Final = front
        self._transport: Final = transport
        self._known: _KnownHead | None = None
        self._expects: str | None = None
        """What the client expects before it sends its body."""
        self._chunks: Chunks | None = None
        self._body: BytesIO | None = None
        """The beginning of a body that has not come at once; None: there is none. `getvalue` makes no copy: copying
        33 MB takes 15 ms.
        """
        self._uploads = False
        """The body is among the uploads."""
        self.head = _NO_HEAD
        """The head of the request whose body is to be read."""
        self.path = self.tenant = ""
        self.open = False
        """The request is admitted, and not answered yet."""
        self.left = 0
        """Bytes of a body that are still to come; -1: it comes in chunks."""
        self.waited = False
        """The upload waited for others: if it is late, that is not its client's fault."""

    def read_known_head(self, data: bytes) -> int:
        """Read a head that is the same as an earlier one. Returns its end; 0: it differs, or is not complete."""
        known = self._known
        digits_end = -1 if known is None else known.digits_end(data)
        if known is None or digits_end < 0:
            return 0
        self.head, self.path, self._expects = known.head, known.path, None
        self.left = int(data[len(known.start) : digits_end])
        return digits_end + len(known.rest)

    def read_head(self, data: bytes, end: int) -> bool:
        """Read the head ``data[:end]``. False: it asks for something else than generation, and only `head` is set.
        Raises ApiError.
        """
        if end > HEAD_BYTES_MAX:
            raise too_long()
        self.path = _hot(data)
        head = self.head = read_head(data, end)
        if not self.path:
            return False
        self._chunks = Chunks(self._front.body_bytes_max) if head.comes_in_chunks() else None
        self.left = -1 if self._chunks is not None else head.length()
        self._expects = head.headers.get("expect")
        found = _LENGTH.search(data, 0, end)
        if found is not None and _SPECIAL.isdisjoint(head.headers):
            head.headers.drop("content-length")
            self._known = _KnownHead(data[: found.start(1)], data[found.end(1) : end], self.path, head)
        return True

    def admit(self, rest: bytes) -> None:
        """Open the request; `rest` has come behind its head.

        Raises:
            ApiError: the request is refused. `open` says whether it is open nevertheless.
        """
        front, left = self._front, self.left
        self.tenant = front.answers.admit(self.head.headers)
        self.open = True
        if left > front.body_bytes_max:
            raise too_large(front.body_bytes_max)
        if self._expects is not None:
            check_expectation(self._expects)
            waits = self.head.chunks and len(rest) < (left if left >= 0 else 1)  # HTTP/1.0 knows no interim answer
            if waits and self._transport.raw is not None:
                self._transport.raw.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def ends_in(self, data: bytes) -> bool:
        """Whether this request's whole body surely is in `data`: then the next request begins behind it, even if this
        one is refused.
        """
        return self._expects is None and 0 <= self.left <= len(data)

    def read_body(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Read the next bytes of the body. Returns the whole body and the bytes behind it; None: more of it is to come.

        Raises:
            ApiError: as `Chunks.feed`; 503: too many uploads wait.
        """
        chunks, body, left = self._chunks, self._body, self.left
        if chunks is not None:
            used = chunks.feed(data) if data else 0
            if chunks.done:
                return chunks.body.getvalue(), data[used:]
        elif body is None and len(data) >= left:
            rest = data[left:]
            return data[:left] if rest else data, rest
        elif data:
            if body is None:
                body = self._body = BytesIO()
            body.write(data if len(data) <= left else data[:left])
            self.left = max(0, left - len(data))
            if not self.left:
                return body.getvalue(), data[left:]
        if data and not self._front.uploads.add(self, len(data), self._client()):
            raise no_room_for_bodies()
        if not self._uploads:
            self._uploads = True
            self._transport.within(self._front.body_timeout_s)
        return None

    def _client(self) -> str:
        """The client of the upload: a tenant, or without tenants an address."""
        raw = self._transport.raw
        return client_of(self.tenant, None if raw is None else raw.get_extra_info("peername"))

    def end(self) -> None:
        """The body is over, in whatever way: forget the request."""
        self.head, self._chunks, self._body, self.open = _NO_HEAD, None, None, False
        if self._uploads:
            self._uploads = self.waited = False
            self._front.uploads.end(self)
            self._transport.resume()

    def give_up(self) -> None:
        """End a request that gets no answer."""
        was_open = self.open
        self.end()
        if was_open:
            self._front.answers.leave(self.tenant)

    # -- its turn (`uploads.Upload`) --

    def hold(self) -> None:
        """Read no more of this body for now."""
        self.waited = True
        self._transport.pause()

    def go_on(self) -> None:
        """Read on."""
        self._transport.resume()


class ClientConnection(asyncio.Protocol):
    """One client's connection: whose turn it is (the client's, the router's, aiohttp's), and when it ends."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._transport = ClientTransport(front.loop, self._late)
        self._intake = RequestIntake(front, self._transport)
        self._phase = _Phase.HEAD
        self._buffer = b""
        """Bytes that have arrived and are not read yet."""
        self._cold: ColdRequests | None = None
        self.outlet: Outlet | None = None
        """The outlet of the answer in progress; None: no answer is in progress."""
        self._served = False
        """A request has been answered, or handed to aiohttp, on this connection."""
        self._surplus = False
        """The connection is above the limit: its first request is refused."""
        self._unheard = False
        """Bytes of the client may be on their way that will not be read."""
        self._full = False
        """The client reads too slowly: no further request begins."""

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        return self._phase in {_Phase.BODY, _Phase.ANSWERING} or (self._cold is not None and not self._cold.at_rest)

    # -- bytes --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        front = self._front
        self._transport.raw = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass
        front.open.add(self)
        place = front.doors.enter(self, front.loop.time())
        if place is ConnectionPlace.NONE:
            self._transport.abort()
            return
        self._surplus = place is ConnectionPlace.REFUSAL
        self._transport.within(min(REFUSAL_S, front.head_timeout_s) if self._surplus else front.head_timeout_s)

    def data_received(self, data: bytes) -> None:
        if self._phase is not _Phase.LINGERING:
            self._buffer = self._buffer + data if self._buffer else data
            self._advance()

    def _advance(self) -> None:
        """Read on, as far as the arrived bytes allow."""
        try:
            if self._phase is _Phase.COLD and self._cold is not None:
                self._go_on_cold(self._cold)
            if self._phase is _Phase.HEAD and self._buffer and not self._full:
                self._read_head()
            elif self._phase is _Phase.BODY:
                data, self._buffer = self._buffer, b""
                self._read_body(data)
            if len(self._buffer) > AHEAD_BYTES_MAX:
                self._transport.pause()
        except ApiError as problem:
            self._refuse(problem)

    def _read_head(self) -> None:
        data, intake, front = self._buffer, self._intake, self._front
        known = intake.read_known_head(data)
        end = known or _head_end(data)
        if not end:
            if self._transport.deadline > front.loop.time() + front.head_timeout_s:
                self._transport.within(front.head_timeout_s)
            return
        if self._surplus:
            raise no_room(f"it has {front.doors.guests_max} connections open (--connections-max)")
        front.doors.busy(self)
        if known or intake.read_head(data, end):
            self._begin(data[end:])
        else:
            self._go_cold(end)

    def _begin(self, rest: bytes) -> None:
        """A generation request: its head is read, and `rest` follows it."""
        intake = self._intake
        self._leave_cold()
        self._buffer = b""
        try:
            intake.admit(rest)
        except ApiError as problem:
            if intake.open or not intake.ends_in(rest):
                raise
            self._buffer = rest[intake.left :]
            client_id = intake.head.headers.get("x-request-id")
            self._front.answers.refuse(self._outlet(keep=True), problem, client_id)
            return
        self._phase = _Phase.BODY
        self._read_body(rest)

    def _read_body(self, data: bytes) -> None:
        read = self._intake.read_body(data)
        if read is None:
            return
        intake, front = self._intake, self._front
        raw, self._buffer = read
        headers = intake.head.headers
        # Two readers could disagree on where the request after a body in chunks begins: bytes there are not read.
        outlet = self._outlet(keep=intake.left >= 0 or not self._buffer)
        try:
            front.answers.answer(outlet, intake.path, headers, raw, intake.tenant)
        except Exception as problem:  # noqa: BLE001 - the one boundary where faults become answers
            front.answers.refuse(outlet, problem, headers.get("x-request-id"))

    def _outlet(self, *, keep: bool) -> Outlet:
        """Make the outlet for the answer to the request that has been read, or that cannot be read."""
        transport, head = self._transport, self._intake.head
        assert transport.raw is not None
        self._intake.end()
        self._phase, transport.deadline, self._served = _Phase.ANSWERING, math.inf, True
        keeps = keep and head.keep and not self._front.drains
        outlet = self.outlet = Outlet(transport.raw, self._answered, chunked=head.chunks, keep=keeps)
        return outlet

    def _answered(self, outlet: Outlet, keep: bool) -> None:  # noqa: FBT001 - the outlet's one call
        """All of an answer is given to the transport."""
        self.outlet = None
        if self._transport.raw is None:
            return
        front, now = self._front, self._front.loop.time()
        front.doors.idles(self, now)
        if not keep or front.drains:
            unheard, self._unheard = self._unheard or bool(self._buffer), False
            self._phase, self._buffer = _Phase.LINGERING, b""
            self._transport.within(REFUSAL_S if self._surplus else LINGER_S)
            self._transport.finish(unheard=unheard)
            return
        self._phase = _Phase.HEAD
        self._transport.within(KEEPALIVE_S)
        if self._buffer:
            front.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Continue with the bytes that came meanwhile, once the previous answer is given to the transport."""
        if self._full or self._transport.raw is None:
            return
        if not self._front.uploads.waits(self._intake):  # the next request's body may be held up already
            self._transport.resume()
        if self._phase is not _Phase.ANSWERING:
            self._advance()

    def _refuse(self, problem: ApiError) -> None:
        """The arrived bytes cannot be read further."""
        client_id = self._intake.head.headers.get("x-request-id")
        self._leave_cold()
        self._intake.give_up()
        self._buffer, self._unheard = b"", True
        self._front.answers.refuse(self._outlet(keep=False), problem, client_id, close=True)

    # -- aiohttp's, and other events --

    def _go_cold(self, end: int) -> None:
        """Hand the request whose head is read to aiohttp."""
        framing = framing_of(self._intake.head, self._buffer, self._front.body_bytes_max)
        self._intake.end()
        if self._cold is None:
            assert self._transport.raw is not None
            self._cold = ColdRequests(self._front.cold(), self._transport.raw, self._advance)
        self._phase, self._transport.deadline, self._served = _Phase.COLD, math.inf, True
        self._buffer = self._cold.begin(self._buffer, end, framing)
        self._go_on_cold(self._cold)

    def _go_on_cold(self, cold: ColdRequests) -> None:
        """Give aiohttp no more than the one request that it is answering. More bytes are the next request's."""
        self._buffer = cold.feed(self._buffer)
        if cold.whole:
            self._front.doors.idles(self, self._front.loop.time())
        if self._buffer and cold.has_answered():
            self._phase = _Phase.HEAD
            if not self._full:
                self._transport.resume()

    def _leave_cold(self) -> None:
        cold, self._cold = self._cold, None
        if cold is not None:
            cold.leave()

    def _late(self) -> None:
        """The deadline has passed."""
        intake, transport = self._intake, self._transport
        if self._phase is _Phase.LINGERING:
            if self._surplus or not transport.extend_for_client():
                transport.abort()
        elif self._phase is _Phase.BODY:
            self._refuse(no_room_for_bodies() if intake.waited else body_timeout(self._front.body_timeout_s))
        elif transport.extend_for_client():
            pass
        elif self._phase is _Phase.HEAD and (self._buffer or not self._served):
            self._refuse(_HEAD_TIMEOUT)
        else:
            transport.close()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        if self._cold is not None:
            self._cold.handler.pause_writing()
        self._full = True
        if self.outlet is not None:
            self.outlet.pause()

    def resume_writing(self) -> None:
        """The client has caught up."""
        if self._cold is not None:
            self._cold.handler.resume_writing()
        self._full = False
        if self.outlet is not None:
            self.outlet.resume()
        elif self._phase is _Phase.HEAD:
            self._front.loop.call_soon(self._go_on)

    def eof_received(self) -> bool:
        """The client has closed its sending side: it counts as gone, so the connection is closed."""
        if self._cold is not None:
            self._cold.handler.eof_received()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport.lost()
        cold, self._cold = self._cold, None
        if cold is not None:
            cold.handler.connection_lost(exc)
        outlet, self.outlet = self.outlet, None
        if outlet is not None:
            outlet.left()
        self._phase, self._buffer = _Phase.LINGERING, b""
        self._intake.give_up()
        self._front.doors.leave(self)
        self._front.open.discard(self)

    def make_room(self) -> bool:
        """Another client's connection needs this one's place (`doors.Guest`). False: a request is under way."""
        if self.busy:
            return False
        if self._phase is _Phase.LINGERING:
            self._transport.abort()
        else:
            self._transport.give_way()
        return True

    def close_if_idle(self) -> None:
        """The router is about to stop."""
        if not self.busy and self._phase is not _Phase.LINGERING:
            self._transport.close()

    def cut(self) -> None:
        """The router stops now. aiohttp ends its connections itself."""
        if self._phase is not _Phase.COLD:
            self._transport.abort()


def _hot(data: bytes) -> str:
    """The path of a generation request; empty for any other request."""
    start = data[:_HOT_LONGEST]
    for known, path in _HOT.items():
        if start.startswith(known):
            return path
    return ""


def _head_end(data: bytes) -> int:
    """The end of the head at the beginning of `data`; 0: it is not complete. The length of `data` if it is too long."""
    end = data.find(b"\r\n\r\n") + 4
    if end >= 4:
        return end
    return len(data) if len(data) > HEAD_BYTES_MAX else 0
