"""P's token is not always the first token of the answer. If it is not, no client reads anything that comes from it.

With Mamba models, their hybrids, and MTP of several modules, P leaves the prompt's last tokens to D (vLLM 0.32). P's
token is then another one. Mocks imitate such engines by the faults `keep_back` and `wrong_token`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from support.fake_engine import TOKENS, FakeEngine
from support.fleet import Fleet, Starter, eventually
from support.mock import mock_settings
from support.mocked_router import MockedRouter, mocked_router

from cluster.instance import Role
from engine.mock.fleet import MockFleet
from engine.mock.settings import Ends
from router.fleet import pair_proofs, prover

BODY = {"model": "fake", "prompt": "A small robot found a bright red lantern. " * 3, "max_tokens": 12, "temperature": 0}
STREAM = {**BODY, "stream": True}


async def right(router: MockedRouter, body: dict[str, Any], **mock: Any) -> str:
    """The answer of one engine alone."""
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


async def set_fault(router: MockedRouter, fault: str, at: str = "p", **more: Any) -> None:
    url = router.mocks.instances[at].url
    async with router.client.post(f"{url}/mock/faults", json={"fault": fault, **more}) as response:
        assert response.status == 200, await response.text()


async def test_a_p_that_leaves_the_last_token_to_d_is_handed_over_unseeded() -> None:
    async with mocked_router(fleet(), pins=True) as router:
        await set_fault(router, "keep_back", leg="prefill")
        alone = await right(router, BODY)
        status, text, _ = await router.ask(STREAM, x_request_id="unseeded")
        assert (status, said(text)) == (200, alone)
        told = await router.explain("unseeded")
        assert not told["seed"]["given"] and "not the first" in told["seed"]["because"]
        assert (await router.metrics())['baton_handoffs_total{result="ok"}'] == 1, "its blocks are right all the same"
        assert (await router.ask(BODY))[1]["choices"][0]["text"] == alone


async def test_a_stop_at_a_token_that_is_not_the_first_is_no_answer() -> None:
    """P reports the end of the answer, but for a prompt without its last token. The client's prompt has an answer."""
    ends = Ends(1, 1)
    p, d = mock_settings("p", Role.PREFILL, answers=ends), mock_settings("d", Role.DECODE)
    async with mocked_router([p, d], pins=True) as router:
        alone = await right(router, BODY)
        await set_fault(router, "keep_back", leg="prefill")
        assert (await router.ask(BODY))[1]["choices"][0]["text"] == alone
        assert said((await router.ask(STREAM))[1]) == alone


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None}, {"prompt_tokens": 8}, {"prompt_tokens": True}])
async def test_a_p_that_does_not_report_its_prompt_tokens_gives_no_first_token(start: Starter, usage: Any) -> None:
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


async def test_a_stop_that_was_drawn_by_lot_is_left_to_d(start: Starter) -> None:
    """P's answer would be the whole answer, but only where P's draw stops: together with D's own stops, too often."""
    given = await start()
    given.engines["prefill-0"].finish_reason = "stop"
    status, answer = await given.post("/v1/completions", json={**BODY, "prompt": "hello", "temperature": 1})
    assert status == 200 and answer["from"] == "decode-0"
    await eventually(lambda: given.held == 0, "D has pulled the hold")


async def test_a_stop_after_a_part_of_the_prompt_is_answered_by_d(start: Starter) -> None:
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


# -- proofs --


async def proven(router: MockedRouter, result: str) -> dict[str, Any]:
    """The pair's entry in `/ui/data`, once its proof has this result."""
    name = f'baton_pair_proofs_total{{result="{result}"}}'
    async with asyncio.timeout(10):
        while not (await router.metrics()).get(name):
            await asyncio.sleep(0.01)
    async with router.client.get(f"{router.admin}/ui/data") as response:
        pairs: list[dict[str, Any]] = (await response.json())["pairs"]
    return pairs[0] if pairs else {}


async def test_a_ready_router_hands_the_first_request_over_and_seeds_it() -> None:
    """Also with engines given by URL: the pair is proven before the router is ready (`MockedRouter` waits for that)."""
    async with mocked_router(fleet(), pins=True, proves=True) as router:
        alone = await right(router, BODY)
        async with router.client.get(f"{router.admin}/ready") as response:
            assert response.status == 200
        assert said((await router.ask(STREAM))[1]) == alone
        told = await router.metrics()
        assert told['baton_pair_proofs_total{result="passed"}'] == 1
        assert (told['baton_handoffs_total{result="ok"}'], told["baton_seeds_total"]) == (1, 1)


