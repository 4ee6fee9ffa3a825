"""A request for an adapter is handed over only if the agents of P and D announce the same digest of the adapter.

P's first token is given to the client only if P's answer does not name another digest."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web
from support.cast import Breakable, Cast
from support.fake_engine import FIRST_TOKEN, Behaviour

from cluster.instance import Role

MODELS = ({"id": "fake", "max_model_len": 99}, {"id": "poet", "parent": "fake", "root": "/adapters/poet"})
BODY = {"model": "poet", "prompt": "hello", "max_tokens": 5, "temperature": 0, "stream": True}


@pytest.fixture
async def cast() -> AsyncIterator[Cast]:
    async with AsyncExitStack() as stack:
        yield Cast(Breakable(clock=time.monotonic), stack)


async def told(
    cast: Cast, prefill: str, decode: str, answered: str | None, speaks: Behaviour | None = None
) -> dict[str, Any]:
    """The router's `/explain` of a request. The agents announce `prefill` and `decode`; P's answer names `answered`."""
    for name, role, digest in (("p", Role.PREFILL, prefill), ("d", Role.DECODE, decode)):
        await cast.join(name, role, models=MODELS, adapters={"poet": digest}, pins=True)
        cast.engines[name].adapters = ["poet"]
    cast.engines["p"].tells_adapter, cast.engines["d"].behave = answered, speaks
    fleet = await cast.serve()
    await cast.router_sees(p="up", d="up")
    status, text = await fleet.post("/v1/completions", json=BODY, headers={"X-Request-Id": "one"})
    assert status == 200 and text.endswith("data: [DONE]\n\n") and "error" not in text
    async with fleet.client.get(f"{fleet.admin}/explain/one") as answer:
        return dict(await answer.json())


@pytest.mark.parametrize("answered", [None, "a"])
async def test_one_digest_everywhere_is_handed_over_and_seeded(cast: Cast, answered: str | None) -> None:
    story = await told(cast, "a", "a", answered)
    assert story["seed"]["given"], story["seed"]
    assert len(cast.engines["p"].generated) == 1


@pytest.mark.parametrize("answered", [None, "a"])
async def test_an_engine_that_goes_on_without_a_hold_is_told_which_adapter_chose_the_token(
    cast: Cast, answered: str | None
) -> None:
    async def another(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"index": 0, "text": "zwei ", "finish_reason": null}]}\n\n')
        return response

    story = await told(cast, "a", "a", answered, another)
    assert story["seed"]["given"], story["seed"]
    alone = cast.engines["p"].generated[-1]["kv_transfer_params"]
    assert alone["baton_first_token"] == FIRST_TOKEN
    assert alone.get("baton_adapter") == answered


@pytest.mark.parametrize("answered", ["b", ""])
async def test_a_p_whose_adapter_was_exchanged_in_that_moment_gives_no_first_token(cast: Cast, answered: str) -> None:
    """D still gets P's transfer fields: D's connector compares their digest with D's own adapter."""
    story = await told(cast, "a", "a", answered)
    assert not story["seed"]["given"] and "another adapter" in story["seed"]["because"]
    (leg,) = cast.engines["d"].generated
    assert leg["kv_transfer_params"]["baton_adapter"] == answered
    assert "baton_first_token" not in leg["kv_transfer_params"]


@pytest.mark.parametrize(("prefill", "decode"), [("a", "b"), ("", ""), ("a", "")])
async def test_two_digests_or_none_are_never_handed_over(cast: Cast, prefill: str, decode: str) -> None:
    await told(cast, prefill, decode, None)
    assert not cast.engines["p"].generated and len(cast.engines["d"].generated) == 1
