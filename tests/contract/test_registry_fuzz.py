"""A holder of the registry's password can write anything there: no value ends a loop, a process, or an answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aiohttp
import pytest
from support.fake_engine import FakeEngine
from support.hostile_registry import NAMES, cases, spoil
from support.redis_server import RedisServer
from support.served import served

from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.registry.membership import Heartbeat, MemberKind, Membership, MemberState, decode, encode
from cluster.registry.memory import MemoryRegistry
from cluster.registry.redis import RedisRegistry
from cluster.registry.registry import Author, RegistryDown
from decode.rules import DecodeRules
from engine.agent.announcer import ROUTERS_MAX
from engine.agent.grants import concerning
from engine.agent.machine import AgentMachine, RoutersHeard, Tick
from router.api.config import RouterConfig

SEEDS = range(3)
PROMPT = {"model": "fake", "prompt": "hello", "max_tokens": 2}


class Watched(MemoryRegistry):
    """A registry that counts how often the router has read it, and has announced itself."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.reads = self.announced = 0

    async def read(self, kind: MemberKind = MemberKind.INSTANCE) -> tuple[Heartbeat, ...]:
        self.reads += kind is MemberKind.ROUTER
        return await super().read(kind)

    async def beat(self, beat: Heartbeat) -> Any:
        self.announced += beat.kind is MemberKind.ROUTER
        return await super().beat(beat)

    def put(self, payload: bytes) -> None:
        with contextlib.suppress(ValueError):
            self.plant(payload)


@contextlib.asynccontextmanager
async def router(registry: MemoryRegistry) -> AsyncIterator[tuple[str, str]]:
    config = RouterConfig(
        port=0, admin_port=0, drain_s=0.1, has_registry=True, first_token_s=1.0, stall_s=1.0, whole_s=1.0
    )
    async with served(config, registry) as urls:
        yield urls


async def until(count: Any, more: int, registry: Watched) -> None:
    """Wait until the router has done this `more` times more. A loop that has ended would not."""
    wanted = count() + more
    async with asyncio.timeout(10):
        while count() < wanted:
            registry._nudge()
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_router_outlives_any_value_in_its_registry(
    seed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.fleet.discovery.BEAT_EVERY_S", 0.02)
    caplog.set_level(logging.ERROR)
    registry = Watched()
    async with FakeEngine("good") as engine, aiohttp.ClientSession() as client, router(registry) as (endpoint, admin):
        good = Heartbeat(
            id=InstanceId("good"), agent="good", role=Role.BOTH, state=MemberState.READY, url=engine.url, credits=8,
            models=({"id": "fake"},),
        )  # fmt: skip
        for turn in range(3):
            for payload in cases(100 * seed + turn, url=engine.url):
                registry.put(payload)
            await registry.beat(good)
            await until(lambda: registry.reads, 2, registry)
            for method in ("POST", "DELETE"):
                async with client.request(method, f"{admin}/quarantine/good") as answer:
                    assert answer.status == 200, await answer.text()
            await until(lambda: registry.announced, 2, registry)
            for path in ("/ui/data", "/metrics", "/metrics?all=1", "/ready", "/quarantine", "/explain"):
                async with client.get(admin + path) as answer:
                    assert answer.status in {200, 503}, (path, await answer.text())
            async with client.get(f"{endpoint}/v1/models") as answer:
                assert answer.status == 200, await answer.text()
            async with client.post(f"{endpoint}/v1/completions", json=PROMPT) as answer:
                assert answer.status != 500, await answer.text()
    assert not [record.getMessage() for record in caplog.records], "no task may fail"


@pytest.mark.parametrize("seed", SEEDS)
def test_an_agent_outlives_any_announcement_of_routers(seed: int) -> None:
    machine, routers = AgentMachine(name=InstanceId("d"), rules=DecodeRules(), role=Role.DECODE), Membership()
    for turn in range(5):
        now = float(turn)
        heard = [beat for payload in cases(1000 * seed + turn) if (beat := decode(payload)[0]) is not None]
        crowd = [_router(number) for number in range(1500)] if turn == 3 else []
        routers.fold([beat for beat in heard if beat.kind is MemberKind.ROUTER] + crowd, now)
        said = (concerning(each.beat, "d", Role.DECODE, ["fake"]) for each in list(routers.snapshot())[:ROUTERS_MAX])
        machine.handle(RoutersHeard(tuple(said)), now)
        machine.handle(Tick(), now)
        grants = machine.grants((1, turn + 1))
        assert encode(Heartbeat(id=InstanceId("d"), agent="a", url="http://127.0.0.1:9", grants=grants))


def _router(number: int) -> Heartbeat:
    return Heartbeat(
        id=InstanceId(f"{number:04}{'x' * 120}"), agent="a", kind=MemberKind.ROUTER, url="http://127.0.0.1:9",
        legs={"d": (number, 1, 1)},
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    started = RedisServer(tmp_path_factory.mktemp("fuzz"), standin=True)
    started.start()
    yield started
    started.kill()


@pytest.mark.parametrize("seed", SEEDS)
async def test_no_value_in_redis_raises_anything_but_registry_down(seed: int, server: RedisServer) -> None:
    chance, cluster = random.Random(seed), f"fuzz{seed}"
    settings: dict[str, Any] = {"cluster": cluster, "password_file": server.command.password_file, "timeout_s": 10.0}
    async with contextlib.AsyncExitStack() as closing:
        holder, other = (RedisRegistry.open(server.url, **settings) for _ in range(2))
        closing.push_async_callback(holder.close)
        closing.push_async_callback(other.close)
        await _use(holder, other, cluster, chance)


async def _use(holder: RedisRegistry, other: RedisRegistry, cluster: str, chance: random.Random) -> None:
    membership = Membership()
    mine = Heartbeat(id=InstanceId("p"), agent="mine", url="http://127.0.0.1:9")
    await holder.beat(mine)
    for turn in range(4):
        await spoil(other, cluster, chance)
        authors = [Author(name, "a", epoch) for name in NAMES for epoch in (1, 2)]
        new = Heartbeat(id=InstanceId("d"), agent="new", url="http://127.0.0.1:9")
        calls = (
            other.read, partial(other.read, MemberKind.ROUTER), partial(holder.beat, mine), partial(other.claim, new),
            partial(other.posted, authors, "p"), partial(other.keep, authors[0]), partial(other.leave, "x", "new"),
        )  # fmt: skip
        for call in calls:
            try:
                found = await call()
            except RegistryDown:
                continue
            if isinstance(found, tuple) and found and isinstance(found[0], Heartbeat):
                membership.fold(found, float(turn))
        for name in NAMES:
            with contextlib.suppress(RegistryDown):
                epoch = await other.next_epoch(name)
                assert encode(Heartbeat(id=InstanceId(name), agent="a", url="http://127.0.0.1:9", epoch=epoch))


def test_what_decodes_encodes_again() -> None:
    """A heartbeat that a reader accepts can be encoded again. At least a fifth of the made-up ones are accepted;
    otherwise the test would test nothing.
    """
    found = [decode(payload)[0] for seed in range(20) for payload in cases(seed)]
    believed = [beat for beat in found if beat is not None]
    assert len(believed) > len(found) / 5
    for beat in believed:
        encode(beat)
