"""Baton's router in front of a chaos fleet: in this event loop, or as a process that a test can kill.

In this loop it gets its engines by URL or from a registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from support.chaos_fleet import ChaosFleet
from support.chaos_scenarios import LIMITS
from support.hands_over import ROUTER, hands_over
from support.redis_server import start
from support.served import served

from cluster.ids import InstanceId
from cluster.instance import Instance
from cluster.registry.membership import Heartbeat, MemberState
from cluster.registry.memory import MemoryRegistry
from cluster.registry.registry import Registry, RegistryDown
from engine.mock.instance import MockInstance as Mock
from router.api.config import RouterConfig

BEAT_S = 0.1
CREDITS = 6
"""Credits of each instance: fewer than there are clients, so that some requests wait in the flow-control queue."""

_LIMITS = ("first_token_s", "stall_s", "whole_s")


@asynccontextmanager
async def in_process(fleet: ChaosFleet, seed: int) -> AsyncIterator[str]:
    """A router in this event loop. Yields its endpoint; at the end, checks that no place is taken and no task is left.

    The seed decides the kind of fleet: engines by URL that pin the first token (the router sends P's token to the
    client before the hand-over), engines by URL that do not pin, or engines announced in a registry with credits. Early
    decode legs: with every second seed where engines are given by URL, always where they are announced.
    """
    if seed % 3 == 2:
        registry = MemoryRegistry(clock=time.monotonic)
        async with announced(fleet, registry, registry, seed) as endpoint:
            yield endpoint
        return
    instances = tuple(
        Instance(
            id=InstanceId(name),
            role=mock.settings.role,
            url=fleet.url(name),
            pins=seed % 3 == 0,
            early=seed % 2 == 0,
        )
        for name, mock in fleet.mocks.instances.items()
    )
    async with _serving(_config(instances=instances), None, len(fleet.mocks.instances), seed) as endpoint:
        yield endpoint


@asynccontextmanager
async def announced(fleet: ChaosFleet, agents: Registry, own: Registry, seed: int) -> AsyncIterator[str]:
    """A router that knows its fleet from a registry alone, which it reads through `own`. Heartbeats of the instances
    are written through `agents`.
    """
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as beating:
        for mock in fleet.mocks.instances.values():
            beating.create_task(_beat(fleet, mock, agents, stop))
        try:
            async with _serving(_config(has_registry=True), own, len(fleet.mocks.instances), seed) as endpoint:
                yield endpoint
        finally:
            stop.set()


async def _beat(fleet: ChaosFleet, mock: Mock, registry: Registry, stop: asyncio.Event) -> None:
    """Write heartbeats as an agent does: they tell whether the engine runs, not whether a router can reach it."""
    name, seq = mock.settings.name, 0
    while not stop.is_set():
        seq += 1
        beat = Heartbeat(
            id=InstanceId(name),
            agent="agent-" + name.replace("@", "-"),
            epoch=mock.epoch,
            seq=seq,
            role=mock.settings.role,
            state=MemberState.READY if mock.ready.is_set() else MemberState.RESTARTING,
            credits=CREDITS,
            url=fleet.url(name),
            models=({"id": "fake"},),
            pins=True,
            early=True,
        )
        with contextlib.suppress(RegistryDown):  # an agent outlives this, and goes on with its heartbeats
            await registry.beat(beat)
        try:
            async with asyncio.timeout(BEAT_S):
                await stop.wait()
        except TimeoutError:
            continue


def _config(**more: Any) -> RouterConfig:
    limits = {name: getattr(LIMITS, name) for name in _LIMITS}
    return RouterConfig(port=0, admin_port=0, drain_s=0.5, **limits, **hands_over(more))


@asynccontextmanager
async def _serving(config: RouterConfig, registry: Registry | None, count: int, seed: int) -> AsyncIterator[str]:
    async with served(config, registry) as (endpoint, _), aiohttp.ClientSession() as client:
        await _all_up(client, endpoint, count)
        yield endpoint
        await _no_place_taken(client, endpoint, seed)


async def _instances(client: aiohttp.ClientSession, endpoint: str) -> list[dict[str, object]]:
    async with client.get(endpoint + "/ready") as response:
        listed: list[dict[str, object]] = (await response.json())["instances"]
        return listed


async def _all_up(client: aiohttp.ClientSession, endpoint: str, count: int) -> None:
    async with asyncio.timeout(10):
        while [each["state"] for each in await _instances(client, endpoint)] != ["up"] * count:
            await asyncio.sleep(0.005)


async def _proven(client: aiohttp.ClientSession, endpoint: str) -> None:
    """Wait until at least one pair of the fleet has passed its proof: from then on the router hands over."""
    async with asyncio.timeout(10):
        while True:
            async with client.get(f"{endpoint}/metrics") as answer:
                text = await answer.text()
            if 'baton_pair_proofs_total{result="passed"}' in text:
                return
            await asyncio.sleep(0.005)


async def _no_place_taken(client: aiohttp.ClientSession, endpoint: str, seed: int) -> None:
    """Fail unless all places are given back and all background tasks of this seed's requests end in time."""
    taken: object = None
    try:
        async with asyncio.timeout(LIMITS.released_s + LIMITS.lease_s + LIMITS.grace_s):
            while taken := _left(await _instances(client, endpoint), seed):
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"seed {seed}: places that are never given back, or tasks that never end: {taken}")


def _left(listed: list[dict[str, object]], seed: int) -> list[object]:
    working = [task.get_name() for task in asyncio.all_tasks() if f"-c{seed}-" in task.get_name()]
    return [f"{each['id']}: {each['inflight']}" for each in listed if each["inflight"]] + working


@asynccontextmanager
async def as_process(fleet: ChaosFleet, killed: list[subprocess.Popen[bytes]]) -> AsyncIterator[str]:
    """A process `baton router` with these engines. The process is added to `killed`, so that a strike can kill it."""
    words = [*ROUTER]
    for name, mock in fleet.mocks.instances.items():
        words += [f"--{mock.settings.role.value}-url", f"{name}={fleet.url(name)}"]
    for name in _LIMITS:
        words += [f"--{name.replace('_', '-')}", str(getattr(LIMITS, name))]
    process = start(tuple(words), stderr=subprocess.DEVNULL)
    killed.append(process)
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        endpoint = line.decode().split()[-1]
        async with aiohttp.ClientSession() as client:
            await _all_up(client, endpoint, len(fleet.mocks.instances))
            await _proven(client, endpoint)
        yield endpoint
    finally:
        process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()
