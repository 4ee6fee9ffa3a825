"""A prefill leg that does not answer: a second is sent beside it, the first answer is used, and no hold stays."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from support.fleet import Fleet, Starter, eventually

from cluster import wire
from router.core import journey

pytestmark = pytest.mark.timed

PROMPT = {"model": "fake", "prompt": "hello", "max_tokens": 5}
MINE = {"X-Request-Id": "mine"}
LIMIT_S = 1.0
"""Deadline for the first token, in seconds; a second leg is sent after half of it."""


async def places(fleet: Fleet) -> int:
    return sum(each["inflight"] for each in (await fleet.get("/ready"))[1]["instances"])


async def none_taken(fleet: Fleet) -> None:
    async with asyncio.timeout(5):
        while await places(fleet):
            await asyncio.sleep(0.005)
    assert fleet.held == 0


def asked(fleet: Fleet) -> list[int]:
    return [len(fleet.engines[f"prefill-{number}"].generated) for number in range(2)]


def released(fleet: Fleet) -> set[str]:
    """The producers whose holds were released through a decode leg that the engine rejects."""
    bodies = [body for engine in fleet.engines.values() for _, body in engine.bodies if isinstance(body, dict)]
    return {body["kv_transfer_params"]["remote_engine_id"] for body in bodies if body["model"] == wire.RELEASE_MODEL}


@pytest.mark.parametrize("stream", [False, True])
async def test_another_prefill_instance_serves_and_the_silent_leg_is_aborted(
    start: Starter, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(journey, "PATIENCE_S", 0.05)
    fleet = await start(prefill=2, first_token_s=LIMIT_S)
    silent = fleet.engines["prefill-0"]
    silent.hold_leg = asyncio.Event()
    status, answer = await fleet.post("/v1/completions", json={**PROMPT, "stream": stream}, headers=MINE)
    assert status == 200 and "decode-0" in str(answer)
    assert asked(fleet) == [1, 1]
    assert await places(fleet) == 1, "the silent leg's place is taken as long as it may run"
    await eventually(lambda: silent.aborted == [f"cmpl-{silent.named[0]}-0"], "the silent leg is aborted")
    await none_taken(fleet)
    assert silent.cut_off == 0
    told = await fleet.client.get(fleet.admin + "/metrics")
    assert 'baton_retries_total{kind="second"} 1.0' in await told.text()


async def test_a_hold_that_the_silent_leg_makes_late_is_released(start: Starter) -> None:
    fleet = await start(prefill=2, decode=2, first_token_s=LIMIT_S)
    silent = fleet.engines["prefill-0"]
    silent.hold_leg = asyncio.Event()
    status, _ = await fleet.post("/v1/completions", json=PROMPT, headers=MINE)
    assert status == 200
    silent.hold_leg.set()
    await eventually(lambda: "prefill-0" in released(fleet), "the silent leg answers late, and its hold is released")
    await none_taken(fleet)
    assert silent.aborted == []


async def test_the_first_leg_is_used_where_it_answers_first(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journey, "PATIENCE_S", 0.05)
    fleet = await start(prefill=2, first_token_s=LIMIT_S)
    slow, second = fleet.engines["prefill-0"], fleet.engines["prefill-1"]
    slow.hold_leg, second.hold_leg = asyncio.Event(), asyncio.Event()
    request = asyncio.ensure_future(fleet.post("/v1/completions", json=PROMPT, headers=MINE))
    await eventually(lambda: asked(fleet) == [1, 1], "a second leg")
    slow.hold_leg.set()
    status, _ = await request
    assert status == 200
    (leg,) = fleet.engines["decode-0"].generated
    assert leg["kv_transfer_params"]["remote_engine_id"] == "prefill-0"
    await eventually(lambda: second.aborted == [f"cmpl-{second.named[0]}-0"], "the second is not wanted any more")
    await none_taken(fleet)


async def test_a_slow_instance_that_is_alone_is_waited_for(start: Starter) -> None:
    """Giving it up gains nothing. Nor does the prompt go to a decode instance, whose other answers would suffer."""
    fleet = await start(first_token_s=LIMIT_S)
    slow = fleet.engines["prefill-0"]
    slow.hold_leg = asyncio.Event()
    asyncio.get_running_loop().call_later(0.7 * LIMIT_S, slow.hold_leg.set)
    status, answer = await fleet.post("/v1/completions", json=PROMPT, headers=MINE)
    assert (status, answer["from"]) == (200, "decode-0")
    assert len(slow.generated) == 1
    assert fleet.engines["decode-0"].generated[0]["kv_transfer_params"]["remote_engine_id"] == "prefill-0"
    await none_taken(fleet)


async def counted(fleet: Fleet, series: str) -> float:
    async with fleet.client.get(f"{fleet.admin}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{series} "))


async def test_a_hand_over_that_hangs_is_counted_as_failed(start: Starter) -> None:
    """Its leg is given up before it answers; else no figure would show a link that swallows every pull."""
    fleet = await start(first_token_s=0.4)
    never = asyncio.Event()

    async def hangs(*_: object) -> web.Response:
        await never.wait()
        return web.Response()

    fleet.engines["decode-0"].behave = hangs
    async with asyncio.timeout(20):
        status, _ = await fleet.post("/v1/completions", json={**PROMPT, "stream": True}, headers=MINE)
    never.set()
    assert status == 504
    assert await counted(fleet, 'baton_handoffs_total{result="failed"}') == 1
    assert await counted(fleet, 'baton_pair_failures_total{decode="decode-0",prefill="prefill-0"}') == 1
    assert await counted(fleet, 'baton_leg_seconds_count{leg="decode"}') == 1


async def test_two_silent_legs_and_the_deadline(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journey, "PATIENCE_S", 0.05)
    fleet = await start(prefill=2, first_token_s=0.4)
    for number in range(2):
        fleet.engines[f"prefill-{number}"].hold_leg = asyncio.Event()
    status, answer = await fleet.post("/v1/completions", json=PROMPT, headers=MINE)
    assert (status, answer["error"]["type"]) == (504, "DeadlineExceededError")
    assert await counted(fleet, 'baton_rejected_total{status="504"}') == 1
    await none_taken(fleet)
    for number in range(2):
        engine = fleet.engines[f"prefill-{number}"]
        assert engine.aborted == [f"cmpl-{engine.named[0]}-0"]
