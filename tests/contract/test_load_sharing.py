"""Two routers of one registry learn of each other's requests by notes, within milliseconds while the registry is up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.fake_engine import FakeEngine
from support.redis_server import RedisServer
from support.served import served

from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.registry.membership import Heartbeat, MemberState
from cluster.registry.memory import MemoryRegistry
from cluster.registry.redis import RedisRegistry
from cluster.registry.registry import Registry
from kvtransfer.proving import FleetProofs
from kvtransfer.sealed_notes import sealed
from kvtransfer.ticket import SigningKey
from router.api.config import RouterConfig
from router.core.load_notes import LoadNote, note_bytes
from router.fleet import events, load_sharing
from router.fleet.view import FleetView

KEY = SigningKey("k1", b"s" * 32)
SOON_S = 10.0


class Shared:
    """A fleet of one engine and two routers, and their registry."""

    def __init__(self, stack: AsyncExitStack, client: aiohttp.ClientSession, server: RedisServer) -> None:
        self.stack, self.client, self.server = stack, client, server
        self.engine = FakeEngine("both-0")
        self.go_on = asyncio.Event()
        self.endpoints: list[str] = []
        self.admins: list[str] = []
        self.seq = 0

    def registry(self, *, proves: bool) -> Registry:
        proofs = FleetProofs(lambda: (KEY,), time.time) if proves else None
        return RedisRegistry.open(
            self.server.url, password_file=self.server.command.password_file, ttl_s=5.0, proofs=proofs
        )

    async def start(self, *, proves: bool = True) -> None:
        await self.stack.enter_async_context(self.engine)
        self.engine.behave = self.answer
        for _ in range(2):
            config = RouterConfig(
                port=0, admin_port=0, drain_s=0.1, has_registry=True, ticket_keys=(lambda: (KEY,)) if proves else None
            )
            endpoint, admin = await self.stack.enter_async_context(served(config, self.registry(proves=proves)))
            self.endpoints.append(endpoint)
            self.admins.append(admin)
        beats = self.registry(proves=proves)
        self.stack.push_async_callback(beats.close)
        await self.stack.enter_async_context(Background(self.beat_forever(beats)))
        async with asyncio.timeout(SOON_S):
            for admin in self.admins:
                while await self.metric(admin, "baton_routers") != 2 or not await self.ready(admin):
                    await asyncio.sleep(0.02)

    async def beat_forever(self, registry: Registry) -> None:
        while True:
            self.seq += 1
            await registry.beat(
                Heartbeat(
                    id=InstanceId("both-0"), agent="a", epoch=1, seq=self.seq, role=Role.BOTH, state=MemberState.READY,
                    credits=64, url=self.engine.url, models=({"id": "fake"},), sent_at=time.time(),
                )
            )  # fmt: skip
            await asyncio.sleep(0.5)

    async def answer(self, *_: Any) -> web.Response:
        await self.go_on.wait()
        usage = {"prompt_tokens": 2600, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1600}}
        said = {"object": "text_completion", "choices": [{"text": "x", "finish_reason": "stop"}], "usage": usage}
        return web.json_response(said)

    async def ask(self, endpoint: str, prompt: str = "hello") -> int:
        body = {"model": "fake", "prompt": prompt, "max_tokens": 5}
        async with self.client.post(f"{endpoint}/v1/completions", json=body) as answer:
            await answer.read()
            return answer.status

    async def ready(self, admin: str) -> bool:
        async with self.client.get(f"{admin}/ready") as answer:
            return answer.status == 200

    async def metric(self, admin: str, name: str) -> float:
        async with self.client.get(f"{admin}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)

    async def until(self, admin: str, name: str, value: float) -> None:
        async with asyncio.timeout(SOON_S):
            while await self.metric(admin, name) != value:
                await asyncio.sleep(0.01)


class Background:
    """Runs a coroutine as a task while a block lasts."""

    def __init__(self, running: Any) -> None:
        self._running = running

    async def __aenter__(self) -> None:
        self._task = asyncio.ensure_future(self._running)

    async def __aexit__(self, *_: object) -> None:
        while not self._task.done():  # a registry's client may swallow a cancellation
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1.0)


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[Shared]:
    server = RedisServer(tmp_path, standin=False)
    server.start()
    try:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(aiohttp.ClientSession())
            yield Shared(stack, client, server)
    finally:
        server.kill()


async def test_each_router_counts_the_others_requests(shared: Shared) -> None:
    await shared.start()
    first, second = shared.admins
    asking = [asyncio.ensure_future(shared.ask(shared.endpoints[0])) for _ in range(3)]
    await shared.until(second, "baton_peer_requests", 3)
    assert await shared.metric(first, "baton_peer_requests") == 0
    asking.append(asyncio.ensure_future(shared.ask(shared.endpoints[1])))
    await shared.until(first, "baton_peer_requests", 1)
    shared.go_on.set()
    assert await asyncio.gather(*asking) == [200] * 4
    for admin in shared.admins:
        await shared.until(admin, "baton_peer_requests", 0)
        assert await shared.metric(admin, "baton_peer_notes_lost_total") == 0


async def test_a_prompt_that_another_router_sent_is_expected_in_the_prefix_cache(shared: Shared) -> None:
    await shared.start()
    prompt, expected = "what was said before " * 500, "baton_prefix_expected_tokens_total"
    asking = asyncio.ensure_future(shared.ask(shared.endpoints[0], prompt))
    await shared.until(shared.admins[1], "baton_peer_requests", 1)
    shared.go_on.set()
    assert await asking == 200
    assert await shared.ask(shared.endpoints[1], f"{prompt}and what is said now") == 200
    assert await shared.metric(shared.admins[1], expected) > 1000
    assert await shared.metric(shared.admins[0], expected) == 0


async def test_a_note_without_the_fleets_keys_is_not_believed(shared: Shared) -> None:
    await shared.start()
    stranger = shared.registry(proves=False)
    shared.stack.push_async_callback(stranger.close)
    for payload in (sealed(note_bytes(LoadNote("router-x", 0)), ()), b"", b"\n", b"k1.\xff\nx", b"x" * 3_000_000):
        before = await shared.metric(shared.admins[0], "baton_peer_notes_lost_total")
        await stranger.send_note(payload)
        await shared.until(shared.admins[0], "baton_peer_notes_lost_total", before + 1)
    assert await shared.metric(shared.admins[0], "baton_peer_requests") == 0


async def test_without_keys_notes_are_believed_and_nonsense_is_not(shared: Shared) -> None:
    await shared.start(proves=False)
    asking = asyncio.ensure_future(shared.ask(shared.endpoints[0]))
    await shared.until(shared.admins[1], "baton_peer_requests", 1)
    stranger = shared.registry(proves=False)
    shared.stack.push_async_callback(stranger.close)
    await stranger.send_note(b"\nnonsense")
    await shared.until(shared.admins[1], "baton_peer_notes_lost_total", 1)
    shared.go_on.set()
    assert await asking == 200
    await shared.until(shared.admins[1], "baton_peer_requests", 0)


async def test_load_that_peers_missed_in_an_outage_is_announced_again(shared: Shared) -> None:
    await shared.start()
    asking = [asyncio.ensure_future(shared.ask(shared.endpoints[0]))]
    await shared.until(shared.admins[1], "baton_peer_requests", 1)
    shared.server.kill()
    await shared.until(shared.admins[1], "baton_peer_requests", 0)  # it has fallen silent
    asking.append(asyncio.ensure_future(shared.ask(shared.endpoints[0])))  # served all the same
    shared.server.start()
    await shared.until(shared.admins[1], "baton_peer_requests", 2)
    shared.go_on.set()
    assert await asyncio.gather(*asking) == [200, 200]
    await shared.until(shared.admins[1], "baton_peer_requests", 0)


async def test_a_router_alone_sends_no_notes() -> None:
    class Counting(MemoryRegistry):
        sent = 0

        async def send_note(self, note: bytes) -> None:
            Counting.sent += 1
            await super().send_note(note)

    async with FakeEngine("both-0") as engine:
        registry = Counting(time.monotonic)
        beat = Heartbeat(
            id=InstanceId("both-0"), agent="a", epoch=1, seq=1, role=Role.BOTH, state=MemberState.READY, credits=8,
            url=engine.url, models=({"id": "fake"},),
        )  # fmt: skip
        await registry.beat(beat)
        config = RouterConfig(port=0, admin_port=0, drain_s=0.1, has_registry=True)
        async with served(config, registry) as (endpoint, _), aiohttp.ClientSession() as client:
            body = {"model": "fake", "prompt": "hello", "max_tokens": 2}
            for _ in range(20):
                async with client.post(f"{endpoint}/v1/completions", json=body) as answer:
                    assert answer.status == 200
    assert Counting.sent == 0


async def test_a_connection_that_brings_not_even_a_routers_own_notes_is_made_anew(monkeypatch) -> None:
    monkeypatch.setattr(load_sharing, "AGAIN_S", 0.02)
    monkeypatch.setattr(load_sharing, "ALIVE_S", 0.02)
    monkeypatch.setattr(load_sharing, "SILENT_S", 0.1)
    renewed = asyncio.Event()

    class HalfOpen(MemoryRegistry):
        """Takes notes, but delivers none over the first connection."""

        async def next_note(self, timeout_s: float, *, anew: bool = False) -> bytes | None:
            if anew:
                renewed.set()
            if renewed.is_set():
                return await super().next_note(timeout_s)
            await asyncio.sleep(timeout_s)
            return None

    heard: list[object] = []
    sharing = load_sharing.LoadSharing(
        "router-a", HalfOpen(time.monotonic), FleetView(), peers=lambda: {"router-b"}, keys=None, handle=heard.append,
        freed=lambda: None, lost=heard.append,
    )  # fmt: skip
    async with Background(sharing.tell_forever()), Background(sharing.hear_forever()), asyncio.timeout(SOON_S):
        await renewed.wait()
    assert heard == []


@pytest.mark.parametrize("error", [OverflowError("math range error"), ZeroDivisionError(), ValueError("math domain")])
async def test_a_note_that_cannot_be_counted_is_refused_and_the_next_one_is_heard(error: Exception) -> None:
    heard: list[object] = []

    def handle(event: events.FleetEvent) -> None:
        assert isinstance(event, events.LoadNoted)
        heard.append(event.note.number)
        if event.note.number == 1:
            raise error

    registry, lost = MemoryRegistry(time.monotonic), list[str]()
    sharing = load_sharing.LoadSharing(
        "router-a", registry, FleetView(), peers=lambda: {"router-b"}, keys=None, handle=handle,
        freed=lambda: None, lost=lost.append,
    )  # fmt: skip
    async with Background(sharing.hear_forever()), asyncio.timeout(SOON_S):
        await asyncio.sleep(0)  # it listens
        for number in (1, 2):
            await registry.send_note(sealed(note_bytes(LoadNote("router-b", number)), ()))
        while len(heard) < 2:
            await asyncio.sleep(0.01)
    assert (heard, lost) == ([1, 2], ["refused"])
