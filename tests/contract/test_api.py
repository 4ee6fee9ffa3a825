"""Paths, models and responses: a request reaches an instance that has what it names, or gets an error."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from support.fake_engine import FakeEngine
from support.fleet import Fleet, Starter

from cluster.keys import digest
from cluster.spec import SloClass, Tenant
from router.api.paths import PATHS, How
from router.fleet import probes

ASK = {"model": "fake", "prompt": "hello", "max_tokens": 5}
GENERATES = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/{response_id}", "/tokenize"]
EMBEDS = ["/v1/embeddings", "/pooling", "/tokenize"]


def with_paths(**paths: list[str]) -> Callable[[dict[str, FakeEngine]], None]:
    def prepare(engines: dict[str, FakeEngine]) -> None:
        for name, listed in paths.items():
            engines[name.replace("_", "-")].paths = listed

    return prepare


async def test_a_request_reaches_the_engine_that_has_its_path(start: Starter) -> None:
    fleet = await start(decode=2, prepare=with_paths(prefill_0=GENERATES, decode_0=GENERATES, decode_1=EMBEDS))
    for _ in range(3):
        assert (await fleet.post("/v1/embeddings", json={"input": "x"}))[0] == 200
    assert [path for path, _ in fleet.engines["decode-1"].bodies] == ["/v1/embeddings"] * 3
    assert not fleet.engines["decode-0"].bodies


async def test_a_path_that_no_engine_has_is_named_in_a_404(start: Starter) -> None:
    fleet = await start(prepare=with_paths(prefill_0=GENERATES, decode_0=GENERATES))
    for path in ("/v1/embeddings", "/rerank", "/v1/files"):
        status, answer = await fleet.post(path, json={"input": "x"})
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (404, "NotFoundError", 404)
        assert f"`{path}`" in answer["error"]["message"]
    assert not any(engine.bodies for engine in fleet.engines.values())


async def test_an_engine_that_lists_no_paths_is_tried(start: Starter) -> None:
    fleet = await start(decode=2, prepare=with_paths(prefill_0=GENERATES, decode_0=GENERATES))
    assert (await fleet.post("/v1/made/up", json={}))[0] == 200
    assert [path for path, _ in fleet.engines["decode-1"].bodies] == ["/v1/made/up"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../sleep",
        "/v1/%2e%2e/sleep",
        "/v1/%2e%2e%2fsleep",
        "/v1/x/..%2f..%2fsleep",
        "/v1/%252e%252e/sleep",
        "/v1//sleep",
        "/v1/./load_lora_adapter",
        "/v1/x/%2e%2e/load_lora_adapter",
        "/v1/load_lora_adapter/",
        "/v1/..\\sleep",
        "/v1/a%00b",
        "/v1/chat%2Fcompletions",
        "/v1/chat%2fcompletions?x=1",
        "/v1%2Fcompletions",
        "/v1/load%5Flora%5Fadapter",
        "/v1/embed%64ings",
    ],
)
async def test_no_spelling_of_a_path_reaches_what_is_closed(start: Starter, path: str) -> None:
    """A path that the router reads as below ``/v1/`` must not be another path to an engine."""
    fleet = await start()
    address = urlsplit(fleet.endpoint)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 2"
    writer.write(f"{head}\r\nConnection: close\r\n\r\n{{}}".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert answer.split(b" ", 2)[1] in {b"400", b"403", b"404"}, answer
    assert b'"message"' in answer
    assert not any(engine.bodies for engine in fleet.engines.values())


@pytest.mark.parametrize(
    "path", [path for path in PATHS if path.how in {How.PASSTHROUGH, How.SPLIT}], ids=lambda p: p.template
)
async def test_methods_that_a_path_does_not_have(start: Starter, path: Any) -> None:
    fleet = await start()
    wrong = next(method for method in ("GET", "POST") if method not in path.methods)
    async with fleet.client.request(wrong, fleet.endpoint + path.template) as response:
        assert (response.status, response.headers["Allow"]) == (405, ", ".join(path.methods))
        assert (await response.json())["error"]["type"] == "MethodNotAllowedError"


async def test_paths_that_the_router_does_not_relay_get_an_error(start: Starter) -> None:
    fleet = await start()
    assert (await fleet.get("/v1/realtime"))[0] == 501
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert (await fleet.post(path, json={}))[0] == 403


# -- models --


def _loaded(*names: str) -> Callable[[dict[str, FakeEngine]], None]:
    def prepare(engines: dict[str, FakeEngine]) -> None:
        for name in names:
            engines[name].adapters = ["poet"]

    return prepare


async def test_an_adapter_goes_where_it_is_loaded(start: Starter) -> None:
    """Aggregated: no agent announces that both engines have the same adapter under this name."""
    fleet = await start(prefill=2, decode=2, prepare=_loaded("prefill-1", "decode-0"))
    for _ in range(3):
        assert (await fleet.post("/v1/completions", json={**ASK, "model": "poet"}))[0] == 200
    assert {name: len(engine.generated) for name, engine in fleet.engines.items()} == {
        "prefill-0": 0,
        "prefill-1": 0,
        "decode-0": 3,
        "decode-1": 0,
    }
    listed = {card["id"]: card for card in (await fleet.get("/v1/models"))[1]["data"]}
    assert set(listed) == {"fake", "poet"}
    assert listed["poet"]["parent"] == "fake"
    assert (await fleet.get("/v1/models/poet"))[1]["parent"] == "fake"


async def test_adapters_come_and_go_while_engines_run(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "INTERVAL_S", 0.02)
    monkeypatch.setattr(probes, "MODELS_EVERY_S", 0.02)
    fleet = await start()
    poet = {**ASK, "model": "poet"}
    assert (await fleet.post("/v1/completions", json=poet))[0] == 404
    for adapters, status in ((["poet"], 200), ([], 404)):
        for engine in fleet.engines.values():
            engine.adapters = adapters
        async with asyncio.timeout(5.0):
            while (await fleet.post("/v1/completions", json=poet))[0] != status:
                await asyncio.sleep(0.01)


async def test_an_adapter_that_no_prefill_engine_has_is_served_whole(start: Starter) -> None:
    fleet = await start(prepare=_loaded("decode-0"))
    status, answer = await fleet.post("/v1/completions", json={**ASK, "model": "poet"})
    assert (status, answer["from"]) == (200, "decode-0")
    assert not fleet.engines["prefill-0"].generated


async def test_a_model_in_any_body_decides_which_engine_gets_the_request(start: Starter) -> None:
    def other(engines: dict[str, FakeEngine]) -> None:
        engines["both-0"].model = "bge"

    fleet = await start(both=1, prepare=other)
    form = aiohttp.FormData({"model": "bge"})
    form.add_field("file", b"RIFF", filename="a.wav")
    assert (await fleet.post("/v1/embeddings", json={"model": "bge", "input": "x"}))[0] == 200
    assert (await fleet.post("/v1/audio/transcriptions", data=form))[0] == 200
    assert (await fleet.post("/v1/embeddings", json={"model": "fake", "input": "x"}))[0] == 200
    seen = {name: [path for path, _ in engine.bodies] for name, engine in fleet.engines.items()}
    assert seen == {
        "prefill-0": [],
        "decode-0": ["/v1/embeddings"],
        "both-0": ["/v1/embeddings", "/v1/audio/transcriptions"],
    }
    status, answer = await fleet.post("/v1/embeddings", json={"model": "nosuch", "input": "x"})
    assert (status, answer["error"]["param"]) == (404, "model")


async def test_a_path_that_no_engine_of_the_model_has(start: Starter) -> None:
    def other(engines: dict[str, FakeEngine]) -> None:
        engines["both-0"].model = "bge"
        with_paths(prefill_0=GENERATES, decode_0=GENERATES, both_0=EMBEDS)(engines)

    fleet = await start(both=1, prepare=other)
    assert (await fleet.post("/v1/embeddings", json={"model": "bge", "input": "x"}))[0] == 200
    assert (await fleet.post("/v1/embeddings", json={"input": "x"}))[0] == 200
    status, answer = await fleet.post("/v1/embeddings", json={"model": "fake", "input": "x"})
    assert status == 404
    assert "No engine that serves `fake` has `/v1/embeddings`" in answer["error"]["message"]


async def test_both_legs_of_a_request_that_names_no_model_reach_the_same_model(start: Starter) -> None:
    def other(engines: dict[str, FakeEngine]) -> None:
        for name in ("prefill-1", "decode-1"):
            engines[name].model = "other"

    fleet = await start(prefill=2, decode=2, prepare=other)
    for model in ({}, {"model": None}, {"model": ""}):
        assert (await fleet.post("/v1/completions", json={"prompt": "x", "max_tokens": 5, **model}))[0] in {200, 404}
    taken = {name: len(engine.bodies) for name, engine in fleet.engines.items()}
    assert taken["prefill-0"] >= 2
    assert taken["decode-0"] >= 2
    assert taken["prefill-1"] == taken["decode-1"] == 0


ALIASED: dict[str, Any] = {"aliases": {"gpt-4o": "fake", "gone": "not served"}}


async def test_an_alias_is_its_model_to_engines(start: Starter) -> None:
    fleet = await start(**ALIASED)
    for path, body in (("/v1/completions", ASK), ("/v1/responses", {"model": "fake", "input": "x"})):
        assert (await fleet.post(path, json={**body, "model": "gpt-4o"}))[0] == 200
    form = aiohttp.FormData({"model": "gpt-4o", "language": "en"})
    form.add_field("file", b'RIFF\r\n\r\nname="model"', filename="a.wav")
    assert (await fleet.post("/v1/audio/transcriptions", data=form))[0] == 200
    seen = [body for engine in fleet.engines.values() for _, body in engine.bodies]
    assert len(seen) == 4
    assert not any("gpt-4o" in repr(body) for body in seen)
    assert sum("fake" in repr(body) for body in seen) == 4
    assert b'RIFF\r\n\r\nname="model"' in next(body for body in seen if isinstance(body, bytes) and b"RIFF" in body)


async def test_aliases_are_listed_where_their_model_is_served(start: Starter) -> None:
    fleet = await start(**ALIASED)
    own = {"id": "fake", "object": "model", "max_model_len": 99}
    alias = {"id": "gpt-4o", "object": "model", "max_model_len": 99, "root": "fake", "parent": None}
    assert (await fleet.get("/v1/models"))[1]["data"] == [own, alias]
    assert (await fleet.get("/v1/models/gpt-4o"))[1] == alias
    status, answer = await fleet.post("/v1/completions", json={**ASK, "model": "gone"})
    assert status == 404
    assert answer["error"]["message"].endswith("Served here: `fake`, `gpt-4o`.")


# -- responses that engines keep --


class Stores:
    """Engines that keep responses by id, as vLLM does with VLLM_ENABLE_RESPONSES_API_STORE=1."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        """Name of the engine that keeps a response, by the response's id."""

    def __call__(self, engines: dict[str, FakeEngine]) -> None:
        for engine in engines.values():
            engine.behave_elsewhere = self.answer

    async def answer(self, engine: FakeEngine, request: web.Request, raw: bytes) -> web.Response:
        if request.method == "POST" and request.path == "/v1/responses":
            body = json.loads(raw)
            before = body.get("previous_response_id")
            if before is not None and self.kept.get(before) != engine.name:
                return web.json_response({"error": {"message": "not found", "code": 404}}, status=404)
            self.kept[body["request_id"]] = engine.name
            return web.json_response({"id": body["request_id"], "from": engine.name})
        identifier = request.path.split("/")[3]
        status = 200 if self.kept.get(identifier) == engine.name else 404
        return web.json_response({"id": identifier, "from": engine.name}, status=status)


