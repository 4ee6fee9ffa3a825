"""Legs, byte by byte: the answers that an engine may give, and connections that break, go stale or stay silent."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from support.fleet import eventually

from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from router.fleet.probes import Ask, Prober
from router.fleet.view import FleetView
from router.http.legs import EngineLeg, Legs
from router.http.questions import ask
from router.http.upstream import EngineLost, Upstream

Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b"data: 1\n\n"


class Heard:
    """Keeps what a leg reports."""

    def __init__(self) -> None:
        self.status, self.kind, self.bytes = 0, "", b""
        self.chunks = 0
        self.over: asyncio.Future[EngineLost | None] = asyncio.get_running_loop().create_future()

    def opened(self, status: int, content_type: str, cache_control: str) -> None:
        self.status, self.kind = status, content_type

    def body(self, data: bytes) -> None:
        self.bytes += data

    def chunk(self, framed: bytes, begin: int) -> None:
        self.chunks += 1
        self.bytes += framed[begin:-2]

    def happened(self, found: object) -> None:
        raise AssertionError("chunk() returns nothing")

    def ended(self) -> None:
        self.over.set_result(None)

    def lost(self, lost: EngineLost) -> None:
        self.over.set_result(lost)

    async def end(self) -> EngineLost | None:
        async with asyncio.timeout(5):
            return await self.over


class Engine:
    """An engine that calls `speak` for each request. `asked`: the heads of the requests that it has read."""

    def __init__(self, speak: Speak) -> None:
        self._speak = speak
        self.asked: list[bytes] = []
        self.connections = self.left = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0))
                self.asked.append(head)
                await self._speak(reader, writer)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self.left += 1
            writer.close()


def says(*pieces: bytes, close: bool = False, pause_s: float = 0.01) -> Speak:
    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause_s)
        if close:
            writer.close()

    return speak


@pytest.fixture
async def legs() -> AsyncIterator[Legs]:
    found = Legs()
    yield found
    found.close()
    await asyncio.sleep(0.01)


def send(legs: Legs, url: str, heard: Heard, *, once: bool = False, silence_s: float = 0.0) -> EngineLeg:
    return legs.send(url, "/v1/completions", b"x: y\r\n", [b"{}"], heard, once=once, silence_s=silence_s)


@pytest.mark.parametrize("host", ["a..b", "pod..svc", "a" * 64 + ".svc"])
async def test_a_name_that_no_host_can_have_is_a_lost_engine(legs: Legs, host: str) -> None:
    """`getaddrinfo` raises UnicodeError for it, which is no OSError."""
    heard = Heard()
    send(legs, f"http://{host}:80", heard)
    lost = await heard.end()
    assert lost is not None
    assert (str(lost), lost.reached) == (f"cannot connect to {host}:80: no host has such a name", False)
    instance = Instance(id=InstanceId("d"), role=Role.DECODE, url=f"http://{host}:80")
    view = FleetView()
    view.add(instance)
    view.seen(instance.id, ({"id": "fake"},), None)
    upstream = Upstream()
    await upstream.start()
    try:
        with pytest.raises(EngineLost, match="no host has such a name") as refused:
            await upstream.open(instance, "GET", "/health", None, {})
        assert not refused.value.reached
        prober = Prober(view, asking(legs), lambda *_, **__: None, read_metrics=False)
        for _ in range(10):
            assert not await prober._probe(instance, models=False, paths=False)
        assert not view.get(instance.id).up
    finally:
        await upstream.close()


def asking(legs: Legs) -> Ask:
    return lambda instance, path: ask(legs, instance, path, b"x: y\r\n")


def at(url: str, rank: int | None = None) -> Instance:
    return Instance(id=InstanceId("d" if rank is None else f"d@{rank}"), role=Role.DECODE, url=url)


@pytest.mark.parametrize(
    "pieces",
    [(WHOLE,), (CHUNKED, b"2\r\n{}\r\n0\r\n\r\n"), (WHOLE[:-1], WHOLE[-1:])],
    ids=["at once", "chunks", "pieces"],
)
async def test_a_question_waits_for_the_whole_answer(legs: Legs, pieces: tuple[bytes, ...]) -> None:
    engine = Engine(says(*pieces))
    async with engine.open() as url:
        for _ in range(2):
            answer = await asking(legs)(at(f"{url}/base", rank=1), "/health")
            assert (answer.status, answer.body) == (200, b"{}")
    assert engine.connections == 1, "the connection is kept"
    head = engine.asked[0]
    assert head.startswith(b"GET /base/health HTTP/1.1\r\nHost: 127.0.0.1:")
    assert head.endswith(b"x: y\r\nx-data-parallel-rank: 1\r\n\r\n")


async def test_events_are_an_answer_too(legs: Legs) -> None:
    """An engine may stream any answer: whole chunks do not go through the parser."""
    async with Engine(says(CHUNKED, *[b"9\r\n" + EVENT + b"\r\n"] * 3, b"0\r\n\r\n")).open() as url:
        assert (await asking(legs)(at(url), "/metrics")).body == EVENT * 3


async def test_a_question_ends_with_its_caller_and_its_bound(legs: Legs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.http.questions.WORD_BYTES_MAX", 1)
    engine = Engine(says(WHOLE[:-2], b"{}", pause_s=0.0))
    async with engine.open() as url:
        with pytest.raises(EngineLost, match="longer than 1 bytes") as lost:
            await asking(legs)(at(url), "/metrics")
        assert lost.value.unfit == "too_long"
    silent = Engine(says(b""))
    async with silent.open() as url:
        asked = asyncio.ensure_future(asking(legs)(at(url), "/health"))
        await eventually(lambda: bool(silent.asked), "the engine has read the question")
        asked.cancel()
        await eventually(lambda: silent.left == 1, "the connection is cut")


async def test_a_lost_question_leaves_no_cycle(legs: Legs) -> None:
    """A lost engine is probed twice a second."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    gone = at(f"http://127.0.0.1:{port}")
    with suppress(EngineLost):
        await asking(legs)(gone, "/health")
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            with pytest.raises(EngineLost, match="cannot connect"):
                await asking(legs)(gone, "/health")
        assert gc.collect() == 0
    finally:
        gc.enable()


