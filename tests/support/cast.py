"""A registry, engines announced in it, and a router that knows them from nowhere else."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from support.fake_engine import FakeEngine
from support.fleet import Fleet
from support.hands_over import hands_over
from support.served import served

from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.registry.membership import Heartbeat, MemberState
from cluster.registry.memory import MemoryRegistry
from cluster.registry.registry import RegistryDown
from router.api.config import RouterConfig


class Breakable(MemoryRegistry):
    """Goes away and comes back at a test's word."""

    deaf = False
    failed = 0
    """Readings while it was away."""

    async def read(self, *args: Any) -> tuple[Heartbeat, ...]:
        if self.deaf:
            self.failed += 1
            raise RegistryDown("registry at redis://test: cannot be reached")
        return await super().read(*args)


@dataclass
class Cast:
    """A registry, the engines announced in it, and a router that knows them from nowhere else."""

    registry: Breakable
    stack: AsyncExitStack
    engines: dict[str, FakeEngine] = field(default_factory=dict)
    seq: int = 0
    fleet: Fleet | None = None

    async def join(
        self,
        name: str,
        role: Role,
        *,
        state: MemberState = MemberState.READY,
        epoch: int = 1,
        places: int = 8,
        **more: Any,
    ) -> None:
        """Start an engine (or keep it) and say what its agent would say."""
        if name not in self.engines:
            engine = await self.stack.enter_async_context(FakeEngine(name))
            engine.peers = self.engines
            self.engines[name] = engine
        self.seq += 1
        beat = Heartbeat(
            id=InstanceId(name), agent=f"agent-{name}", epoch=epoch, seq=self.seq, role=role, state=state,
            credits=places, url=self.engines[name].url, **{"models": ({"id": "fake"},), **more},
        )  # fmt: skip
        await self.registry.beat(beat)

    async def serve(self, **settings: Any) -> Fleet:
        config = RouterConfig(port=0, admin_port=0, drain_s=1.0, has_registry=True, **hands_over(settings))
        client = await self.stack.enter_async_context(aiohttp.ClientSession())
        self.fleet = Fleet(*await self.stack.enter_async_context(served(config, self.registry)), self.engines, client)
        return self.fleet

    async def router_sees(self, **states: str) -> None:
        """Wait until `/ready` tells these states."""
        assert self.fleet is not None
        async with asyncio.timeout(5):
            while True:
                async with self.fleet.client.get(f"{self.fleet.admin}/ready") as answer:
                    told = (await answer.json())["instances"]
                seen = {each["id"].replace("-", "_"): each["state"] for each in told}
                if seen == states:
                    return
                await asyncio.sleep(0.01)
