"""Seeds (a first token before the handoff), and streams that go on elsewhere, against engines with scripted faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from support.fake_engine import FIRST_TOKEN, TOKENS, FakeEngine
from support.fleet import Fleet, Starter, eventually

from cluster.wire import FIRST_TOKEN as PIN
from router.request.reply import REMEMBERED_BYTES_MAX

GREEDY = {"model": "fake", "prompt": "hello", "max_tokens": 5, "temperature": 0, "stream": True}
CHAT = {
    **{key: value for key, value in GREEDY.items() if key != "prompt"},
    "messages": [{"role": "user", "content": "x"}],
}
BY_LOT = {**GREEDY, "temperature": 1}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


async def listen(fleet: Fleet, body: dict[str, Any], path: str = COMPLETIONS) -> list[dict[str, Any]]:
    """All events of a stream except its end, which must be there."""
    async with fleet.client.post(fleet.endpoint + path, json=body) as response:
        assert response.status == 200
        events = (await response.text()).strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def text_of(events: list[dict[str, Any]]) -> str:
    choices = [event["choices"][0] for event in events if "error" not in event]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def errors(events: list[dict[str, Any]]) -> list[str]:
    return [event["error"]["message"] for event in events if "error" in event]


async def metric(fleet: Fleet, line: str) -> float:
    async with fleet.client.get(fleet.admin + "/metrics") as response:
        text = await response.text()
    return float(next(each.rsplit(" ", 1)[1] for each in text.splitlines() if each.startswith(line)))


async def write(request: web.Request, *texts: str, chat: bool = False) -> web.StreamResponse:
    """A stream of these texts, left open."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for text in texts:
        choice: dict[str, Any] = {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}
        await response.write(f"data: {json.dumps({'choices': [{**choice, 'finish_reason': None}]})}\n\n".encode())
    return response


def says(*texts: str, done: bool = True) -> Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]:
    """Behaviour of an engine that streams these texts; without `done` its connection breaks after them."""

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await write(request, *texts)
        if done:
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        else:
            assert request.transport is not None
            request.transport.abort()
        return response

    return behave


@pytest.mark.parametrize("reason", ["abort", "stop"])
async def test_a_token_of_p_that_no_client_got_is_no_seed(start: Starter, reason: str) -> None:
    """P's answer names its token and a hold, but P is about to stop, or its token is the last one. The client gets no
    seed, and the first byte that it does get is counted.
    """
    fleet = await start(prefill=2, pins=True)
    ended: list[str] = []

    def ends(engine: FakeEngine) -> Callable[[web.Request, dict[str, Any]], Awaitable[web.Response | None]]:
        async def behave(request: web.Request, body: dict[str, Any]) -> web.Response | None:
            if ended:
                return None
            ended.append(engine.name)
            answer = json.loads((await engine._prefill(request)).text or "")
            answer["choices"][0]["finish_reason"] = reason
            return web.json_response(answer)

        return behave

    for name in ("prefill-0", "prefill-1"):
        fleet.engines[name].behave = ends(fleet.engines[name])
    assert text_of(await listen(fleet, GREEDY)) == "".join(TOKENS)
    assert len(ended) == 1
    assert await metric(fleet, "baton_seeds_total") == 0
    assert await metric(fleet, "baton_first_byte_seconds_count") == 1


@pytest.mark.parametrize(("body", "answering"), [(BY_LOT, "decode-0"), (GREEDY, "prefill-0")])
async def test_an_end_that_p_has_drawn_by_lot_is_told_to_d(
    start: Starter, body: dict[str, Any], answering: str
) -> None:
    """If D drew again where P's draw ends the answer, answers would end at their first token too seldom."""
    fleet = await start(pins=True)
    fleet.engines["prefill-0"].finish_reason = "stop"
    assert {event["from"] for event in await listen(fleet, body)} == {answering}
    legs = fleet.engines["decode-0"].generated
    assert [leg["kv_transfer_params"][PIN] for leg in legs] == ([FIRST_TOKEN] if body is BY_LOT else [])
    assert await metric(fleet, "baton_seeds_total") == 0
    await eventually(lambda: fleet.held == 0, "no hold is left")


