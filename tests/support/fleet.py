"""A running router with its fake engines and an HTTP client, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from support.fake_engine import FakeEngine


@dataclass
class Fleet:
    """A running router, its fake engines and an HTTP client."""

    endpoint: str
    admin: str
    engines: dict[str, FakeEngine]
    client: aiohttp.ClientSession
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set this event to end the router, as SIGTERM does."""

    async def post(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.client.post(self.endpoint + path, **kwargs) as response:
            if response.content_type == "application/json":
                return response.status, await response.json()
            return response.status, await response.text()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(self.endpoint + path) as response:
            return response.status, await (
                response.json() if response.content_type == "application/json" else response.text()
            )

    @property
    def held(self) -> int:
        return sum(len(engine.holds) for engine in self.engines.values())


async def eventually(condition: Callable[[], bool], what: str, within_s: float = 5.0) -> None:
    """Wait for a condition that other tasks make true. `what` describes it."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
    assert condition(), what


Starter = Callable[..., Awaitable[Fleet]]