async def test_a_bug_in_one_pair_proof_ends_no_other_proof(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prover, "EVERY_S", 0.01)
    monkeypatch.setattr(pair_proofs, "LATER_S", 0.01)
    made, failed = prover._Proof.made, list[object]()

    async def fails_once(proof: prover._Proof) -> tuple[str, str]:
        if not failed:
            failed.append(proof._pair)
            raise RuntimeError("a bug")
        return await made(proof)

    monkeypatch.setattr(prover._Proof, "made", fails_once)
    async with mocked_router(fleet(), pins=True, proves=True) as router:
        await proven(router, "passed")
        assert (await router.metrics())['baton_pair_proofs_total{result="none"}'] == 1
        assert (await router.ask(STREAM))[0] == 200
        assert (await router.metrics())['baton_handoffs_total{result="ok"}'] == 1
    assert any("p to d: not proven" in line for line in caplog.messages)


@pytest.mark.parametrize(("fault", "because"), [("keep_back", "not the first"), ("wrong_token", "not D's first")])
async def test_a_proof_finds_a_token_that_is_not_the_first(
    fault: str, because: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prover, "EVERY_S", 0.01)
    slow = fleet(start_up_ns=300_000_000)
    async with mocked_router(slow, pins=True, proves=True, up=False, dtype="float32") as router:
        await set_fault(router, fault, leg="prefill")
        pair = await proven(router, "passed")
        assert not pair["apart"] and because in pair["unseeded"]
        alone = await right(router, BODY)
        assert said((await router.ask(STREAM, x_request_id="unseeded"))[1]) == alone
        assert because in (await router.explain("unseeded"))["seed"]["because"]
        assert (await router.ask(BODY))[1]["choices"][0]["text"] == alone
        told = await router.metrics()
        assert (told['baton_handoffs_total{result="ok"}'], told["baton_seeds_total"]) == (2, 0)


@pytest.mark.parametrize(("dtype", "told"), [("", "unknown"), ("bfloat16", "bfloat16")])
async def test_a_last_token_that_d_rounds_otherwise_is_not_handed_over(dtype: str, told: str) -> None:
    """In 16 bits D's step for the prompt's last token rounds otherwise than one engine's scan (Mamba hybrids): the
    answers of the proof may be equal, and those of other prompts are not."""
    slow = fleet(start_up_ns=300_000_000)
    async with mocked_router(slow, pins=True, proves=True, up=False, dtype=dtype) as router:
        await set_fault(router, "keep_back", leg="prefill")
        pair = await proven(router, "failed")
        because = f"exact in float32 only (P: {told}, D: {told})"
        assert pair["apart"] and because in pair["last_failure"]
        alone = await right(router, BODY)
        assert said((await router.ask(STREAM, x_request_id="whole"))[1]) == alone
        assert because in json.dumps(await router.explain("whole"))
        assert (await router.ask(BODY))[1]["choices"][0]["text"] == alone
        assert (await router.metrics()).get('baton_handoffs_total{result="ok"}', 0) == 0
        await eventually(lambda: not router.mocks.instances["p"].handoffs.holds(), "the proof's hold is released")


async def test_a_pair_with_wrong_answers_gets_no_handover_not_even_before_its_proof() -> None:
    async with mocked_router(fleet(start_up_ns=300_000_000), pins=True, proves=True, up=False) as router:
        await set_fault(router, "corrupt", at="d")
        pair = await proven(router, "failed")
        assert pair["apart"] and "answers otherwise" in pair["last_failure"]
        alone = await right(router, BODY)
        assert said((await router.ask(STREAM, x_request_id="whole"))[1]) == alone
        assert "answers otherwise" in json.dumps(await router.explain("whole"))
        assert (await router.metrics()).get('baton_handoffs_total{result="ok"}', 0) == 0