FORMS: dict[str, tuple[tuple[bytes, ...], bytes, bool]] = {
    "whole": ((WHOLE,), b"{}", False),
    "byte by byte": (tuple(WHOLE[at : at + 1] for at in range(len(WHOLE))), b"{}", False),
    "chunks": ((CHUNKED, b"9\r\n" + EVENT + b"\r\n", b"9\r\n" + EVENT + b"\r\n", b"0\r\n\r\n"), EVENT * 2, False),
    "chunks at once": (
        (CHUNKED + b"9\r\n" + EVENT + b"\r\n" + b"009\r\n" + EVENT + b"\r\n0\r\n\r\n",),
        EVENT * 2,
        False,
    ),
    "a chunk in halves": ((CHUNKED + b"9\r\n" + EVENT[:4], EVENT[4:] + b"\r\n0", b"\r\n\r\n"), EVENT, False),
    "a chunk that holds what looks like one": (
        (CHUNKED + b"11\r\nxxx", b"9\r\n" + EVENT + b"\r\n", b"\r\n0\r\n\r\n"),
        b"xxx9\r\n" + EVENT + b"\r\n",
        False,
    ),
    "a chunk whose middle ends as one does": (
        (CHUNKED + b"12\r\nyyy\n\n\r\n", b"5\r\nx\n\n\r\n", b"zz\n\r\n0\r\n\r\n"),
        b"yyy\n\n\r\n5\r\nx\n\n\r\nzz\n",
        False,
    ),
    "a chunk that says it is longer": (
        (CHUNKED, b"9\r\n" + EVENT + b"\r\n", b"a\r\n" + EVENT, b"\n\r\n0\r\n\r\n"),
        EVENT * 2 + b"\n",
        False,
    ),
    "a long chunk": (
        (CHUNKED, b"9\r\n" + EVENT + b"\r\n", b"1388\r\n" + b"x" * 4998 + b"\n\n\r\n0\r\n\r\n"),
        EVENT + b"x" * 4998 + b"\n\n",
        False,
    ),
    "extended chunks": ((CHUNKED, b"9;a=b\r\n" + EVENT + b"\r\n", b"0\r\n\r\n"), EVENT, False),
    "no length": ((b"HTTP/1.1 200 OK\r\n\r\nall", b" of it"), b"all of it", True),
    "100 first": ((b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE), b"{}", False),
}


