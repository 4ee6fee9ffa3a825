"""What connections of hostile clients may take from a router: bytes, places, time. The transports are stand-ins."""

from __future__ import annotations

import asyncio
import errno
import gc
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, cast

import pytest
from aiohttp.web_protocol import RequestHandler

from cluster.errors import ApiError
from cluster.http.headers import Headers
from router.http.doors import REFUSALS_MAX, Doors
from router.http.front import ClientConnection, Front
from router.http.outlet import Outlet
from router.http.uploads import Uploads

BODY_MAX = 1 << 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
SMALL = HEAD + b"Content-Length: 2\r\n\r\n{}"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


class Line:
    """A client's transport: the bytes written to it, and whether it is still read. Each has an address of its own."""

    numbers = count(1)

    def __init__(self) -> None:
        self.address = (f"client-{next(self.numbers)}", 1)
        self.told = bytearray()
        self.unread = 0
        self.heard = True
        self.closed = self.ended = False

    def write(self, data: bytes) -> None:
        self.told += data

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, name: str) -> object:
        return {"peername": self.address}[name]

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def pause_reading(self) -> None:
        self.heard = False

    def resume_reading(self) -> None:
        self.heard = True

    def close(self) -> None:
        self.closed = True

    abort = close

    @property
    def statuses(self) -> list[int]:
        return [int(each[:3]) for each in bytes(self.told).split(b"HTTP/1.1 ")[1:]]


class Answers:
    """What answers behind the front: each request at once, or with `fault`."""

    def __init__(self) -> None:
        self.open: Counter[str] = Counter()
        self.open_max = 1_000_000
        self.asked: list[bytes] = []
        self.answer_bytes = 0
        self.fault: Exception | None = None

    def admit(self, headers: Mapping[str, str]) -> str:
        if self.open[""] >= self.open_max:
            raise ApiError(429, "RateLimitError", "as many as it may")
        self.open[""] += 1
        return ""

    def leave(self, tenant: str) -> None:
        self.open[tenant] -= 1

    def answer(self, outlet: Outlet, path: str, headers: Headers, raw: bytes, tenant: str) -> None:
        self.leave(tenant)
        if self.fault is not None:
            raise self.fault
        self.asked.append(raw)
        outlet.whole(200, {}, b"x" * self.answer_bytes)

    def refuse(self, outlet: Outlet, problem: Exception, client_id: str | None, *, close: bool = False) -> None:
        status = problem.status if isinstance(problem, ApiError) else 500
        outlet.whole(status, {}, str(problem).encode(), close=close)


def no_cold() -> RequestHandler:
    raise AssertionError("nothing here is aiohttp's")


def front_of(answers: Answers, **settings: Any) -> Front:
    given = {"body_bytes_max": BODY_MAX, "body_timeout_s": 60.0, "head_timeout_s": 60.0}
    given |= {"doors": Doors(1000), "uploads": Uploads(8 * BODY_MAX), **settings}
    return Front(answers, no_cold, **given)


def connected(front: Front, *sent: bytes) -> tuple[ClientConnection, Line]:
    line, connection = Line(), front.connect()
    connection.connection_made(cast("asyncio.Transport", line))
    for each in sent:
        if line.heard and not line.closed:
            connection.data_received(each)
    return connection, line


def alive() -> Counter[str]:
    """The live objects of connections, by class."""
    kinds = [type(each) for each in gc.get_objects()]
    ours = ("cluster.http", "router.http", "httptools")
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith(ours))


def _upload(client: tuple[ClientConnection, Line]) -> None:
    client[0].data_received(HEAD + b"Content-Length: 100000\r\n\r\n" + b"x" * 5000)
    client[0].data_received(b"x" * 5000)


