"""Clients' connections, byte by byte: where requests begin and end, in what order answers come, errors for bad ones."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from support.fleet import Fleet, Starter, eventually

BODY = json.dumps({"model": "fake", "prompt": "hello", "max_tokens": 5}).encode()
STREAM = json.dumps({"model": "fake", "prompt": "hello", "max_tokens": 5, "stream": True}).encode()
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
TARGET = b"POST /v1/completions HTTP/1.1"


def head(*lines: bytes, target: bytes = TARGET) -> bytes:
    return b"\r\n".join([target, b"Host: x", b"Content-Type: application/json", *lines]) + b"\r\n\r\n"


def asked(body: bytes = BODY, *lines: bytes, target: bytes = TARGET) -> bytes:
    return head(b"Content-Length: %d" % len(body), *lines, target=target) + body


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


class Wire:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next answer: status, headers, body."""
        async with asyncio.timeout(10):
            said = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            status = int(said.split(" ", 2)[1])
            headers = {name.lower(): value for name, value in re.findall(r"^([\w-]+): (.*?)\r$", said, re.MULTILINE)}
            return status, headers, await self._body(headers)

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            return await self.reader.read()
        found = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            found += (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)
        return found

    async def ended(self) -> bool:
        """Whether the router closes the connection and sends nothing more."""
        async with asyncio.timeout(5):
            return await self.reader.read() == b""


@asynccontextmanager
async def wire(fleet: Fleet) -> AsyncIterator[Wire]:
    address = urlsplit(fleet.endpoint)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


async def test_one_connection_for_all_kinds_of_requests_one_after_the_other(start: Starter) -> None:
    fleet = await start()
    async with wire(fleet) as client:
        for sent in (MODELS, asked(), MODELS, asked(STREAM), asked(), MODELS, MODELS):
            client.writer.write(sent)
            status, headers, body = await client.answer()
            assert status == 200
            assert "connection" not in headers
            assert (b"data: [DONE]" in body) == (sent == asked(STREAM))
            assert (b'"list"' in body) == (sent == MODELS)


async def test_the_same_head_again_with_another_body(start: Starter) -> None:
    """A head with the bytes of the last one is not parsed again, whatever its Content-Length. Any other head is."""
    fleet = await start(body_bytes_max=1024)
    bodies = [json.dumps({"model": "fake", "prompt": "p" * size, "max_tokens": 5}).encode() for size in (1, 7, 300)]
    async with wire(fleet) as client:
        for body in (*bodies, *bodies):
            client.writer.write(asked(body))
            assert (await client.answer())[0] == 200
        for name in (b"one", b"two", b""):
            client.writer.write(asked(bodies[0], *([b"X-Request-Id: %b" % name] if name else [])))
            status, headers, _ = await client.answer()
            assert status == 200
            assert (headers["x-request-id"] == name.decode()) == bool(name)
        for at in (3, len(asked(bodies[2])) - 3):  # in two pieces: within the head, within the body
            client.writer.write(asked(bodies[2])[:at])
            await asyncio.sleep(0.01)
            client.writer.write(asked(bodies[2])[at:])
            assert (await client.answer())[0] == 200
        client.writer.write(asked(b"{"))
        assert (await client.answer())[0] == 400
        assert await told_too_large(client)
    prompts = [len(leg["prompt"]) for leg in fleet.engines["decode-0"].generated]
    assert prompts == [1, 7, 300, 1, 7, 300, 1, 1, 1, 300, 300]


async def told_too_large(client: Wire) -> bool:
    client.writer.write(asked(b"x" * 1025))
    return (await client.answer())[0] == 413


async def test_requests_sent_together_are_answered_in_order(start: Starter) -> None:
    fleet = await start()
    order = [asked(), MODELS, asked(STREAM), asked(), MODELS]
    async with wire(fleet) as client:
        client.writer.write(b"".join(order))
        answers = [await client.answer() for _ in order]
    assert [status for status, _, _ in answers] == [200] * 5
    assert [b'"list"' in body for _, _, body in answers] == [False, True, False, False, True]
    assert [b"data: [DONE]" in body for _, _, body in answers] == [False, False, True, False, False]
    assert len(fleet.engines["decode-0"].generated) == 3


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_request_in_pieces(start: Starter, size: int) -> None:
    fleet = await start()
    sent = asked(STREAM) + MODELS + asked()
    async with wire(fleet) as client:
        for at in range(0, len(sent), size):
            client.writer.write(sent[at : at + size])
            await asyncio.sleep(0)
        answers = [await client.answer() for _ in range(3)]
    assert [status for status, _, _ in answers] == [200] * 3
    assert b"data: [DONE]" in answers[0][2]


