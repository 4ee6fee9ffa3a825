"""Requests that are nearly HTTP, or unusual HTTP: each gets an answer in JSON, and no error is logged."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from support.fleet import Fleet, Starter

from cluster.spec import SloClass

BODY = json.dumps({"model": "fake", "prompt": "hello", "max_tokens": 5}).encode()
GENERATE = b"POST /v1/completions HTTP/1.1"
EMBED = b"POST /v1/embeddings HTTP/1.1"
MODELS = b"GET /v1/models HTTP/1.1"


def head(*lines: bytes, target: bytes = GENERATE) -> bytes:
    return b"\r\n".join([target, b"Host: localhost", b"Content-Type: application/json", *lines]) + b"\r\n\r\n"


def asked(*lines: bytes, target: bytes = GENERATE, body: bytes = BODY) -> bytes:
    return head(b"Content-Length: %d" % len(body), *lines, target=target) + body


def chunked(*lines: bytes, target: bytes = GENERATE, body: bytes = b"0\r\n\r\n") -> bytes:
    return head(b"Transfer-Encoding: chunked", *lines, target=target) + body


FINE = [  # bytes beyond ASCII do no harm where they are not read
    asked(b"X-Foo: \xff"),
    asked(b"X-Request-Id: \xff"),
    asked(b"Authorization: Bearer \xff"),
    asked(b"traceparent: \xff"),
    asked(b"tracestate: \xff"),
    asked(b"X-Foo: \xff", target=EMBED),
    asked(b"X-Foo: \xff", target=b"POST /v1/%63ompletions HTTP/1.1"),
    chunked(target=EMBED, body=b"2\r\n{}\r\n0\r\n\r\n"),
]

REFUSED = [
    asked(b"X-SLO-Class: \xff"),
    asked(b"Accept: \xff", target=EMBED),
    head(b"Content-Length: 62").replace(b"application/json", b"application/js\xffon") + b" " * 62,
    asked(b"Transfer-Encoding: \xff"),
    asked(b"Expect: \xff"),
    asked(b"Expect: 100-\xff", target=EMBED),
    head(b"Content-Length: \xff5") + BODY,
    head(b"Content-Length: +5") + BODY,
    head(b"Content-Length: 5, 5") + BODY,
    head(b"Content-Length: 5", b"Content-Length: 5") + BODY,
    head("Content-Length: ٥".encode()) + BODY,
    head(b"Transfer-Encoding: chunked, chunked") + b"0\r\n\r\n",
    chunked(b"Transfer-Encoding: chunked"),
    head(b"Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n",
    head(b"Transfer-Encoding: chunked, identity") + b"0\r\n\r\n",
    head(b"Transfer-Encoding: \x0bchunked") + b"0\r\n\r\n",
    chunked(target=b"POST /v1/completions HTTP/1.0"),
    chunked(b"Content-Length: 5"),
    chunked(b"Content-Length: 5", target=EMBED),
    head(b"Transfer-Encoding: chunked, chunked", target=EMBED) + b"0\r\n\r\n",
    head(b"Transfer-Encoding: gzip", target=EMBED) + b"0\r\n\r\n",
    chunked(target=EMBED, body=b"zz\r\n\r\n"),
    chunked(target=EMBED, body=b"2;" + b"x" * 5000 + b"\r\n{}\r\n0\r\n\r\n"),
    chunked(target=EMBED, body=b"2\r\n{}\r\n0\r\n" + b"X-A: b\r\n" * 2000 + b"\r\n"),
    chunked(target=b"POST /v1/%63ompletions HTTP/1.1", body=b"zz\r\n\r\n"),
    asked(b"Content-Encoding: gzip", target=EMBED),
    asked(*[b"a:"] * 200),
    asked(*[b"a:"] * 200, target=EMBED),
    asked(b"X-F\xffoo: 1"),
    asked(b"X-Foo : 1"),
    asked(b": 1"),
    asked(b"X-Foo: a\0b"),
    asked(b"X-Foo: a\x01b"),
    asked(b"X-Foo: a\rb"),
    asked(b"X-Foo: a\nb"),
    asked(b"X-Foo: a", b" b"),
    asked(target=b"POST /v1/completions?\xff HTTP/1.1"),
    asked(target=b"POST /v1/\xff HTTP/1.1"),
    asked(target=b"POST /v1/%ff HTTP/1.1"),
    asked(target=b"GET /v1/models/%ff HTTP/1.1", body=b""),
    asked(target=b"GET /v1/models/\xff HTTP/1.1", body=b""),
    asked(target=b"GET /v1/mo\0dels HTTP/1.1", body=b""),
    asked(target=b"POST /v1/completions? a HTTP/1.1"),
    asked(target=b"P\xffST /v1/completions HTTP/1.1"),
    asked(target=b"FROB /v1/completions HTTP/1.1"),
    asked(target=b"CONNECT a:1 HTTP/1.1", body=b""),
    asked(target=b"POST /v1/completions HTTP/1.2"),
    asked(target=b"POST /v1/completions HTTP/2.0"),
    b"GET /v1/models HTTP/1.1\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    asked().replace(b"\r\n", b"\n"),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    asked(target=b"GET http://[::1/v1/models HTTP/1.1", body=b""),
    asked(target=b"GET http://a:99999/v1/models HTTP/1.1", body=b""),
    asked(target=b"OPTIONS * HTTP/1.1", body=b""),
    asked(target=b"GET // HTTP/1.1", body=b""),
]

TO_ADMIN = (
    (b"/v1/completions", b"/explain"),
    (b"/v1/%63ompletions", b"/explain"),
    (b"/v1/embeddings", b"/explain"),
    (b"/v1/models", b"/metrics"),
)


async def told(url: str, sent: bytes) -> tuple[int, bytes, bytes]:
    """Status, head and body of the first answer on a new connection. Status 0: the connection ended before that."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        async with asyncio.timeout(5):
            writer.write(sent)
            said = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", said.lower())
            return int(said[9:12]), said, await reader.readexactly(int(length[1])) if length else b""
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        return 0, b"", repr(error).encode()
    finally:
        writer.close()