async def _respond(fleet: Fleet, key: str = "", **more: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return await fleet.post("/v1/responses", json={"model": "fake", "input": "x", **more}, headers=headers)


async def test_a_response_is_found_where_it_was_made(start: Starter) -> None:
    fleet = await start(decode=4, prepare=Stores())
    made = [(await _respond(fleet))[1] for _ in range(8)]
    assert len({each["from"] for each in made}) == 4, "they are spread"
    for each in made:
        assert (await fleet.get(f"/v1/responses/{each['id']}?stream=false")) == (200, each)
        assert (await fleet.post(f"/v1/responses/{each['id']}/cancel", json={})) == (200, each)
        status, follows = await _respond(fleet, previous_response_id=each["id"])
        assert (status, follows["from"]) == (200, each["from"])
    assert (await fleet.get("/v1/responses/resp_unknown"))[0] == 404


async def test_a_response_whose_id_the_router_did_not_make_is_looked_for_at_each_engine(start: Starter) -> None:
    stores = Stores()
    fleet = await start(decode=4, prepare=stores)
    stores.kept["resp_others"] = "decode-2"
    assert (await fleet.get("/v1/responses/resp_others"))[1]["from"] == "decode-2"
    assert (await _respond(fleet, previous_response_id="resp_others"))[1]["from"] == "decode-2"


async def test_a_client_does_not_choose_a_responses_id(start: Starter) -> None:
    fleet = await start(prepare=Stores())
    assert (await _respond(fleet, request_id="resp_mine"))[1]["id"] != "resp_mine"


async def test_a_tenant_finds_its_own_responses_alone(start: Starter) -> None:
    names = ("acme", "other")
    tenants: dict[str, Any] = {
        "tenants": {name: Tenant() for name in names},
        "tenant_keys": {name: lambda name=name: (digest(f"sk-{name}"),) for name in names},
    }
    stores = Stores()
    fleet = await start(decode=2, prepare=stores, **tenants)
    made = (await _respond(fleet, "sk-acme"))[1]
    stores.kept["resp_others"] = "decode-0"
    for key, identifier, status in (
        ("sk-acme", made["id"], 200),
        ("sk-other", made["id"], 404),
        ("sk-acme", "resp_others", 404),
    ):
        headers = {"Authorization": f"Bearer {key}"}
        async with fleet.client.get(f"{fleet.endpoint}/v1/responses/{identifier}", headers=headers) as response:
            assert response.status == status
        assert (await _respond(fleet, key, previous_response_id=identifier))[0] == status


async def test_a_relayed_request_ends_in_time(start: Starter) -> None:
    """The router cannot tell a long answer from an engine that hangs, so `whole_s` and `stall_s` limit both."""
    go_on = asyncio.Event()

    async def hang(_: FakeEngine, request: web.Request, raw: bytes) -> Any:
        if request.path == "/v1/embeddings":
            await go_on.wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        await go_on.wait()
        return response

    def prepare(engines: dict[str, FakeEngine]) -> None:
        for engine in engines.values():
            engine.behave_elsewhere = hang

    fleet = await start(prepare=prepare, whole_s=0.3, stall_s=0.3)
    status, answer = await fleet.post("/v1/embeddings", json={"input": "x"})
    assert (status, answer["error"]["type"]) == (504, "DeadlineExceededError")
    with pytest.raises(aiohttp.ClientPayloadError):
        await fleet.post("/v1/responses", json={"input": "x", "stream": True})
    go_on.set()


async def test_relays_are_placed_on_a_machine_that_has_run_for_a_day(
    monkeypatch: pytest.MonkeyPatch, start: Starter
) -> None:
    """In-flight load decays with time. A relay was once placed as at time 0, and at that time no place had a price."""
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 86400.0)
    fleet = await start(classes={"fast": SloClass(ttft_ms=60_000)})
    body = {"model": "fake", "prompt": "hello", "max_tokens": 5}
    assert (await fleet.post("/v1/completions", json=body))[0] == 200
    assert (await fleet.post("/v1/embeddings", json={"model": "fake", "input": "hello"}))[0] == 200


async def test_a_client_that_leaves_a_relayed_request_is_no_fault_of_ours(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow(*_: object) -> web.Response:
        asked.set()
        await go_on.wait()
        return web.json_response({"data": []})

    fleet = await start()
    for engine in fleet.engines.values():
        engine.behave_elsewhere = slow
    address = urlsplit(fleet.endpoint)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    body = b'{"model": "fake", "input": "x"}'
    writer.write(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    await asked.wait()
    writer.transport.abort()
    await asyncio.sleep(0)
    go_on.set()
    async with asyncio.timeout(5):
        while await _open_legs(fleet):
            await asyncio.sleep(0.01)
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


async def _open_legs(fleet: Fleet) -> int:
    async with fleet.client.get(fleet.admin + "/ready") as answer:
        return sum(each["inflight"] for each in (await answer.json())["instances"])
