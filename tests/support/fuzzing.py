"""What all tests under tests/fuzz share: seeded cases, a router in a thread of its own, and checks of that router.

The router may never hang, grow without limit, or log a bug.

A fuzz test looks like this:

    async def test_something(fuzz: Fuzzing) -> None:
        async with router_beside(instances) as router, watched(router) as watch:
            for case in fuzz.cases(fixed=100):
                with case:  # an error names the seed, and how to run it again
                    ... make a request with `case.chance` (a random.Random), send it, check the answer
        assert watch.slowest_health_s < 2

`Turns` measures how long each callback holds the router's loop, in CPU time of the router's own thread: a busy machine
does not lengthen it. Memory is the peak of the whole process, as the kernel counts it (`peak_bytes`).

In `make test` the fixed cases run, the same ones each time. With `--fuzz-s N` each test goes on with fresh seeds, all
fuzz tests of the run together for N seconds. `--fuzz-seed SEED` runs one case again.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import random
import re
import resource
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import msgspec
from support.hands_over import hands_over

from cluster.instance import Instance
from cluster.registry.registry import Registry
from router.api.app import serve
from router.api.config import RouterConfig

HEALTH_S = 10.0
"""A router that does not answer /health within so many seconds hangs, also on a busy machine."""

WATCH_EVERY_S = 0.05

FRESH_FROM = 1 << 32
"""Fresh seeds are at least this, so that they differ from the seeds of the fixed cases."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_PAGE_BYTES = resource.getpagesize()


class Case:
    """One case: a seed, and a random generator made from it. As a context manager it adds its seed to an error."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            error.add_note(f"fuzz seed {self.seed}: run it again with --fuzz-seed {self.seed}")


@dataclass(frozen=True)
class Fuzzing:
    """How long one test fuzzes, in seconds. `seed`: run this one case alone."""

    seconds: float = 0.0
    seed: int | None = None

    def cases(self, fixed: int) -> Iterator[Case]:
        """The fixed cases 0 to `fixed` - 1, then cases with fresh seeds until the test's time is over."""
        if self.seed is not None:
            yield Case(self.seed)
            return
        ends = time.monotonic() + self.seconds
        for seed in range(fixed):
            yield Case(seed)
        lot = random.SystemRandom()
        while time.monotonic() < ends:
            yield Case(lot.randrange(FRESH_FROM, FRESH_FROM * 1000))

    def rounds(self, fixed: int, together: int) -> Iterator[list[Case]]:
        """The same cases in lists of `together`, for tests that send several requests at once."""
        batch: list[Case] = []
        for case in self.cases(fixed):
            batch.append(case)
            if len(batch) == together:
                yield batch
                batch = []
        if batch:
            yield batch


# --- a router beside the test ----------------------------------------------------------------------------------------


@dataclass
class Turns:
    """How long single callbacks of the router's loop took."""

    longest_s: float = 0.0
    """Seconds of CPU time of the longest callback since this was last set to 0."""
    thread: int = 0


@contextmanager
def _timed(turns: Turns) -> Iterator[None]:
    """Measure every callback of the thread that `turns` names. asyncio has no hook for this: it only logs slow ones in
    debug mode, by the wall clock.
    """
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        if threading.get_ident() != turns.thread:
            run(handle)
            return
        began = time.thread_time()
        try:
            run(handle)
        finally:
            turns.longest_s = max(turns.longest_s, time.thread_time() - began)

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]


@dataclass
class Beside:
    """A router in a thread and a loop of its own: if the router hangs, the test still runs and can report it."""

    endpoint: str
    admin: str
    bugs: list[str] = field(default_factory=list)
    """The router's bugs: every log record of level ERROR, with the traceback."""
    turns: Turns = field(default_factory=Turns)


class _Bugs(logging.Handler):
    """Keeps every log record of level ERROR."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record, with its traceback."""
        self.said.append(logging.Formatter("%(name)s: %(message)s").format(record))


class _Thread(threading.Thread):
    """Runs the router until `stop` is called."""

    def __init__(self, config: RouterConfig, registry: Callable[[], Registry] | None) -> None:
        super().__init__(name="router-beside", daemon=True)
        self._config = config
        self._registry = registry
        self.opened = threading.Event()
        self.urls: tuple[str, str] | None = None
        self.fault: BaseException | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as fault:  # noqa: BLE001 - `router_beside` raises it in the test
            self.fault = fault
        finally:
            self.opened.set()

    async def _serve(self) -> None:
        self.loop, self.over = asyncio.get_running_loop(), asyncio.Event()
        registry = None if self._registry is None else self._registry()
        await serve(self._config, self._announce, self.over, registry)

    def _announce(self, endpoint: str, admin: str) -> None:
        self.urls = endpoint, admin
        self.opened.set()

    def stop(self) -> None:
        """Tell the router to end."""
        if self.urls is not None and not self.loop.is_closed():
            with suppress(RuntimeError):  # it has just ended by itself
                self.loop.call_soon_threadsafe(self.over.set)


