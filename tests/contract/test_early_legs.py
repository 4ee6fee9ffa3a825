"""Early legs: D gets its decode leg while P still computes. A router in front of mocks that accept early legs.

Whatever fails meanwhile, the client reads the answer that one engine alone would give, and no hold is left.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.fleet import eventually
from support.mock import mock_settings
from support.mocked_router import MockedRouter, mocked_router

from cluster.ids import InstanceId, RequestId, TransferId
from cluster.instance import Role
from cluster.wire import TOLD_EARLY, early_fields, prefill_fields
from engine.mock.fleet import MockFleet
from engine.mock.settings import Ends
from kvtransfer.early_notes import Ready
from router.predict import early_cost
from router.request import scheduled

BODY = {"model": "fake", "prompt": "A small robot found a bright red lantern. " * 20, "max_tokens": 12,
        "temperature": 0, "stream_options": {"include_usage": True}}  # fmt: skip
STREAM = {**BODY, "stream": True}
WHOLE = {key: value for key, value in BODY.items() if key != "stream_options"}


def fleet(prefills: int = 1, decodes: int = 1) -> list[Any]:
    made = [mock_settings(f"p{number}", Role.PREFILL) for number in range(prefills)]
    return made + [mock_settings(f"d{number}", Role.DECODE) for number in range(decodes)]


async def right(router: MockedRouter) -> str:
    async with MockFleet([mock_settings("alone", Role.BOTH)]) as alone:
        url = alone.instances["alone"].url
        async with router.client.post(url + "/v1/completions", json=WHOLE) as response:
            text: str = (await response.json())["choices"][0]["text"]
            return text


def said(stream: str) -> str:
    assert stream.endswith("data: [DONE]\n\n"), stream
    events = [json.loads(event.removeprefix("data: ")) for event in stream.strip().split("\n\n")[:-1]]
    assert all("error" not in event for event in events), stream
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


def usage(stream: str) -> Any:
    events = [json.loads(event.removeprefix("data: ")) for event in stream.strip().split("\n\n")[:-1]]
    return next(event["usage"] for event in events if event.get("usage"))


async def set_fault(router: MockedRouter, fault: str, at: str, **more: Any) -> None:
    url = router.mocks.instances[at].url
    async with router.client.post(f"{url}/mock/faults", json={"fault": fault, **more}) as response:
        assert response.status == 200, await response.text()


async def nothing_is_left(router: MockedRouter) -> None:
    mocks = router.mocks.instances.values()
    await eventually(
        lambda: not any(each.handoffs.holds() or each.serving.open_requests for each in mocks), "nothing is left"
    )


async def ways(router: MockedRouter) -> tuple[float, float]:
    """Counters: early legs that became decode legs, and streams that did not go on as they had begun."""
    told = await router.metrics()
    return told.get('baton_early_legs_total{result="used"}', 0.0), told.get("baton_broken_seams_total", 0.0)


@pytest.mark.parametrize("seeding", [True, False])
async def test_streams_and_answers_read_as_from_one_engine(seeding: bool) -> None:
    async with mocked_router(fleet(), pins=True, early=True, seeding=seeding) as router:
        alone = await right(router)
        status, text, _ = await router.ask(STREAM)
        assert (status, said(text)) == (200, alone)
        assert (await router.ask(WHOLE))[1]["choices"][0]["text"] == alone
        assert await ways(router) == (2, 0)
        assert (await router.metrics())['baton_handoffs_total{result="ok"}'] == 2
        await nothing_is_left(router)


async def test_the_usage_is_that_of_a_leg_in_sequence() -> None:
    async with mocked_router(fleet(), pins=True) as router:
        in_sequence = [usage((await router.ask(STREAM))[1]) for _ in range(2)]
    async with mocked_router(fleet(), pins=True, early=True) as router:
        assert [usage((await router.ask(STREAM))[1]) for _ in range(2)] == in_sequence


async def test_the_usage_after_a_second_try_is_that_of_the_first_p() -> None:
    """The second prefill finds the whole prompt in P's prefix cache. The client's usage must not count that."""
    told = []
    for early in (False, True):
        async with mocked_router(fleet(1, 3), pins=True, early=early) as router:
            for decode in ("d0", "d1"):
                await set_fault(router, "break", decode, leg="decode", times=1, after_tokens=1)
            status, answer, headers = await router.ask(WHOLE)
            turns = (await router.explain(headers["X-Baton-Request-Id"]))["turns"]
            assert status == 200 and sum(each["turn"] == "choice" for each in turns) == 3
            told.append(answer["usage"])
            await nothing_is_left(router)
    assert told[0] == told[1]
    assert told[0]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_eight_at_once() -> None:
    async with mocked_router(fleet(2, 2), pins=True, early=True) as router:
        alone = await right(router)
        answers = await asyncio.gather(*(router.ask(STREAM) for _ in range(8)))
        assert {said(text) for _, text, _ in answers} == {alone}
        await nothing_is_left(router)


@pytest.mark.parametrize("fault", ["refuse", "break", "error"])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_leg_that_fails_costs_no_request(fault: str, leg: str) -> None:
    async with mocked_router(fleet(2, 2), pins=True, early=True) as router:
        alone = await right(router)
        for at in ("p0", "p1") if leg == "prefill" else ("d0", "d1"):
            await set_fault(router, fault, at, leg=leg, times=1)
        for _ in range(3):
            status, text, _ = await router.ask(STREAM)
            assert (status, said(text)) == (200, alone)
        assert (await ways(router))[1] == 0
        await nothing_is_left(router)


@pytest.mark.parametrize("dies", ["p0", "d0"])
async def test_an_engine_that_dies_while_p_computes_costs_no_request(dies: str) -> None:
    async with mocked_router(fleet(2, 2), pins=True, early=True) as router:
        alone = await right(router)
        await set_fault(router, "slow", "p0", factor=20)
        asking = [asyncio.create_task(router.ask(STREAM)) for _ in range(6)]
        await asyncio.sleep(0.02)
        await set_fault(router, "die", dies)
        for status, text, _ in await asyncio.wait_for(asyncio.gather(*asking), 20):
            assert (status, said(text)) == (200, alone)
        assert (await ways(router))[1] == 0


async def test_a_leg_that_waits_for_a_dead_p_computes_the_prompt() -> None:
    """As real engines do, whose agents tell them that P is lost: no leg waits for a hold that will not come."""
    async with mocked_router(fleet(), pins=True, early=True) as router:
        alone, url = await right(router), router.mocks.instances["d0"].url
        fields = early_fields(TransferId(RequestId("r1"), 1, 1), InstanceId("p0"), pins=True)
        leg = router.client.post(f"{url}/v1/completions", json={**WHOLE, **fields})
        async with asyncio.timeout(10):
            asking = asyncio.ensure_future(leg)
            await eventually(lambda: any(part.awaits for part in waiting(router)), "the leg waits")
            await set_fault(router, "die", "p0")
            async with await asking as answer:
                assert (await answer.json())["choices"][0]["text"] == alone
    assert not waiting(router)


async def test_a_leg_that_asks_after_p_has_died_with_the_hold_computes_the_prompt() -> None:
    """P's answer said that no engine was told; then P died and started anew, before D's question came."""
    name = TransferId(RequestId("r1"), 1, 1)
    async with mocked_router(fleet(), pins=True, early=True) as router:
        alone, producer, url = await right(router), router.mocks.instances["p0"], router.mocks.instances["d0"].url
        held = {**WHOLE, **prefill_fields(WHOLE, transfer=name)}
        async with router.client.post(f"{producer.url}/v1/completions", json=held) as answer:
            assert (await answer.json())["kv_transfer_params"][TOLD_EARLY] is False
        await set_fault(router, "die", "p0", seconds=0.1)
        await eventually(lambda: producer.alive and not producer.handoffs.holds(), "P is back, without the hold")
        async with asyncio.timeout(10):
            fields = early_fields(name, InstanceId("p0"), pins=True)
            async with router.client.post(f"{url}/v1/completions", json={**WHOLE, **fields}) as answer:
                assert (await answer.json())["choices"][0]["text"] == alone
    assert not waiting(router)


def waiting(router: MockedRouter) -> list[Any]:
    return list(router.mocks.instances["d0"].serving._parts.values())


async def test_a_pull_that_fails_is_computed_at_d_and_reads_the_same() -> None:
    async with mocked_router(fleet(), pins=True, early=True) as router:
        alone = await right(router)
        await set_fault(router, "fail_pull", "d0", times=1)
        assert said((await router.ask(STREAM))[1]) == alone
        await nothing_is_left(router)


@pytest.mark.parametrize("kind", ["keep_back", "wrong_token"])
async def test_a_p_whose_token_is_not_the_first_breaks_no_stream(kind: str) -> None:
    async with mocked_router(fleet(), pins=True, early=True) as router:
        alone = await right(router)
        await set_fault(router, kind, "p0", leg="prefill")
        told = said((await router.ask(STREAM))[1])
        assert told == alone or kind == "wrong_token"  # without pair proofs the router cannot see a wrong token


@pytest.mark.parametrize("stream", [True, False])
async def test_an_end_that_was_drawn_by_lot_is_handed_over_early(stream: bool) -> None:
    """D has heard P's token in time, so it is not asked again; an answer in one piece is D's own draw."""
    ends = Ends(1, 1)
    engines = [mock_settings("p0", Role.PREFILL, answers=ends), mock_settings("d0", Role.DECODE, answers=ends)]
    async with mocked_router(engines, pins=True, early=True) as router:
        _, answer, _ = await router.ask({**(STREAM if stream else WHOLE), "temperature": 1})
        assert (said(answer) if stream else answer["choices"][0]["text"]) == ""
        assert await ways(router) == (1, 0)
        await nothing_is_left(router)


def draws_its_own(router: MockedRouter, monkeypatch: pytest.MonkeyPatch, *names: str) -> list[Any]:
    """The first of these instances to be told P's token begins with another token.

    Returns a list that holds this instance as soon as it has done so."""
    drawn: list[Any] = []

    def draws(serving: Any, ready: Callable[[Any, Ready], None]) -> Callable[[Any, Ready], None]:
        def its_own(part: Any, told: Ready) -> None:
            if not drawn:
                drawn.append(serving)
                assert told.token is not None
                told = replace(told, token=told.token + 1)
            ready(part, told)

        return its_own

    for name in names:
        serving = router.mocks.instances[name].serving
        monkeypatch.setattr(serving, "_ready", draws(serving, serving._ready))
    return drawn


async def test_an_early_leg_that_begins_with_another_token_than_the_client_has_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D has computed the prompt itself and sampled another first token. A second D begins with the client's token, also
    where the stream could not be resumed.
    """
    async with mocked_router(fleet(1, 2), pins=True, early=True) as router:
        alone, drawn = await right(router), draws_its_own(router, monkeypatch, "d0", "d1")
        status, text, _ = await router.ask({**STREAM, "temperature": 1})
        assert (status, said(text)) == (200, alone)
        assert len(drawn) == 1, "an early leg drew a token of its own"
        assert (await ways(router)) == (1, 0)
        assert (await router.metrics())['baton_retries_total{kind="resumed"}'] == 1
        await nothing_is_left(router)


