"""Every registry does the same: in memory, Redis' protocol spoken by the stand-in, and a real redis-server."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from support.redis_server import RedisServer

from cluster.registry import launch
from cluster.registry.membership import TTL_S, Heartbeat, State
from cluster.registry.memory import MemoryRegistry
from cluster.registry.redis import RedisRegistry
from cluster.registry.registry import Registry

SHORT_TTL_S = 0.3
SOON_S = 20.0
"""Longest wait for what must happen; on an idle machine all of it happens within a second."""


def beat(agent: str, *, seq: int = 0, name: str = "prefill-0", **more: Any) -> Heartbeat:
    fields: dict[str, Any] = {"url": "http://10.0.0.1:8100", "where": f"host-{agent}:7", "state": State.READY}
    return Heartbeat(id=name, agent=agent, seq=seq, **{**fields, **more})


class World:
    """One registry, and as many clients of it as a test wants."""

    server: RedisServer | None = None

    def __init__(self, ttl_s: float = TTL_S) -> None:
        self.ttl_s = ttl_s

    def open(self) -> Registry:
        """One more client."""
        raise NotImplementedError

    async def pass_time(self) -> None:
        """A moment, long enough for somebody else's turn."""
        await asyncio.sleep(0.01)

    def down(self) -> None:
        """Make it unreachable."""
        raise NotImplementedError

    def up_again(self) -> None:
        """Bring it back, without its data."""
        raise NotImplementedError


class MemoryWorld(World):
    def __init__(self, ttl_s: float = TTL_S) -> None:
        super().__init__(ttl_s)
        self.now = 0.0
        self.registry = MemoryRegistry(lambda: self.now, ttl_s)

    def open(self) -> Registry:
        return self.registry

    async def pass_time(self) -> None:
        self.now += 0.01
        await asyncio.sleep(0)

    def down(self) -> None:
        self.registry.down = True

    def up_again(self) -> None:
        self.registry.down = False
        self.registry.forget()


class RedisWorld(World):
    def __init__(self, server: RedisServer, stack: AsyncExitStack, cluster: str, ttl_s: float = TTL_S) -> None:
        super().__init__(ttl_s)
        self.server = server
        self._stack, self._cluster = stack, cluster

    def open(self, **more: Any) -> RedisRegistry:
        settings = {"cluster": self._cluster, "password_file": self.server.command.password_file, "ttl_s": self.ttl_s}
        registry = RedisRegistry.open(self.server.url, **{**settings, **more})
        self._stack.push_async_callback(registry.close)
        return registry

    def down(self) -> None:
        self.server.kill()

    def up_again(self) -> None:
        self.server.start()


@pytest.fixture(scope="module", params=["stand-in", "redis-server"])
def server(request, tmp_path_factory) -> Iterator[RedisServer]:
    """One server for the module; who kills it starts it again."""
    if request.param == "redis-server" and shutil.which("redis-server") is None:
        pytest.skip(f"a real Redis: {launch.INSTALL}")
    started = RedisServer(tmp_path_factory.mktemp("registry"), standin=request.param == "stand-in")
    started.start()
    yield started
    started.kill()


@pytest.fixture
async def redis_world(server, request) -> AsyncIterator[RedisWorld]:
    """A cluster of its own in that server."""
    async with AsyncExitStack() as stack:
        cluster = "".join(char if char.isalnum() else "-" for char in request.node.name)[:60]
        yield RedisWorld(
            server, stack, f"t{cluster}", getattr(request.node.get_closest_marker("ttl"), "args", [TTL_S])[0]
        )


@pytest.fixture(params=["memory", "stand-in", "redis-server"])
def world(request) -> World: ...