@pytest.mark.parametrize(("pieces", "body", "close"), FORMS.values(), ids=FORMS)
async def test_forms_of_answers(legs: Legs, pieces: tuple[bytes, ...], body: bytes, close: bool) -> None:
    engine = Engine(says(*pieces, close=close, pause_s=0.002))
    async with engine.open() as url:
        for turn in (1, 2):
            heard = Heard()
            send(legs, url, heard)
            assert await heard.end() is None
            assert (heard.status, heard.bytes) == (200, body)
            assert engine.connections == (turn if close else 1), "kept alive where it may be"
    assert b"Content-Length: 2\r\n" in engine.asked[0]
    assert b"x: y\r\n" in engine.asked[0]


async def test_whole_chunks_are_told_as_they_came(legs: Legs) -> None:
    async with Engine(says(*FORMS["chunks"][0])).open() as url:
        heard = Heard()
        send(legs, url, heard)
        await heard.end()
        assert heard.chunks >= 1


BROKEN: dict[str, tuple[bytes, ...]] = {
    "half a head": (WHOLE[:20],),
    "half a body": (WHOLE[:-1],),
    "half a chunk": (CHUNKED + b"9\r\nda",),
    "no end": (CHUNKED + b"9\r\n" + EVENT + b"\r\n",),
    "no HTTP": (b"SMTP ready\r\n\r\n",),
    "a chunk longer than said": (CHUNKED, b"8\r\n" + EVENT + b"\r\n"),
    "a head without an end": (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20000,),
}


@pytest.mark.parametrize("pieces", BROKEN.values(), ids=BROKEN)
async def test_answers_that_break_off(legs: Legs, pieces: tuple[bytes, ...]) -> None:
    engine = Engine(says(*pieces, close=True))
    async with engine.open() as url:
        heard = Heard()
        send(legs, url, heard)
        lost = await heard.end()
        assert isinstance(lost, EngineLost)
        assert lost.reached
    assert len(engine.asked) == 1, "not sent again: the engine may have acted on it"


@pytest.mark.parametrize(
    "behind",
    [WHOLE.replace(b"{}", b"[]"), b"HTTP/1.1 200 OK\r\nContent-Le", b"H", b"x", b"\r\n\r\nHTTP/1.1 500 x\r\n\r\n"],
)
async def test_bytes_behind_an_answers_end_reach_no_other_leg(legs: Legs, behind: bytes) -> None:
    """Bytes that come in one piece with an answer's end: the answer counts, but its connection is not used again."""
    extra = iter([behind, b""])

    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE + next(extra))

    engine = Engine(speak)
    async with engine.open() as url:
        for turn in (1, 2):
            heard = Heard()
            send(legs, url, heard)
            assert await heard.end() is None
            assert heard.bytes == b"{}"
            assert engine.connections == turn


def speaks_behind(listening: socket.socket, more: threading.Event, said: threading.Event) -> None:
    """Answers one request on each of two connections. On the first it then sends an answer to no request at all."""
    for last in (False, True):
        connection, _ = listening.accept()
        with connection:
            head = b""
            while b"\r\n\r\n{}" not in head:
                head += connection.recv(4096)
            connection.sendall(WHOLE)
            if not last:
                more.wait(5)
                connection.sendall(WHOLE.replace(b"{}", b"[]"))
                said.set()
            with suppress(ConnectionError):
                connection.recv(1)


async def test_an_answer_that_came_before_its_leg_was_sent_is_not_taken(legs: Legs) -> None:
    """The answer lies unread on an idle connection when the next leg is sent. The event loop has not seen it yet."""
    more, said = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        engine = threading.Thread(target=speaks_behind, args=(listening, more, said), daemon=True)
        engine.start()
        first, second = Heard(), Heard()
        send(legs, f"http://127.0.0.1:{listening.getsockname()[1]}", first)
        assert await first.end() is None
        more.set()
        assert said.wait(5), "it is there, and the loop has had no chance to read it"
        send(legs, f"http://127.0.0.1:{listening.getsockname()[1]}", second)
        assert await second.end() is None
        legs.close()
        await asyncio.to_thread(engine.join, 5)
    assert (first.bytes, second.bytes) == (b"{}", b"{}")


