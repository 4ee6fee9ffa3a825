"""The router's HTTP behaviour, against engines that can be made to misbehave at a chosen moment."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from support.fake_engine import FakeEngine
from support.fleet import Fleet, Starter, eventually

from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from router.fleet import probes
from router.fleet.probes import Prober
from router.fleet.view import FleetView
from router.http.upstream import Answer, EngineLost

PROMPT = {"model": "fake", "prompt": "hello", "max_tokens": 5}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


async def test_handoff_takes_two_legs(start: Starter) -> None:
    fleet = await start()
    status, answer = await fleet.post("/v1/completions", json=PROMPT, headers={"X-Request-Id": "mine"})
    assert (status, answer["from"]) == (200, "decode-0")
    (leg1,), (leg2,) = fleet.engines["prefill-0"].generated, fleet.engines["decode-0"].generated
    assert leg1["max_tokens"] == 1
    assert leg1["kv_transfer_params"]["do_remote_decode"]
    assert leg2["kv_transfer_params"]["remote_request_id"].startswith(fleet.engines["prefill-0"].named[0])
    assert {**leg2, "kv_transfer_params": None} == {**PROMPT, "kv_transfer_params": None}
    assert fleet.held == 0


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)])
async def test_streams_are_relayed_as_they_are(start: Starter, path: str, body: dict[str, Any]) -> None:
    fleet = await start()
    async with fleet.client.post(fleet.endpoint + path, json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        assert response.headers["X-Request-Id"]
        text = await response.text()
    assert text.count("data: ") == 4
    assert text.endswith("data: [DONE]\n\n")
    assert "decode-0" in text


async def test_one_token_never_hands_off(start: Starter) -> None:
    fleet = await start()
    status, answer = await fleet.post("/v1/completions", json={**PROMPT, "max_tokens": 1})
    assert (status, answer["from"]) == (200, "prefill-0")
    assert "kv_transfer_params" not in fleet.engines["prefill-0"].generated[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_ended_at_the_first_token(start: Starter, stream: bool) -> None:
    fleet = await start()
    fleet.engines["prefill-0"].finish_reason = "stop"
    status, answer = await fleet.post("/v1/completions", json={**PROMPT, "stream": stream, "temperature": 0})
    assert status == 200
    if stream:
        assert "prefill-0" in answer
    else:
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["kv_transfer_params"] is None, "clients do not get the hold's address"
    assert not fleet.engines["decode-0"].generated
    await eventually(lambda: fleet.held == 0, "the hold is released")


async def test_engine_errors_reach_the_client_as_they_are(start: Starter) -> None:
    fleet = await start()

    async def refuse(_: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "too long", "code": 400}}, status=400)

    fleet.engines["prefill-0"].behave = refuse
    assert await fleet.post("/v1/completions", json=PROMPT) == (400, {"error": {"message": "too long", "code": 400}})
    fleet.engines["prefill-0"].behave = None
    fleet.engines["decode-0"].behave = refuse
    status, _ = await fleet.post("/v1/completions", json={**PROMPT, "stream": True})
    assert status == 400, "a true status, before the first byte"
    await eventually(lambda: fleet.held == 0, "the hold is released")


async def test_dead_prefill_instance_is_replaced(start: Starter) -> None:
    fleet = await start(prefill=2)
    await fleet.engines["prefill-0"].stop()
    for _ in range(4):
        status, answer = await fleet.post("/v1/completions", json=PROMPT)
        assert (status, answer["from"]) == (200, "decode-0")
    assert len(fleet.engines["prefill-1"].generated) == 4


async def test_without_a_prefill_instance_decode_serves_aggregated(start: Starter) -> None:
    fleet = await start()
    await fleet.engines["prefill-0"].stop()
    status, answer = await fleet.post("/v1/completions", json=PROMPT)
    assert (status, answer["from"]) == (200, "decode-0")
    assert "kv_transfer_params" not in fleet.engines["decode-0"].generated[0]


async def test_server_error_in_decode_goes_to_another(start: Starter) -> None:
    fleet = await start(decode=2)

    async def fail(_: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "boom"}}, status=500)

    fleet.engines["decode-0"].behave = fail
    answers = [await fleet.post("/v1/completions", json=PROMPT) for _ in range(3)]
    assert [(status, answer["from"]) for status, answer in answers] == [(200, "decode-1")] * 3
    assert fleet.held == 0


async def test_stream_that_fails_before_its_first_token_goes_to_another(start: Starter) -> None:
    """vLLM sends 200 and then an error event: the client must see neither."""
    fleet = await start(decode=2)

    async def fail(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"error": {"message": "kv load failed", "code": 500}}\n\ndata: [DONE]\n\n')
        return response

    fleet.engines["decode-0"].behave = fail
    for _ in range(2):
        status, text = await fleet.post("/v1/completions", json={**PROMPT, "stream": True})
        assert status == 200
        assert "error" not in text
        assert "decode-1" in text


async def test_stream_that_breaks_ends_with_an_error_event_and_whole_events(start: Starter) -> None:
    fleet = await start()

    async def break_off(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "one"}]}\n\ndata: {"cho')
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    fleet.engines["decode-0"].behave = break_off
    status, text = await fleet.post("/v1/completions", json={**PROMPT, "stream": True})
    assert status == 200
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert events[0] == '{"choices": [{"text": "one"}]}'
    assert json.loads(events[1])["error"]["code"] == 502
    assert events[2:] == ["[DONE]"]


async def test_client_that_leaves_in_prefill_leaves_no_hold(start: Starter) -> None:
    fleet = await start()
    prefill = fleet.engines["prefill-0"]
    prefill.hold_leg = asyncio.Event()
    with pytest.raises(TimeoutError):
        await fleet.post("/v1/completions", json=PROMPT, timeout=aiohttp.ClientTimeout(total=0.1))
    prefill.hold_leg.set()
    await eventually(
        lambda: any(body.get("model") == "baton-release" for _, body in fleet.engines["decode-0"].bodies), ""
    )
    await eventually(lambda: fleet.held == 0, "the hold is released after the client has left")
    assert prefill.aborted == [], "a short leg is not aborted: an abort may strand its blocks"


async def test_client_that_leaves_in_a_long_prefill_has_it_aborted(start: Starter) -> None:
    fleet = await start()
    prefill = fleet.engines["prefill-0"]
    prefill.hold_leg = asyncio.Event()
    with pytest.raises(TimeoutError):
        await fleet.post(
            "/v1/completions", json=PROMPT, headers={"X-Request-Id": "r"}, timeout=aiohttp.ClientTimeout(total=0.1)
        )
    await eventually(lambda: prefill.aborted == [f"cmpl-{prefill.named[0]}-0"], "aborted by vLLM's own id")
    assert prefill.cut_off == 0, "P's connection stays open until P has answered"


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_in_decode_closes_the_leg(start: Starter, stream: bool) -> None:
    fleet = await start()
    decode = fleet.engines["decode-0"]
    forever = asyncio.Event()

    async def hang(request: web.Request, body: dict[str, Any]) -> None:
        await forever.wait()

    decode.behave = hang
    with pytest.raises(TimeoutError):
        await fleet.post("/v1/completions", json={**PROMPT, "stream": stream}, timeout=aiohttp.ClientTimeout(total=0.2))
    await eventually(lambda: decode.cut_off == 1, "the decode leg is closed")
    assert fleet.held == 0


async def test_deadline_before_the_first_token(start: Starter) -> None:
    fleet = await start(first_token_s=0.3)
    fleet.engines["prefill-0"].hold_leg = asyncio.Event()
    status, answer = await fleet.post("/v1/completions", json=PROMPT)
    assert status == 504
    assert answer["error"]["type"] == "DeadlineExceededError"


async def test_a_deadline_that_was_far_away(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router sets no timer for a deadline before it is near. In this test everything beyond 0.1 s is far."""
    monkeypatch.setattr("router.request.waiting.FAR_S", 0.1)
    monkeypatch.setattr("router.http.legs.SWEEP_S", 0.05)
    fleet = await start(first_token_s=0.6)
    fleet.engines["prefill-0"].hold_leg = asyncio.Event()
    began = asyncio.get_running_loop().time()
    status, _ = await fleet.post("/v1/completions", json=PROMPT)
    assert status == 504
    assert asyncio.get_running_loop().time() - began >= 0.6