async def test_without_a_second_d_the_same_engine_begins_again_with_the_clients_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two instances; P refuses whole requests after its token. The stream once ended with an error here."""
    async with mocked_router(fleet(), pins=True, early=True) as router:
        alone, drawn = await right(router), draws_its_own(router, monkeypatch, "d0")
        await set_fault(router, "refuse", "p0", leg="whole")
        status, text, _ = await router.ask({**STREAM, "temperature": 1})
        assert (status, said(text)) == (200, alone)
        assert len(drawn) == 1
        await nothing_is_left(router)


async def test_a_client_that_leaves_leaves_nothing() -> None:
    async with mocked_router(fleet(), pins=True, early=True) as router:
        await set_fault(router, "slow", "p0", factor=20)
        asking = asyncio.create_task(router.ask(STREAM))
        await eventually(lambda: router.mocks.instances["d0"].serving.open_requests == 1, "D has it")
        asking.cancel()
        await eventually(lambda: router.mocks.instances["d0"].serving.open_requests == 0, "D has it no more")
        await nothing_is_left(router)


# --- early legs against pulls ----------------------------------------------------------------------------------------


class StandingClock:
    """The clock that the router's scheduler reads. It moves when it is moved."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


async def sent_early(router: MockedRouter, count: int) -> tuple[int, str]:
    """Of so many requests, one after the other: the number with an early leg, and why the last one went its way."""
    short = {**STREAM, "prompt": "A robot.", "max_tokens": 2}
    before = (await ways(router))[0]
    for _ in range(count):
        status, text, headers = await router.ask(short)
        assert status == 200 and said(text)
    turns = (await router.explain(headers["X-Baton-Request-Id"]))["turns"]
    because = next(each["because"] for each in turns if each["turn"] == "choice")
    return int((await ways(router))[0] - before), because