@pytest.mark.parametrize("once", [False, True])
async def test_a_connection_that_went_stale(legs: Legs, once: bool) -> None:
    """The engine closes an idle connection just when the next leg is sent, perhaps without having read that leg."""
    closing = iter([False, True, False])

    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if next(closing):
            writer.close()
        else:
            writer.write(WHOLE)

    engine = Engine(speak)
    async with engine.open() as url:
        first, second = Heard(), Heard()
        send(legs, url, first)
        assert await first.end() is None
        send(legs, url, second, once=once)
        lost = await second.end()
    assert (lost is None) is not once
    assert len(engine.asked) == (2 if once else 3)


async def test_a_port_on_which_nothing_listens(legs: Legs) -> None:
    async with Engine(says(WHOLE)).open() as url:
        pass
    heard = Heard()
    send(legs, url, heard)
    assert not heard.over.done(), "nothing is told while it is being sent"
    lost = await heard.end()
    assert isinstance(lost, EngineLost)
    assert not lost.reached


@pytest.mark.parametrize("pieces", [(), (CHUNKED + b"9\r\n" + EVENT + b"\r\n",)], ids=["at once", "after a chunk"])
async def test_silence(legs: Legs, pieces: tuple[bytes, ...]) -> None:
    async with Engine(says(*pieces, pause_s=5)).open() as url:
        heard = Heard()
        began = asyncio.get_running_loop().time()
        send(legs, url, heard, silence_s=0.2)
        lost = await heard.end()
        assert isinstance(lost, EngineLost)
        assert 0.19 < asyncio.get_running_loop().time() - began < 2
        assert lost.reached


async def test_an_engine_does_not_count_as_silent_while_its_leg_is_paused(legs: Legs) -> None:
    async with Engine(says(CHUNKED, b"9\r\n" + EVENT + b"\r\n", b"0\r\n\r\n", pause_s=0.05)).open() as url:
        heard = Heard()
        leg = send(legs, url, heard, silence_s=0.3)
        while not heard.status:
            await asyncio.sleep(0.005)
        leg.pause()
        await asyncio.sleep(0.5)
        assert not heard.over.done()
        leg.resume()
        assert await heard.end() is None
        assert heard.bytes == EVENT


async def test_a_closed_leg_says_nothing_and_closes_its_connection(legs: Legs) -> None:
    gone = asyncio.Event()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        await reader.read()
        gone.set()

    async with Engine(speak).open() as url:
        heard = Heard()
        leg = send(legs, url, heard)
        while not heard.status:
            await asyncio.sleep(0.005)
        leg.close()
        async with asyncio.timeout(5):
            await gone.wait()
        assert not heard.over.done()


async def test_an_engine_that_left_is_forgotten_without_a_cycle(legs: Legs) -> None:
    """A pool and its idle connections once formed reference cycles: each restart of an engine left some in memory."""
    engine = Engine(says(WHOLE, close=True))
    async with engine.open() as url:
        heard = Heard()
        send(legs, url, heard)
        assert await heard.end() is None
        pool = legs._pools[url]
        async with asyncio.timeout(5):
            while pool.opened:
                await asyncio.sleep(0.005)
    assert not pool._idle
    legs._sweeping.cancel()
    legs._sweep()
    assert not legs._pools


async def test_a_fault_of_one_leg_ends_no_sweep(
    legs: Legs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.http.legs.SWEEP_S", 0.01)
    looks, third = list[float](), asyncio.Event()

    class Broken:
        def look(self, now: float) -> None:
            raise RuntimeError("a bug")

    class Sound:
        def look(self, now: float) -> None:
            looks.append(now)
            if len(looks) == 3:
                third.set()

    legs.long |= {Broken(), Sound()}
    legs._sweep()
    async with asyncio.timeout(5):
        await third.wait()
    assert caplog.messages.count("a leg's silence could not be judged") >= 2