@pytest.mark.parametrize("body", [{**BY_LOT, "stop": " two"}, {**BY_LOT, "max_tokens": 100}])
async def test_a_token_drawn_by_lot_that_cannot_be_shown_is_told_to_d(start: Starter, body: dict[str, Any]) -> None:
    fleet = await start(pins=True)
    assert text_of(await listen(fleet, body)) == "".join(TOKENS)
    (leg,) = fleet.engines["decode-0"].generated
    assert leg["kv_transfer_params"][PIN] == FIRST_TOKEN
    assert await metric(fleet, "baton_seeds_total") == 0


@pytest.mark.parametrize("deaf", [{"decode-1"}, {"decode-1", "prefill-0"}])
async def test_an_engine_that_cannot_be_told_a_drawn_token_is_asked_last(start: Starter, deaf: set[str]) -> None:
    """It would draw again, and no splice would notice, as the client has no token yet. If no other engine is left, the
    draw is given up.
    """
    fleet = await start(pins=True, decode=2, deaf=frozenset(deaf))

    async def fail(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "boom"}}, status=500)

    fleet.engines["decode-0"].behave = fail
    status, answer = await fleet.post(COMPLETIONS, json={**BY_LOT, "stop": " two"})
    assert status == 200, answer
    told = [leg["kv_transfer_params"] for leg in fleet.engines["prefill-0"].generated]
    alone = [fields for fields in told if "do_remote_decode" not in fields]
    others = [leg.get("kv_transfer_params") or {} for leg in fleet.engines["decode-1"].generated]
    if "prefill-0" in deaf:
        assert len(others) + len(alone) == 1 and not any(PIN in fields for fields in (*others, *alone))
    else:
        assert alone == [{PIN: FIRST_TOKEN}] and not others
    await eventually(lambda: fleet.held == 0, "no hold is left")


async def test_a_token_that_ends_the_answer_is_no_seed_even_if_it_has_a_text(start: Starter) -> None:
    """As with `include_stop_str_in_output`: one engine sends the text and the reason in one event."""
    fleet = await start(pins=True)
    engine = fleet.engines["prefill-0"]

    async def ends(request: web.Request, body: dict[str, Any]) -> web.Response:
        answer = json.loads((await engine._prefill(request)).text or "")
        answer["choices"][0]["finish_reason"] = "stop"
        return web.json_response(answer)

    engine.behave = ends
    await listen(fleet, BY_LOT)
    (leg,) = fleet.engines["decode-0"].generated
    assert leg["kv_transfer_params"][PIN] == FIRST_TOKEN
    assert await metric(fleet, "baton_seeds_total") == 0


async def test_the_first_token_comes_while_d_has_sent_nothing(start: Starter) -> None:
    fleet = await start(pins=True)
    may_speak = asyncio.Event()

    async def wait(request: web.Request, body: dict[str, Any]) -> None:
        await may_speak.wait()

    fleet.engines["decode-0"].behave = wait
    async with fleet.client.post(fleet.endpoint + COMPLETIONS, json=GREEDY) as response:
        first = await response.content.readuntil(b"\n\n")
        assert json.loads(first[6:])["choices"][0]["text"] == TOKENS[0]
        may_speak.set()
        rest = (await response.content.read()).decode()
    assert rest.count("data: ") == 3
    assert TOKENS[0] not in rest
    (leg2,) = fleet.engines["decode-0"].generated
    assert leg2["kv_transfer_params"][PIN] == FIRST_TOKEN
    assert "return_token_ids" not in leg2
    assert fleet.held == 0
    assert await metric(fleet, "baton_seeds_total") == 1


@pytest.mark.parametrize(
    "body",
    [
        {**GREEDY, "logprobs": 1},
        {**GREEDY, "return_token_ids": True},
        {**GREEDY, "stream_options": {"continuous_usage_stats": True}},
        {**GREEDY, "stream_options": 1},
        {**GREEDY, "stream_options": {"include_usage": "yes"}},
        {**GREEDY, "max_tokens": 100},  # 99 of context
        {**GREEDY, "min_tokens": 2},
    ],
)
async def test_plain_where_seeding_is_not_exact(start: Starter, body: dict[str, Any]) -> None:
    fleet = await start(pins=True)
    assert text_of(await listen(fleet, body)) == "".join(TOKENS)
    (leg2,) = fleet.engines["decode-0"].generated
    assert PIN not in leg2["kv_transfer_params"]


