"""Large and odd bodies at a router on mocks: right ones are served, wrong ones get an error, others are not held up."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import time
import weakref
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from support.fleet import eventually
from support.mock import mock_settings
from support.mocked_router import MockedRouter, mocked_router

from cluster.errors import ApiError, bad_request
from cluster.http.headers import Headers
from cluster.instance import Role
from cluster.scan import Steps
from router.api.config import RouterConfig
from router.api.endpoints import _errors
from router.api.server import Router
from router.core.values import Wanted
from router.fleet.events import Picked
from router.http.outlet import Outlet
from router.http.uploads import Uploads, share_of
from router.request import slices
from router.request.heavy import HEAVY_BYTES
from router.request.slices import ClientGone, Slices

JSON = "application/json"


@pytest.fixture
async def router() -> AsyncIterator[MockedRouter]:
    settings = [mock_settings("prefill-0", Role.PREFILL), mock_settings("decode-0", Role.DECODE)]
    async with mocked_router(settings, policy="workload") as made:
        yield made


async def post(router: MockedRouter, path: str, raw: bytes, kind: str | None = JSON) -> tuple[int, Any]:
    headers = {} if kind is None else {"Content-Type": kind}
    skip = ("Content-Type",) if kind is None else ()
    async with router.client.post(
        router.endpoint + path, data=io.BytesIO(raw), headers=headers, skip_auto_headers=skip
    ) as answer:
        return answer.status, await answer.json()


async def test_large_bodies_are_served(router: MockedRouter) -> None:
    junk = "x" * HEAVY_BYTES
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + junk}}]
    short = {"model": "fake", "max_tokens": 3}
    for path, body in (
        ("/v1/completions", {**short, "prompt": "hello", "junk": junk}),
        ("/v1/chat/completions", {**short, "messages": [{"role": "user", "content": "hi"}], "junk": image}),
        ("/v1/completions", {**short, "prompt": "hello", "priority": 3, "kv_transfer_params": {"a": 1}, "junk": junk}),
    ):
        status, answer = await post(router, path, json.dumps(body).encode())
        assert status == 200, answer
        assert answer["choices"][0]["finish_reason"] == "length"
    status, answer = await post(
        router, "/tokenize", json.dumps({"model": "fake", "prompt": "a b", "junk": junk}).encode()
    )
    assert (status, answer["count"]) == (200, len(answer["tokens"]))


WRONG = {
    "values": (b'{"a":[' + b"[]," * 1_100_000 + b"1]}", "1,048,576 objects, arrays and texts"),
    "depth": (b'{"a":' + b"[" * 2_000_000, "64 levels"),
    "fields": (b"{" + b",".join(b'"%d":1' % number for number in range(120_000)) + b"}", "1,024 fields"),
    "syntax": (b'{"a":"' + b"x" * HEAVY_BYTES + b'",}', "not valid JSON"),
    "a transfer": (b'{"a":[{"kv_transfer_params":1},"' + b"x" * HEAVY_BYTES + b'"]}', "stands inside `a`"),
    "UTF-8": (b'{"a":"' + b"x" * HEAVY_BYTES + b'\xff"}', "no UTF-8"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_is_wrong_with_a_large_body_is_told(router: MockedRouter, name: str) -> None:
    raw, words = WRONG[name]
    for path in ("/v1/completions", "/tokenize"):
        status, answer = await post(router, path, raw)
        assert (status, answer["error"]["code"]) == (400, 400), path
        assert words in answer["error"]["message"], path
    assert (await router.metrics())["baton_open_requests"] == 0


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-8-sig"])
@pytest.mark.parametrize(
    "path", ["/tokenize", "/v1/embeddings", "/v1/responses", "/v1/audio/translations", "/v1/other"]
)
async def test_no_encoding_carries_transfer_fields_past(router: MockedRouter, path: str, encoding: str) -> None:
    """Python's JSON parser reads all of these, so an engine may, whatever the content type says."""
    text = json.dumps({"model": "fake", "prompt": "x", "kv_transfer_params": {"remote_host": "evil"}})
    for kind in (None, "text/plain", "application/octet-stream", JSON, f"{JSON}; charset={encoding}", "audio/wav"):
        status, answer = await post(router, path, text.encode(encoding), kind)
        assert status == 400, kind
        assert "not valid JSON" in answer["error"]["message"], kind


async def test_forms_of_many_parts_are_refused(router: MockedRouter) -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n'
    status, answer = await post(
        router, "/v1/audio/translations", part * 1_001 + b"--b--", "multipart/form-data; boundary=b"
    )
    assert (status, "1,000 parts" in answer["error"]["message"]) == (400, True)


