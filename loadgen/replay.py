"""The open-loop sender: sends each request at its moment, whatever the server does with the earlier ones.

It never waits for an answer before it sends the next request (unless `concurrency_max` is set; then it counts the
requests that it held back). It records separately when a request was due, when it was sent, and when bytes came.

It ends by itself: after the last arrival it waits for open answers, each until its own deadline. `stop()` ends sending,
`cut()` ends everything; measurements are kept in both cases.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from cluster.telemetry import tracing
from loadgen.arrival import Arrival
from loadgen.body import Asking, body_of, turn_body
from loadgen.http import Failed, LoadConnection, LoadConnections
from loadgen.record import INTERRUPTED, Record, Timings, record_of
from loadgen.sessions import Due, Sessions, Turn, TurnAnswered
from loadgen.stream import DETAIL_CHARS, TIMING_HEADER, Tally
from loadgen.stream import StreamContent as Stream

if TYPE_CHECKING:
    from cluster.telemetry import RequestSpan

EARLY_S = 0.001
"""Timers fire up to a millisecond late, because epoll counts whole milliseconds. So the sender wakes that much earlier
and then yields until the moment."""

SLICE_S = 0.2
"""Longest single sleep in seconds, so that a stop takes no longer."""

TICK_S = 0.1
"""Seconds between two checks of deadlines and reports of progress."""

BURST = 8
"""A late sender yields at request numbers that this divides: answers must be read meanwhile."""

ERROR_BYTES = 4096
"""An error answer's body is kept until it has this many bytes."""


@dataclass(frozen=True, slots=True)
class Sending:
    """Options of sending."""

    asking: Asking
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0
    """Seconds from sending to the end of the answer; later it is an error of kind `timeout`."""
    drain_s: float = 10.0
    """Seconds that open answers may take after `stop()` before they are cut as `interrupted`."""
    concurrency_max: int | None = None
    """Most requests open at once; None = no limit, which is what open-loop means."""
    token_times: bool = False
    stages: bool = True
    """Whether to ask for the router's timing parts; other servers do not know the header."""


@dataclass(frozen=True, slots=True)
class LoadShard:
    """One sender's part of a load: requests first, first + step, first + 2·step ..."""

    first: int
    step: int
    start: float
    """The load's second 0 on `time.perf_counter()`, which all processes of a machine share (CLOCK_MONOTONIC)."""