@pytest.mark.parametrize(
    ("stop", "seeded"),
    [(" two", False), ("one", False), ("e t", False), ("fox", True), ("", True), (["x", " "], False)],
)
async def test_stop_strings_that_may_begin_in_the_seed(start: Starter, stop: Any, seeded: bool) -> None:
    fleet = await start(pins=True)
    await listen(fleet, {**GREEDY, "stop": stop})
    (leg2,) = fleet.engines["decode-0"].generated
    assert (PIN in leg2["kv_transfer_params"]) == seeded


@pytest.mark.parametrize("settings", [{"pins": False}, {"pins": True, "seeding": False}])
async def test_nothing_is_seeded_where_d_cannot_be_told_or_seeding_is_off(
    start: Starter, settings: dict[str, Any]
) -> None:
    fleet = await start(**settings)
    assert text_of(await listen(fleet, GREEDY)) == "".join(TOKENS)
    assert PIN not in fleet.engines["decode-0"].generated[0]["kv_transfer_params"]
    assert "return_token_ids" not in fleet.engines["prefill-0"].generated[0]


async def test_the_longest_answer_that_an_engine_takes_is_seeded(start: Starter) -> None:
    fleet = await start(pins=True)
    await listen(fleet, {**GREEDY, "max_tokens": 99})  # D lowers it to what fits beside the prompt
    (leg2,) = fleet.engines["decode-0"].generated
    assert PIN in leg2["kv_transfer_params"]


async def test_a_refusal_that_only_d_can_give_keeps_its_status(start: Starter) -> None:
    """Leg 1 asks for one token, so only D can see that the client's own limit is too high."""
    fleet = await start(pins=True)

    async def refuse(_: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "too long", "code": 400}}, status=400)

    fleet.engines["decode-0"].behave = refuse
    status, answer = await fleet.post(COMPLETIONS, json={**GREEDY, "max_tokens": 1000})
    assert (status, answer["error"]["message"]) == (400, "too long")
    await eventually(lambda: fleet.held == 0, "no hold is left")


async def test_chat_is_seeded_with_its_role(start: Starter) -> None:
    fleet = await start(pins=True)

    async def chat(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await write(request, "one two ", "three ", chat=True)
        await response.write(b"data: [DONE]\n\n")
        return response

    fleet.engines["decode-0"].behave = chat
    events = await listen(fleet, CHAT, CHATS)
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "one "},
        {"content": "two "},
        {"content": "three "},
    ]