@pytest.mark.parametrize("size", [3, 1000])
async def test_a_body_in_chunks(start: Starter, size: int) -> None:
    fleet = await start()
    async with wire(fleet) as client:
        for _ in range(2):
            client.writer.write(head(b"Transfer-Encoding: chunked") + chunked(BODY, size))
            assert (await client.answer())[0] == 200
    assert fleet.engines["prefill-0"].generated[0]["prompt"] == "hello"


async def test_bytes_after_a_chunked_body_are_never_taken_for_another_request(start: Starter) -> None:
    """Against request smuggling: a proxy and the router must not find different requests in one byte stream."""
    fleet = await start()
    async with wire(fleet) as client:
        client.writer.write(head(b"Transfer-Encoding: chunked") + chunked(BODY, 1000) + asked())
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await client.ended()
    assert len(fleet.engines["decode-0"].generated) == 1


async def test_a_head_for_aiohttp_is_never_continued_by_a_request_for_generation(start: Starter) -> None:
    fleet = await start()
    async with wire(fleet) as client:
        client.writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Note: ")
        await asyncio.sleep(0.02)
        client.writer.write(asked()[: -len(BODY)])
        status, _, body = await client.answer()
        assert status in {200, 400}
        assert b'"from"' not in body
    assert not fleet.engines["decode-0"].generated


async def test_http_1_0(start: Starter) -> None:
    fleet = await start()
    old = b"POST /v1/completions HTTP/1.0"
    async with wire(fleet) as client:
        client.writer.write(asked(STREAM, target=old))
        _, headers, body = await client.answer()
        assert "transfer-encoding" not in headers
        assert body.endswith(b"data: [DONE]\n\n")
    async with wire(fleet) as client:
        client.writer.write(asked(BODY, b"Connection: keep-alive", target=old) + MODELS)
        assert (await client.answer())[1]["connection"] == "keep-alive"
        assert b'"list"' in (await client.answer())[2]


async def test_a_relayed_answer_to_http_1_0_ends_with_its_connection(start: Starter) -> None:
    """Such an answer has no length and no chunks: a client that keeps the connection could not find its end."""
    fleet = await start()
    async with wire(fleet) as client:
        client.writer.write(asked(BODY, b"Connection: keep-alive", target=b"POST /v1/embeddings HTTP/1.0"))
        _, headers, body = await client.answer()
        assert "connection" not in headers
        assert json.loads(body)["path"] == "/v1/embeddings"


async def test_connection_close_is_obeyed(start: Starter) -> None:
    fleet = await start()
    async with wire(fleet) as client:
        client.writer.write(asked(BODY, b"Connection: close"))
        assert (await client.answer())[1]["connection"] == "close"
        assert await client.ended()


async def test_expect_100_continue(start: Starter) -> None:
    fleet = await start()
    async with wire(fleet) as client:
        client.writer.write(head(b"Content-Length: %d" % len(BODY), b"Expect: 100-continue"))
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(BODY)
        assert (await client.answer())[0] == 200
        client.writer.write(head(b"Content-Length: 9", b"Expect: something"))
        assert (await client.answer())[0] == 417


async def test_a_client_of_http_1_0_gets_no_interim_answer(start: Starter) -> None:
    """It would take it for the answer (RFC 9110, 10.1.1)."""
    fleet = await start()
    async with wire(fleet) as client:
        asks = head(b"Content-Length: %d" % len(BODY), b"Expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0")
        client.writer.write(asks)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.reader.read(1)
        client.writer.write(BODY)
        assert (await client.reader.readline()).split()[1] == b"200"