async def test_any_other_path_is_passed_through_to_one_instance(start: Starter) -> None:
    fleet = await start()
    status, answer = await fleet.post(
        "/v1/embeddings?x=1", json={"input": "x", "kv_transfer_params": {"remote_host": "h"}}
    )
    assert status == 200
    assert answer == {"path": "/v1/embeddings?x=1", "method": "POST", "echo": '{"input":"x"}'}
    status, answer = await fleet.get("/v1/responses/abc")
    assert (status, answer["method"]) == (200, "GET")


async def test_a_request_that_reaches_no_engine_is_passed_to_another(start: Starter) -> None:
    fleet = await start(decode=3)
    for name in ("decode-0", "decode-2"):
        await fleet.engines[name].stop()
    answers = [await fleet.post("/v1/messages", json={"messages": []}) for _ in range(3)]
    assert [status for status, _ in answers] == [200] * 3
    await fleet.engines["decode-1"].stop()
    await fleet.engines["prefill-0"].stop()
    assert (await fleet.post("/v1/messages", json={"messages": []}))[0] in {502, 503}


@pytest.mark.parametrize("size", [100, 50_000])
async def test_the_description_of_embeddings_as_bytes_is_relayed(start: Starter, size: int) -> None:
    """``encoding_format: bytes``: vLLM describes the bytes in a header, without which no client can read them."""
    described = json.dumps({"data": "x" * size})

    async def embeds(_: FakeEngine, __: web.Request, ___: bytes) -> web.Response:
        return web.Response(body=b"\1\2", content_type="application/octet-stream", headers={"metadata": described})

    fleet = await start()
    for engine in fleet.engines.values():
        engine.behave_elsewhere = embeds
    asked = {"input": "x", "encoding_format": "bytes"}
    async with fleet.client.post(f"{fleet.endpoint}/v1/embeddings", json=asked, max_field_size=1 << 17) as answer:
        assert (answer.status, await answer.read()) == (200, b"\1\2")
        assert answer.headers["metadata"] == described


