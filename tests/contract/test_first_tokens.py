"""P's token that is not the answer's first: what P says of it is used for nothing that a client reads.

On Mamba and its hybrids, and with MTP of several modules, P leaves the prompt's last tokens to D (vLLM 0.32): what P
answers with is then another token. Mocks play such engines (`keep_back`, `wrong_token`).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from support.fake_engine import FakeEngine
from support.fleet import Starter
from support.mock import mock_settings
from support.mocked_router import MockedRouter, mocked_router

from cluster.instance import Role
from engine.mock.fleet import MockFleet
from engine.mock.settings import Ends

BODY = {"model": "fake", "prompt": "A small robot found a bright red lantern. " * 3, "max_tokens": 12, "temperature": 0}
STREAM = {**BODY, "stream": True}


async def right(router: MockedRouter, body: dict[str, Any], **mock: Any) -> str:
    """What one engine alone answers."""
    async with MockFleet([mock_settings("alone", Role.BOTH, **mock)]) as alone:
        url = alone.instances["alone"].url
        async with router.client.post(url + "/v1/completions", json={**body, "stream": False}) as response:
            text: str = (await response.json())["choices"][0]["text"]
            return text


def said(stream: str) -> str:
    assert stream.endswith("data: [DONE]\n\n"), stream
    events = [json.loads(event.removeprefix("data: ")) for event in stream.strip().split("\n\n")[:-1]]
    assert all("error" not in event for event in events), stream
    return "".join(event["choices"][0]["text"] for event in events)


def fleet(**mock: Any) -> list[Any]:
    return [mock_settings("p", Role.PREFILL, **mock), mock_settings("d", Role.DECODE, **mock)]


async def set_fault(router: MockedRouter, fault: str) -> None:
    url = router.mocks.instances["p"].url
    async with router.client.post(f"{url}/mock/faults", json={"fault": fault, "leg": "prefill"}) as response:
        assert response.status == 200, await response.text()


async def test_a_p_that_leaves_the_last_token_to_d_is_handed_over_unseeded() -> None:
    async with mocked_router(fleet(), pins=True) as router:
        await set_fault(router, "keep_back")
        alone = await right(router, BODY)
        status, text, _ = await router.ask(STREAM, x_request_id="unseeded")
        assert (status, said(text)) == (200, alone)
        told = await router.explain("unseeded")
        assert not told["seed"]["given"] and "not the first" in told["seed"]["because"]
        assert (await router.metrics())['baton_handoffs_total{result="ok"}'] == 1, "its blocks are right all the same"
        assert (await router.ask(BODY))[1]["choices"][0]["text"] == alone


async def test_a_stop_at_a_token_that_is_not_the_first_is_no_answer() -> None:
    """P says END of a prompt that is not the client's, while the client's has an answer; and the other way round."""
    ends = Ends(1, 1)
    p, d = mock_settings("p", Role.PREFILL, answers=ends), mock_settings("d", Role.DECODE)
    async with mocked_router([p, d], pins=True) as router:
        alone = await right(router, BODY)
        await set_fault(router, "keep_back")
        assert (await router.ask(BODY))[1]["choices"][0]["text"] == alone
        assert said((await router.ask(STREAM))[1]) == alone


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None}, {"prompt_tokens": 8}, {"prompt_tokens": True}])
async def test_who_does_not_say_how_much_it_computed_is_not_believed(start: Starter, usage: Any) -> None:
    given = await start(pins=True)
    prefill = given.engines["prefill-0"]._prefill

    async def behave(request: Any, body: dict[str, Any]) -> Any:
        answer = await prefill(request)
        told = json.loads(answer.body)
        told["usage"] = usage
        return web.json_response(told)

    given.engines["prefill-0"].behave = behave
    async with given.client.post(given.endpoint + "/v1/completions", json={**STREAM, "prompt": "hello"}) as response:
        assert "one " in await response.text()
    (leg2,) = given.engines["decode-0"].generated
    assert "baton_first_token" not in leg2["kv_transfer_params"] and leg2["kv_transfer_params"]["remote_engine_id"]


async def test_a_stop_that_nobody_can_vouch_for_is_answered_by_d(start: Starter) -> None:
    given = await start()
    engine: FakeEngine = given.engines["prefill-0"]
    engine.finish_reason = "stop"
    status, answer = await given.post("/v1/completions", json={**BODY, "prompt": "hello"})
    assert status == 200 and answer["choices"][0]["text"] == "", "P's own answer: it has computed all of the prompt"
    prefill = engine._prefill

    async def behave(request: Any, body: dict[str, Any]) -> Any:
        answer = await prefill(request)
        told = json.loads(answer.body)
        told["kv_transfer_params"]["remote_num_tokens"] = 6
        return web.json_response(told)

    engine.behave = behave
    status, answer = await given.post("/v1/completions", json={**BODY, "prompt": "hello"})
    assert status == 200 and answer["from"] == "decode-0" and given.held == 0