async def test_no_seed_where_the_engine_has_a_reasoning_parser(start: Starter) -> None:
    """P's answer has the token as content, as the parser saw no end of the reasoning; D streams it as reasoning."""
    fleet = await start(pins=True)
    prefill = fleet.engines["prefill-0"]

    async def parsed(request: web.Request, body: dict[str, Any]) -> web.Response:
        answer = json.loads((await prefill._prefill(request)).text or "")
        answer["usage"]["completion_tokens_details"] = {"reasoning_tokens": 0}
        return web.json_response(answer)

    async def reasons(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await write(request)
        for delta in ({"role": "assistant", "content": ""}, {"reasoning": "one "}, {"content": "two "}):
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    prefill.behave, fleet.engines["decode-0"].behave = parsed, reasons
    events = await listen(fleet, CHAT, CHATS)
    assert not errors(events)
    assert [event["choices"][0]["delta"] for event in events][1:] == [{"reasoning": "one "}, {"content": "two "}]
    assert await metric(fleet, "baton_seeds_total") == 0
    assert await metric(fleet, "baton_broken_seams_total") == 0


@pytest.mark.parametrize("body", [GREEDY, BY_LOT])
async def test_another_text_than_the_seed_ends_the_stream_and_is_counted(start: Starter, body: dict[str, Any]) -> None:
    """No engine goes on with the seed's text: the router asks each engine once."""
    fleet = await start(pins=True)
    other = says("zwei ", "drei ")

    async def behave(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse | None:
        return await other(request, asked) if asked.get("stream") else None

    for engine in fleet.engines.values():
        engine.behave = behave
    events = await listen(fleet, body)
    assert text_of(events) == "one "
    (message,) = errors(events)
    assert "splice" in message
    await eventually_metric(fleet, "baton_broken_seams_total", 1)


@pytest.mark.parametrize("body", [GREEDY, BY_LOT])
async def test_another_text_than_the_seed_is_replaced_by_an_engine_that_goes_on_with_it(
    start: Starter, body: dict[str, Any]
) -> None:
    fleet = await start(pins=True, decode=2)
    fleet.engines["decode-0"].behave = says("zwei ", "drei ")
    events = await listen(fleet, body)
    assert text_of(events) == "".join(TOKENS)
    assert not errors(events)
    (again,) = fleet.engines["decode-1"].generated
    assert again["kv_transfer_params"][PIN] == FIRST_TOKEN
    assert await metric(fleet, "baton_broken_seams_total") == 0


async def eventually_metric(fleet: Fleet, line: str, value: float) -> None:
    async with asyncio.timeout(5):
        while await metric(fleet, line) != value:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("refusal", ["refused", "500", "dies"])
async def test_after_the_seed_another_d_goes_on(start: Starter, refusal: str) -> None:
    fleet = await start(pins=True, decode=2)
    first = fleet.engines["decode-0"]
    if refusal == "refused":
        await first.stop()
    else:

        async def fail(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if refusal == "500":
                return web.json_response({"error": {"message": "boom"}}, status=500)
            assert request.transport is not None
            request.transport.abort()
            return web.Response()

        first.behave = fail
    events = await listen(fleet, GREEDY)
    assert text_of(events) == "".join(TOKENS)
    assert not errors(events)
    assert fleet.engines["decode-1"].generated[0]["kv_transfer_params"][PIN] == FIRST_TOKEN
    await eventually(lambda: fleet.held == 0, "no hold is left")


async def test_a_hold_that_was_touched_is_never_pulled_by_another(start: Starter) -> None:
    """D pulled, P freed the blocks, and D died before its first byte: a second pull may read another prompt's bytes."""
    fleet = await start(pins=True, decode=2)
    first = fleet.engines["decode-0"]

    async def pull_and_die(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        first._free(body["kv_transfer_params"])
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    first.behave = pull_and_die
    assert text_of(await listen(fleet, GREEDY)) == "".join(TOKENS)
    pulled = [leg["kv_transfer_params"]["remote_request_id"] for name in ("decode-0", "decode-1")
              for leg in fleet.engines[name].generated]  # fmt: skip
    assert len(pulled) == len(set(pulled)) == 2
    assert len(fleet.engines["prefill-0"].generated) == 2
    await eventually(lambda: fleet.held == 0, "no hold is left")


def breaks_after(engine: FakeEngine, *texts: str, chat: bool = False) -> None:
    """Make the engine's next answers break after these texts."""

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        engine._free(body.get("kv_transfer_params") or {})
        response = await write(request, *texts, chat=chat)
        await asyncio.sleep(0)
        assert request.transport is not None
        request.transport.close()
        return response

    engine.behave = behave


@pytest.mark.parametrize("pins", [True, False])
async def test_a_stream_that_dies_goes_on_elsewhere(start: Starter, pins: bool) -> None:
    fleet = await start(pins=pins, decode=2)
    breaks_after(fleet.engines["decode-0"], "one ", "two ")
    events = await listen(fleet, GREEDY)
    assert text_of(events) == "".join(TOKENS)
    assert not errors(events)
    await eventually(lambda: fleet.held == 0, "no hold is left")
    assert await metric(fleet, 'baton_retries_total{kind="resumed"}') == 1


async def test_an_error_event_within_a_stream_is_a_broken_stream(start: Starter) -> None:
    fleet = await start(decode=2)
    first = fleet.engines["decode-0"]

    async def fail(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        first._free(body.get("kv_transfer_params") or {})
        response = await write(request, "one ")
        await response.write(b'data: {"error": {"message": "EngineCore died"}}\n\ndata: [DONE]\n\n')
        await response.write_eof()
        return response

    first.behave = fail
    events = await listen(fleet, GREEDY)
    assert text_of(events) == "".join(TOKENS)
    assert not errors(events)


async def test_a_second_stream_may_fail_before_it_is_joined(start: Starter) -> None:
    """An error event at the splice ends that stream; it does not count as another answer."""
    fleet = await start(decode=3)
    breaks_after(fleet.engines["decode-0"], "one ", "two ")
    second = fleet.engines["decode-1"]

    async def fail(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        second._free(body.get("kv_transfer_params") or {})
        response = await write(request, "one ")
        await response.write(b'data: {"error": {"message": "EngineCore died"}}\n\ndata: [DONE]\n\n')
        await response.write_eof()
        return response

    second.behave = fail
    events = await listen(fleet, GREEDY)
    assert text_of(events) == "".join(TOKENS)
    assert not errors(events)
    assert fleet.engines["decode-2"].generated


@pytest.mark.parametrize("body", [BY_LOT, {**GREEDY, "logprobs": 1}, {**GREEDY, "tools": [{"type": "function"}]}])
async def test_a_broken_stream_that_cannot_be_repeated_ends_with_an_error(start: Starter, body: dict[str, Any]) -> None:
    fleet = await start(decode=2)
    breaks_after(fleet.engines["decode-0"], "one ", "two ")
    events = await listen(fleet, body)
    assert text_of(events) == "one two "
    assert len(errors(events)) == 1
    assert not fleet.engines["decode-1"].generated


async def test_a_drawn_chat_that_breaks_after_its_role_goes_on_elsewhere(start: Starter) -> None:
    """Nothing was said yet, so any answer may follow. It still begins with the token that P has drawn."""
    fleet = await start(pins=True, decode=2)
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'

    def chats(name: str, *texts: str) -> None:
        engine = fleet.engines[name]

        async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            engine._free(body.get("kv_transfer_params") or {})
            response = await write(request)
            await response.write(role)
            for text in texts:
                choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
                await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            if texts:
                await response.write(b"data: [DONE]\n\n")
            else:
                assert request.transport is not None
                request.transport.close()
            return response

        engine.behave = behave

    chats("decode-0")
    chats("decode-1", "three ", "four")
    events = await listen(fleet, {**CHAT, "temperature": 1, "stop": " two"}, CHATS)
    deltas = [event["choices"][0]["delta"] for event in events if "error" not in event]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "three "}, {"content": "four"}]
    assert not errors(events)
    told = [leg["kv_transfer_params"][PIN] for name in ("decode-0", "decode-1")
            for leg in fleet.engines[name].generated]  # fmt: skip
    assert told == [FIRST_TOKEN, FIRST_TOKEN]
    await eventually(lambda: fleet.held == 0, "no hold is left")


async def test_a_broken_stream_without_another_instance_ends_with_an_error(start: Starter) -> None:
    fleet = await start(prefill=0, decode=1)
    breaks_after(fleet.engines["decode-0"], "one ", "two ")
    events = await listen(fleet, GREEDY)
    assert text_of(events) == "one two "
    assert len(errors(events)) == 1


@pytest.mark.timed
async def test_a_d_that_hangs_after_the_seed_is_left_for_another(start: Starter) -> None:
    fleet = await start(pins=True, decode=2, stall_s=0.3)
    first = fleet.engines["decode-0"]

    async def hang(request: web.Request, body: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    first.behave = hang
    events = await listen(fleet, GREEDY)
    assert text_of(events) == "".join(TOKENS)
    assert not errors(events)
    await eventually(lambda: fleet.held == 0, "no hold is left")


@pytest.mark.timed
async def test_a_stream_too_long_to_be_continued_may_be_silent_as_long_as_any(start: Starter) -> None:
    """While another engine could go on, an engine may be silent for half the time (`router.core.turns.TURN`). Before,
    that limit stayed when the stream had become too long for another engine, so a slow answer was cut off.
    """
    fleet = await start(prefill=0, decode=1, stall_s=1.0)
    long = "x" * REMEMBERED_BYTES_MAX

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await write(request, "one ", long)
        await asyncio.sleep(0.7)
        last = {"choices": [{"index": 0, "text": "two", "finish_reason": "length"}]}
        await response.write(b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    fleet.engines["decode-0"].behave = behave
    events = await listen(fleet, GREEDY)
    assert not errors(events)
    assert text_of(events) == f"one {long}two"


async def test_a_client_that_leaves_after_the_seed_leaves_nothing(start: Starter) -> None:
    fleet = await start(pins=True)
    first = fleet.engines["decode-0"]

    async def hang(request: web.Request, body: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    first.behave = hang
    async with fleet.client.post(fleet.endpoint + COMPLETIONS, json=GREEDY) as response:
        await response.content.readuntil(b"\n\n")
    await eventually(lambda: first.cut_off == 1, "D's connection is closed")
    await eventually(lambda: fleet.held == 0, "no hold is left")
    assert len(first.generated) == 1
