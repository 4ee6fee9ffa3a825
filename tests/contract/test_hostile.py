"""Hostile clients on real sockets: limits on the memory, places and connections that they can take from a router."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import resource
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from support.fleet import Fleet, Starter, eventually

from cluster.keys import digest
from cluster.spec import Tenant
from router.api import reference_cycles
from router.http.cold import AiohttpConnection
from router.http.front import AHEAD_BYTES_MAX, ClientConnection

BODY = json.dumps({"model": "fake", "prompt": "p" * 250_000, "max_tokens": 5}).encode()
KEY = "sk-baton-some"
HOT, SPELLED, OTHER = b"/v1/completions", b"/v1/%63ompletions", b"/v1/embeddings"
READ_BYTES_MAX = 1 << 18
"""The most bytes that a loop reads from a socket at once."""
PATHS = pytest.mark.parametrize("path", [HOT, SPELLED, OTHER], ids=["hot", "spelled otherwise", "relayed"])


def head(path: bytes, length: int) -> bytes:
    lines = (b"Host: x", b"Authorization: Bearer " + KEY.encode(), b"Content-Type: application/json")
    return b"POST %b HTTP/1.1\r\n%b\r\nContent-Length: %d\r\n\r\n" % (path, b"\r\n".join(lines), length)


class Client:
    """One connection with a small receive buffer: bytes that it does not read stay in the router."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect((address.hostname, address.port))
        self.socket.setblocking(False)

    async def send(self, data: bytes) -> None:
        async with asyncio.timeout(10):
            await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def status(self) -> int:
        said = b""
        async with asyncio.timeout(10):
            while len(said) < 12:
                more = await asyncio.get_running_loop().sock_recv(self.socket, 12 - len(said))
                if not more:
                    return 0
                said += more
        return int(said[9:12])

    def close(self) -> None:
        self.socket.close()


async def of_metrics(fleet: Fleet, name: str) -> float:
    async with fleet.client.get(fleet.admin + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " "))


async def until(fleet: Fleet, name: str, value: float) -> None:
    async with asyncio.timeout(10):
        while await of_metrics(fleet, name) != value:
            await asyncio.sleep(0.01)


@PATHS
async def test_uploads_are_open_requests(start: Starter, path: bytes) -> None:
    fleet = await start(tenants={"some": Tenant(open_max=3)}, tenant_keys={"some": lambda: (digest(KEY),)})
    uploads = [Client(fleet.endpoint) for _ in range(5)]
    for each in uploads:
        await each.send(head(path, len(BODY)) + BODY[:1000])
    refused = [asyncio.create_task(each.status()) for each in uploads]
    done: set[asyncio.Task[int]] = set()
    async with asyncio.timeout(10):
        while len(done) < 2:
            done, _ = await asyncio.wait(refused, return_when=asyncio.FIRST_COMPLETED, timeout=0.05)
    assert [each.result() for each in done] == [429, 429]
    taken = [(client, task) for client, task in zip(uploads, refused, strict=True) if task not in done]
    for client, task in taken[:2]:
        task.cancel()
        client.close()
    await taken[2][0].send(BODY[1000:])
    assert await taken[2][1] == 200
    for each in uploads:
        each.close()
    await asyncio.gather(*refused, return_exceptions=True)

    async def let_in() -> bool:
        client = Client(fleet.endpoint)
        await client.send(head(path, 2) + b"{}")
        status = await client.status()
        client.close()
        return status != 429

    async with asyncio.timeout(5):
        while not await let_in():
            await asyncio.sleep(0.01)


@PATHS
async def test_bytes_of_all_bodies_together_are_bounded(start: Starter, path: bytes) -> None:
    fleet = await start(uploads_bytes_max=300_000, body_bytes_max=1_000_000)
    first, *others = [Client(fleet.endpoint) for _ in range(5)]
    await first.send(head(path, len(BODY)) + BODY[:200_000])
    await until(fleet, "baton_upload_bytes", 200_000)
    for each in others:
        await each.send(head(path, len(BODY)) + BODY[:150_000])
    await until(fleet, "baton_uploads_waiting", 4)
    assert await of_metrics(fleet, "baton_upload_bytes") <= 200_000 + 4 * 150_000
    await first.send(BODY[200_000:])
    assert await first.status() == 200
    for each in others:
        await each.send(BODY[150_000:])
    assert [await each.status() for each in others] == [200] * 4
    await until(fleet, "baton_upload_bytes", 0)
    assert await of_metrics(fleet, "baton_uploads_waiting") == 0
    for each in (first, *others):
        each.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_bodies_of_requests_that_wait_are_bounded(start: Starter, path: str) -> None:
    """A request keeps its body until it is over, also while it waits for an instance. One client has a share of all."""
    fleet = await start(prefill=0, decode=1, open_bytes_max=330_000)
    engine, hangs = fleet.engines["decode-0"], asyncio.Event()

    async def behave(request: Any, body: Any) -> None:
        await hangs.wait()

    async def waits() -> web.Response:
        await hangs.wait()
        return web.json_response({})

    engine.behave = behave
    prompt = {"model": "fake", "prompt": "x" * 100_000, "max_tokens": 1}
    size = len(json.dumps(prompt))
    engine.behave_elsewhere = lambda *_: waits()
    asked = [asyncio.ensure_future(fleet.post(path, json=prompt)) for _ in range(2)]
    await until(fleet, "baton_open_body_bytes", 2 * size)
    status, told = await fleet.post("/v1/completions", json=prompt)
    assert status == 503
    assert f"your open requests have {2 * size} bytes" in told["error"]["message"]
    hangs.set()
    assert [status for status, _ in await asyncio.gather(*asked)] == [200, 200]
    await until(fleet, "baton_open_body_bytes", 0)
    assert (await fleet.post("/v1/completions", json={**prompt, "prompt": "x" * 300_000}))[0] == 200, "one has room"