@asynccontextmanager
async def router_beside(
    instances: Sequence[Instance], *, registry: Callable[[], Registry] | None = None, **settings: Any
) -> AsyncIterator[Beside]:
    """A router that is ready with these instances. At the end, its log must have no bug.

    It hands over between pairs without a proof: a proof compares answers, and stand-ins compute none. `registry` makes
    the registry that the router reads, in the router's own loop.
    """
    settings = {"drain_s": 0.5, "proves": False, "has_registry": registry is not None, **hands_over(settings)}
    config = RouterConfig(instances=tuple(instances), port=0, admin_port=0, **settings)
    handler, thread = _Bugs(), _Thread(config, registry)
    logging.getLogger().addHandler(handler)
    thread.start()
    try:
        await asyncio.to_thread(thread.opened.wait, HEALTH_S)
        if thread.urls is None:
            raise RuntimeError("the router did not start") from thread.fault
        assert thread.ident is not None
        router = Beside(*thread.urls, bugs=handler.said, turns=Turns(thread=thread.ident))
        async with asyncio.timeout(HEALTH_S):
            while (await told(router.admin, get("/ready"))).status != 200:
                await asyncio.sleep(0.02)
        with _timed(router.turns):
            yield router
    finally:
        thread.stop()
        await asyncio.to_thread(thread.join, HEALTH_S)
        logging.getLogger().removeHandler(handler)
    assert not thread.is_alive(), "the router does not end: it hangs"
    assert not handler.said, "\n".join(handler.said[:3])


# --- watching the router ---------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """Measurements of a router while a test ran."""

    slowest_health_s: float = 0.0
    grown_bytes: int = 0
    """By how many bytes this process, with the router's thread, exceeded its size at the beginning, at most."""


@asynccontextmanager
async def watched(router: Beside) -> AsyncIterator[Watch]:
    """Ask for /health every `WATCH_EVERY_S`; fail if the router does not answer within `HEALTH_S`."""
    watch, over = Watch(), asyncio.Event()
    before = _resident_bytes()

    async def look() -> None:
        while not over.is_set():
            began = time.monotonic()
            try:
                answer = await told(router.endpoint, get("/health"), within_s=HEALTH_S)
            except TimeoutError:
                raise AssertionError(f"the router hangs: no /health within {HEALTH_S:g} s") from None
            assert answer.status == 200, answer
            watch.slowest_health_s = max(watch.slowest_health_s, time.monotonic() - began)
            watch.grown_bytes = max(watch.grown_bytes, _resident_bytes() - before)
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_EVERY_S):
                    await over.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(look())
        try:
            yield watch
        finally:
            over.set()


HELD_S_MAX = 0.05
"""No request may hold the router's loop for longer than this, seconds of CPU time."""
GROWTH_MAX = 3.0
"""No request may take more memory than so many times its body's size, and `SLACK_BYTES` beside that."""
SLACK_BYTES = 24 << 20
"""Memory that a test's process takes and frees for other reasons, in bytes."""
TRIES = 4
"""How often a request may be repeated until it keeps the limits. Its own cost comes with every try; disturbances by
other cores or the garbage collector do not."""


async def judged(router: Beside, send: Callable[[], Awaitable[None]], size: int) -> None:
    """Send a request, and fail if it holds the router's loop too long or takes too much memory. `size`: bytes of its
    body.
    """
    held_s, grown = math.inf, math.inf
    for _ in range(TRIES):
        peak_bytes(begin=True)
        before, router.turns.longest_s = _resident_bytes(), 0.0
        await send()
        held_s = min(held_s, router.turns.longest_s)
        grown = min(grown, peak_bytes() - before)
        if held_s <= HELD_S_MAX and grown <= GROWTH_MAX * size + SLACK_BYTES:
            return
        gc.collect()
    slower = how_much_slower()
    assert held_s <= HELD_S_MAX * slower, f"{1000 * held_s:.0f} ms at once, on a machine {slower:.1f} times slower"
    if grown <= GROWTH_MAX * size + SLACK_BYTES:
        return
    raise AssertionError(f"{grown:,.0f} bytes for {size:,}")


_WORK: Final = b"[" + b"1e5," * 250_000 + b"7]"
_WORK_S: Final = 0.0012
"""Seconds of CPU time to read `_WORK` on an idle core of the AMD EPYC of the measurements in `docs/security.md`."""


def how_much_slower() -> float:
    """How many times longer than `_WORK_S` this machine takes now for `_WORK`; at least 1. Cores that share a cache or
    a unit with busy cores need more CPU time.
    """
    took = []
    for _ in range(5):
        began = time.thread_time()
        msgspec.json.decode(_WORK, type=msgspec.Raw)
        took.append(time.thread_time() - began)
    return max(1.0, sorted(took)[2] / _WORK_S)