async def test_offers_of_another_protocol_are_not_taken_up(start: Starter) -> None:
    fleet = await start()
    async with wire(fleet) as client:
        for _ in range(2):
            client.writer.write(asked(BODY, b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c"))
            assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    "target",
    [
        b"POST /v1/completions?beta=true HTTP/1.1",
        b"POST http://somewhere/v1/completions HTTP/1.1",
        b"POST /v1/%63ompletions HTTP/1.1",
    ],
)
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_other_spellings_of_the_path(start: Starter, target: bytes, body: bytes) -> None:
    fleet = await start()
    async with wire(fleet) as client:
        client.writer.write(asked(body, b"X-Request-Id: mine", target=target))
        status, headers, told = await client.answer()
    assert (status, headers["x-request-id"]) == (200, "mine")
    assert b"decode-0" in told


async def test_a_client_that_leaves_through_aiohttp_closes_the_leg(start: Starter) -> None:
    fleet = await start()
    decode = fleet.engines["decode-0"]

    async def hang(_: web.Request, body: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    decode.behave = hang
    async with wire(fleet) as client:
        client.writer.write(asked(STREAM, target=b"POST /v1/%63ompletions HTTP/1.1"))
        await eventually(lambda: bool(decode.generated), "the leg is there")
    await eventually(lambda: decode.cut_off == 1, "the leg is closed")
    assert fleet.held == 0


LONG = b"x" * 20000

MALFORMED: dict[str, tuple[bytes, int, bytes]] = {
    "no number": (head(b"Content-Length: 1x") + BODY, 400, b"HTTP/1.1"),
    "negative": (head(b"Content-Length: -5") + BODY, 400, b"HTTP/1.1"),
    "two lengths": (head(b"Content-Length: 5", b"Content-Length: 6") + BODY, 400, b"HTTP/1.1"),
    "length and chunks": (head(b"Content-Length: 5", b"Transfer-Encoding: chunked") + BODY, 400, b"Content-Length"),
    "another encoding": (head(b"Transfer-Encoding: gzip") + BODY, 400, b""),
    "no chunk size": (head(b"Transfer-Encoding: chunked") + b"zz\r\nhello\r\n", 400, b"HTTP/1.1"),
    "no header": (head(b"no colon here") + BODY, 400, b"HTTP/1.1"),
    "no version": (b"POST /v1/completions \r\n\r\n", 400, b"HTTP/1.1"),
    "garbage": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, b"HTTP/1.1"),
    "long header": (head(b"X-Long: " + LONG), 431, b"longer than"),
    "long line": (asked(target=b"POST /v1/completions?" + LONG + b" HTTP/1.1"), 431, b"longer than"),
    "endless head": (b"POST /v1/completions HTTP/1.1\r\n" + b"X-Many: 1\r\n" * 7000, 431, b"longer than"),
    "no body": (head(), 400, b"empty"),
    "too large": (head(b"Content-Length: 99999999999"), 413, b"--body-bytes-max"),
}


@pytest.mark.parametrize(("sent", "status", "words"), MALFORMED.values(), ids=MALFORMED)
async def test_malformed(start: Starter, sent: bytes, status: int, words: bytes) -> None:
    fleet = await start()
    async with wire(fleet) as client:
        client.writer.write(sent)
        got, headers, body = await client.answer()
        assert got == status, body
        assert headers["content-type"].startswith("application/json")
        assert words in body
        assert json.loads(body)["error"]["code"] == status
    assert not any(engine.generated for engine in fleet.engines.values())


async def test_chunks_beyond_the_limit(start: Starter) -> None:
    fleet = await start(body_bytes_max=1024)
    async with wire(fleet) as client:
        client.writer.write(head(b"Transfer-Encoding: chunked") + chunked(b" " * 5000, 100)[:3000])
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (413, "close")


async def test_a_client_that_reads_nothing_stops_its_engine_and_is_cut_off(start: Starter) -> None:
    fleet = await start(client_stall_s=0.5)
    written = 0

    async def flood(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        event = b'data: {"choices":[{"index":0,"text":"' + b"x" * 65536 + b'"}]}\n\n'
        for _ in range(4096):
            await response.write(event)
            written += len(event)
        return response

    decode = fleet.engines["decode-0"]
    decode.behave = flood
    async with wire(fleet) as client:
        client.writer.write(asked(STREAM))
        await eventually(lambda: decode.cut_off == 1, "its engine's leg is closed", within_s=10)
    assert 0 < written < 64 << 20, "the router read only a part of the stream"


async def test_answers_that_have_begun_end_before_the_router_does(start: Starter) -> None:
    fleet = await start()
    decode = fleet.engines["decode-0"]
    going = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> None:
        await going.wait()

    decode.behave = slow
    async with wire(fleet) as busy, wire(fleet) as idle:
        busy.writer.write(asked(STREAM))
        idle.writer.write(MODELS)
        await idle.answer()
        await eventually(lambda: bool(decode.generated), "the leg is there")
        fleet.stop.set()
        assert await idle.ended()
        going.set()
        _, _, body = await busy.answer()
        assert body.endswith(b"data: [DONE]\n\n")
        assert await busy.ended()
