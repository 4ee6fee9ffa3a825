"""Engines' answers that are too long, encoded, or no answers: agents, routers and `baton load` report a clear error."""

from __future__ import annotations

import asyncio
import gzip
from contextlib import asynccontextmanager

import aiohttp
import pytest
from support.hostile_engine import Asked, HostileEngine, Script, head, says, whole

from cluster.bounded import PLAIN, WORD_BYTES_MAX, Unfit, whole_body
from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from engine.vllm.probe import Probe, Unwell
from loadgen.http import LoadConnection, LoadConnections
from router.http.upstream import EngineLost, Upstream

ENDLESS = Script(
    (head("Content-Type: application/json"), *[b"x" * (1 << 16)] * (WORD_BYTES_MAX // (1 << 16) + 8)), "hang"
)
ZIPPED = says(whole(gzip.compress(b'{"data":[]}'), "Content-Encoding: gzip"))
DEEP = says(whole(b"[" * 100_000))
GARBAGE = says(whole(b'{"data":[{"id":"\xff"}]}'))


@asynccontextmanager
async def engine_that_says(script: Script):
    async with HostileEngine("e", Role.BOTH, lambda _: script).open() as engine:
        yield engine


@pytest.mark.parametrize(
    ("script", "words"),
    [(ENDLESS, "longer than"), (ZIPPED, "gzip"), (DEEP, "not JSON"), (GARBAGE, "not JSON")],
    ids=["endless", "zipped", "deep", "not UTF-8"],
)
async def test_an_agents_probe_takes_such_an_engine_for_unwell(script: Script, words: str) -> None:
    async with engine_that_says(script) as engine, Probe(engine.url, None) as probe:
        with pytest.raises(Unwell, match=words):
            await probe.models()


@pytest.mark.parametrize(("script", "why"), [(ENDLESS, "too_long"), (ZIPPED, "encoded")], ids=["endless", "zipped"])
async def test_a_router_reads_no_such_answer(script: Script, why: str) -> None:
    upstream = Upstream()
    await upstream.start()
    try:
        async with engine_that_says(script) as engine:
            instance = Instance(id=InstanceId("e"), role=Role.BOTH, url=engine.url)
            with pytest.raises(EngineLost) as lost:
                await upstream.call(instance, "GET", "/v1/models", None, {})
            assert lost.value.unfit == why
            assert await upstream.status(instance, "/v1/responses/x", {}) == 200, "only the status is read"
    finally:
        await upstream.close()


async def test_a_gzip_body_is_not_unpacked() -> None:
    async with (
        engine_that_says(ZIPPED) as engine,
        aiohttp.ClientSession(headers=PLAIN, auto_decompress=False) as session,
        session.get(engine.url) as answer,
    ):
        with pytest.raises(Unfit, match="gzip"):
            await whole_body(answer)


class Heard:
    """Keeps what a load's connection reports."""

    def __init__(self) -> None:
        self.bytes = b""
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def piece(self, status: int, data: bytes, now: float) -> None:
        self.bytes += data

    def ended(self, status: int, now: float) -> None:
        self.over.set_result(f"ended {status}")

    def broke(self, why: str, now: float, *, stale: bool) -> None:
        self.over.set_result(f"broke: {why}")


@pytest.mark.parametrize(
    ("script", "end"),
    [
        (says(head(status="103 Early Hints") + whole(b"{}")), "ended 200"),
        (says(head(status="100 Continue"), head(status="100 Continue") + whole(b"{}")), "ended 200"),
        (says(head("Upgrade: x", "Connection: upgrade", status="101 Switching Protocols")), "broke: no HTTP answer"),
    ],
    ids=["103", "100 twice", "101"],
)
async def test_a_load_hears_only_final_answers(script: Script, end: str) -> None:
    def speak(asked: Asked) -> Script:
        return script

    async with HostileEngine("e", Role.BOTH, speak).open() as engine:
        pool = LoadConnections(engine.url)
        connection: LoadConnection = await pool.connect()
        heard = Heard()
        connection.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", heard)
        async with asyncio.timeout(5):
            assert (await heard.over).startswith(end)
        pool.close()
    assert heard.bytes in {b"", b"{}"}