@pytest.mark.interpreted
async def test_the_choice_for_a_relayed_request_has_the_present_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the time 0 instead, `workload` raised (a 500) on machines that had run for more than an hour."""
    router = Router(RouterConfig(has_registry=True))
    asked: list[Wanted] = []

    class Scheduling:
        def handle(self, event: Picked, _: float) -> None:
            asked.append(event.wanted)
            raise bad_request("that is enough")

    monkeypatch.setattr(router.parts.dispatch, "scheduling", Scheduling())
    before, passthrough = time.monotonic(), router.endpoints._passthrough
    with pytest.raises(ApiError, match="enough"):
        await passthrough._instance("/tokenize", "", None, {}, passthrough.deadline())
    assert before <= asked[0].now <= time.monotonic()


# --- in slices --------------------------------------------------------------------------------------------------------


def steps(count: int, told: list[str], name: str) -> Steps[str]:
    for number in range(count):
        told.append(f"{name}{number}")
        yield
    return name


async def test_others_run_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "STEP_S", 0.0)
    told: list[str] = []

    async def other() -> None:
        for _ in range(3):
            told.append("other")
            await asyncio.sleep(0)

    found, _ = await asyncio.gather(Slices().through(steps(3, told, "a")), other())
    assert found == "a"
    assert told == ["a0", "other", "a1", "other", "a2", "other"]


async def test_one_body_is_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "STEP_S", 0.0)
    monkeypatch.setattr(slices, "WAITING_MAX", 2)
    told: list[str] = []
    reader = Slices()
    works = [reader.through(steps(2, told, name)) for name in "abc"]
    found = await asyncio.gather(*works, return_exceptions=True)
    assert found[:2] == ["a", "b"]
    assert isinstance(found[2], ApiError)
    assert found[2].status == 503
    assert told == ["a0", "a1", "b0", "b1"]
    assert await reader.through(steps(0, told, "d")) == "d", "the refused body no longer takes a place"


async def test_clients_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "STEP_S", 0.0)
    told: list[str] = []
    reader = Slices()
    works = [reader.through(steps(1, told, f"a{each}-"), client="a") for each in range(4)]
    others = [reader.through(steps(1, told, f"b{each}-"), client="b") for each in range(2)]
    await asyncio.gather(*works, *others)
    assert told == ["a0-0", "a1-0", "b0-0", "a2-0", "b1-0", "a3-0"]


async def test_one_client_does_not_have_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "STEP_S", 0.0)
    reader, told, most = Slices(), list[str](), share_of(slices.WAITING_MAX)
    works = [reader.through(steps(1, told, "a"), client="a") for _ in range(slices.WAITING_MAX)]
    found = await asyncio.gather(*works, reader.through(steps(1, told, "b"), client="b"), return_exceptions=True)
    refused = [each for each in found if isinstance(each, ApiError)]
    assert len(refused) == slices.WAITING_MAX - most > 0
    assert "this client" in refused[0].message
    assert found[-1] == "b"


async def test_a_client_that_leaves_gives_up_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "STEP_S", 0.0)
    reader, told = Slices(Uploads(1000)), list[str]()
    works = [asyncio.create_task(reader.through(steps(2, told, name), size=10)) for name in "abc"]
    works.insert(1, asyncio.create_task(reader.through(steps(2, told, "gone"), gone=lambda: True)))
    await asyncio.sleep(0)
    works[2].cancel()
    found = await asyncio.gather(*works, return_exceptions=True)
    assert [type(each) for each in found] == [str, ClientGone, asyncio.CancelledError, str]
    assert told == ["a0", "a1", "c0", "c1"]
    assert await reader.through(steps(0, told, "d")) == "d"


async def test_a_body_counts_until_it_is_parsed() -> None:
    """On every path that reads large bodies: bodies that wait to be parsed use memory, as uploads do."""
    router = Router(RouterConfig(has_registry=True))
    hold = asyncio.get_running_loop().create_future()

    def held() -> Steps[None]:
        while not hold.done():
            yield

    first = asyncio.create_task(router.endpoints._passthrough._slices.through(held(), size=1))
    await asyncio.sleep(0)
    raw = b'{"model":"fake","a":"' + b"x" * HEAVY_BYTES + b'"}'
    form = b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n--x--\r\n"
    heads = {"Content-Type": "multipart/form-data; boundary=x"}
    transport = Mock(get_extra_info=lambda _: ("10.0.0.1", 1), is_closing=lambda: False)
    outlet = Outlet(transport, lambda *_: None, chunked=True, keep=True)
    router.parts.clients.enter("", 1)
    headers = Headers()
    headers.add(b"content-type", b"application/json")
    router.generation.answer(outlet, "/v1/completions", headers, raw, "")
    place, deadline = router.endpoints._passthrough.place, router.endpoints._passthrough.deadline()
    works = [
        asyncio.create_task(place(make_mocked_request("POST", "/tokenize", headers=each), "", body, deadline))
        for each, body in (({}, raw), (heads, form))
    ]
    await asyncio.sleep(0.01)
    assert router.uploads.bytes == 1 + 2 * len(raw) + len(form)
    hold.set_result(None)
    await asyncio.gather(first, *works, return_exceptions=True)
    await eventually(lambda: router.uploads.bytes == 0, "all are read")


# --- what is kept -----------------------------------------------------------------------------------------------------


class Large:
    """Stands for a body: `bytes` objects take no weak references."""


async def test_a_refused_body_is_not_kept() -> None:
    """The error once kept the frames, and so the body of up to 33 MB, until the garbage collector ran."""
    router = Router(RouterConfig(has_registry=True))
    kept: list[weakref.ref[Large]] = []

    async def handler(_: web.Request) -> web.StreamResponse:
        body = Large()
        kept.append(weakref.ref(body))
        try:
            int("no number")
        except ValueError:
            raise bad_request("no") from None
        return web.Response()

    gc.disable()
    try:
        answer = await _errors(router.endpoints)(make_mocked_request("POST", "/v1/embeddings"), handler)
        assert answer.status == 400
        assert kept[0]() is None
    finally:
        gc.enable()
