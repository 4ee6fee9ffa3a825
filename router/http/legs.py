"""Connections to engines for legs and probes: kept alive, one leg at a time on each, answers reported piece by piece. A
shell.

A leg calls its `LegListener`, but never during `Legs.send`, and not after `EngineLeg.close`. For a lost leg,
`EngineLost.reached` tells whether a connection was made (`router.http.upstream`).
"""

from __future__ import annotations

import asyncio
import logging
import select
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

from cluster.http.answers import AnswerReader
from cluster.http.pool import Pool
from router.http.upstream import CONNECT_S, EngineLost, not_connected

logger = logging.getLogger("baton.router")

SWEEP_S: Final = 0.5
"""Seconds between two sweeps, which check idle connections and legs that may be silent for long. (An idle connection
older than `cluster.http.pool.KEEPALIVE_S` is never used in any case.)"""

LONG_SILENCE_S: Final = 10.0
"""A leg that may be silent for so many seconds or more is checked in the sweep, without a timer of its own: half a
second more does not matter then, and most legs never need a timer."""

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
"""The end of an event, and of its chunk with it."""

_FRAMINGS: Final = _framings(CHUNK_BYTES_MAX)
"""The first line of a whole chunk (its size), by the chunk's length with framing. Comparing bytes is cheaper than
reading a number."""


class LegListener(Protocol):
    """Receives an answer. The last call is `ended` or `lost`."""

    def opened(self, status: int, content_type: str, cache_control: str) -> None:
        """The head of the answer has come."""

    def body(self, data: bytes) -> None:
        """Bytes of its body have come."""

    def chunk(self, framed: bytes, begin: int) -> object:
        """One whole chunk that ends with an event. `framed` has its framing: its bytes are ``framed[begin:-2]``. A
        returned value other than None comes back through `happened`.
        """

    def happened(self, found: object) -> None:
        """`EngineLeg.chunk` has returned this."""

    def ended(self) -> None:
        """The answer is complete."""

    def lost(self, lost: EngineLost) -> None:
        """The answer will never be complete."""


class Patient(Protocol):
    """An object with a far deadline, which is checked in the sweep instead of by a timer."""

    def look(self, now: float) -> None:
        """Called every `SWEEP_S`. `now`: monotonic seconds, as the loop counts them."""


class EngineLeg:
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
        pool: Pool[EngineConnection],
        request: tuple[bytes | memoryview, ...],
        listener: LegListener,
        *,
        once: bool,
        silence_s: float,
    ) -> None:
        self.listener: LegListener | None = listener
        """None: the leg is over."""
        self.complete = False
        """The whole answer has come: `ended` follows the call of `body` that is under way."""
        self.chunk: Callable[[bytes, int], object] = listener.chunk
        """Takes whole chunks: the listener's own method, until the listener sets another. Each token comes this way."""
        self._legs = legs
        self._pool = pool
        self._request = request
        self._once = once
        self._tried = False
        self._silence_s = silence_s
        self._timer: asyncio.TimerHandle | None = None
        self._connection: EngineConnection | None = None

    def begin(self, *, fresh: bool = False) -> None:
        """Send the leg on an idle connection, or on a new one."""
        connection = None if fresh else self._pool.idle(self._legs.loop.time())
        if connection is None:
            self._legs.spawn(self)
        else:
            self.ride(connection)

    def ride(self, connection: EngineConnection) -> None:
        """Send the leg on this connection."""
        self._connection = connection
        connection.send(self, self._request)
        if self._silence_s and self._timer is None:
            self._watch(self._silence_s)

    def look(self, now: float) -> None:
        """Give the leg up if its engine has been silent for too long."""
        connection = self._connection
        if connection is None or connection.paused:
            return
        if now - connection.heard_at >= self._silence_s:
            self._silent(connection)

    async def connect(self) -> None:
        """Open a new connection for the leg."""
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
        """The connection is lost. If no byte of an answer has come (`heard`), the engine probably closed an idle
        connection at this moment: the leg is sent once more, on a new connection, unless it has `once`.
        """
        self._connection = None
        if heard or self._once or self._tried:
            self.over(EngineLost(because, reached=True))
        elif self.listener is not None:
            self._tried = True
            self.begin(fresh=True)

    def over(self, lost: EngineLost | None = None) -> None:
        """The leg has ended."""
        listener = self._forget()
        if listener is not None and lost is None:
            listener.ended()
        elif listener is not None and lost is not None:
            listener.lost(lost)

    def refuse(self, lost: EngineLost) -> None:
        """Break off, because the listener cannot use this answer; the listener is told of the loss."""
        connection = self._connection
        if connection is not None:
            connection.cut()
        self.over(lost)

    def close(self) -> None:
        """Break off, and do not tell the listener. The engine aborts the request."""
        connection = self._connection
        if self._forget() is not None and connection is not None:
            connection.cut()

    def _forget(self) -> LegListener | None:
        listener, self.listener = self.listener, None
        self._connection, self._request = None, ()
        self._legs.long.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return listener

    # -- silence and slow readers --

    def limit_silence(self, silence_s: float) -> None:
        """Set the longest silence of the engine, in seconds from now on."""
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
            self._timer = None  # the leg is being sent again
            return
        now = self._legs.loop.time()
        since = now if connection.paused else connection.heard_at
        left_s = since + self._silence_s - now
        if left_s > 0.001:
            self._watch(left_s)
            return
        self._silent(connection)

    def _silent(self, connection: EngineConnection) -> None:
        listener = self._forget()
        connection.cut()
        if listener is not None:
            listener.lost(EngineLost(f"silent for {self._silence_s:g} s", reached=True, silent=True))

    def pause(self) -> None:
        """Stop reading: the client does not keep up."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Read again."""
        if self._connection is not None:
            self._connection.resume()


