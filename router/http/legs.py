"""Connections to engines for legs: kept alive, one leg at a time on each, answers told piece by piece. A shell.

Who sends a leg hears `Listener`'s calls: never while it is being sent, and none after `Leg.close`. Of a lost leg holds
what `router.http.upstream` promises: `EngineLost.reached` tells whether there was a connection at all.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast
from urllib.parse import urlsplit

import httptools

from cluster.bounded import encoding
from cluster.http.headers import printable
from router.http.upstream import CONNECT_S, KEEPALIVE_S, EngineLost, not_connected

SWEEP_S: Final = 0.5
"""Idle connections are looked at this often, and legs that may be silent for long. (An idle connection older than
`KEEPALIVE_S` is never used in any case.)"""

LONG_SILENCE_S: Final = 10.0
"""A leg that may be silent for this long is looked at in the sweep, without a timer of its own: half a second more does
not matter then, and most legs never need one."""

HEAD_BYTES_MAX: Final = 1 << 16
"""An answer's head is shorter, or it is no answer. So is what comes of its framing (trailers, chunks' extensions)
without a byte of its body between."""

_NO_ANSWER: Final = (httptools.HttpParserError, httptools.HttpParserUpgrade)
"""What the parser raises: the second one, of a status 101, is none of the first."""

PIECE_BYTES: Final = 1 << 16
"""Bodies over this are not copied together with their heads."""

CHUNK_BYTES_MAX: Final = 4096
"""Longer chunks go through the parser; the event of a token has some hundred bytes."""


def _framings(longest: int) -> list[bytes]:
    framings = [b"\n"] * (longest + 1)  # no chunk begins so
    for size in range(1, longest):
        begin = b"%x\r\n" % size
        if len(begin) + size + 2 <= longest:
            framings[len(begin) + size + 2] = begin
    return framings


_EVENT_ENDS: Final = b"\n\n\r\n"
"""And its chunk with it."""

_FRAMINGS: Final = _framings(CHUNK_BYTES_MAX)
"""How a whole chunk begins, by its length, framing included. To compare is cheaper than to read a number."""


_READ: Final = frozenset(
    {b"content-type", b"cache-control", b"content-encoding", b"content-length", b"transfer-encoding"}
)
"""Headers of an answer that are looked at."""


class Listener(Protocol):
    """Who hears an answer. `ended` or `lost` comes last."""

    def opened(self, status: int, content_type: str, cache_control: str) -> None:
        """Its head is here."""

    def body(self, data: bytes) -> None:
        """Bytes of it came."""

    def chunk(self, framed: bytes, begin: int) -> object:
        """One whole chunk, as HTTP frames it, that ends as an event does: its bytes are ``framed[begin:-2]``. What it
        returns comes back through `happened`, if it is not None.
        """

    def happened(self, found: object) -> None:
        """`Leg.chunk` has returned this."""

    def ended(self) -> None:
        """It is complete."""

    def lost(self, lost: EngineLost) -> None:
        """It never will be."""


class Patient(Protocol):
    """Who waits for something that mostly comes long before it is due."""

    def look(self, now: float) -> None:
        """Called every `SWEEP_S`. `now`: monotonic seconds, as the loop counts them."""


class Leg:
    """One request to an engine, and its answer."""

    __slots__ = (
        "_connection",
        "_legs",
        "_once",
        "_pool",
        "_request",
        "_silence_s",
        "_timer",
        "_tried",
        "chunk",
        "complete",
        "listener",
    )

    def __init__(
        self,
        legs: Legs,
        pool: Pool,
        request: tuple[bytes | memoryview, ...],
        listener: Listener,
        *,
        once: bool,
        silence_s: float,
    ) -> None:
        self.listener: Listener | None = listener
        """None: it is over."""
        self.complete = False
        """All of its answer is here: what the listener hears now is followed by its end."""
        self.chunk: Callable[[bytes, int], object] = listener.chunk
        """Takes whole chunks: the listener's own, until it names another. A token's way is as short as it can be."""
        self._legs = legs
        self._pool = pool
        self._request = request
        self._once = once
        self._tried = False
        self._silence_s = silence_s
        self._timer: asyncio.TimerHandle | None = None
        self._connection: Connection | None = None

    def begin(self, *, fresh: bool = False) -> None:
        """Send it, on a connection that is there or on a new one."""
        connection = None if fresh else self._pool.idle(self._legs.loop.time())
        if connection is None:
            self._legs.spawn(self)
        else:
            self.ride(connection)

    def ride(self, connection: Connection) -> None:
        """Send it on this connection."""
        self._connection = connection
        connection.send(self, self._request)
        if self._silence_s and self._timer is None:
            self._watch(self._silence_s)

    def look(self, now: float) -> None:
        """How long it has been silent."""
        connection = self._connection
        if connection is None or connection.paused:
            return
        if now - connection.heard_at >= self._silence_s:
            self._silent(connection)

    async def connect(self) -> None:
        """A new connection for it."""
        try:
            async with asyncio.timeout(CONNECT_S):
                connection = await self._pool.connect()
        except TimeoutError:
            self.over(EngineLost(f"no connection within {CONNECT_S:g} s", reached=False))
        except OSError as error:
            self.over(not_connected(error, f"cannot connect to {self._pool.netloc}: {error.strerror or error}"))
        else:
            if self.listener is None:
                connection.cut()
            else:
                self.ride(connection)

    def broke(self, because: str, *, heard: bool) -> None:
        """Its connection is gone. Without a byte of an answer it is taken for an idle one that the engine closed at
        this very moment, and the leg sent again on a new one; with `once` it is not.
        """
        self._connection = None
        if heard or self._once or self._tried:
            self.over(EngineLost(because, reached=True))
        elif self.listener is not None:
            self._tried = True
            self.begin(fresh=True)

    def over(self, lost: EngineLost | None = None) -> None:
        """It has ended."""
        listener = self._forget()
        if listener is not None and lost is None:
            listener.ended()
        elif listener is not None and lost is not None:
            listener.lost(lost)

    def refuse(self, lost: EngineLost) -> None:
        """Break off: what has come of its answer is not what its listener can take; the listener hears of the loss."""
        connection = self._connection
        if connection is not None:
            connection.cut()
        self.over(lost)

    def close(self) -> None:
        """Break off: its engine aborts what it is doing for us. Nobody is told."""
        connection = self._connection
        if self._forget() is not None and connection is not None:
            connection.cut()

    def _forget(self) -> Listener | None:
        listener, self.listener = self.listener, None
        self._connection, self._request = None, ()
        self._legs.long.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return listener

    # -- silence and slow readers --

    def limit_silence(self, silence_s: float) -> None:
        """It may be silent for no longer than this from now on."""
        self._silence_s = silence_s
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._connection is not None:
            self._connection.heard_at = self._legs.loop.time()
            self._watch(silence_s)

    def _watch(self, after_s: float) -> None:
        if self._silence_s >= LONG_SILENCE_S:
            self._legs.long.add(self)
            return
        self._legs.long.discard(self)
        self._timer = self._legs.loop.call_later(after_s, self._look)

    def _look(self) -> None:
        connection = self._connection
        if connection is None:
            self._timer = None  # being sent again
            return
        now = self._legs.loop.time()
        since = now if connection.paused else connection.heard_at
        left_s = since + self._silence_s - now
        if left_s > 0.001:
            self._watch(left_s)
            return
        self._silent(connection)

    def _silent(self, connection: Connection) -> None:
        listener = self._forget()
        connection.cut()
        if listener is not None:
            listener.lost(EngineLost(f"silent for {self._silence_s:g} s", reached=True))

    def pause(self) -> None:
        """Read no more of it: its client does not keep up."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Read on."""
        if self._connection is not None:
            self._connection.resume()


