"""A registry, engines announced in it, and a router that learns of the engines from this registry alone."""

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
    """A registry that a test can make unreachable (`deaf`) and reachable again."""

    deaf = False
    failed = 0
    """Reads that failed because the registry was unreachable."""

    async def read(self, *args: Any) -> tuple[Heartbeat, ...]:
        if self.deaf:
            self.failed += 1
            raise RegistryDown("registry at redis://test: cannot be reached")
        return await super().read(*args)


@dataclass
class Cast:
    """A registry, the engines announced in it, and a router that learns of the engines from this registry alone."""

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
        """Start an engine, unless it runs already, and write its agent's heartbeat."""
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
        """Wait until `/ready` lists exactly these instances in these states; `_` in a name stands for `-`."""
        assert self.fleet is not None
        async with asyncio.timeout(5):
            while True:
                async with self.fleet.client.get(f"{self.fleet.admin}/ready") as answer:
                    told = (await answer.json())["instances"]
                seen = {each["id"].replace("-", "_"): each["state"] for each in told}
                if seen == states:
                    return
                await asyncio.sleep(0.01)