@dataclass(slots=True)
class RunningLoad:
    """The requests sent so far and their results, also while the load runs."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    held_back: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    """Processor time of this whole process during the load."""
    stopped: bool = False
    records: list[Record] = field(default_factory=list)
    gaps_s: array[float] = field(default_factory=lambda: array("f"))
    """Seconds between two chunks of an answer, over all whole answers."""

    @property
    def open(self) -> int:
        """Requests sent and not yet answered."""
        return self.sent - self.done


class Replay:
    """One load on one endpoint. `on_record` gets each record at its end, `on_tick` the load ten times a second.

    It has many attributes: all tasks of a load share its open requests, its clock, and how it ends.
    """

    def __init__(
        self,
        pool: LoadConnections,
        sending: Sending,
        on_record: Callable[[Record], None] | None = None,
        on_tick: Callable[[RunningLoad], None] | None = None,
    ) -> None:
        self.load = RunningLoad()
        self._pool = pool
        self.sending = sending
        self._on_record, self._on_tick = on_record, on_tick
        self._open: dict[int, _Exchange] = {}
        self._held: deque[tuple[int, Arrival, bytes]] = deque()
        self._talks: Sessions | None = None
        self._answered = asyncio.Event()
        self._start = 0.0
        self._stop_at: float | None = None
        self._sent_all = False
        self._group: asyncio.TaskGroup | None = None
        self._tracing = tracing("baton-load")
        lines = [f"POST {pool.base}{sending.asking.path} HTTP/1.1", f"Host: {pool.netloc}"]
        lines += ["Content-Type: application/json", "Accept: text/event-stream", "User-Agent: baton-load"]
        named = ({TIMING_HEADER: "1"} if sending.stages else {}) | dict(sending.headers)
        self._head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in named.items()), ""]).encode()

    def stop(self) -> None:
        """Send no more; open requests may still end, for `drain_s`."""
        self.load.stopped = True
        if self._stop_at is None:
            self._stop_at = time.perf_counter() + self.sending.drain_s

    def cut(self) -> None:
        """End now: open requests are recorded as interrupted."""
        self.stop()
        self._stop_at = time.perf_counter()

    async def run(self, arrivals: Iterable[Arrival], shard: LoadShard | None = None) -> RunningLoad:
        """Send all arrivals and wait for the answers; with a `shard`, as one of several senders."""
        numbers = count() if shard is None else count(shard.first, shard.step)
        start = None if shard is None else shard.start
        return await self._run(self._send_all(zip(numbers, arrivals, strict=False)), start)

    async def converse(self, talks: Sessions) -> RunningLoad:
        """Hold these conversations: send each turn after the answer before it."""
        self._talks = talks
        return await self._run(self._send_turns(talks), None)

    async def _run(self, sending: Coroutine[Any, Any, None], start: float | None) -> RunningLoad:
        _allow_many_files()
        thresholds = gc.get_threshold()
        gc.freeze()  # older objects need no search, and a load makes no cycles that are worth a pause
        gc.set_threshold(100_000, 50, 1000)
        cpu_s = time.process_time()
        self._start = time.perf_counter() if start is None else start
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(sending)
                await self._watch()
        finally:
            self.load.elapsed_s = max(0.0, time.perf_counter() - self._start)
            self.load.cpu_s = time.process_time() - cpu_s
            self._pool.close()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)
            gc.set_threshold(*thresholds)
            gc.unfreeze()
        return self.load

    # sending

    async def _send_all(self, arrivals: Iterable[tuple[int, Arrival]]) -> None:
        for before, (number, arrival) in enumerate(arrivals):
            if self._stop_at is not None:
                break
            body = body_of(arrival, self.sending.asking, number)  # made ahead of its time, while there is time
            if not await self._until(self._start + arrival.at_s, before):
                break
            limit = self.sending.concurrency_max
            if limit is not None and len(self._open) >= limit:
                self.load.held_back += 1
                self._held.append((number, arrival, body))
            else:
                self._send(self._exchange(number, arrival, body))
        self._sent_all = True

    async def _send_turns(self, talks: Sessions) -> None:
        while self._stop_at is None and not talks.over:
            now = time.perf_counter() - self._start
            for turn in talks.handle(Due(), now):
                body = turn_body(turn.said, turn.output_tokens, self.sending.asking)
                arrival = turn.arrival
                self._send(self._exchange(turn.number, arrival, body, turn=turn))
            due = talks.next_wakeup()
            self._answered.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(SLICE_S if due is None else min(SLICE_S, max(0.0, due - now))):
                    await self._answered.wait()
        self._sent_all = True

    async def _until(self, due: float, before: int) -> bool:
        """Wait for the moment `due`, on `time.perf_counter()`; False if a stop comes first. `before`: how many arrivals
        this sender had before.
        """
        left = due - time.perf_counter()
        if left <= 0:
            if before % BURST == 0:
                await asyncio.sleep(0)
            return self._stop_at is None
        while left > 2 * EARLY_S:
            await asyncio.sleep(min(left - EARLY_S, SLICE_S))
            if self._stop_at is not None:
                return False
            left = due - time.perf_counter()
            if left <= 2 * EARLY_S:
                while time.perf_counter() < due:  # noqa: ASYNC110 - waits for a moment, which is no event
                    await asyncio.sleep(0)
                return self._stop_at is None
        await asyncio.sleep(left)
        return self._stop_at is None

    def _exchange(
        self, number: int, arrival: Arrival, body: bytes, *, held_back: bool = False, turn: Turn | None = None
    ) -> _Exchange:
        named = {"x-slo-class": arrival.slo_class} if arrival.slo_class else {}
        span = None
        if self._tracing is not None:
            span = self._tracing.asked("baton.load.request", {"baton.load.number": number})
            named = span.passed_on(named)
        lines = "".join(f"{name}: {value}\r\n" for name, value in named.items()).encode()
        request = b"%b%bContent-Length: %d\r\n\r\n%b" % (self._head, lines, len(body), body)
        return _Exchange(self, number, arrival, request, held_back=held_back, turn=turn, span=span)

    def _send(self, exchange: _Exchange) -> None:
        self._open[exchange.number] = exchange
        self.load.sent += 1
        exchange.sent = time.perf_counter()
        self.send_on(self._pool.idle(), exchange)

    def send_on(self, connection: LoadConnection | None, exchange: _Exchange) -> None:
        """Send on this connection, or on a new one."""
        if connection is not None:
            exchange.connection = connection
            connection.send(exchange.request, exchange)
            return
        assert self._group is not None
        exchange.connecting = self._group.create_task(self._connect(exchange))

    async def _connect(self, exchange: _Exchange) -> None:
        try:
            connection = await self._pool.connect()
        except Failed as failed:
            exchange.connecting = None
            exchange.give_up(failed.kind, str(failed))
            return
        exchange.connecting = None
        exchange.connection = connection
        connection.send(exchange.request, exchange)

    # ends

    async def _watch(self) -> None:
        """Check deadlines, report progress, end the load."""
        while not (self._sent_all and not self._open and not self._held):
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            self.load.elapsed_s = now - self._start
            if self._stop_at is not None:
                self._drop_held()
                if now >= self._stop_at:
                    for exchange in list(self._open.values()):
                        exchange.give_up(INTERRUPTED, "cut when the load was stopped")
            self._expire(now)
            if self._on_tick is not None:
                self._on_tick(self.load)

    def _expire(self, now: float) -> None:
        """End the requests that have timed out. All have the same timeout, so the first one sent is due first."""
        while self._open:
            oldest = next(iter(self._open.values()))
            if now - oldest.sent < self.sending.timeout_s:
                return
            oldest.give_up("timeout", f"no complete answer within {self.sending.timeout_s:g} s")

    def _drop_held(self) -> None:
        """Drop the requests that waited for a place when the stop came: they were never sent."""
        self._held.clear()

    def ended(self, exchange: _Exchange, record: Record, token_s: array[float], text: str) -> None:
        """Note that an exchange is over, well or not."""
        del self._open[exchange.number]
        if self._talks is not None and exchange.turn is not None:
            record.closed_loop = True
            tokens = (record.prompt_tokens or record.input_tokens) + record.tokens
            answered = TurnAnswered(exchange.turn, text, tokens, well=record.error is None)
            self._talks.handle(answered, time.perf_counter() - self._start)
            self._answered.set()
        load = self.load
        load.done += 1
        load.failed += record.error is not None
        load.tokens += record.tokens
        load.records.append(record)
        if record.error is None:
            load.gaps_s.extend([later - one for one, later in pairwise(token_s)])
        if self._on_record is not None:
            self._on_record(record)
        if self._held and self._stop_at is None:
            number, arrival, body = self._held.popleft()
            self._send(self._exchange(number, arrival, body, held_back=True))

    @property
    def start(self) -> float:
        return self._start


class _Exchange:
    """One request and its answer: receives from the connection, ends in one record.

    It has many attributes: the request, where it stands, and what its record is made of.
    """

    __slots__ = (
        "_arrival", "_error_body", "_first_byte", "_held_back", "_replay", "_resent", "_span", "_status", "_tally",
        "connecting", "connection", "number", "over", "request", "sent", "turn",
    )  # fmt: skip

    def __init__(
        self,
        replay: Replay,
        number: int,
        arrival: Arrival,
        request: bytes,
        *,
        held_back: bool = False,
        turn: Turn | None = None,
        span: RequestSpan | None = None,
    ) -> None:
        self._span = span
        self.number, self.request, self.turn = number, request, turn
        self.sent = 0.0
        self.connection: LoadConnection | None = None
        self.connecting: asyncio.Task[None] | None = None
        self.over = False
        self._replay, self._arrival, self._held_back = replay, arrival, held_back
        self._resent = False
        self._status: int | None = None
        self._first_byte: float | None = None
        self._tally = Tally(keep=turn is not None)
        self._error_body = b""

    def piece(self, status: int, data: bytes, now: float) -> None:
        if self._first_byte is None:
            self._first_byte = now
            self._status = status
        if status == 200:
            self._tally.feed(data, now)
        elif len(self._error_body) < ERROR_BYTES:
            self._error_body += data

    def ended(self, status: int, now: float) -> None:
        self._status = status
        if status == 200:
            self._end(self._tally.end(), now)
        else:
            kind = "shed" if status == 429 else f"http_{status}"
            self._end(_nothing(kind, _said(self._error_body)), now)

    def broke(self, why: str, now: float, *, stale: bool) -> None:
        if stale and not self._resent:
            self._resent = True
            self._replay.send_on(None, self)
            return
        self._end(_broken(self._tally, "broken_off", why), now)

    def give_up(self, kind: str, detail: str) -> None:
        """End the request here, by the sender's own decision or for lack of a connection."""
        if self.over:
            return
        if self.connecting is not None:
            self.connecting.cancel()
        if self.connection is not None:
            self.connection.cut()
        self._end(_broken(self._tally, kind, detail), time.perf_counter())

    def _end(self, answered: Stream, now: float) -> None:
        self.over = True
        start = self._replay.start
        token_s = array("d", [at - start for at in answered.token_s])
        first = None if self._first_byte is None else self._first_byte - start
        timings = Timings(self.sent - start, first, now - start, token_s)
        record = record_of(self.number, self._arrival, timings, token_times=self._replay.sending.token_times)
        record.status, record.error, record.detail = self._status, answered.error, answered.detail
        record.prompt_tokens, record.completion_tokens = answered.prompt_tokens, answered.completion_tokens
        record.held_back, record.resent = self._held_back, self._resent
        record.timing = answered.timing
        self.connection = None
        if self._span is not None:
            self._span.end(record.error or "", _span_attributes(record))
        self._replay.ended(self, record, token_s, answered.text)