class Connection(asyncio.Protocol):
    """One connection, one leg at a time."""

    __deletable__ = ("_parser",)  # compiled (mypyc) no other attribute can be
    __slots__ = (
        "_bodies",
        "_cache_control",
        "_complete",
        "_content_type",
        "_fault",
        "_framing_bytes",
        "_head",
        "_head_bytes",
        "_keep",
        "_leg",
        "_length_known",
        "_loop",
        "_parser",
        "_poll",
        "_pool",
        "_status",
        "_time",
        "_transport",
        "_whole_chunks",
        "heard_at",
        "idle_since",
        "on_body",
        "paused",
    )

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._loop = pool.loop
        self._time = pool.loop.time
        self._leg: Leg | None = None
        self._transport: asyncio.Transport | None = None
        self._bodies: list[bytes] = []
        self.on_body = self._bodies.append
        """The parser's callback."""
        self.paused = False
        self.heard_at = self.idle_since = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._poll = select.poll()
        self._reset()

    def _reset(self) -> None:
        self._content_type, self._cache_control = "application/json", ""
        self._head = self._length_known = self._whole_chunks = self._complete = self._keep = False
        self._head_bytes = self._status = self._framing_bytes = 0
        self._fault: EngineLost | None = None
        """Why its answer is not read on."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by descent
        self._pool.opened.add(self)
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            self._poll.register(sock.fileno(), select.POLLIN)

    @property
    def usable(self) -> bool:
        """It can take a leg."""
        return self._leg is None and self._transport is not None and not self._transport.is_closing()

    @property
    def silent(self) -> bool:
        """Nothing has come that was not read yet. What comes before a leg is sent is no answer to it: bytes behind the
        end of another client's answer, or the connection's end.
        """
        return not self._poll.poll(0)

    def send(self, leg: Leg, request: tuple[bytes | memoryview, ...]) -> None:
        """Write a leg's request."""
        self._leg = leg
        self._reset()
        self.heard_at = self._time()
        if self._transport is None:
            self._loop.call_soon(self._tell_broke, "the engine closed the connection at once")
        elif len(request) == 1:
            self._transport.write(request[0])
        else:
            self._transport.writelines(request)

    def cut(self) -> None:
        """Break off at once; nobody is told."""
        self._leg = None
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Read nothing."""
        if self._transport is not None and not self.paused:
            self.paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._transport is not None and self.paused:
            self.paused = False
            self.heard_at = self._loop.time()
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._time()
        leg, size = self._leg, len(data)
        # Most of what comes is one token: one chunk, whole. It is looked at no further than to be sure of that.
        if self._whole_chunks and size <= CHUNK_BYTES_MAX and leg is not None:
            begin = _FRAMINGS[size]
            if data.startswith(begin) and data.endswith(_EVENT_ENDS):
                found = leg.chunk(data, len(begin))
                if found is not None and leg.listener is not None:
                    leg.listener.happened(found)
                return
        if leg is None:
            self.cut()  # nobody has asked anything
            return
        if not self._head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except _NO_ANSWER as error:
            if not self._complete:
                self._give_up(self._fault or _malformed(str(error)))
                return
            self._keep = False  # the answer is whole; what stands behind its end goes with the connection
        if not self._head and self._head_bytes > HEAD_BYTES_MAX:
            self._give_up(_malformed("its head has no end"))
            return
        if self._bodies:
            self._framing_bytes = 0
        elif self._head:
            self._framing_bytes += size
            if self._framing_bytes > HEAD_BYTES_MAX and not self._complete:
                self._give_up(_malformed("its framing has no end"))
                return
        # Where a body's last piece is not the last that came, a line end closes its chunk: there is none in between.
        bodies = self._bodies
        self._whole_chunks = bool(
            bodies and bodies[-1].endswith(b"\n\n") and data.endswith(_EVENT_ENDS) and not self._complete
        )
        self._tell(leg)

    def _tell(self, leg: Leg) -> None:
        """What came with the last bytes."""
        if self._bodies:
            data = self._bodies[0] if len(self._bodies) == 1 else b"".join(self._bodies)
            self._bodies.clear()
            leg.complete = self._complete
            if leg.listener is not None:
                leg.listener.body(data)
        if self._complete and self._leg is leg:
            self._end(leg)

    def _end(self, leg: Leg) -> None:
        self._leg = None
        assert self._transport is not None
        if self._keep and not self._transport.is_closing():
            if self.paused:
                self.resume()
            self.idle_since = self.heard_at
            self._pool.give_back(self)
        else:
            self._transport.close()
        leg.over()

    def _give_up(self, lost: EngineLost) -> None:
        leg = self._leg
        self._bodies.clear()
        self.cut()
        if leg is not None:
            leg.over(lost)

    # httptools' callbacks

    def on_message_begin(self) -> None:
        if self._complete:  # behind the end of an answer: it would be read as the next leg's
            self._keep = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name not in _READ or self._head:  # trailers say nothing
            return
        said = value.decode("latin-1")
        if name == b"content-type":
            self._content_type = printable(said) or self._content_type
        elif name == b"cache-control":
            self._cache_control = printable(said)
        elif name == b"content-encoding":
            found = encoding(said)
            if found:
                because = f"its answer is encoded ({found[:40]!r}) although plain bytes were asked for"
                self._fault = EngineLost(because, reached=True, unfit="encoded")
        elif name == b"transfer-encoding" and said.strip().lower() != "chunked":
            self._fault = _malformed(f"its transfer encoding is {said[:40]!r}")
        else:
            self._length_known = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        leg = self._leg
        if self._head:
            raise ValueError("an answer that nobody asked for")
        if not 100 <= self._status < 600 or self._status == 101:
            self._fault = _malformed(f"its status is {self._status}")
        if self._fault is not None:
            raise ValueError("an answer that is not read")
        if self._status < 200:  # what only says that more is to come
            self._content_type, self._cache_control = "application/json", ""
            return
        self._head = True
        if leg is not None and leg.listener is not None:
            leg.listener.opened(self._status, self._content_type, self._cache_control)

    def on_message_complete(self) -> None:
        if self._head:
            self._complete = True
            self._keep = self._length_known and self._parser.should_keep_alive()  # known only here
        else:
            self._length_known = False

    # the end

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        self._transport = None
        del self._parser  # the two know each other, and nothing is to be read any more
        leg = self._leg
        if leg is not None and exc is None and self._head and not self._length_known:
            self._leg = None
            leg.over()  # an answer without a length ends with its connection
            return
        self._tell_broke(str(exc) if exc else "the engine closed the connection")

    def _tell_broke(self, because: str) -> None:
        leg, self._leg = self._leg, None
        if leg is not None:
            leg.broke(because, heard=self._head_bytes > 0)


def _malformed(because: str) -> EngineLost:
    return EngineLost(f"no HTTP answer: {because}", reached=True, unfit="malformed")


class Pool:
    """Connections to one engine."""

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop) -> None:
        parts = urlsplit(url)
        self.loop = loop
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.netloc = parts.netloc.rpartition("@")[2]
        self.base = parts.path.rstrip("/")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._idle: dict[Connection, None] = {}
        """In the order in which they were given back."""
        self.opened: set[Connection] = set()

    def idle(self, now: float) -> Connection | None:
        """The connection used last, if one is free: the older ones may then end."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.usable and now - connection.idle_since < KEEPALIVE_S and connection.silent:
                return connection
            connection.cut()
        return None

    async def connect(self) -> Connection:
        """A new one. Raises OSError."""
        _, made = await self.loop.create_connection(lambda: Connection(self), self.host, self.port, ssl=self._ssl)
        return made

    def give_back(self, connection: Connection) -> None:
        """It is free."""
        self._idle[connection] = None

    def forget(self, connection: Connection) -> None:
        """It is gone."""
        self.opened.discard(connection)
        self._idle.pop(connection, None)  # which knows its pool: a cycle, once the pool is swept away

    def sweep(self, now: float) -> None:
        """Close what has been idle for too long."""
        while self._idle and now - (oldest := next(iter(self._idle))).idle_since >= KEEPALIVE_S:
            del self._idle[oldest]
            oldest.cut()

    def close(self) -> None:
        """Cut every connection."""
        for connection in list(self.opened):
            connection.cut()
        self._idle.clear()


