"""The simulator repeats a live router's decisions also with mock engines, which take time, fail and die."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from support.mock import mock_settings
from support.mocked_router import mocked_router
from support.served import served

from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from cluster.spec import SloClass, WhenMissed
from costs.step import StepCost
from engine.mock.fleet import MockFleet
from engine.mock.settings import SimpleCosts
from router.api.config import RouterConfig
from router.fleet.events import Cached, Came, Counted, Decided, PromptOver, Seated, entry_of
from router.predict.step_model import Make
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
        endpoint, _ = await stack.enter_async_context(served(config))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        while await _up(client, endpoint) < len(ROLES):
            await asyncio.sleep(0.01)
        await _load(client, endpoint, range(30))
        for name, fault in (("prefill-0", "refuse"), ("decode-1", "die")):
            url = f"{mocks.instances['prefill-1'].url}/mock/{name}/faults"
            async with client.post(url, json={"fault": fault}) as response:
                assert response.status == 200, await response.text()
        await _load(client, endpoint, range(30, 60))
    entries = [entry_of(line) for line in b"".join(lines).splitlines()]
    replayed = replay(entries)
    assert replayed.choices > 60, "some requests were tried again"
    assert replayed.differences == ()
    chosen = [entry.chosen for entry in entries if isinstance(entry, Decided)]
    assert {each.prefill for each in chosen} >= {"prefill-0", "prefill-1"}
    assert {each.decode for each in chosen} >= {"decode-0", "decode-1"}


STORY = "Once upon a time a small robot found a bright red lantern near the river. " * 20
STEP = StepCost(floor_ms=1.0, start_ms=1.0, token_ms=0.1, area_ms=0.0, decode_ms=1.0, context_ms=0.0, request_ms=0.0)
CLASSES = {
    "at once": SloClass(ttft_ms=5.0, when_missed=WhenMissed.SHED),
    "soon": SloClass(ttft_ms=150.0, tpot_ms=20.0),
    "later": SloClass(ttft_ms=60_000.0, tpot_ms=1000.0),
}


async def test_a_run_with_classes_on_mocks_replays_to_the_same_choices() -> None:
    """With classes: the workload policy, load in flight, step model, prefix cache, queue and saturation detector."""
    lines: list[bytes] = []
    costs = SimpleCosts(step_ms=1.0, prefill_ms_per_1k=100.0)
    mocks = [mock_settings(name, role, costs=costs, prefix_caching=True) for name, role in ROLES.items()]
    known = Make(prefill=STEP, decode=STEP, budget_tokens=2048)
    async with mocked_router(mocks, decision_log=lines.append, classes=CLASSES, makes=lambda _: known) as router:

        async def ask(number: int) -> int:
            body = {"model": "fake", "max_tokens": 1 + number % 7, "stream": number % 2 == 0}
            prompt = f"[{number % 4}] {STORY} {number}"
            more = {"stream_options": {"include_usage": True}} if body["stream"] else {}
            whole = {"n": 2} if number % 6 == 0 else more
            slo_class = ("later", "soon", "later", "soon", "at once")[number % 5]
            status, _, _ = await router.ask({**body, **whole, "prompt": prompt}, x_slo_class=slo_class)
            return status

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(number)) for number in range(40)]
        assert {each.result() for each in asked} == {200, 429}
        url = f"{router.mocks.instances['prefill-1'].url}/mock/prefill-0/faults"
        async with router.client.post(url, json={"fault": "refuse"}) as response:
            assert response.status == 200, await response.text()
        async with asyncio.TaskGroup() as group:
            for number in range(40, 60):
                group.create_task(ask(number))
    entries = [entry_of(line) for line in b"".join(lines).splitlines()]
    came = [entry for entry in entries if isinstance(entry, Came)]
    assert any(entry.called for entry in came), "some requests were called from the queue"
    assert any(entry.chosen is not None and entry.chosen.shed_s for entry in came)
    assert {type(entry) for entry in entries} >= {PromptOver, Counted, Cached}
    assert {entry.wanted.streamed for entry in entries if isinstance(entry, Seated)} == {True, False}
    replayed = replay(entries)
    assert replayed.choices > 60, "some requests were tried again"
    assert replayed.differences == ()


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