def _span_attributes(record: Record) -> dict[str, Any]:
    """Span attributes by the GenAI semantic conventions, as in the router's own span."""
    return {
        "http.response.status_code": record.status,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.response.time_to_first_chunk": record.ttft_s,
        "baton.load.sent_late_ms": 1000 * (record.sent_s - record.at_s),
    }


def _nothing(kind: str, detail: str) -> Stream:
    return Stream(array("d"), None, None, kind, detail)


def _broken(tally: Tally, kind: str, detail: str) -> Stream:
    """The part of a stream that came, with the error that ended it."""
    if not tally.event_s:
        return _nothing(kind, detail)
    found = tally.end()
    return Stream(found.token_s, found.prompt_tokens, found.completion_tokens, kind, detail)


def _said(body: bytes) -> str:
    """The message of an error answer, whatever its shape."""
    with suppress(msgspec.DecodeError, UnicodeError, RecursionError):
        found = msgspec.json.decode(body)
        if isinstance(found, dict):
            inner = found.get("error", found)
            if isinstance(inner, dict) and "message" in inner:
                return str(inner["message"])[:DETAIL_CHARS]
    return body.decode(errors="replace").strip()[:DETAIL_CHARS]


def _allow_many_files() -> None:
    """An open-loop load may hold thousands of connections: take as many files as this user may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