class Legs:
    """The pools of one process."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._pools: dict[str, Pool] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self.long: set[Patient] = set()
        """Legs that may be silent for long; and who else wants to be looked at now and then."""
        self._sweeping = self.loop.call_later(SWEEP_S, self._sweep)
        self._heads: dict[tuple[str, str], bytes] = {}

    def send(
        self,
        url: str,
        path: str,
        headers: bytes,
        body: Sequence[bytes | memoryview],
        listener: Listener,
        *,
        once: bool = False,
        silence_s: float = 0.0,
    ) -> Leg:
        """POST a leg to the engine at `url`.

        Args:
            url: its root.
            path: the endpoint.
            headers: further lines of the head (`headers.lines`).
            body: JSON, in pieces.
            listener: hears of it.
            once: never sent a second time, as no one can tell what was done with the first.
            silence_s: longest silence of the engine; 0: any.
        """
        pool = self._pools.get(url)
        if pool is None:
            pool = self._pools[url] = Pool(url, self.loop)
        start = self._heads.get((url, path))
        if start is None:
            asks = f"Host: {pool.netloc}\r\nAccept: */*\r\nAccept-Encoding: identity\r\n"
            start = self._heads[url, path] = f"POST {pool.base}{path} HTTP/1.1\r\n{asks}".encode()
        size = sum(map(len, body))
        head = b"%b%bContent-Length: %d\r\n\r\n" % (start, headers, size)
        request = (b"".join((head, *body)),) if size <= PIECE_BYTES else (head, *body)
        leg = Leg(self, pool, request, listener, once=once, silence_s=silence_s)
        leg.begin()
        return leg

    def spawn(self, leg: Leg) -> None:
        """Connect for a leg."""
        task = self.loop.create_task(leg.connect(), name="connect-leg")
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _sweep(self) -> None:
        now = self.loop.time()
        for each in [*self.long]:
            each.look(now)
        for url, pool in list(self._pools.items()):
            pool.sweep(now)
            if not pool.opened and not self._connecting:
                del self._pools[url]
                self._heads = {key: head for key, head in self._heads.items() if key[0] != url}
        self._sweeping = self.loop.call_later(SWEEP_S, self._sweep)

    def close(self) -> None:
        """Cut every connection: engines abort what still runs for us."""
        self._sweeping.cancel()
        for task in self._connecting:
            task.cancel()
        for pool in self._pools.values():
            pool.close()
