"""The same with mock engines, which take time, fail and die: every choice of the live router comes out again."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from support.mock import mock_settings

from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from engine.mock.fleet import MockFleet
from router.app import serve
from router.config import RouterConfig
from router.decisions import Decided, entry_of
from sim.replay import replay

ROLES = {"prefill-0": Role.PREFILL, "prefill-1": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}


async def test_a_run_on_mocks_replays_to_the_same_choices() -> None:
    lines: list[bytes] = []
    async with AsyncExitStack() as stack:
        mocks = await stack.enter_async_context(MockFleet([mock_settings(name, role) for name, role in ROLES.items()]))
        instances = tuple(
            Instance(id=InstanceId(name), role=ROLES[name], url=each.url) for name, each in mocks.instances.items()
        )
        config = RouterConfig(instances=instances, port=0, admin_port=0, drain_s=1.0, decision_log=lines.append)
        ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        serving = asyncio.ensure_future(serve(config, lambda *urls: ready.set_result(urls), stop))
        endpoint, _ = await ready
        client = await stack.enter_async_context(aiohttp.ClientSession())
        while await _up(client, endpoint) < len(ROLES):
            await asyncio.sleep(0.01)
        await _load(client, endpoint, range(30))
        for name, fault in (("prefill-0", "refuse"), ("decode-1", "die")):
            url = f"{mocks.instances['prefill-1'].url}/mock/{name}/faults"
            async with client.post(url, json={"fault": fault}) as response:
                assert response.status == 200, await response.text()
        await _load(client, endpoint, range(30, 60))
        stop.set()
        await serving
    entries = [entry_of(line) for line in lines]
    replayed = replay(entries)
    assert replayed.choices > 60, "some were tried again"
    assert replayed.differences == ()
    chosen = [entry.chosen for entry in entries if isinstance(entry, Decided)]
    assert {each.prefill for each in chosen} >= {"prefill-0", "prefill-1"}
    assert {each.decode for each in chosen} >= {"decode-0", "decode-1"}


async def _up(client: aiohttp.ClientSession, endpoint: str) -> int:
    async with client.get(endpoint + "/ready") as response:
        return sum(each["state"] == "up" for each in (await response.json())["instances"])


async def _load(client: aiohttp.ClientSession, endpoint: str, numbers: range) -> None:
    async def ask(number: int) -> None:
        body: dict[str, Any] = {
            "model": "fake",
            "prompt": f"hello {number}",
            "max_tokens": 5,
            "stream": number % 2 == 0,
        }
        async with client.post(endpoint + "/v1/completions", json=body) as response:
            await response.read()

    async with asyncio.TaskGroup() as group:
        for number in numbers:
            group.create_task(ask(number))
