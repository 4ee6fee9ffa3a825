"""A hostile holder of Redis' password writes arbitrary values while a router and an agent read them: heartbeats of
instances and routers with credits, quarantine and demand, locks, epochs, introductions. No program ends or hangs, the
router's event loop is not blocked for long, and clients of an honest instance are served.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from support.fuzzing import (
    Beside,
    Case,
    Fuzzing,
    get,
    judged,
    metric,
    post,
    router_beside,
    told,
    watched,
)
from support.hostile_engine import HostileEngine
from support.hostile_registry import NAMES, spoil
from support.redis_server import RedisServer

from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.registry.membership import Heartbeat, MemberKind, Membership, MemberState
from cluster.registry.redis import RedisRegistry
from cluster.registry.registry import Author, RegistryDown
from decode.rules import DecodeRules
from engine.agent.announcer import ROUTERS_MAX
from engine.agent.grants import concerning
from engine.agent.machine import AgentMachine, RoutersHeard, Tick

FIXED = 12
PAYLOAD_BYTES = 1 << 20
"""Size against which memory growth is judged: the test writes no larger value to one key."""
GROWN_BYTES_MAX = 256 << 20
PAGES = ("/ui/data", "/metrics?all=1", "/ready", "/quarantine", "/explain")
WITHIN_S = 20.0


@dataclass
class World:
    """A registry with hostile contents, an honest engine that it names, and a router that reads it."""

    engine: HostileEngine
    router: Beside
    hand: RedisRegistry
    """The honest agent's registry client. The hostile writer uses its connection, too."""
    cluster: str
    seq: int = 0

    async def honest(self) -> None:
        """Send the honest engine's heartbeat. Redis may refuse it for a moment, if its key holds a hostile value."""
        self.seq += 1
        beat = Heartbeat(
            id=InstanceId("good"), agent="good", role=Role.BOTH, state=MemberState.READY, url=self.engine.url,
            credits=64, seq=self.seq, models=({"id": "fake"},),
        )  # fmt: skip
        with suppress(RegistryDown):
            await self.hand.beat(beat)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    started = RedisServer(tmp_path_factory.mktemp("fuzz"), standin=True)
    started.start()
    yield started
    started.kill()


@asynccontextmanager
async def opened(server: RedisServer, cluster: str) -> AsyncIterator[World]:
    settings: dict[str, Any] = {"cluster": cluster, "password_file": server.command.password_file, "timeout_s": 10.0}
    make = partial(RedisRegistry.open, server.url, **settings)
    limits = {"first_token_s": 5.0, "stall_s": 2.0, "whole_s": 2.0}
    async with AsyncExitStack() as stack:
        engine = HostileEngine("good", Role.BOTH)
        await stack.enter_async_context(engine.open())
        hand = make()
        stack.push_async_callback(hand.close)
        world = World(engine, Beside("", ""), hand, cluster)
        await world.honest()
        world.router = await stack.enter_async_context(router_beside((), registry=make, **limits))
        yield world


async def _one(world: World, case: Case) -> None:
    chance = random.Random(case.seed)
    with suppress(RegistryDown):
        await world.hand.read()
    await spoil(world.hand, world.cluster, chance, url=world.engine.url)
    await world.honest()
    for method in ("POST", "DELETE"):
        raw = f"{method} /quarantine/good HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        answer = await told(world.router.admin, raw.encode(), within_s=WITHIN_S)
        assert answer.status in {200, 404, 409}, answer
    for page in PAGES:
        answer = await told(world.router.admin, get(page), within_s=WITHIN_S)
        assert answer.whole and answer.status in {200, 503}, (page, answer)
    body = json.dumps({"model": "fake", "prompt": "hello", "max_tokens": 5}).encode()
    answer = await told(world.router.endpoint, post("/v1/completions", body), within_s=WITHIN_S)
    assert answer.whole and answer.status != 500, answer
    assert not world.router.bugs, world.router.bugs[0]


async def _served(world: World) -> None:
    """Delete everything in Redis, then check that the router finds the honest instance again and serves."""
    body = json.dumps({"model": "fake", "prompt": "hello", "max_tokens": 5}).encode()
    await world.hand._redis.flushall()
    async with asyncio.timeout(WITHIN_S):
        while True:
            await world.honest()
            answer = await told(world.router.endpoint, post("/v1/completions", body), within_s=WITHIN_S)
            if answer.status == 200 and b'"choices"' in answer.body:
                return
            await asyncio.sleep(0.1)


async def test_hostile_registry(fuzz: Fuzzing, server: RedisServer) -> None:
    gc.collect()
    gc.freeze()
    try:
        async with opened(server, "hostile") as world, watched(world.router) as watch:
            for number, case in enumerate(fuzz.cases(fixed=FIXED)):
                with case:
                    await judged(world.router, lambda case=case: _one(world, case), PAYLOAD_BYTES)
                    if number % 10 == 9:
                        await _served(world)
            assert await metric(world.router, "baton_open_requests") == 0
        assert watch.grown_bytes < GROWN_BYTES_MAX
    finally:
        gc.unfreeze()


async def test_hostile_words_to_an_agent(fuzz: Fuzzing, server: RedisServer) -> None:
    """What agents read: other agents' heartbeats, locks on their names, routers' legs and demand, introductions."""
    settings: dict[str, Any] = {"cluster": "agents", "password_file": server.command.password_file, "timeout_s": 10.0}
    async with AsyncExitStack() as stack:
        mine, other = (RedisRegistry.open(server.url, **settings) for _ in range(2))
        stack.push_async_callback(mine.close)
        stack.push_async_callback(other.close)
        machine, routers = AgentMachine(name=InstanceId("d"), rules=DecodeRules(), role=Role.DECODE), Membership()
        for turn, case in enumerate(fuzz.cases(fixed=FIXED)):
            with case:
                await spoil(other, "agents", case.chance, url="http://127.0.0.1:9")
                await _agents_turn(mine, machine, routers, case, turn)


async def _agents_turn(mine: RedisRegistry, machine: AgentMachine, routers: Membership, case: Case, turn: int) -> None:
    beat = Heartbeat(id=InstanceId("d"), agent="mine", url="http://127.0.0.1:9", seq=turn)
    authors = [Author(name, "a", epoch) for name in NAMES for epoch in (1, 2)]
    calls = (partial(mine.claim, beat), partial(mine.beat, beat), partial(mine.posted, authors, "d"), mine.read)
    async with asyncio.timeout(WITHIN_S):
        for call in calls:
            with suppress(RegistryDown):
                await call()
        with suppress(RegistryDown):
            assert 0 <= await mine.next_epoch("d") < 1 << 53
        with suppress(RegistryDown):
            routers.fold(await mine.read(MemberKind.ROUTER), float(turn))
    said = (concerning(each.beat, "d", Role.DECODE, ["fake"]) for each in list(routers.snapshot())[:ROUTERS_MAX])
    machine.handle(RoutersHeard(tuple(said)), float(turn))
    machine.handle(Tick(), float(turn))
    assert all(grant >= 0 for grant in machine.grants((1, turn + 1)).values()), case.seed