@pytest.mark.interpreted
async def test_a_router_pulls_where_early_legs_cost_more_and_returns_when_they_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the scheduler's clock the first token of an early leg comes 12 ms later, and later in no time. One request of
    four is compared, also where one of 32 is in earnest.
    """
    clock, slow_s = StandingClock(), [0.012]
    monkeypatch.setattr(early_cost, "LATER", early_cost.SOON)
    monkeypatch.setattr(scheduled, "time", clock)
    async with mocked_router(fleet(), pins=True, early=True) as router:
        serving: Any = router.mocks.instances["d0"].serving
        ready = serving._ready

        def slowed(part: Any, told: Ready) -> None:
            clock.now_s += slow_s[0]
            ready(part, told)

        monkeypatch.setattr(serving, "_ready", slowed)
        assert (await sent_early(router, 24))[0] == 24
        early, because = await sent_early(router, 8)
        assert early == 0 and because.endswith("; pulls, to compare with early legs")
        assert (await sent_early(router, 96))[0] == 72
        assert (await sent_early(router, 8))[0] == 8, "what came after the fourth run is compared, too"
        early, because = await sent_early(router, 16)
        assert early == 0 and because.endswith("; pulls: early legs took 12 ms longer here")
        told = await router.metrics()
        assert told['baton_early_legs_forgone_total{why="dearer"}'] == 16
        assert told['baton_early_legs_forgone_total{why="compared"}'] == 32
        extra_s = told['baton_early_leg_extra_seconds{near="false",prefill="p0",queued="false"}']
        assert extra_s == pytest.approx(0.012)

        slow_s[0] = 0.0
        early, because = await sent_early(router, 8)
        assert early == 8 and because.endswith("; an early leg, to compare with pulls")
        assert (await sent_early(router, 32))[0] == 8
        assert (await sent_early(router, 8))[0] == 0
        assert (await sent_early(router, 16))[0] == 16, "two runs have found that they are as fast"
        await nothing_is_left(router)