async def wrong(url: str, requests: list[bytes], least: int, most: int) -> list[tuple[bytes, int, bytes]]:
    """The requests with a status outside `least` to `most`, or with an error that is not in the API's form."""
    several = asyncio.Semaphore(16)

    async def one(request: bytes) -> tuple[int, bytes, bytes]:
        async with several:
            return await told(url, request)

    answers = await asyncio.gather(*map(one, requests))
    return [
        (sent[:150], status, body)
        for sent, (status, said, body) in zip(requests, answers, strict=True)
        if not least <= status <= most or (status >= 400 and not _is_problem(status, said, body))
    ]


def _is_problem(status: int, said: bytes, body: bytes) -> bool:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError):
        return False
    return b"application/json" in said and error["code"] == status and bool(error["message"])


async def odd(start: Starter) -> Fleet:
    return await start(head_timeout_s=1.0, body_timeout_s=1.0, classes={"fast": SloClass(ttft_ms=60_000)})


async def test_odd_requests_on_the_clients_port(start: Starter, caplog: pytest.LogCaptureFixture) -> None:
    fleet = await odd(start)
    assert not await wrong(fleet.endpoint, FINE, 200, 200)
    assert not await wrong(fleet.endpoint, REFUSED, 400, 499)
    assert not [each for each in caplog.records if each.exc_info or each.levelno >= logging.ERROR]


async def test_odd_requests_on_the_admin_side(start: Starter, caplog: pytest.LogCaptureFixture) -> None:
    fleet = await odd(start)
    requests = []
    for request in (*FINE, *REFUSED):
        for path, other in TO_ADMIN:
            request = request.replace(path, other)  # noqa: PLW2901
        requests.append(request)
    assert not await wrong(fleet.admin, requests, 400, 499)
    assert not [each for each in caplog.records if each.exc_info or each.levelno >= logging.ERROR]


ANSWER = b'{"choices": [{"index": 0, "text": "yes", "finish_reason": "stop"}]}'


async def test_bytes_of_headers_go_on_as_they_came(start: Starter) -> None:
    """In a generation request, a client's header value reaches the engine unchanged. From an engine's `Content-Type`,
    the router removes what may not stand in a header.
    """
    seen: list[bytes] = []

    async def raw(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen.extend(value for name, value in request.raw_headers if name.lower() == b"user-agent")
        assert request.transport is not None
        request.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json; x=\xff\xc3\xbf\r\nContent-Length: %d\r\n\r\n%b"
            % (len(ANSWER), ANSWER)
        )
        request.transport.close()
        return web.Response()

    fleet = await start(prefill=0, decode=0, both=1)
    fleet.engines["both-0"].behave = raw
    status, said, body = await told(fleet.endpoint, asked(b"User-Agent: \xff\xc3\xbf"))
    assert (status, body) == (200, ANSWER)
    assert b"Content-Type: application/json\r\n" in said
    assert seen == [b"\xff\xc3\xbf"]