ENDS: dict[str, Callable[[tuple[ClientConnection, Line]], None]] = {
    "broken off within its head": lambda client: client[0].data_received(HEAD),
    "broken off within its body": _upload,
    "broken off within chunks": lambda client: client[0].data_received(CHUNKED + b"fff\r\nabc"),
    "no HTTP": lambda client: client[0].data_received(b"\x16\x03\r\n\r\n"),
    "too large": lambda client: client[0].data_received(HEAD + b"Content-Length: 99999999\r\n\r\n"),
    "too large, in chunks": lambda client: client[0].data_received(CHUNKED + b"ffffffff\r\nabc"),
    "bad chunks": lambda client: client[0].data_received(CHUNKED + b"5\r\nabcdefghi\r\n"),
    "answered": lambda client: client[0].data_received(SMALL),
    "answered, in chunks": lambda client: client[0].data_received(CHUNKED + b"2\r\n{}\r\n0\r\n\r\n"),
    "pipelined": lambda client: client[0].data_received(SMALL * 3 + HEAD + b"Content-Length: 9\r\n\r\n"),
    "an expectation": lambda client: client[0].data_received(HEAD + b"Expect: 1\r\nContent-Length: 9\r\n\r\n"),
    "an upgrade": lambda client: client[0].data_received(
        HEAD + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 9\r\n\r\n{}"
    ),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
async def test_a_request_that_has_ended_is_gone_without_the_collector(
    end: Callable[[tuple[ClientConnection, Line]], None],
) -> None:
    answers = Answers()
    front = front_of(answers)
    gc.collect()
    gc.disable()
    try:
        before = alive()
        for _ in range(5):
            client = connected(front)
            end(client)
            client[0].connection_lost(None)
            del client
        await asyncio.sleep(0)
        assert alive() == before
    finally:
        gc.enable()
    assert not answers.open[""], "and no place is held"


@pytest.mark.parametrize("began", [HEAD + b"Content-Length: 9\r\n\r\n{", CHUNKED + b"9\r\n{"])
async def test_a_body_that_does_not_come_leaves_nothing_after_its_answer(began: bytes) -> None:
    answers = Answers()
    front = front_of(answers, body_timeout_s=0.01)
    gc.collect()
    gc.disable()
    try:
        before = alive()
        connection, line = connected(front, began)
        while not line.ended:
            await asyncio.sleep(0.002)
        assert line.statuses == [408]
        connection.connection_lost(None)
        del connection
        await asyncio.sleep(0)
        assert alive() == before
    finally:
        gc.enable()
    assert not answers.open[""]


async def test_a_body_that_is_held_up_is_not_read_on_behind_another_answer() -> None:
    """A client sends a small request and a part of the next one's head. The rest, and a body, come in the turn in which
    the first is answered.
    """
    uploads, others = Uploads(BODY_MAX), Waits()
    uploads.add(others, BODY_MAX + 1, "another client")
    large = HEAD + b"Content-Length: 100000\r\n\r\n"
    connection, line = connected(front_of(Answers(), uploads=uploads), SMALL + large[:20])
    connection.data_received(large[20:] + b"x" * 1000)
    assert uploads.waiting and not line.heard
    await asyncio.sleep(0)
    assert not line.heard
    uploads.end(others)
    assert line.heard


class Waits:
    """Another client's upload."""

    def hold(self) -> None:
        pass

    def go_on(self) -> None:
        pass


# -- what a body in chunks may bring with it --


TRAILERS = {
    "one without an end": (b"X-A: ", b"x" * 60_000),
    "one after the other": (b"", b"X-A: xxxxxxx\r\n" * 5_000),
}


@pytest.mark.parametrize(("begin", "piece"), TRAILERS.values(), ids=TRAILERS)
async def test_trailers_are_bounded(begin: bytes, piece: bytes) -> None:
    answers = Answers()
    _, line = connected(front_of(answers), CHUNKED + b"2\r\n{}\r\n0\r\n" + begin, *[piece] * 20)
    assert line.statuses == [431]
    assert not answers.asked


async def test_a_few_trailers_are_read_and_forgotten() -> None:
    answers = Answers()
    _, line = connected(front_of(answers), CHUNKED + b"2\r\n{}\r\n0\r\nX-A: 1\r\nX-B: 2\r\n\r\n", SMALL)
    assert line.statuses == [200, 200]
    assert answers.asked == [b"{}", b"{}"]


@pytest.mark.parametrize(
    "sent",
    [[b"2;" + b"x" * 100_000], [b"2;", *[b"x" * 50_000] * 20], [b"1;" + b"x" * 200 + b"\r\na\r\n"] * 5000],
    ids=["one", "in pieces", "many"],
)
async def test_extensions_of_chunks_are_bounded(sent: list[bytes]) -> None:
    _, line = connected(front_of(Answers()), CHUNKED, *sent)
    assert line.statuses == [400]


async def test_extensions_of_chunks_are_passed_over() -> None:
    answers = Answers()
    connected(front_of(answers), CHUNKED + b"1;a=b\r\n{\r\n1 ; c\r\n}\r\n0;d\r\n\r\n")
    assert answers.asked == [b"{}"]


@pytest.mark.parametrize("behind", [b"POST ", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_an_answer_is_read_before_its_connection_ends(behind: bytes) -> None:
    """Bytes behind a body in chunks are not read. A socket that is closed with unread bytes is reset: its client may
    never see the answer.
    """
    front = front_of(Answers())
    connection, line = connected(front, CHUNKED + b"2\r\n{}\r\n0\r\n\r\n" + behind)
    assert line.statuses == [200]
    assert (line.ended, line.closed, line.heard) == (True, False, True)
    connection.data_received(behind)
    assert line.statuses == [200], "nothing more is read"
    connection.connection_lost(None)
    assert not front.open


async def test_no_body_is_read_behind_a_connect() -> None:
    """aiohttp would take the body for a request."""
    hidden = b"POST /v1/hidden HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    head = b"CONNECT /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(hidden)
    _, line = connected(front_of(Answers()), head + hidden)
    assert line.statuses == [405]
    assert line.ended


async def test_a_client_that_has_reset_its_connection_is_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(_: Line) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(Line, "write_eof", reset)
    _, line = connected(front_of(Answers()), CHUNKED + b"zz\r\n")
    assert line.statuses == [400]
    assert line.closed


async def test_a_body_in_tiny_chunks_is_refused() -> None:
    """A megabyte of single bytes would be a million chunks, a microsecond each."""
    _, line = connected(front_of(Answers()), CHUNKED, *[b"1\r\nx\r\n" * 10_000] * 20)
    assert line.statuses == [400]


async def test_many_headers_are_refused_before_they_are_read() -> None:
    answers = Answers()
    many = SMALL.replace(b"Host: x\r\n", b"Host: x\r\n" + b"a:\r\n" * 15_000)
    _, line = connected(front_of(answers), many)
    assert line.statuses == [431]
    assert not answers.open[""]
    just = SMALL.replace(b"Host: x\r\n", b"Host: x\r\n" + b"a:\r\n" * 126)
    _, line = connected(front_of(answers), just)
    assert line.statuses == [200]


# -- places --


async def test_a_request_is_counted_from_its_head_on() -> None:
    answers = Answers()
    answers.open_max = 3
    front = front_of(answers)
    uploads = [connected(front, HEAD + b"Content-Length: 9\r\n\r\n{") for _ in range(5)]
    assert [line.statuses for _, line in uploads] == [[], [], [], [429], [429]]
    uploads[0][0].connection_lost(None)
    uploads[1][0].data_received(b'"a": 1}}')
    assert answers.open[""] == 1
    assert connected(front, SMALL)[1].statuses == [200]


async def test_a_refusal_of_a_complete_request_keeps_the_connection() -> None:
    answers = Answers()
    answers.open_max = 0
    connection, line = connected(front_of(answers), SMALL)
    answers.open_max = 1
    connection.data_received(SMALL)
    assert line.statuses == [429, 200]
    assert b"Connection: close" not in line.told


async def test_a_fault_of_ours_gives_the_place_back() -> None:
    answers = Answers()
    answers.fault = RuntimeError("a bug")
    assert connected(front_of(answers), SMALL)[1].statuses == [500]
    assert not answers.open[""]


# -- answers that are not read --


async def test_no_request_begins_before_the_last_answer_is_written_out() -> None:
    answers = Answers()
    connection, line = connected(front_of(answers))
    line.unread = 100_000
    connection.pause_writing()
    connection.data_received(SMALL * 3)
    assert line.statuses == []
    line.unread = 0
    connection.resume_writing()
    for _ in range(5):
        await asyncio.sleep(0)
    assert line.statuses == [200] * 3


async def test_requests_that_come_before_the_last_answer_is_written_are_bounded() -> None:
    connection, line = connected(front_of(Answers()))
    line.unread = 100_000
    connection.pause_writing()
    sent = 0
    while line.heard:
        connection.data_received(SMALL * 100)
        sent += len(SMALL) * 100
        assert sent < 200_000
    connection.resume_writing()
    for _ in range(2 * sent // len(SMALL)):
        await asyncio.sleep(0)
    assert line.heard
    assert len(line.statuses) == sent // len(SMALL)


# -- bytes of bodies, all together --

LARGE = HEAD + b"Content-Length: 500000\r\n\r\n"


async def test_uploads_wait_for_their_turn() -> None:
    answers = Answers()
    front = front_of(answers, uploads=Uploads(1_000_000))
    clients = [connected(front, LARGE + b"x" * 300_000) for _ in range(5)]
    assert [line.heard for _, line in clients] == [True, False, False, False, False]
    clients[0][0].data_received(b"x" * 200_000)
    assert clients[0][1].statuses == [200]
    assert clients[1][1].heard
    clients[1][0].connection_lost(None)
    for connection, line in clients[2:]:
        assert line.heard
        connection.data_received(b"x" * 200_000)
        assert line.statuses == [200]
    assert (front.uploads.bytes, front.uploads.waiting) == (0, 0)


async def test_what_one_address_uploads_leaves_room_for_others() -> None:
    front = front_of(Answers(), uploads=Uploads(1_000_000))
    greedy = [connected(front, LARGE) for _ in range(3)]
    for connection, line in greedy:
        line.address = greedy[0][1].address
        connection.data_received(b"x" * 300_000)
    assert [line.heard for _, line in greedy] == [True, False, False]
    connection, other = connected(front, LARGE + b"x" * 50_000)
    assert other.heard
    connection.data_received(b"x" * 30_000)
    assert other.heard, "uploads of one address do not hold up another's"


async def test_an_upload_that_has_waited_in_vain_gets_a_503_and_no_408() -> None:
    front = front_of(Answers(), uploads=Uploads(100), body_timeout_s=0.05)
    (_, first), (_, second) = [connected(front, LARGE + b"x" * 300) for _ in range(2)]
    async with asyncio.timeout(5):
        while not second.ended:
            await asyncio.sleep(0.005)
    assert (first.statuses, second.statuses) == ([408], [503])
    assert second.heard, "the end of its connection must be read"
    assert (front.uploads.bytes, front.uploads.waiting) == (0, 0)


# -- connections, all together --


async def test_the_idlest_connection_makes_room_and_no_busy_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers()
    front = front_of(answers, doors=Doors(3))
    now = front.loop.time()
    monkeypatch.setattr(front.loop, "time", lambda: now)
    silent, served, uploads = connected(front), connected(front, SMALL), connected(front, LARGE)
    assert connected(front)[1].statuses == [], "none is idle for long enough, and the new one has not asked"
    now += 5
    newcomers = [connected(front, SMALL) for _ in range(3)]
    assert [each[1].closed for each in (silent, served, uploads)] == [True, True, False]
    assert [line.statuses for _, line in newcomers] == [[200], [200], [503]]
    assert b"--connections-max" in newcomers[2][1].told


async def test_beyond_the_refusals_connections_are_closed_without_an_answer() -> None:
    front = front_of(Answers(), doors=Doors(1))
    connected(front, LARGE)
    late = [connected(front, SMALL) for _ in range(REFUSALS_MAX + 2)]
    assert [line.statuses for _, line in late] == [[503]] * REFUSALS_MAX + [[], []]
    assert all(line.closed for _, line in late[REFUSALS_MAX:])
    for connection, _ in late:
        connection.connection_lost(None)
    assert len(front.doors.guests) == 1
