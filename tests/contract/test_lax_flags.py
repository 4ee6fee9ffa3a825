"""Boolean fields in other forms than `true` and `false`: the router serves what vLLM serves, in the same form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.mock import mock_settings
from support.mocked_router import mocked_router

from cluster.instance import Role

BODY = {"model": "fake", "prompt": "A small robot found a bright red lantern. " * 5, "max_tokens": 6, "temperature": 0}
PAIR = [mock_settings("p", Role.PREFILL), mock_settings("d", Role.DECODE)]
ON, OFF, NONE = [1, 1.0, "true", "Yes"], [0, "false", "off", None], [2, "maybe", "", [], {}]
"""Values that vLLM reads as true, reads as false, and refuses."""


def text_of(answer: Any) -> str:
    if isinstance(answer, dict):
        return str(answer["choices"][0]["text"])
    assert answer.endswith("data: [DONE]\n\n")
    events = [json.loads(each[6:]) for each in answer.split("\n\n") if each.startswith("data: {")]
    return "".join(each["choices"][0]["text"] for each in events if each["choices"])


async def test_streams_are_asked_for_in_any_form_that_vllm_reads(subtests: pytest.Subtests) -> None:
    async with mocked_router(PAIR, pins=True) as router:
        alone = text_of((await router.ask(BODY))[1])
        for given in [*ON, *OFF]:
            with subtests.test(stream=given):
                status, answer, headers = await router.ask({**BODY, "stream": given})
                assert status == 200
                assert headers["Content-Type"].startswith("text/event-stream") == (given in ON)
                assert text_of(answer) == alone
        told = await router.metrics()
        assert told["baton_seeds_total"] == len(ON)
        assert not [name for name in told if name.startswith("baton_unfit_answers_total")]


async def test_what_vllm_refuses_is_refused_by_an_engine(subtests: pytest.Subtests) -> None:
    async with mocked_router(PAIR) as router:
        for body in [{"stream": given} for given in NONE] + [{"stream": True, "ignore_eos": "maybe"}]:
            with subtests.test(**body):
                status, answer, _ = await router.ask({**BODY, **body})
                assert (status, answer["error"]["type"]) == (400, "Bad Request")
                assert "valid boolean" in answer["error"]["message"]


@pytest.mark.parametrize("given", ["true", 1])
async def test_the_usage_is_asked_for_in_any_form_that_vllm_reads(given: object) -> None:
    async with mocked_router(PAIR, pins=True) as router:
        body = {**BODY, "stream": "true", "stream_options": {"include_usage": given}}
        status, answer, headers = await router.ask(body)
        assert status == 200 and '"completion_tokens":6' in answer
        timing = (await router.explain(headers["X-Baton-Request-Id"]))["timing"]
        assert "decode_leg" not in timing["ttft_ms"], "the engine's own times, beside the usage, are read"
