"""The head of a Ray cluster: a controller that is a client of the head (`ray://`), and what is left after its death."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from uuid import uuid4

import pytest
from support.cluster import within
from support.ray_fleet import MODEL, RayFleet, engines_of
from support.ray_nodes import RayNodes
from support.streams import Streams

pytestmark = [pytest.mark.live, pytest.mark.timed, pytest.mark.long, pytest.mark.timeout(600)]

NAMES = tuple(f"{role}-{number}" for role in ("prefill", "decode") for number in range(3))
RECONNECT_S = 20
"""How many seconds nodes wait for a lost head; Ray's default is a minute."""


def free_port() -> int:
    with socket.socket() as at:
        at.bind(("127.0.0.2", 0))
        return int(at.getsockname()[1])


@pytest.fixture
def nodes() -> Iterator[tuple[RayNodes, str]]:
    """A cluster, and its address for clients."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("fleets on Ray: Ray (pip install 'baton-serve[ray]')")
    port = free_port()
    found = RayNodes(port, RAY_gcs_rpc_server_reconnect_timeout_s=str(RECONNECT_S))
    yield found, f"ray://127.0.0.2:{port}"
    found.close()


@pytest.fixture
async def fleet(nodes: tuple[RayNodes, str], request: pytest.FixtureRequest) -> AsyncIterator[RayFleet]:
    """A fleet of two instances. Its controller is a Ray client where the test's name has "client"."""
    on = nodes[1] if "client" in request.node.name else "ray"
    found = await asyncio.to_thread(RayFleet, nodes[0].address, f"t{uuid4().hex[:6]}", on=on, looks=12)
    try:
        await asyncio.to_thread(found.wait_for, 2, 120)
        yield found
    finally:
        await asyncio.to_thread(found.close)


async def test_a_client_goes_from_two_engines_to_six_and_back(nodes: tuple[RayNodes, str], fleet: RayFleet) -> None:
    load = Streams(fleet.endpoint, MODEL, tokens=60, every_s=0.25)
    running = asyncio.ensure_future(load.run())
    wanted = {f"baton:{fleet.cluster}:{name.partition('-')[0]}:{name}" for name in NAMES}
    first = {name for name in wanted if name.endswith("-0")}
    await asyncio.to_thread(nodes[0].wait_for_groups, wanted, 60)
    await asyncio.to_thread(nodes[0].wait_for_groups, first, 90)
    load.over.set()
    await running
    assert load.faults == []
    assert load.served == load.sent > 20


async def test_when_the_head_is_killed_engines_serve_on_until_their_nodes_end_and_none_is_left(
    nodes: tuple[RayNodes, str], fleet: RayFleet
) -> None:
    """Without an external store Ray ends its nodes some time after their head."""
    engines = lambda: engines_of(fleet.cluster, *NAMES)  # noqa: E731 - said once for three uses
    assert engines()
    nodes[0].ask("kill_head")
    load = Streams(fleet.endpoint, MODEL, tokens=20, every_s=0.25)
    running = asyncio.ensure_future(load.run())
    await asyncio.sleep(RECONNECT_S / 2)  # the load runs for this long
    load.over.set()
    await running
    assert load.faults == []
    assert load.served == load.sent > 20
    fleet.controller.send_signal(signal.SIGKILL)
    fleet.controller.wait()
    await asyncio.to_thread(within, 3 * RECONNECT_S, lambda: not engines(), engines)
