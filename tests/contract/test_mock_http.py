"""The mock's HTTP server, byte by byte: what clients may send, and what the server refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from support.fleet import eventually
from support.mock import mock_settings

from cluster.instance import Role
from engine.mock.fleet import MockFleet
from engine.mock.listener import MockListener

BODY = json.dumps({"model": "fake", "prompt": "hello", "max_tokens": 3}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture
async def listener() -> AsyncIterator[MockListener]:
    async with MockFleet([mock_settings("one", Role.BOTH)]) as fleet:
        yield fleet.instances["one"].listener


@pytest.fixture
def port(listener: MockListener) -> int:
    return listener.port


async def answers(port: int, *sent: bytes, count: int = 1) -> bytes:
    """The bytes that come back until `count` completions are there, or the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in sent:
        writer.write(piece)
        await asyncio.sleep(0.01)  # so that it comes as a piece of its own
    got = b""
    async with asyncio.timeout(5):
        while got.count(b'"completion_tokens":3') < count:
            piece = await reader.read(1 << 16)
            got += piece
            if not piece:
                break
    writer.close()
    await writer.wait_closed()
    return got


async def test_requests_in_pieces(port: int) -> None:
    got = await answers(port, *(WHOLE[at : at + 40] for at in range(0, len(WHOLE), 40)))
    assert got.startswith(b"HTTP/1.1 200 OK\r\n")


async def test_several_requests_at_once_are_answered_in_order(port: int) -> None:
    health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    got = await answers(port, WHOLE + health + WHOLE, count=2)
    assert got.count(b"HTTP/1.1 200 OK") == 3
    assert got.index(b"content-length: 0") > got.index(b'"completion_tokens":3')


async def test_bodies_in_chunks(port: int) -> None:
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:9], BODY[9:])) + b"0\r\n\r\n"
    got = await answers(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    assert got.startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_client_that_asks_first_is_told_to_go_on(port: int) -> None:
    length = b"Content-Length: %d\r\n" % len(BODY)
    got = await answers(port, HEAD + length + b"Expect: 100-continue\r\n\r\n", BODY)
    assert got.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


async def test_a_connection_may_be_for_one_request(port: int) -> None:
    got = await answers(port, WHOLE.replace(b"Host: x", b"Connection: close"), count=2)
    assert b"connection: close" in got
    assert got.count(b"HTTP/1.1") == 1, "and then it ends"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n", b"400"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"X-Long: %b\r\n" % (b"a" * 30_000) * 3 + b"\r\n", b"431"),
    ],
    ids=["nonsense", "length", "long target", "long head"],
)
async def test_what_is_no_request_is_refused_and_ends_the_connection(port: int, sent: bytes, status: bytes) -> None:
    got = await answers(port, sent)
    assert got.startswith(b"HTTP/1.1 " + status)
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == int(status)


@pytest.mark.parametrize("sent", [WHOLE[:20], WHOLE[: len(HEAD) + 5], WHOLE[:-3]], ids=["head", "length", "body"])
async def test_a_request_that_comes_slowly_is_waited_for(listener: MockListener, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    _, idle = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(sent)
    await eventually(lambda: [each.midway for each in listener._open].count(True) == 1, "a part has come", 5)
    await eventually(lambda: len(listener._open) == 2, "both are open", 5)
    for _ in range(5):
        listener._sweep()
    await eventually(lambda: len(listener._open) == 1, "the idle one is closed", 5)
    writer.write(WHOLE[len(sent) :])
    async with asyncio.timeout(5):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    for each in (writer, idle):
        each.close()
        await each.wait_closed()


async def test_a_client_that_only_connects_is_no_harm(port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    assert (await answers(port, WHOLE)).startswith(b"HTTP/1.1 200")
    writer.close()
    await writer.wait_closed()