async def test_a_pair_that_cannot_be_proven_is_served_aggregated_and_says_why(start: Starter) -> None:
    """D does not report cached tokens, so the router cannot know whether D pulled P's blocks."""
    given = await start(pins=True, proves=True)
    async with asyncio.timeout(10):
        while "enable-prompt-tokens-details" not in json.dumps(await ui(given)):
            await asyncio.sleep(0.01)
    given.engines["prefill-0"].bodies.clear()
    status, answer = await given.post("/v1/completions", json={**BODY, "prompt": "hello"})
    assert status == 200 and answer["from"] == "decode-0" and not given.engines["prefill-0"].generated


def tells(apart: float | None, other_after: int = 99) -> Callable[[dict[str, FakeEngine]], None]:
    """Decode engines that answer a proof as vLLM does, always with the same three tokens.

    Args:
        apart: nats between the logprobs of these tokens as they are generated and as they are read; None: the engine
            refuses to tell logprobs.
        other_after: after so many hand-overs, D answers otherwise with P's blocks than alone.
    """

    def prepare(engines: dict[str, FakeEngine]) -> None:
        d = engines["decode-0"]

        async def behave(_: web.Request, body: dict[str, Any]) -> web.Response | None:
            if "messages" in body:
                return None
            if apart is None and {"logprobs", "prompt_logprobs"} & body.keys():
                return web.json_response({"error": {"message": "no logprobs", "code": 400}}, status=400)
            fields = body.get("kv_transfer_params") or {}
            d._free(fields)
            handed = sum(1 for each in d.generated if each.get("kv_transfer_params"))
            ids = [11, 12, 14 if fields and handed > other_after else 13]
            prompt = body["prompt"] if isinstance(body["prompt"], list) else list(range(7))
            choice = {"text": "".join(TOKENS), "token_ids": ids, "prompt_token_ids": prompt}
            if "logprobs" in body:
                choice["logprobs"] = {"tokens": TOKENS, "token_logprobs": [-1] * 3, "top_logprobs": [None] * 3}
            if "prompt_logprobs" in body and apart is not None:
                choice["prompt_logprobs"] = [None, *({str(each): {"logprob": -1 - apart}} for each in prompt[1:])]
            usage = {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 7 if fields else 0}}
            return web.json_response({"choices": [choice], "usage": usage})

        d.behave = behave

    return prepare


async def proofs_of(given: Fleet, result: str) -> Any:
    """What `/ui/data` says of the only pair, once its proof has this result."""
    told = ""
    async with asyncio.timeout(10):
        while f'baton_pair_proofs_total{{result="{result}"}} 1.0' not in told:
            async with given.client.get(f"{given.admin}/metrics") as response:
                told = await response.text()
    return (await ui(given) or [{}])[0]


async def test_a_d_that_disagrees_with_itself_gets_no_handover_although_its_answers_are_equal(start: Starter) -> None:
    """Its answers with P's blocks and without are the same ones. With such an engine that is chance."""
    given = await start(pins=True, proves=True, prepare=tells(1.0))
    pair = await proofs_of(given, "failed")
    assert pair["apart"] and "disagrees with itself" in pair["last_failure"]
    status, answer = await given.post("/v1/completions", json={**BODY, "prompt": "hello"})
    assert status == 200 and answer["choices"][0]["text"] == "".join(TOKENS)
    assert not given.engines["prefill-0"].generated


async def test_a_d_that_agrees_with_itself_is_asked_about_one_prompt(start: Starter) -> None:
    given = await start(pins=True, proves=True, prepare=tells(0.0))
    pair = await proofs_of(given, "passed")
    assert not pair.get("apart")
    assert len([each for each in given.engines["prefill-0"].generated if "prompt" in each]) == 1


@pytest.mark.parametrize("other_after", [99, pair_proofs.PROMPTS - 1])
async def test_a_d_that_tells_no_logprobs_is_asked_about_more_prompts(start: Starter, other_after: int) -> None:
    given = await start(pins=True, proves=True, prepare=tells(None, other_after))
    pair = await proofs_of(given, "passed" if other_after == 99 else "failed")
    assert bool(pair.get("apart")) == (other_after != 99)
    asked = [each for each in given.engines["prefill-0"].generated if "prompt" in each]
    assert len(asked) == pair_proofs.PROMPTS + (other_after != 99)  # and once more, to see whether it is a tie


async def ui(given: Fleet) -> Any:
    async with given.client.get(f"{given.admin}/ui/data") as response:
        return (await response.json())["pairs"]