SMUGGLED = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"},
    "ec_transfer_params": {"remote_host": "evil"},
}


async def test_paths_outside_v1(start: Starter) -> None:
    fleet = await start()
    status, answer = await fleet.post("/tokenize", json={"prompt": "x"})
    assert (status, answer["path"]) == (200, "/tokenize")
    assert (await fleet.post("/sleep", json={}))[0] == 404
    assert (await fleet.post("/inference/v1/generate", json={}))[0] == 404
    assert (await fleet.post("/v1/load_lora_adapter", json={}))[0] == 403


ENDPOINTS = [
    "completions",
    "chat/completions",
    "responses",
    "messages",
    "embeddings",
    "chat/completions/batch",
    "score",
]
WRAPPINGS = {
    "plain": lambda x: x,
    "extra args": lambda x: {"sampling_params": {"extra_args": x}},
    "xargs": lambda x: {"vllm_xargs": x},
    "text": lambda x: {"vllm_xargs": json.dumps(x)},
    "deep": lambda x: {"a": [[{"b": x}]]},
}


@pytest.mark.parametrize("path", [f"/v1/{endpoint}" for endpoint in ENDPOINTS])
@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
async def test_nothing_smuggled_reaches_an_engine(start: Starter, path: str, wrap: Any) -> None:
    fleet = await start()
    body = {**PROMPT, **CHAT, **wrap(SMUGGLED)}
    headers = {"X-data-parallel-rank": "1", "X-Vllm-Priority": "-5", "Authorization": "Bearer k"}
    await fleet.post(path, json=body, headers=headers)
    for engine in fleet.engines.values():
        assert "evil" not in repr(engine.bodies)
        for seen in engine.headers:
            assert not {"x-data-parallel-rank", "x-vllm-priority"} & {name.lower() for name in seen}
            assert seen["Authorization"] == "Bearer k"


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("not JSON", {"data": b"{", "headers": {"Content-Type": "application/json"}}, 400, "not valid JSON"),
    ("no content type", {"data": b"{}", "headers": {"Content-Type": ""}}, 400, "application/json"),
    ("array", {"json": [1]}, 400, "must be a JSON object"),
    ("empty", {"data": b"", "headers": {"Content-Type": "application/json"}}, 400, "empty"),
    ("model type", {"json": {**PROMPT, "model": 7}}, 400, "`model` must be a string"),
    ("unknown model", {"json": {**PROMPT, "model": "nosuch"}}, 404, "Served here: `fake`"),
    (
        "64 MB",
        {"data": io.BytesIO(b" " * (64 << 20)), "headers": {"Content-Type": "application/json"}},
        413,
        "--body-bytes-max",
    ),
]


