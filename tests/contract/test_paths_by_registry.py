"""The router asks engines for their paths also where a registry's heartbeats already say that they are ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from support.fake_engine import FakeEngine
from support.served import served

from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.registry.membership import Heartbeat, MemberState
from cluster.registry.memory import MemoryRegistry
from router.api.config import RouterConfig

GENERATES = ["/v1/completions", "/v1/chat/completions", "/tokenize"]


@pytest.fixture
async def endpoint() -> AsyncIterator[tuple[str, aiohttp.ClientSession, FakeEngine]]:
    """A router that starts when its engine is running and the engine's heartbeat already says READY."""
    async with AsyncExitStack() as stack:
        registry = MemoryRegistry(time.monotonic)
        engine = FakeEngine("b")
        engine.paths = GENERATES
        await stack.enter_async_context(engine)
        await registry.beat(
            Heartbeat(
                id=InstanceId("b"), agent="agent-b", epoch=1, seq=1, role=Role.BOTH, state=MemberState.READY, credits=8,
                url=engine.url, models=({"id": "fake"},),
            )
        )  # fmt: skip
        config = RouterConfig(port=0, admin_port=0, drain_s=1.0, has_registry=True)
        endpoint, _ = await stack.enter_async_context(served(config, registry))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield endpoint, client, engine


async def test_a_path_that_no_engine_has_is_a_404(endpoint: tuple[str, aiohttp.ClientSession, FakeEngine]) -> None:
    url, client, _ = endpoint
    told: Any = None
    async with asyncio.timeout(10):
        while "has `/v1/embeddings`" not in str(told):  # until the router knows the paths, the engine answers
            async with client.post(f"{url}/v1/embeddings", json={"model": "fake", "input": "x"}) as answer:
                told = await answer.json()
            await asyncio.sleep(0.02)
    assert answer.status == 404
    assert "It needs a model that embeds." in told["error"]["message"]
