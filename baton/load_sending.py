"""Sending one load: by this process, or by several that share its schedule and are merged into one result."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import signal
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from loadgen.arrival import Arrival
from loadgen.http import LoadConnections
from loadgen.record import Record
from loadgen.replay import TICK_S, Replay, RunningLoad, Sending
from loadgen.sessions import Sessions

LINE_BYTES_MAX = 1 << 28
"""Longest line of a sender: a record with the times of a hundred thousand tokens fits."""

BEGIN_S = 0.5
"""Seconds from the moment when all senders are ready to the load's second 0; they make first bodies meanwhile."""

READY_S = 60.0
"""Longest wait for the senders; then the load starts all the same, and a later one sends late."""

LAST_WORDS_S = 5.0
"""Time that a sender has for its last records after `cut`."""

OnRecord = Callable[[Record], None]
OnTick = Callable[[RunningLoad], None]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One sender's part of a load."""

    url: str
    sending: Sending
    arrivals: list[Arrival]
    first: int
    """Number of its first request in the whole load."""
    step: int
    """Difference between the numbers of two successive requests of this sender."""


class SenderReady(msgspec.Struct, frozen=True, tag="ready"):
    """A sender has its part, and waits for the start."""


class Got(msgspec.Struct, frozen=True, tag="record"):
    """A request has ended."""

    record: Record


class Stands(msgspec.Struct, frozen=True, tag="stands"):
    """How many requests a sender has sent."""

    sent: int


class SenderEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A sender's part is over."""

    sent: int
    held_back: int
    """Requests that --max-concurrency delayed."""
    cpu_s: float
    elapsed_s: float
    gaps: str
    """Gaps between chunks (`encoded_gaps`), in seconds."""


Told = SenderReady | Got | Stands | SenderEnded


class Sender(Protocol):
    """Sends loads, one at a time."""

    async def send(
        self, arrivals: Sequence[Arrival], sending: Sending, on_record: OnRecord, on_tick: OnTick
    ) -> LoadSent:
        """Send all requests, and wait for the answers."""

    def stop(self) -> None:
        """Send no more; open answers may end."""

    def cut(self) -> None:
        """Cut open answers, and end now."""


@dataclass(slots=True)
class LoadSent:
    """The result of a load."""

    load: RunningLoad
    cpu_s: float
    """CPU seconds of the busiest sender."""
    senders: int = 1
    notes: tuple[str, ...] = ()
    """A line for each sender that died."""