@pytest.mark.parametrize(("kwargs", "status", "words"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_bad_input(start: Starter, path: str, kwargs: dict[str, Any], status: int, words: str) -> None:
    fleet = await start()
    if isinstance(kwargs.get("data"), io.BytesIO):
        kwargs = {**kwargs, "data": io.BytesIO(kwargs["data"].getvalue())}  # aiohttp closes what it sent
    got, answer = await fleet.post(path, **kwargs)
    assert got == status
    assert words in answer["error"]["message"]
    assert answer["error"]["code"] == status
    assert not any(engine.bodies for engine in fleet.engines.values())


async def test_unknown_paths_and_methods(start: Starter) -> None:
    fleet = await start()
    assert (await fleet.get("/nowhere"))[0] == 404
    async with fleet.client.post(fleet.endpoint + "/health") as response:
        assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")
        assert (await response.json())["error"]["type"] == "MethodNotAllowedError"


async def _silent(fleet: Fleet, sent: bytes) -> bytes:
    """What a client receives that sends these bytes and then nothing."""
    address = urlsplit(fleet.endpoint)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(sent)
    async with asyncio.timeout(5):
        answer = await reader.read(4096)
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"", b"head"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", b"head"),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99\r\n\r\n{",
            b"body",
        ),
    ],
)
async def test_half_a_request_then_silence(start: Starter, sent: bytes, words: bytes) -> None:
    fleet = await start(body_timeout_s=0.3, head_timeout_s=0.3)
    answer = await _silent(fleet, sent)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert words in answer
    assert b'"RequestTimeoutError"' in answer


async def test_readiness_models_and_metrics(start: Starter) -> None:
    fleet = await start()
    assert (await fleet.get("/health"))[0] == 200
    assert (await fleet.get("/v1/models"))[1]["data"] == [{"id": "fake", "object": "model", "max_model_len": 99}]
    assert (await fleet.get("/v1/models/fake"))[1]["id"] == "fake"
    assert (await fleet.get("/v1/models/nosuch"))[0] == 404
    await fleet.post("/v1/completions", json=PROMPT)
    text = (await fleet.get("/metrics"))[1]
    assert 'baton_requests_total{outcome="served",path="/v1/completions",way="handoff"} 1.0' in text
    assert 'baton_instance_up{instance="prefill-0",role="prefill"} 1.0' in text
    assert 'baton_instance_inflight{instance="decode-0",role="decode"} 0.0' in text
    async with fleet.client.get(fleet.admin + "/metrics") as response:
        assert response.status == 200
    await fleet.engines["decode-0"].stop()
    async with asyncio.timeout(10):
        while (await fleet.get("/ready"))[0] == 200:
            await asyncio.sleep(0.05)
    status, answer = await fleet.get("/ready")
    assert status == 503
    assert [each["state"] for each in answer["instances"]] == ["up", "down"]


async def test_busy_port_names_the_flag(start: Starter) -> None:
    from cluster.errors import UsageError
    from cluster.ids import InstanceId
    from cluster.instance import Instance, Role
    from router.api.app import serve
    from router.api.config import RouterConfig

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        only = (Instance(id=InstanceId("x"), role=Role.BOTH, url="http://127.0.0.1:9"),)
        with pytest.raises(UsageError, match=rf"{port}.*--port"):
            await serve(RouterConfig(instances=only, port=port, admin_port=0), lambda *_: None, asyncio.Event())