def peak_bytes(*, begin: bool = False) -> int:
    """The peak memory of this process, in bytes, since the last call with `begin`."""
    if begin:
        Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


# --- a strict client -------------------------------------------------------------------------------------------------


class NotHttp(AssertionError):
    """The router's bytes are no well-formed HTTP answer."""


@dataclass(frozen=True)
class Told:
    """One answer, as a strict client reads it."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool
    """Whether the answer is complete; False: the connection was closed before its end."""


def get(path: str) -> bytes:
    """A request without a body, after which the connection is closed."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()


def post(path: str, body: bytes, **headers: str) -> bytes:
    """A request with a JSON body, after which the connection is closed. An underscore in a name stands for a hyphen."""
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n{lines}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def told(url: str, request: bytes, *, within_s: float = HEALTH_S) -> Told:
    """Send these bytes to the server at `url`, on a connection of their own, and read the whole answer.

    Raises:
        TimeoutError: the answer does not end in time.
        NotHttp: the answer is not well-formed.
    """
    address = urlsplit(url)
    async with asyncio.timeout(within_s):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            writer.write(request)
            raw = bytearray()
            with suppress(ConnectionError):  # the router cut the connection: the bytes before that count
                while piece := await reader.read(1 << 16):
                    raw += piece
        finally:
            writer.close()
    return read_answer(bytes(raw))


def read_answer(raw: bytes) -> Told:
    """The one answer in `raw`. Raises `NotHttp`, also if bytes follow the answer."""
    answer, rest = _first_answer(raw)
    if rest:
        raise NotHttp(f"{len(rest)} bytes behind the answer's end: {rest[:200]!r}")
    return answer


def read_answers(raw: bytes) -> list[Told]:
    """All answers on one connection. HTTP/1.0 is allowed; interim answers (status 100) are left out.

    Raises:
        NotHttp: an answer is not well-formed.
    """
    found: list[Told] = []
    while raw:
        if raw.startswith(CONTINUE):
            raw = raw.removeprefix(CONTINUE)
            continue
        answer, raw = _first_answer(raw, (b"HTTP/1.1", b"HTTP/1.0"))
        found.append(answer)
    return found


def _first_answer(raw: bytes, versions: tuple[bytes, ...] = (b"HTTP/1.1",)) -> tuple[Told, bytes]:
    """The first answer in `raw`, and the bytes after it."""
    head, gap, rest = raw.partition(b"\r\n\r\n")
    if not gap:
        if raw.startswith(tuple(version + b" " for version in versions)) or not raw:
            return Told(0, {}, b"", whole=False), b""
        raise NotHttp(f"no head: {raw[:200]!r}")
    first, *lines = head.split(b"\r\n")
    words = first.split(b" ", 2)
    if words[0] not in versions or not words[1].isdigit() or not 200 <= int(words[1]) <= 599:
        raise NotHttp(f"status line {first!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name.replace(b"-", b"").isalnum() or any(byte < 32 or byte > 126 for byte in value):
            raise NotHttp(f"header line {line!r}")
        if name.lower().decode() in headers:
            raise NotHttp(f"two headers {name!r}")
        headers[name.lower().decode()] = value.strip().decode()
    status = int(words[1])
    if headers.get("transfer-encoding") == "chunked":
        body, whole, rest = _unchunked(rest)
        return Told(status, headers, body, whole), rest
    length = int(headers.get("content-length", len(rest)))
    return Told(status, headers, rest[:length], whole=len(rest) >= length), rest[length:]


def _unchunked(rest: bytes) -> tuple[bytes, bool, bytes]:
    """The body of a chunked answer, whether it is complete, and the bytes after it."""
    body = bytearray()
    while rest:
        size, line_end, rest = rest.partition(b"\r\n")
        if not line_end:
            return bytes(body), False, b""
        try:
            length = int(size, 16)
        except ValueError:
            raise NotHttp(f"chunk size {size[:50]!r}") from None
        if not length:
            if rest and not rest.startswith(b"\r\n"):
                raise NotHttp(f"behind the last chunk: {rest[:200]!r}")
            return bytes(body), rest.startswith(b"\r\n"), rest[2:]
        body += rest[:length]
        if len(rest) < length + 2:
            return bytes(body), False, b""
        if rest[length : length + 2] != b"\r\n":
            raise NotHttp(f"a chunk of {length} bytes ends with {rest[length : length + 2]!r}")
        rest = rest[length + 2 :]
    return bytes(body), False, b""


async def metric(router: Beside, name: str) -> float:
    """A metric's value, by its name with labels as `/metrics` writes it."""
    answer = await told(router.admin, get("/metrics"))
    lines = answer.body.decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " "))
