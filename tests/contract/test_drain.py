"""A router that stops: begun answers reach their clients, and it has stopped in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from support.fleet import Fleet, Starter

from router.http import client_transport, front
from router.http.client_transport import ClientTransport

LONG = 7 << 20
"""Characters of an answer: more than kernels take at once, less than the router keeps of one."""
HOT, OTHER = b"/v1/completions", b"/v1/embeddings"


def asked(path: bytes, *lines: bytes, **more: Any) -> bytes:
    body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 1, **more}).encode()
    length = b"Content-Length: %d" % len(body)
    head = (b"POST %b HTTP/1.1" % path, b"Host: x", b"Content-Type: application/json", length, *lines)
    return b"\r\n".join(head) + b"\r\n\r\n" + body


async def connect(
    endpoint: str, trust: ssl.SSLContext | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection with a small receive buffer: bytes that it does not read stay in the router."""
    address = urlsplit(endpoint)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, (address.hostname, address.port))
    return await asyncio.open_connection(
        sock=raw, ssl=trust, server_hostname=None if trust is None else address.hostname
    )


async def refuses(fleet: Fleet) -> None:
    """Wait until the router accepts no more connections."""
    address = urlsplit(fleet.endpoint)
    async with asyncio.timeout(5):
        while True:
            try:
                _, writer = await asyncio.open_connection(address.hostname, address.port)
            except OSError:
                return
            writer.close()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("path", [HOT, OTHER], ids=["hot", "relayed"])
@pytest.mark.parametrize("lines", [[], [b"Connection: close"]], ids=["kept", "closed"])
async def test_a_slow_client_gets_all_of_its_answer(
    start: Starter, certificate: tuple[Path, Path], lines: list[bytes], path: bytes, tls: bool
) -> None:
    cert, key = map(str, certificate)
    files = {"tls_cert_file": cert, "tls_key_file": key} if tls else {}
    fleet = await start(prefill=0, decode=0, both=1, drain_s=20.0, **files)

    async def long(*_: object) -> web.Response:
        return web.json_response({"choices": [{"index": 0, "text": "x" * LONG, "finish_reason": "stop"}]})

    fleet.engines["both-0"].behave = fleet.engines["both-0"].behave_elsewhere = long
    reader, writer = await connect(fleet.endpoint, ssl.create_default_context(cafile=cert) if tls else None)
    writer.write(asked(path, *lines))
    async with asyncio.timeout(15):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        fleet.stop.set()
        await refuses(fleet)
        if b"content-length: " in head:
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            assert len(await reader.readexactly(length)) > LONG
        else:
            assert (await reader.read()).endswith(b"\r\n0\r\n\r\n")
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_a_client_that_reads_on_for_longer_than_connections_linger_gets_all(
    start: Starter, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    """The router has written all of a "Connection: close" answer at once. It closed the connection 10 s later, although
    the client was reading.
    """
    monkeypatch.setattr(front, "LINGER_S", 0.2)
    monkeypatch.setattr(client_transport, "KEEPALIVE_S", 0.2)
    cert, key = map(str, certificate)
    fleet = await start(prefill=0, decode=0, both=1, **({"tls_cert_file": cert, "tls_key_file": key} if tls else {}))

    async def long(*_: object) -> web.Response:
        return web.json_response({"choices": [{"index": 0, "text": "x" * LONG, "finish_reason": "stop"}]})

    fleet.engines["both-0"].behave = long
    reader, writer = await connect(fleet.endpoint, ssl.create_default_context(cafile=cert) if tls else None)
    writer.write(asked(HOT, b"Connection: close"))
    async with asyncio.timeout(20):
        got = len(await reader.readuntil(b"\r\n\r\n"))
        while data := await reader.read(1 << 16):
            got += len(data)
            await asyncio.sleep(0.01)  # the client is slow: the test's subject
    assert got > LONG
    writer.close()


class Below(asyncio.Transport):
    """A TLS transport that has given all bytes to the transport below it."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__({"sslcontext": ssl.create_default_context(), "socket": connected})

    def get_write_buffer_size(self) -> int:
        return 0


async def test_bytes_below_a_tls_transport_count_as_long_as_the_kernel_has_some() -> None:
    ours, theirs = socket.socketpair()
    transport = ClientTransport(asyncio.get_running_loop(), lambda: None)
    assert not transport.untaken, "the client is not connected"
    transport.raw = Below(ours)
    ours.send(b"answer")
    assert transport.untaken
    theirs.recv(6)
    assert not transport.untaken
    ours.close()
    assert not transport.untaken
    theirs.close()


@pytest.mark.parametrize("drain_s", [0.0, 1.0])
async def test_streams_that_never_end_are_cut_off_once_the_time_is_over(start: Starter, drain_s: float) -> None:
    """One stream of each kind; an operator's request, which never ends either, does not add to the time."""

    async def endless(request: web.Request, _: object) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
            await asyncio.sleep(0.01)

    async def elsewhere(_: object, request: web.Request, __: bytes) -> Any:
        return await endless(request, None)

    fleet = await start(prefill=0, decode=0, both=1, drain_s=drain_s)
    fleet.engines["both-0"].behave, fleet.engines["both-0"].behave_elsewhere = endless, elsewhere
    streams = [await connect(fleet.endpoint), await connect(fleet.endpoint)]
    _, operator = await connect(fleet.admin)
    operator.write(asked(b"/drain/both-0")[:-1])
    async with asyncio.timeout(15):
        for path, (reader, writer) in zip((HOT, OTHER), streams, strict=True):
            writer.write(asked(path, stream=True))
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        fleet.stop.set()
        began = time.monotonic()
        for reader, _ in streams:
            with contextlib.suppress(ConnectionResetError):
                while await reader.read(1 << 16):
                    pass
        took_s = time.monotonic() - began
    assert drain_s - 0.1 < took_s < drain_s + 1.5
    for writer in (operator, *(writer for _, writer in streams)):
        writer.close()