async def test_sixty_four_streams_at_once(start: Starter) -> None:
    fleet = await start(prefill=2, decode=2)
    answers = await asyncio.gather(*(fleet.post("/v1/completions", json={**PROMPT, "stream": True}) for _ in range(64)))
    assert all(status == 200 and text.endswith("data: [DONE]\n\n") for status, text in answers)
    counts = [len(fleet.engines[name].generated) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")]
    assert counts == [32, 32, 32, 32], "the load is shared evenly"
    assert fleet.held == 0


async def test_an_unreadable_answer_of_p_is_ps_failure(start: Starter) -> None:
    fleet = await start(prefill=2)

    async def babble(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(body=b"[" * 4000, content_type="application/json")

    fleet.engines["prefill-0"].behave = fleet.engines["prefill-1"].behave = babble
    for _ in range(2):
        status, answer = await fleet.post("/v1/completions", json=PROMPT)
        assert (status, answer["from"]) == (200, "decode-0"), "served aggregated"
    async with fleet.client.get(fleet.admin + "/explain?n=1") as response:
        (line,) = (await response.json())["requests"]
    assert (await fleet.client.get(f"{fleet.admin}/explain/{line['id']}")).status == 200


async def test_an_answer_in_one_piece_that_its_engine_aborted_is_made_by_another(start: Starter) -> None:
    """vLLM's status is 200, and the text may be empty."""
    fleet = await start(decode=2)
    aborting = fleet.engines["decode-0"]

    async def aborted(request: web.Request, body: dict[str, Any]) -> web.Response:
        choice = {"index": 0, "text": "", "finish_reason": "abort"}
        text = json.dumps({"id": "a", "object": "text_completion", "choices": [choice]}, separators=(",", ":"))
        return web.Response(text=text, content_type="application/json")

    aborting.behave = aborted
    for _ in range(4):
        status, answer = await fleet.post("/v1/completions", json=PROMPT)
        assert (status, answer["from"]) == (200, "decode-1")


async def test_the_reason_of_failing_probes_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong URL, or an engine without `/metrics`: otherwise nothing would ever say why the instance is not used."""
    monkeypatch.setattr(probes, "INTERVAL_S", 0.0)
    instance, view = Instance(id=InstanceId("d"), role=Role.DECODE, url="http://d"), FleetView()
    view.add(instance)
    asked = 0

    async def ask(*_: object) -> Answer:
        nonlocal asked
        asked += 1
        if asked <= 5:
            raise EngineLost("no answer at all", reached=False)
        raise TimeoutError

    watching = asyncio.ensure_future(Prober(view, ask, lambda *_, **__: None, read_metrics=False).watch(instance))
    await eventually(lambda: asked > 9, "it is probed again and again")
    watching.cancel()
    said = [each.getMessage() for each in caplog.records if "fails its probe" in each.getMessage()]
    assert said == [
        "d at http://d fails its probe: no answer at all", "d at http://d fails its probe: no answer in 5 s"
    ]  # fmt: skip


async def test_an_engine_that_no_leg_could_reach_during_a_probe_is_up_again_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The probe goes over a kept connection. Requests that wait for the instance must be told, and the engine may be
    another one.
    """
    monkeypatch.setattr(probes, "INTERVAL_S", 0.0)
    instance, view = Instance(id=InstanceId("d"), role=Role.DECODE, url="http://d"), FleetView()
    view.add(instance)
    told: list[bool] = []
    asked: list[str] = []

    async def ask(instance: Instance, path: str) -> Answer:
        asked.append(path)
        if asked.count("/health") == 3:
            view.unreachable(instance.id)
        return Answer(200, "application/json", b'{"data": [{"id": "m"}]}')

    prober = Prober(view, ask, lambda _, *, up: told.append(up), read_metrics=False)
    watching = asyncio.ensure_future(prober.watch(instance))
    await eventually(lambda: asked.count("/health") > 4, "the probe after it has ended")
    watching.cancel()
    assert told == [True, True]
    first = ["/health", "/v1/models", "/openapi.json"]
    assert asked[:8] == [*first, "/health", "/health", *first], "models and paths are read again"
