"""What clients get when the targets of their SLO class cannot be met: a router with mocks whose speed it knows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.mock import mock_settings
from support.mocked_router import MockedRouter, mocked_router

import router.api.app
from cluster.instance import Instance, Role
from cluster.keys import digest
from cluster.spec import SloClass, Tenant, WhenMissed
from costs.step import StepCost
from engine.mock.settings import SimpleCosts
from router.api.server import Router
from router.predict.margins import WIDEST
from router.predict.step_model import Make
from router.scheduler.flow_control import queue

STORY = "Once upon a time a small robot found a bright red lantern near the river. " * 40
"""About 700 tokens. The mocks here compute 1,000 prompt tokens in 100 ms."""

PREFILL_MS_PER_1K = 100.0
STEP = StepCost(floor_ms=1.0, start_ms=1.0, token_ms=0.1, area_ms=0.0, decode_ms=1.0, context_ms=0.0, request_ms=0.0)
IN_NO_TIME = 5.0
"""In ms: far less than the prompt alone takes."""
EASY = 60_000.0


def make(_: Instance) -> Make:
    """The step model of every mock."""
    return Make(prefill=STEP, decode=STEP, budget_tokens=2048)


def fleet(**mock: Any) -> list[Any]:
    costs = SimpleCosts(step_ms=1.0, prefill_ms_per_1k=PREFILL_MS_PER_1K)
    return [mock_settings(f"{role.value}-0", role, costs=costs, **mock) for role in (Role.PREFILL, Role.DECODE)]


def body(number: int = 0, **more: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": f"[{number}] {STORY}", "max_tokens": 8, "stream": True, **more}


async def ended(router: MockedRouter, request_id: str) -> Any:
    """The `/explain` record of a request, once the request is over."""
    async with asyncio.timeout(5):
        while (story := await router.explain(request_id))["state"] == "open":
            await asyncio.sleep(0.002)
    return story


def slo(metrics: dict[str, float], name: str, **labels: str) -> float:
    inner = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return metrics.get(f"{name}{{{inner}}}", 0.0)


async def test_a_request_that_cannot_be_in_time_is_refused_at_once_if_its_class_sheds() -> None:
    classes = {"now": SloClass(ttft_ms=IN_NO_TIME, when_missed=WhenMissed.SHED, attainment=0.9)}
    async with mocked_router(fleet(), classes=classes, makes=make) as router:
        status, told, headers = await router.ask(body(), x_slo_class="now", x_request_id="a")
        assert status == 429
        assert int(headers["Retry-After"]) >= 1
        assert (told["error"]["type"], told["error"]["code"]) == ("RateLimitError", 429)
        assert f"Try again in {headers['Retry-After']} s" in told["error"]["message"]
        story = await ended(router, "a")
        assert (story["state"], story["slo_class"], story["slo"]["result"]) == ("shed", "now", "shed")
        assert story["slo"]["late"]
        assert "5 ms" in story["turns"][0]["because"]
        found = await router.metrics()
    assert slo(found, "baton_slo_requests_total", slo_class="now", tenant="", result="shed") == 1
    assert slo(found, "baton_requests_total", path="/v1/completions", way="whole", outcome="shed") == 1
    assert slo(found, "baton_slo_attainment", slo_class="now") == 0
    assert slo(found, "baton_slo_attainment_target", slo_class="now") == 0.9
    assert not any(each.metrics.counts["prompt_tokens"] for each in router.mocks.instances.values())


async def test_by_default_a_request_that_cannot_be_in_time_is_served_late() -> None:
    async with mocked_router(fleet(), classes={"now": SloClass(ttft_ms=IN_NO_TIME)}, makes=make) as router:
        status, text, _ = await router.ask(body(), x_slo_class="now", x_request_id="a")
        assert (status, text[-14:]) == (200, "data: [DONE]\n\n")
        story = await ended(router, "a")
        assert (story["state"], story["slo"]["late"], story["slo"]["result"]) == ("served", True, "missed")
        assert story["slo"]["seen"]["ttft_ms"] > IN_NO_TIME
        found = await router.metrics()
    assert slo(found, "baton_slo_late_total", slo_class="now", tenant="") == 1
    assert slo(found, "baton_slo_requests_total", slo_class="now", tenant="", result="missed") == 1


async def test_a_class_may_have_a_second_promise() -> None:
    classes = {
        "now": SloClass(ttft_ms=IN_NO_TIME, when_missed=WhenMissed.DEGRADE, degrade_to="later"),
        "later": SloClass(ttft_ms=EASY, when_missed=WhenMissed.SHED),
    }
    async with mocked_router(fleet(), classes=classes, makes=make) as router:
        assert (await router.ask(body(), x_slo_class="now", x_request_id="a"))[0] == 200
        story = await ended(router, "a")
        assert (story["slo"]["degraded"], story["slo"]["late"], story["slo"]["result"]) == (True, False, "missed")
        found = await router.metrics()
    assert slo(found, "baton_slo_degraded_total", slo_class="now", tenant="") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_in_time_has_met_its_class_and_its_times_were_predicted(stream: bool) -> None:
    classes = {"easy": SloClass(ttft_ms=EASY, tt2t_ms=EASY, tpot_ms=EASY, e2e_ms=EASY)}
    async with mocked_router(fleet(), classes=classes, makes=make) as router:
        for number in range(3):
            asked = body(number, stream=stream)
            assert (await router.ask(asked, x_slo_class="easy", x_request_id=str(number)))[0] == 200
        story = await ended(router, "2")
        found = await router.metrics()
    told = story["slo"]
    assert (told["result"], told["late"], told["degraded"], told["tokens"]) == ("met", False, False, 8)
    assert told["targets"] == dict.fromkeys(("ttft_ms", "tt2t_ms", "tpot_ms", "e2e_ms"), EASY)
    choice = next(turn for turn in story["turns"] if turn["turn"] == "choice")
    assert told["foretold"] == {name: choice[name] for name in ("ttft_ms", "tpot_ms")}
    assert 40 < told["foretold"]["ttft_ms"] < 200
    assert told["seen"]["ttft_ms"] > 40
    assert (told["seen"]["tt2t_ms"] is not None) == stream
    assert slo(found, "baton_slo_requests_total", slo_class="easy", tenant="", result="met") == 3
    assert slo(found, "baton_slo_attainment", slo_class="easy") == 1
    assert found['baton_foretold_ratio_count{what="ttft"}'] == 3


async def test_a_request_that_names_no_class_has_no_targets_and_is_not_refused() -> None:
    classes = {"now": SloClass(ttft_ms=IN_NO_TIME, when_missed=WhenMissed.SHED)}
    async with mocked_router(fleet(), classes=classes, makes=make) as router:
        assert (await router.ask(body(), x_request_id="a"))[0] == 200
        story = await ended(router, "a")
        assert "slo_class" not in story
        assert "targets" not in story["slo"]
        assert not any(name.startswith("baton_slo_requests_total") for name in await router.metrics())


async def test_without_classes_nothing_is_foretold_or_refused() -> None:
    async with mocked_router(fleet(), makes=make) as router:
        assert (await router.ask(body(), x_slo_class="now", x_request_id="a"))[0] == 200
        story = await ended(router, "a")
    assert "slo" not in story
    assert "least load" in story["turns"][0]["because"]


async def test_engines_of_unknown_speed_lead_to_no_refusal() -> None:
    """After a cold start, only hard limits shed requests: predictions for an unknown engine are not used yet."""
    classes = {"now": SloClass(ttft_ms=IN_NO_TIME, when_missed=WhenMissed.SHED)}
    async with mocked_router(fleet(), classes=classes) as router:
        assert (await router.ask(body(), x_slo_class="now"))[0] == 200


async def test_more_than_can_be_in_time_is_refused_and_the_rest_is_in_time() -> None:
    """Sixteen prompts of 70 ms each arrive at once at one prefill instance. About half can have a TTFT of 500 ms."""
    classes = {"now": SloClass(ttft_ms=500, when_missed=WhenMissed.SHED)}
    async with mocked_router(fleet(), classes=classes, makes=make) as router:
        answers = await asyncio.gather(*(router.ask(body(number), x_slo_class="now") for number in range(16)))
        found = await router.metrics()
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 429}
    assert 3 <= statuses.count(200) <= 12
    assert slo(found, "baton_slo_requests_total", slo_class="now", tenant="", result="shed") == statuses.count(429)
    assert found["baton_waiting_requests"] == 0


@pytest.mark.interpreted
async def test_tenants_that_wait_are_served_by_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """`many` sends its 32 requests first, then `few` sends 4. With equal shares, `few` does not wait for all 32."""
    monkeypatch.setattr(queue, "FAIR_MS", 50.0)
    tenants = {"many": Tenant(), "few": Tenant()}
    keys = {name: lambda name=name: (digest(name),) for name in tenants}
    classes = {"any": SloClass(ttft_ms=EASY)}
    async with mocked_router(fleet(), classes=classes, makes=make, tenants=tenants, tenant_keys=keys) as router:
        ends: list[str] = []

        async def ask(tenant: str, number: int) -> None:
            status, _, _ = await router.ask(body(number), x_slo_class="any", authorization=f"Bearer {tenant}")
            assert status == 200
            ends.append(tenant)

        first = [asyncio.create_task(ask("many", number)) for number in range(32)]
        async with asyncio.timeout(5):
            while (await router.metrics())["baton_waiting_requests"] < 20:
                await asyncio.sleep(0.002)
        second = [asyncio.create_task(ask("few", 100 + number)) for number in range(4)]
        await asyncio.gather(*first, *second)
    assert ends[-8:] == ["many"] * 8, "by deadline alone, `few` would have been last"


async def test_answers_that_end_at_their_limit_teach_how_full_engines_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most answers of a benchmark end at `max_tokens`. The margin of a class is learned from such answers, too."""
    made: list[Router] = []

    class Seen(Router):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(router.api.app, "Router", Seen)
    slow_ms, target_ms = 30.0, 6.0
    costs = SimpleCosts(step_ms=slow_ms, prefill_ms_per_1k=PREFILL_MS_PER_1K)
    mocks = [mock_settings(f"{role.value}-0", role, costs=costs) for role in (Role.PREFILL, Role.DECODE)]
    classes = {"tight": SloClass(ttft_ms=EASY, tpot_ms=target_ms, when_missed=WhenMissed.SHED)}
    async with mocked_router(mocks, classes=classes, makes=make) as front:
        status, text, _ = await front.ask(body(), x_slo_class="tight", x_request_id="a")
        assert status == 200 and '"finish_reason":"length"' in text.replace(" ", "")
        await ended(front, "a")
        margins = made[0].parts.scheduler.view.all().inflight.margins.shed
        assert margins.of(target_ms) < WIDEST