def connections(*kinds: Any) -> list[Any]:
    """All clients' connections of these kinds in this process."""
    return [
        each for each in gc.get_objects() if issubclass(type(each), kinds)
    ]  # isinstance would ask what lazy modules are


def transports() -> list[asyncio.Transport]:
    """Transports of all clients' connections in this process that are not closing."""
    found = connections(ClientConnection, AiohttpConnection)
    both = (each._transport.raw if isinstance(each, ClientConnection) else each.transport for each in found)
    return [each for each in both if each is not None and not each.is_closing()]


async def transport_of(client: Client) -> asyncio.Transport:
    """The router's transport to this client."""
    mine = client.socket.getsockname()
    await eventually(lambda: any(each.get_extra_info("peername") == mine for each in transports()), "it is there")
    (kept,) = {each for each in transports() if each.get_extra_info("peername") == mine}
    return kept


@pytest.mark.interpreted
@pytest.mark.parametrize("side", ["generation", "aiohttp", pytest.param("admin", marks=pytest.mark.long)])
async def test_a_client_that_reads_no_answers_gets_no_further_ones(start: Starter, side: str) -> None:
    async def long(*_: object) -> web.Response:
        return web.json_response({"choices": [{"index": 0, "text": "x" * 200_000, "finish_reason": "stop"}]})

    fleet = await start(prefill=0, decode=0, both=1)
    fleet.engines["both-0"].behave = fleet.engines["both-0"].behave_elsewhere = long
    small = b'{"model": "fake", "prompt": "x", "max_tokens": 1}'
    request, count = {
        "generation": (head(HOT, len(small)) + small, 100),
        "aiohttp": (head(OTHER, len(small)) + small, 100),
        "admin": (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 1000),
    }[side]
    client = Client(fleet.admin if side == "admin" else fleet.endpoint)
    try:
        await client.send(request * count)
        kept = await transport_of(client)
        last, same = -1, 0
        async with asyncio.timeout(30):
            while same < 20:  # until nothing moves any more
                await asyncio.sleep(0.01)
                now = kept.get_write_buffer_size()
                same, last = (same + 1 if now == last and now > 0 else 0), now
        assert last < 500_000
    finally:
        client.close()


@pytest.mark.interpreted
@pytest.mark.parametrize("path", [SPELLED, OTHER], ids=["spelled otherwise", "relayed"])
async def test_bytes_that_come_before_an_answer_of_aiohttps_are_bounded(start: Starter, path: bytes) -> None:
    """aiohttp resumes the transport that it shares when its handler reads the request's body."""
    answers = asyncio.Event()

    async def late(*_: object) -> web.Response:
        await answers.wait()
        return web.json_response({"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]})

    fleet = await start(prefill=0, decode=0, both=1)
    engine = fleet.engines["both-0"]
    engine.behave = engine.behave_elsewhere = late
    small = b'{"model": "fake", "prompt": "x", "max_tokens": 1}'
    client = Client(fleet.endpoint)
    sending = asyncio.create_task(client.send(head(path, len(small)) + small + b"x" * (8 << 20)))
    try:
        await eventually(lambda: len(engine.bodies) == 1, "the engine has the request")
        raw = await transport_of(client)
        (mine,) = (each for each in connections(ClientConnection) if each._transport.raw is raw)
        last, same = -1, 0
        async with asyncio.timeout(10):
            while same < 20:  # until nothing moves any more
                await asyncio.sleep(0.01)
                now = len(mine._buffer)
                same, last = (same + 1 if now == last else 0), now
        assert AHEAD_BYTES_MAX < last <= AHEAD_BYTES_MAX + READ_BYTES_MAX
    finally:
        answers.set()
        sending.cancel()
        client.close()


async def _broken_off(fleet: Fleet, count: int) -> None:
    """Send `count` uploads of 100 KB. By turns they are broken off, refused for size, or badly chunked."""
    address = urlsplit(fleet.endpoint)
    half = BODY[:100_000]
    kinds = (
        head(HOT, len(BODY)) + half,
        head(HOT, 1 << 40) + half,
        head(HOT, 5).replace(b"Content-Length: 5", b"Transfer-Encoding: chunked") + b"186a0\r\n" + half + b"no end",
        head(OTHER, len(BODY)) + half,
    )

    async def one(number: int) -> None:
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(kinds[number % len(kinds)])
        await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    for begin in range(0, count, 10):
        await asyncio.gather(*map(one, range(begin, begin + 10)))


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


async def _growth_mb(fleet: Fleet, count: int) -> float:
    """Growth of this process's resident memory, in MB, by `count` broken uploads after 100 to warm up."""
    await _broken_off(fleet, 100)
    gc.collect()
    before = resident_mb()
    await _broken_off(fleet, count)
    await until(fleet, "baton_client_connections", 0)
    return resident_mb() - before


async def test_three_hundred_broken_uploads_leave_nothing(start: Starter) -> None:
    """Garbage collection is off: reference counts alone must free their 30 MB."""
    fleet = await start()
    gc.collect()
    gc.disable()
    try:
        assert await _growth_mb(fleet, 300) < 12
    finally:
        gc.enable()


@pytest.mark.long
async def test_ten_thousand_broken_uploads_leave_nothing(start: Starter) -> None:
    """Garbage collection is set as in `baton router`: aiohttp's connections form cycles. In all 1 GB is uploaded."""
    fleet = await start()
    threshold = gc.get_threshold()
    reference_cycles.begin()
    try:
        assert await _growth_mb(fleet, 10_000) < 12
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
