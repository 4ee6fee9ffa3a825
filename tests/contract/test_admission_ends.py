"""However requests with predictions and SLO classes end, the scheduler keeps nothing of them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp
import pytest
from support.fleet import eventually
from support.mock import mock_settings
from support.mocked_router import MockedRouter, mocked_router

import router.api.app
from cluster.instance import Instance, Role
from cluster.spec import SloClass, WhenMissed
from costs.step import StepCost
from router.api.server import Router
from router.predict.step_model import Make

STORY = "Once upon a time a small robot found a bright red lantern near the river. "
STEP = StepCost(floor_ms=1.0, start_ms=1.0, token_ms=0.005, area_ms=0.0, decode_ms=1.0, context_ms=0.0, request_ms=0.0)
CLASSES = {
    "tight": SloClass(ttft_ms=30, tpot_ms=5, when_missed=WhenMissed.SHED),
    "loose": SloClass(ttft_ms=2000, tpot_ms=50),
    "hopeless": SloClass(ttft_ms=0.5, when_missed=WhenMissed.SHED),
    "falls": SloClass(ttft_ms=20, when_missed=WhenMissed.DEGRADE, degrade_to="loose"),
}
MIXED = [name for name in CLASSES if name != "hopeless"]
REQUESTS = 120


def make(instance: Instance) -> Make:
    return Make(prefill=STEP, decode=STEP)


def asked(chance: random.Random, number: int) -> tuple[dict[str, Any], dict[str, str]]:
    """A random request: long or short, streamed or not; some want one token or two answers; some are invalid."""
    body: dict[str, Any] = {
        "model": "fake",
        "prompt": f"[{number}] {STORY * chance.randint(1, 40)}",
        "max_tokens": chance.choice([1, 2, 8, 30]),
        "stream": chance.random() < 0.6,
        "temperature": 0,
    }
    body |= chance.choice([{}, {}, {}, {"n": 2}, {"stream_options": {"include_usage": True}}, {"max_tokens": -1}])
    if not body["stream"]:
        body.pop("stream_options", None)
    named = chance.choice(["", *MIXED])
    return body, {"x-slo-class": named} if named else {}


async def ask(front: MockedRouter, chance: random.Random, number: int, statuses: list[int]) -> None:
    body, headers = asked(chance, number)
    patience_s = chance.choice([None, None, None, 0.02, 0.2])
    try:
        async with asyncio.timeout(patience_s):
            async with front.client.post(f"{front.endpoint}/v1/completions", json=body, headers=headers) as response:
                statuses.append(response.status)
                await response.read()
    except (TimeoutError, aiohttp.ClientError):
        statuses.append(0)


async def hopeless(front: MockedRouter) -> None:
    """A request that no engine can serve in time is refused. The router has timed prompts by then."""
    body = {"model": "fake", "prompt": STORY, "max_tokens": 2}
    headers = {"x-slo-class": "hopeless"}
    async with front.client.post(f"{front.endpoint}/v1/completions", json=body, headers=headers) as response:
        assert response.status == 429, await response.text()


async def disturb(front: MockedRouter, chance: random.Random) -> None:
    """While requests are served: engines that break off streams, answer errors, die and come back, or fail to pull."""
    names = list(front.mocks.instances)
    faults: list[dict[str, Any]] = [
        {"fault": "break", "after_tokens": 3, "times": 3},
        {"fault": "error", "after_tokens": 0, "times": 3},
        {"fault": "die", "seconds": 0.1},
        {"fault": "fail_pull", "times": 5},
    ]
    for fault in faults:
        url = front.mocks.instances[chance.choice(names)].url
        async with front.client.post(f"{url}/mock/faults", json=fault) as response:
            assert response.status == 200, await response.text()


def lines(made: Router) -> list[dict[str, Any]]:
    return [story.line(0.0) for story in made.parts.telling.memory.latest(2 * REQUESTS)]


@pytest.mark.parametrize("policy", ["workload", "least_load"])
async def test_nothing_of_any_request_stays(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Router] = []

    class Seen(Router):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(router.api.app, "Router", Seen)
    chance = random.Random(7)
    roles = (Role.PREFILL, Role.DECODE)
    mocks = [mock_settings(f"{role.value}-{number}", role) for role in roles for number in range(2)]
    statuses: list[int] = []
    async with mocked_router(mocks, policy=policy, classes=CLASSES, makes=make) as front:
        asking = [asyncio.create_task(ask(front, chance, number, statuses)) for number in range(REQUESTS)]
        await disturb(front, chance)
        await asyncio.gather(*asking)
        await hopeless(front)
        scheduler = made[0].parts.scheduler
        fleet = scheduler.view.all()
        await eventually(lambda: all(each["state"] != "open" for each in lines(made[0])), "every request is over")
        await eventually(lambda: not any(seen.inflight for seen in fleet), "no leg is under way")
        assert not scheduler.legs.placed
        assert not len(scheduler.line)
        for name in ("prompts", "backlog", "decoding", "answer_context", "kv_mean", "kv_variance"):
            assert max(abs(getattr(row, name)) for row in fleet.inflight.rows) < 1e-6, name
        assert not any(scheduler.admission.saturation._late.values()) if scheduler.admission else True
        assert {200, 400} <= set(statuses)
        assert statuses.count(200) > REQUESTS / 3
