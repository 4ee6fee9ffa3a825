"""The handoff guard serves a class aggregated while handing over loses, and tells operators so: on mocks."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from itertools import count

import pytest
from support.mock import mock_settings
from support.mocked_router import MockedRouter, mocked_router

from cluster.instance import Role
from cluster.spec import SloClass
from costs.step import StepCost
from engine.mock.settings import SimpleCosts
from router.fleet.events import entry_of
from router.predict.step_model import Make
from router.scheduler.scoring.handoff_guard import TRIES
from sim.replay import replay

STEP = StepCost(floor_ms=1.0, start_ms=1.0, token_ms=0.1, area_ms=0.0, decode_ms=1.0, context_ms=0.0, request_ms=0.0)
TOLD = Make(prefill=STEP, decode=STEP, budget_tokens=2048, kv_bytes=1e5, kv_gb_s=100.0)
"""By these figures, a handoff of the test's prompts takes less than 1 ms of transfer."""

CLASSES = {"chat": SloClass(ttft_ms=2000.0, tpot_ms=8.0)}
OFF = 'baton_handoffs_off{slo_class="chat"}'


class Network:
    """Transfer time of a pull: `ms` times the number of pulls at once, which share the network."""

    ms = 40.0

    def __call__(self, _bytes: int, sharers: int) -> float:
        return self.ms * sharers


async def ask(router: MockedRouter, number: int) -> str:
    """Send one request. Returns its id."""
    body = {"model": "fake", "max_tokens": 40, "stream": True, "prompt": f"{number} " + "lantern " * 300}
    name = f"request-{number}"
    status, _, _ = await router.ask(body, x_slo_class="chat", x_request_id=name)
    assert status == 200
    return name


async def load(router: MockedRouter, wanted: float, numbers: count[int]) -> list[str]:
    """Send twelve requests at a time until the gauge has the wanted value. Returns the ids of the last twelve."""
    async with asyncio.timeout(40):
        while True:
            ids = await asyncio.gather(*(ask(router, next(numbers)) for _ in range(12)))
            if (await router.metrics()).get(OFF) == wanted:
                return list(ids)


async def test_a_class_that_loses_by_handing_over_is_served_whole(caplog: pytest.LogCaptureFixture) -> None:
    network, lines, numbers = Network(), list[bytes](), count()
    costs = SimpleCosts(step_ms=1.0, prefill_ms_per_1k=100.0)
    roles = {"prefill-0": Role.PREFILL, "prefill-1": Role.PREFILL, "decode-0": Role.DECODE}
    mocks = [replace(mock_settings(name, role, costs=costs), transfer_ms=network) for name, role in roles.items()]
    caplog.set_level(logging.INFO, "baton.router")
    async with mocked_router(
        mocks, classes=CLASSES, makes=lambda _: TOLD, decision_log=lines.append, seeding=False
    ) as router:
        await ask(router, next(numbers))
        assert (await router.metrics())[OFF] == 0.0, "the gauge exists before the guard acts"
        await load(router, 1.0, numbers)
        ids = [await ask(router, next(numbers)) for _ in range(TRIES)]
        said = [await router.explain(each) for each in ids]
        whole = [story for story in said if "handing over loses" in story["turns"][0]["because"]]
        assert len(whole) == TRIES - 1, "one of them is handed over, as a trial"
        assert all(event.get("prefill") is None for story in whole for event in story["turns"])
        async with router.client.get(f"{router.admin}/ui/data") as answer:
            data = await answer.json()
        assert data["served_whole"] == ["chat"]
        prompts = next(each for each in data["basis"] if each["name"] == "prompts")
        assert (prompts["told"], prompts["learned"], prompts["assumed"]) == (3, 0, 0)
        assert {each["basis"]["memory"]["from"] for each in data["instances"]} == {"told"}
    assert "requests of class 'chat' are served whole from now on" in caplog.text
    assert replay([entry_of(line) for line in b"".join(lines).splitlines()]).differences == ()
