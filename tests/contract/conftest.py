"""A router in front of fake engines, on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from types import MappingProxyType
from typing import Any

import aiohttp
import pytest
from support.fake_engine import FakeEngine
from support.fleet import Fleet, Starter
from support.hands_over import hands_over
from support.served import served

from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from router.api.config import RouterConfig


@pytest.fixture(scope="session", autouse=True)
def real_server_left_clean(pytestconfig: pytest.Config) -> Iterator[None]:
    """With --kubeconfig: after the last test, delete what the operator's scenarios made on that API server."""
    yield
    if kubeconfig := pytestconfig.getoption("kubeconfig", ""):
        from support.k8s_stage import swept  # the client is an optional extra

        asyncio.run(swept(kubeconfig))


@pytest.fixture
async def start() -> AsyncIterator[Starter]:
    """`await start(prefill=1, decode=1, **router settings)` gives a fleet, once its last engine is up for the router.

    `prepare` may change the engines before the router sees them; `reserved` gives the tenants of an instance."""
    async with AsyncExitStack() as stack:

        async def starter(
            *,
            prefill: int = 1,
            decode: int = 1,
            both: int = 0,
            pins: bool = False,
            reserved: Mapping[str, frozenset[str]] = MappingProxyType({}),
            prepare: Callable[[dict[str, FakeEngine]], None] | None = None,
            **settings: Any,
        ) -> Fleet:
            engines: dict[str, FakeEngine] = {}
            instances = []
            for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.BOTH, both)):
                for number in range(count):
                    engine = await stack.enter_async_context(FakeEngine(f"{role.value}-{number}"))
                    engine.peers = engines
                    engines[engine.name] = engine
                    tenants = reserved.get(engine.name, frozenset())
                    instances.append(
                        Instance(id=InstanceId(engine.name), role=role, url=engine.url, pins=pins, tenants=tenants)
                    )
            if prepare is not None:
                prepare(engines)
            config = RouterConfig(instances=tuple(instances), port=0, admin_port=0, drain_s=1.0, **hands_over(settings))
            stop = asyncio.Event()
            endpoint, admin = await stack.enter_async_context(served(config, stop=stop))
            client = await stack.enter_async_context(aiohttp.ClientSession())
            fleet = Fleet(endpoint, admin, engines, client, stop)
            async with asyncio.timeout(5):
                while await _last_state(fleet) != "up":
                    await asyncio.sleep(0.01)
            return fleet

        yield starter


async def _last_state(fleet: Fleet) -> str:
    """State of the last engine in the configuration. The admin side answers, because it uses no TLS."""
    async with fleet.client.get(fleet.admin + "/ready") as response:
        state: str = (await response.json())["instances"][-1]["state"]
    return state
