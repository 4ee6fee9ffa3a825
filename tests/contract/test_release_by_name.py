"""The router releases a hold at an engine with Baton's connector by its name; at other engines it asks D to do so."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.fake_engine import FakeEngine
from support.fleet import Starter, eventually

from cluster import wire
from router.api import server
from router.core import journey
from router.http.legs import Legs
from router.request import releases
from router.scheduler.dispatch import Dispatch

PROMPT = {"model": "fake", "prompt": "hello", "max_tokens": 5}
GREEDY = {**PROMPT, "temperature": 0}
"""If P ends this answer at its first token, P's answer is the whole one, and its hold is released."""
SLOT = {"baton_slot": [3, "0f" * 16]}


def with_names(engine: FakeEngine) -> None:
    """Make the engine answer a prefill leg as Baton's connector does."""
    plain = engine._prefill

    async def named(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        fields = body.get("kv_transfer_params") or {}
        if not fields.get("do_remote_decode"):
            return None
        answer = await plain(request)
        assert isinstance(answer.body, bytes)
        told = json.loads(answer.body)
        told["kv_transfer_params"] |= SLOT | {wire.TRANSFER: fields[wire.TRANSFER]}
        return web.json_response(told)

    engine.behave = named


@pytest.mark.parametrize("status", [200, 404, 503])
async def test_a_hold_is_released_at_p_or_through_d_where_p_refuses(start: Starter, status: int) -> None:
    fleet = await start()
    prefill, decode = fleet.engines["prefill-0"], fleet.engines["decode-0"]
    prefill.finish_reason = "stop"
    with_names(prefill)
    released: list[tuple[str, Any]] = []

    async def release(engine: FakeEngine, request: web.Request, raw: bytes) -> web.Response:
        released.append((request.path, json.loads(raw)))
        if status == 200:
            engine.holds.clear()
        return web.json_response({"ok": True}, status=status)

    prefill.behave_elsewhere = release
    assert (await fleet.post("/v1/completions", json=GREEDY, headers={"X-Request-Id": "mine"}))[0] == 200
    await eventually(lambda: fleet.held == 0, "the hold is released")
    ((path, body),) = released
    assert path == wire.RELEASE_PATH
    assert body["kv_transfer_params"][wire.TRANSFER].startswith(f"{prefill.named[0]}/")
    through_d = [body for _, body in decode.bodies if body.get("model") == wire.RELEASE_MODEL]
    assert bool(through_d) == (status != 200)


async def breaks_off(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def speaks_nonsense(_: web.Request) -> web.StreamResponse:
    return web.json_response(["no", "object"])


@pytest.mark.parametrize("end", [breaks_off, speaks_nonsense, None], ids=["breaks off", "nonsense", "aborted"])
async def test_a_hold_that_no_answer_names_is_given_up(
    start: Starter, monkeypatch: pytest.MonkeyPatch, end: Callable[[web.Request], Awaitable[web.StreamResponse]] | None
) -> None:
    """P holds the blocks, and its answer does not arrive, or says something else: an abort that arrives as the prompt's
    step ends is answered with "abort".
    """
    monkeypatch.setattr(journey, "PATIENCE_S", 0.05)
    fleet = await start(prefill=1)
    prefill = fleet.engines["prefill-0"]
    prefill.hold_leg = asyncio.Event() if end is None else None
    made: list[str] = []

    async def holds(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        fields = body.get("kv_transfer_params") or {}
        if not fields.get("do_remote_decode"):
            return None
        made.append(fields[wire.TRANSFER])
        prefill.holds[made[-1]] = {}
        return None if end is None else await end(request)

    async def release(engine: FakeEngine, request: web.Request, raw: bytes) -> web.Response:
        assert request.path == wire.RELEASE_PATH
        engine.holds.pop(json.loads(raw)["kv_transfer_params"][wire.TRANSFER])
        return web.json_response({"ok": True})

    prefill.behave, prefill.behave_elsewhere = holds, release
    with contextlib.suppress(TimeoutError):
        await fleet.post("/v1/completions", json=PROMPT, timeout=aiohttp.ClientTimeout(total=0.1 if end is None else 5))
    await eventually(lambda: bool(made) and fleet.held == 0, "the hold is released")
    assert (end is None) == bool(prefill.aborted)


def holding(prefill: FakeEngine, statuses: list[int]) -> list[str]:
    """Make P hold the blocks of each leg, and answer releases with these statuses first. Returns the holds' names."""
    made: list[str] = []

    async def holds(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        fields = body.get("kv_transfer_params") or {}
        if fields.get("do_remote_decode"):
            made.append(fields[wire.TRANSFER])
            prefill.holds[made[-1]] = {}
            if prefill.hold_leg is None:
                return await breaks_off(request)
        return None

    async def release(engine: FakeEngine, request: web.Request, raw: bytes) -> web.Response:
        if statuses:
            return web.json_response({}, status=statuses.pop(0))
        engine.holds.pop(json.loads(raw)["kv_transfer_params"][wire.TRANSFER])
        return web.json_response({"ok": True})

    prefill.behave, prefill.behave_elsewhere = holds, release
    return made


@pytest.mark.parametrize("failures", [1, 2])
async def test_an_engine_that_does_not_take_a_give_up_is_asked_once_more(
    start: Starter, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr(releases, "AGAIN_S", 0.05)
    fleet = await start(prefill=1)
    statuses = [503] * failures
    made = holding(fleet.engines["prefill-0"], statuses)
    await fleet.post("/v1/completions", json=PROMPT)
    await eventually(lambda: bool(made) and not statuses, "it is asked again")
    if failures == 1:
        await eventually(lambda: fleet.held == 0, "the hold is released")
    else:
        async with fleet.client.get(f"{fleet.admin}/metrics") as response:
            assert 'baton_releases_total{ok="false"} 1.0' in await response.text()


async def test_a_router_that_ends_gives_up_what_its_prefill_legs_may_hold(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CLOSE_S", 0.05)
    fleet = await start(prefill=1, drain_s=0.1)
    prefill = fleet.engines["prefill-0"]
    prefill.hold_leg = asyncio.Event()
    made = holding(prefill, [])
    asked = asyncio.ensure_future(fleet.post("/v1/completions", json=PROMPT))
    await eventually(lambda: bool(made), "the leg is under way")
    fleet.stop.set()
    await eventually(lambda: fleet.held == 0, "the hold is released")
    with contextlib.suppress(aiohttp.ClientError):
        await asked
    assert len(made) == 1


@pytest.mark.interpreted
async def test_a_leg_that_cannot_be_sent_for_a_bug_leaves_its_place(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await start(prefill=1)
    begun, ended = list[str](), list[str]()

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Legs, "send", fails)
    monkeypatch.setattr(Dispatch, "leg_started", lambda _, instance: begun.append(instance))
    monkeypatch.setattr(Dispatch, "leg_ended", lambda _, instance: ended.append(instance))
    assert (await fleet.post("/v1/completions", json=PROMPT))[0] == 500
    assert begun == ended == ["prefill-0"]


async def test_an_engine_with_vllms_own_connector_is_not_asked_to_release(start: Starter) -> None:
    fleet = await start()
    prefill = fleet.engines["prefill-0"]
    prefill.finish_reason = "stop"
    assert (await fleet.post("/v1/completions", json=GREEDY))[0] == 200
    await eventually(lambda: fleet.held == 0, "the hold is released")
    assert wire.RELEASE_PATH not in [path for path, _ in prefill.bodies]
