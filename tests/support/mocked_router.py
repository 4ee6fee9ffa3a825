"""A router with a test's settings in front of mock engines, in the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from support.hands_over import hands_over
from support.served import served

from cluster.ids import InstanceId
from cluster.instance import Instance
from engine.mock.fleet import MockFleet
from engine.mock.settings import MockSettings
from router.api.config import RouterConfig


@dataclass
class MockedRouter:
    """A running router, its mocks and an HTTP client."""

    endpoint: str
    admin: str
    mocks: MockFleet
    client: aiohttp.ClientSession

    async def ask(
        self, body: dict[str, Any], path: str = "/v1/completions", **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """Send a request. Returns the status, the answer (a stream as text) and the headers."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.post(self.endpoint + path, json=body, headers=named) as response:
            whole = response.content_type == "application/json"
            return response.status, await (response.json() if whole else response.text()), dict(response.headers)

    async def explain(self, request_id: str) -> Any:
        async with self.client.get(f"{self.admin}/explain/{request_id}") as response:
            return await response.json()

    async def metrics(self) -> dict[str, float]:
        """The router's metrics, by name with labels."""
        async with self.client.get(f"{self.admin}/metrics") as response:
            lines = (await response.text()).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


@asynccontextmanager
async def mocked_router(
    settings: Sequence[MockSettings],
    *,
    pins: bool = False,
    early: bool = False,
    dtype: str = "",
    up: bool = True,
    **router: Any,
) -> AsyncIterator[MockedRouter]:
    """A router that has seen every mock up and reports that it is ready. `up` False: do not wait for that. `dtype`: the
    number format that the mocks' agents would announce.
    """
    async with MockFleet(list(settings)) as mocks, aiohttp.ClientSession() as client:
        instances = tuple(
            Instance(id=InstanceId(name), role=each.settings.role, url=each.url, pins=pins, early=early, dtype=dtype)
            for name, each in mocks.instances.items()
        )
        config = RouterConfig(instances=instances, port=0, admin_port=0, drain_s=1.0, **hands_over(router))
        async with served(config) as (endpoint, admin):
            async with asyncio.timeout(5):
                while up and not await _all_up(client, admin):
                    await asyncio.sleep(0.01)
            yield MockedRouter(endpoint, admin, mocks, client)


async def _all_up(client: aiohttp.ClientSession, admin: str) -> bool:
    async with client.get(f"{admin}/ready") as response:
        told = await response.json()
        return told["ready"] and {each["state"] for each in told["instances"]} == {"up"}