class OneSender:
    """Sends from this process."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._replay: Replay | None = None

    async def send(
        self, arrivals: Sequence[Arrival], sending: Sending, on_record: OnRecord, on_tick: OnTick
    ) -> LoadSent:
        """Send them all, and wait for the answers."""
        self._replay = Replay(LoadConnections(self._url), sending, on_record, on_tick)
        load = await self._replay.run(arrivals)
        return LoadSent(load, load.cpu_s)

    async def converse(self, talks: Sessions, sending: Sending, on_record: OnRecord, on_tick: OnTick) -> LoadSent:
        """Hold conversations, each turn after the answer before it."""
        self._replay = Replay(LoadConnections(self._url), sending, on_record, on_tick)
        load = await self._replay.converse(talks)
        return LoadSent(load, load.cpu_s)

    def stop(self) -> None:
        """Send no more; open answers may end."""
        if self._replay is not None:
            self._replay.stop()

    def cut(self) -> None:
        """End now."""
        if self._replay is not None:
            self._replay.cut()


@dataclass(slots=True)
class _Child:
    """One sender process."""

    number: int
    process: asyncio.subprocess.Process
    share: int
    """Requests that this sender is to send."""
    sent: int = 0
    told: int = 0
    """Records that it has reported."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    ended: SenderEnded | None = None

    def tell(self, word: bytes) -> None:
        """Write one line to its stdin."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, RuntimeError):
            self.process.stdin.write(word + b"\n")

    @property
    def gone(self) -> bool:
        """Whether it ended without its final report."""
        return self.ended is None and self.process.returncode is not None


class ManySenders:
    """Sends from several processes, each with every n-th request: the same requests at the same moments as one."""

    def __init__(self, url: str, count: int) -> None:
        self._url, self._most, self._count = url, count, count
        self._children: list[_Child] = []
        self._load = RunningLoad()
        self._start_at = 0.0
        self._cut = False

    async def send(
        self, arrivals: Sequence[Arrival], sending: Sending, on_record: OnRecord, on_tick: OnTick
    ) -> LoadSent:
        """Send them all, and wait for the answers. There is no sender without a request."""
        self._load, self._cut, self._children = RunningLoad(), False, []
        self._count = min(self._most, max(1, len(arrivals)))
        try:
            for number in range(self._count):
                if self._load.stopped:
                    break
                self._children.append(await self._start(number, arrivals, sending))
            async with asyncio.TaskGroup() as group:
                readers = [group.create_task(self._read(child, on_record)) for child in self._children]
                await self._begin()
                await self._watch(readers, on_tick)
        finally:
            await self._end()
        return self._merged()

    def stop(self) -> None:
        """Send no more; open answers may end."""
        self._load.stopped = True
        for child in self._children:
            child.tell(b"stop")

    def cut(self) -> None:
        """End now."""
        self._load.stopped = self._cut = True
        for child in self._children:
            child.tell(b"cut")

    async def _start(self, number: int, arrivals: Sequence[Arrival], sending: Sending) -> _Child:
        """Start a sender in a session of its own: Ctrl-C reaches this process only, which passes it on."""
        part = list(arrivals[number :: self._count])
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "baton.load_sender",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            start_new_session=True, limit=LINE_BYTES_MAX,
        )  # fmt: skip
        child = _Child(number, process, len(part))
        job = Job(url=self._url, sending=sending, arrivals=part, first=number, step=self._count)
        child.tell(msgspec.json.encode(job))
        if self._load.stopped:  # while it was started: `stop` did not know of it
            child.tell(b"stop")
        return child

    async def _begin(self) -> None:
        """Wait until all senders are ready or gone, then start them at one moment. Those that were stopped before have
        ended.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                for child in self._children:
                    await child.ready.wait()
        self._start_at = time.perf_counter() + BEGIN_S
        for child in () if self._load.stopped else self._children:
            child.tell(b"start %r" % self._start_at)

    async def _watch(self, readers: Sequence[asyncio.Task[None]], on_tick: OnTick) -> None:
        """Report progress until the last sender has ended."""
        cut_at: float | None = None
        while not all(reader.done() for reader in readers):
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            self._load.elapsed_s = max(0.0, now - self._start_at)
            self._load.sent = sum(child.sent for child in self._children)
            on_tick(self._load)
            if self._cut:
                cut_at = cut_at or now + LAST_WORDS_S
                if now > cut_at:
                    break
        for reader in readers:
            reader.cancel()

    async def _read(self, child: _Child, on_record: OnRecord) -> None:
        """Read one sender's records until it ends."""
        decoder = msgspec.json.Decoder(Told)
        assert child.process.stdout is not None
        while (line := await child.process.stdout.readline()).endswith(b"\n"):
            told = decoder.decode(line)
            if isinstance(told, SenderReady):
                child.ready.set()
            elif isinstance(told, Stands):
                child.sent = told.sent
            elif isinstance(told, Got):
                self._take(child, told.record, on_record)
            else:
                child.ended, child.sent = told, told.sent
                break
        if child.ended is None:
            await child.process.wait()
            child.ready.set()  # it will never be ready

    def _take(self, child: _Child, record: Record, on_record: OnRecord) -> None:
        load = self._load
        load.records.append(record)
        load.done += 1
        load.failed += record.error is not None
        load.tokens += record.tokens
        child.told += 1
        child.sent = max(child.sent, child.told)
        on_record(record)

    async def _end(self) -> None:
        """End all sender processes: none outlives the load."""
        for child in self._children:
            if child.process.stdin is not None:
                child.process.stdin.close()  # a sender ends by itself when its stdin closes
            if child.process.returncode is None and child.ended is None:
                with contextlib.suppress(ProcessLookupError):
                    child.process.send_signal(signal.SIGKILL)
        for child in self._children:
            try:
                async with asyncio.timeout(LAST_WORDS_S):
                    await child.process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    child.process.kill()
                await child.process.wait()

    def _merged(self) -> LoadSent:
        load = self._load
        ended = [child.ended for child in self._children if child.ended is not None]
        load.held_back = sum(each.held_back for each in ended)
        load.elapsed_s = max([each.elapsed_s for each in ended] or [load.elapsed_s])
        for each in ended:
            load.gaps_s.frombytes(base64.b64decode(each.gaps))
        load.cpu_s = sum(each.cpu_s for each in ended)
        load.sent = len(load.records)
        notes = [note for child in self._children if (note := self._death(child))]
        return LoadSent(load, max([each.cpu_s for each in ended] or [0.0]), self._count, tuple(notes))

    def _death(self, child: _Child) -> str:
        """How a sender died, and what that means for the load; empty if it ended in order."""
        if child.ended is not None:
            return ""
        code = child.process.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return (
            f"sender {child.number + 1} of {self._count} died ({how}): {child.share - child.told} of its {child.share} "
            "requests count as not sent, and the load was not the one asked for"
        )


def encoded_gaps(gaps_s: array[float]) -> str:
    """Gaps as `SenderEnded` carries them: the array's bytes, in base64."""
    return base64.b64encode(gaps_s.tobytes()).decode()
