"""Tenants' shares at a router that is one of several: those that it announces, and those that it uses itself."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from cluster.registry.memory import MemoryRegistry
from cluster.spec import SloClass, Tenant
from router.api.config import RouterConfig
from router.api.server import Router
from router.core.values import Reported, Wanted
from router.scheduler.placements import SchedulingContext

ONE = Instance(id=InstanceId("one"), role=Role.BOTH, url="http://127.0.0.1:1", epoch=1)


def router(**settings: Any) -> Router:
    config = RouterConfig(has_registry=True, classes={"fast": SloClass(ttft_ms=500)}, **settings)
    return Router(config, MemoryRegistry(clock=time.monotonic))


def reported() -> tuple[Reported, ...]:
    return (Reported(instance=ONE, state="ready", accepting=True, credits=4, load=Load(), models=({"id": "m"},)),)


async def told(here: Router) -> None:
    """Tell the router of the fleet, as the registry's reader does."""
    try:
        here._fleet_told(reported(), 2)
    finally:
        for _, probe in here.probing.tasks.values():
            probe.cancel()
        await asyncio.sleep(0)


async def test_local_shares_follow_the_registry_and_announced_shares_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = {"acme": lambda: ("x",), "other": lambda: ("y",)}
    here = router(tenants={"acme": Tenant(share=3), "other": Tenant()}, tenant_keys=keys)
    assert (here.parts.scheduler.shares, here.parts.scheduler.local_shares) == ({"acme": 3.0, "other": 1.0}, {})
    assert here.watch is not None
    monkeypatch.setattr(here.watch, "local_shares", lambda: {"acme": 1.5})
    here.probing.prober = Prober()  # type: ignore[assignment]
    await told(here)
    assert here.parts.scheduler.local_shares == {"acme": 1.5}
    assert here.parts.scheduler.shares == {"acme": 3.0, "other": 1.0}
    context = SchedulingContext(Wanted(model="m", hand_over=False, tenant="acme"))
    here.parts.scheduler.line.enter(context, context.wanted)
    demand = here.watch.announcement("http://127.0.0.1:1", "http://127.0.0.1:2").demand
    assert [each.tenants for each in demand] == [{"acme": (1, 3.0)}]


async def test_without_tenants_there_is_nothing_to_divide() -> None:
    here = router()
    here.probing.prober = Prober()  # type: ignore[assignment]
    await told(here)
    assert here.parts.scheduler.shares == here.parts.scheduler.local_shares == {}


class Prober:
    """A prober that sends no request."""

    async def watch(self, instance: Instance) -> None:
        await asyncio.Event().wait()
