"""Engines on a real Ray cluster: placed by GPU type, resized under load, and gone without a trace however they end."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from collections.abc import AsyncIterator, Iterator
from uuid import uuid4

import pytest
from support.cluster import within
from support.ray_fleet import MODEL, RayFleet, engines_of
from support.ray_nodes import RayNodes
from support.streams import Streams

pytestmark = [pytest.mark.live, pytest.mark.timed]

INSTALL = "Ray (pip install 'baton-serve[ray]')"
GONE_S = 10.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip(f"fleets on Ray: {INSTALL}")
    found = RayNodes()
    yield found
    found.close()


@pytest.fixture
async def fleet(nodes: RayNodes, request: pytest.FixtureRequest) -> AsyncIterator[RayFleet]:
    """A fleet of two instances. After the test none of its processes is left, and Ray has its resources back."""
    before = nodes.ask("free")
    looks = 60 if request.node.get_closest_marker("long") else 6
    found = await asyncio.to_thread(RayFleet, nodes.address, f"t{uuid4().hex[:6]}", looks=looks)
    try:
        await asyncio.to_thread(found.wait_for, 2)
        yield found
    finally:
        await asyncio.to_thread(found.close)
    if not found.lost_node:
        await asyncio.to_thread(within, GONE_S, lambda: nodes.ask("free") == before, lambda: nodes.ask("free"))
    assert nodes.ask("groups") == {}
    left = lambda: engines_of(found.cluster, *ALL)  # noqa: E731 - said once for two arguments
    await asyncio.to_thread(within, GONE_S, lambda: not left(), left)


def groups_of(fleet: RayFleet, *names: str) -> set[str]:
    return {f"baton:{fleet.cluster}:{name.partition('-')[0]}:{name}" for name in names}


FIRST = ("prefill-0", "decode-0")
ALL = tuple(f"{role}-{number}" for role in ("prefill", "decode") for number in range(3))


async def test_from_two_engines_to_six_and_back_on_three_nodes_of_two_types(nodes: RayNodes, fleet: RayFleet) -> None:
    load = Streams(fleet.endpoint, MODEL, tokens=60, every_s=0.25)
    running = asyncio.ensure_future(load.run())
    await asyncio.to_thread(nodes.wait_for_groups, groups_of(fleet, *ALL), 90)
    # Six engines on six GPUs, three of each type. Ray's view of free resources is behind its placement groups.
    await asyncio.to_thread(within, 10, lambda: nodes.ask("free")["GPU"] == 0, lambda: nodes.ask("free"))
    await asyncio.to_thread(nodes.wait_for_groups, groups_of(fleet, *FIRST), 90)
    load.over.set()
    await running
    assert load.faults == []
    assert load.served == load.sent > 20
    assert engines_of(fleet.cluster, *(name for name in ALL if name not in FIRST)) == []


async def with_another(nodes: RayNodes, fleet: RayFleet) -> tuple[Streams, asyncio.Future[None]]:
    """Wait for six instances under load, so that another one can take the place of each that ends."""
    load = Streams(fleet.endpoint, MODEL, tokens=60, every_s=0.25)
    running = asyncio.ensure_future(load.run())
    await asyncio.to_thread(nodes.wait_for_groups, groups_of(fleet, *ALL), 90)
    return load, running


@pytest.mark.long
@pytest.mark.parametrize("what", ["worker", "pid"])
async def test_a_killed_actor_or_keeper_leaves_no_engine_and_no_group(
    nodes: RayNodes, fleet: RayFleet, what: str
) -> None:
    load, running = await with_another(nodes, fleet)
    told = nodes.ask("actor", instance="decode-1", cluster=fleet.cluster)
    os.kill(told[what], signal.SIGKILL)
    name = next(iter(groups_of(fleet, "decode-1")))
    left = lambda: engines_of(fleet.cluster, "decode-1")  # noqa: E731 - said once for two arguments
    await asyncio.to_thread(within, GONE_S, lambda: not left(), left)
    await asyncio.to_thread(within, GONE_S, lambda: name not in nodes.ask("groups"), lambda: nodes.ask("groups"))
    load.over.set()
    await running
    assert load.faults == []


@pytest.mark.long
async def test_a_killed_driver_leaves_engines_serving_and_the_next_driver_goes_on(
    nodes: RayNodes, fleet: RayFleet
) -> None:
    load, running = await with_another(nodes, fleet)
    before = engines_of(fleet.cluster, *ALL)
    fleet.controller.kill()
    fleet.controller.wait()
    await asyncio.sleep(5)
    assert set(before) <= set(engines_of(fleet.cluster, *ALL)), "detached: engines live on without a driver"
    fleet.controller = await asyncio.to_thread(fleet.start_controller)
    await asyncio.to_thread(nodes.wait_for_groups, groups_of(fleet, *FIRST), 100)
    load.over.set()
    await running
    assert load.faults == []
    assert load.served == load.sent


@pytest.mark.long
async def test_a_killed_raylet_leaves_no_engine_and_no_group(nodes: RayNodes, fleet: RayFleet) -> None:
    """This must be the last test on this Ray cluster, because its node does not come back."""
    load, running = await with_another(nodes, fleet)
    nodes.ask("kill_raylet", gpu="L4")
    fleet.lost_node = True
    prefills = [name for name in ALL if name.startswith("prefill")]
    left = lambda: engines_of(fleet.cluster, *prefills)  # noqa: E731 - said once for two arguments
    await asyncio.to_thread(within, GONE_S, lambda: not left(), left)
    placed = groups_of(fleet, *prefills)

    def none_placed() -> bool:
        return not any(state == "CREATED" for name, state in nodes.ask("groups").items() if name in placed)

    await asyncio.to_thread(within, 30, none_placed, lambda: nodes.ask("groups"))
    load.over.set()
    await running
    assert load.faults == [], "decode instances serve requests aggregated"