class EngineConnection(asyncio.Protocol):
    """One connection to an engine; one leg at a time."""

    __slots__ = (
        "_leg",
        "_loop",
        "_poll",
        "_pool",
        "_reader",
        "_time",
        "_transport",
        "_whole_chunks",
        "heard_at",
        "idle_since",
        "paused",
    )

    def __init__(self, pool: Pool[EngineConnection], loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self._loop = loop
        self._time = loop.time
        self._leg: EngineLeg | None = None
        self._transport: asyncio.Transport | None = None
        self._reader = AnswerReader()
        self._whole_chunks = False
        """The bytes that came last ended with a whole event and its chunk."""
        self.paused = False
        self.heard_at = self.idle_since = 0.0
        self._poll = select.poll()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by descent
        self._pool.opened.add(self)
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            self._poll.register(sock.fileno(), select.POLLIN)

    @property
    def usable(self) -> bool:
        """Whether the connection can take a leg. It cannot with unread bytes: they are the connection's end, or stand
        behind the end of an earlier answer, and would be taken for the answer of the next leg.
        """
        return (
            self._leg is None
            and self._transport is not None
            and not self._transport.is_closing()
            and not self._poll.poll(0)
        )

    def send(self, leg: EngineLeg, request: tuple[bytes | memoryview, ...]) -> None:
        """Write a leg's request."""
        self._leg = leg
        self._reader.reset()
        self._whole_chunks = False
        self.heard_at = self._time()
        if self._transport is None:
            self._loop.call_soon(self._tell_broke, "the engine closed the connection at once")
        elif len(request) == 1:
            self._transport.write(request[0])
        else:
            self._transport.writelines(request)

    def cut(self) -> None:
        """Close the connection at once, and do not tell the leg."""
        self._leg = None
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Stop reading."""
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
        # Mostly one token comes, as one whole chunk: it needs no parser. This check makes sure of that, and no more.
        if self._whole_chunks and size <= CHUNK_BYTES_MAX and leg is not None:
            begin = _FRAMINGS[size]
            if data.startswith(begin) and data.endswith(_EVENT_ENDS):
                found = leg.chunk(data, len(begin))
                if found is not None and leg.listener is not None:
                    leg.listener.happened(found)
                return
        if leg is None:
            self.cut()  # an answer to no request
            return
        reader = self._reader
        in_head = not reader.head
        fault = reader.feed(data)
        if in_head and reader.head:
            if reader.encoding:
                self._give_up(_encoded(reader.encoding))
                return
            if leg.listener is not None:
                leg.listener.opened(reader.status, reader.content_type, reader.cache_control)
        if fault:
            self._give_up(_malformed(fault))
            return
        # A line end behind the last piece of a body closes its chunk: the next bytes begin a chunk.
        bodies = reader.bodies
        self._whole_chunks = bool(
            bodies and bodies[-1].endswith(b"\n\n") and data.endswith(_EVENT_ENDS) and not reader.complete
        )
        if bodies:
            data = bodies[0] if len(bodies) == 1 else b"".join(bodies)
            bodies.clear()
            leg.complete = reader.complete
            if leg.listener is not None:
                leg.listener.body(data)
        if reader.complete and self._leg is leg:
            self._end(leg)

    def _end(self, leg: EngineLeg) -> None:
        self._leg = None
        assert self._transport is not None
        if self._reader.keep and not self._transport.is_closing():
            if self.paused:
                self.resume()
            self.idle_since = self.heard_at
            self._pool.give_back(self)
        else:
            self._transport.close()
        leg.over()

    def _give_up(self, lost: EngineLost) -> None:
        leg = self._leg
        self._reader.bodies.clear()
        self.cut()
        if leg is not None:
            leg.over(lost)

    # the end

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        self._transport = None
        self._reader.close()
        leg = self._leg
        if leg is not None and exc is None and self._reader.ends_with_connection:
            self._leg = None
            leg.over()
            return
        self._tell_broke(str(exc) if exc else "the engine closed the connection")

    def _tell_broke(self, because: str) -> None:
        leg, self._leg = self._leg, None
        if leg is not None:
            leg.broke(because, heard=self._reader.heard)


def _malformed(because: str) -> EngineLost:
    return EngineLost(f"no HTTP answer: {because}", reached=True, unfit="malformed")


def _encoded(found: str) -> EngineLost:
    because = f"its answer is encoded ({found[:40]!r}) although plain bytes were asked for"
    return EngineLost(because, reached=True, unfit="encoded")


class Legs:
    """The connection pools for the legs of one process, by the engine's URL."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._pools: dict[str, Pool[EngineConnection]] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self.long: set[Patient] = set()
        """Legs that may be silent for long, and other objects that are looked at in every sweep."""
        self._sweeping = self.loop.call_later(SWEEP_S, self._sweep)
        self._heads: dict[tuple[str, str, str], bytes] = {}
        """The first lines of a head, by method, engine and path."""

    def send(
        self,
        url: str,
        path: str,
        headers: bytes,
        body: Sequence[bytes | memoryview],
        listener: LegListener,
        *,
        once: bool = False,
        silence_s: float = 0.0,
    ) -> EngineLeg:
        """POST a leg to the engine at `url`.

        Args:
            url: the engine's root.
            path: the endpoint.
            headers: further lines of the head (`headers.lines`).
            body: JSON, in pieces.
            listener: receives the answer.
            once: never send it a second time, because the engine may have acted on the first.
            silence_s: the longest silence of the engine, in seconds; 0: no limit.
        """
        size = sum(map(len, body))
        start = self._heads.get(("POST", url, path)) or self._start("POST", url, path)
        head = b"%b%bContent-Length: %d\r\n\r\n" % (start, headers, size)
        request = (b"".join((head, *body)),) if size <= PIECE_BYTES else (head, *body)
        leg = EngineLeg(self, self._pools[url], request, listener, once=once, silence_s=silence_s)
        leg.begin()
        return leg

    def ask(self, url: str, path: str, headers: bytes, listener: LegListener) -> EngineLeg:
        """GET `path` of the engine at `url`, on the same connections as legs. `headers`: as in `send`."""
        start = self._heads.get(("GET", url, path)) or self._start("GET", url, path)
        request = b"%b%b\r\n" % (start, headers)
        leg = EngineLeg(self, self._pools[url], (request,), listener, once=False, silence_s=0.0)
        leg.begin()
        return leg

    def _start(self, method: str, url: str, path: str) -> bytes:
        """The first lines of a request's head, kept as long as the engine's pool, which it has from now on."""
        pool = self._pools.get(url)
        if pool is None:
            pool = self._pools[url] = Pool(url, self.connection)
        asks = f"Host: {pool.netloc}\r\nAccept: */*\r\nAccept-Encoding: identity\r\n"
        self._heads[method, url, path] = f"{method} {pool.base}{path} HTTP/1.1\r\n{asks}".encode()
        return self._heads[method, url, path]

    def connection(self, pool: Pool[EngineConnection]) -> EngineConnection:
        """A connection for this pool, not connected yet."""
        return EngineConnection(pool, self.loop)

    def spawn(self, leg: EngineLeg) -> None:
        """Open a connection for a leg."""
        task = self.loop.create_task(leg.connect(), name="connect-leg")
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _sweep(self) -> None:
        self._sweeping = self.loop.call_later(SWEEP_S, self._sweep)  # first: a fault below ends no later sweep
        now = self.loop.time()
        for each in [*self.long]:
            try:
                each.look(now)
            except Exception:  # a bug with this leg: the others are looked at
                logger.exception("a leg's silence could not be judged")
        for url, pool in list(self._pools.items()):
            pool.sweep(now)
            if not pool.opened and not self._connecting:
                del self._pools[url]
                self._heads = {key: head for key, head in self._heads.items() if key[1] != url}

    def close(self) -> None:
        """Cut every connection: engines abort the requests that still run."""
        self._sweeping.cancel()
        for task in self._connecting:
            task.cancel()
        for pool in self._pools.values():
            pool.close()
