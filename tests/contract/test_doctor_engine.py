"""`baton doctor --engine` on servers that give odd answers: findings with fixes, never a traceback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from baton import engine_checks
from baton.checks import CheckVerdict
from baton.cli import main
from engine.agent.http import listen

HOLD = {"do_remote_prefill": True, "remote_block_ids": [1], "remote_host": "127.0.0.1", "remote_port": "no port"}
PAGES = {"/version": {"version": "0.32.0"}, "/v1/models": {"data": [{"id": "m"}]}}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", handler)
    runner, url = await listen(app, "127.0.0.1", 0)
    try:
        yield url
    finally:
        await runner.cleanup()


async def html(_: web.Request) -> web.Response:
    return web.Response(text="<html>a gateway</html>", content_type="text/html")


async def hanging(request: web.Request) -> web.Response:
    if request.path == "/v1/completions":
        await asyncio.sleep(60)
    return web.json_response(PAGES.get(request.path, {}))


async def odd(request: web.Request) -> web.Response:
    if request.path == "/v1/completions":
        return web.json_response({"kv_transfer_params": HOLD, "usage": [1]})
    return web.json_response(PAGES.get(request.path, {}))


async def routed(request: web.Request) -> web.Response:
    return web.json_response(PAGES.get(request.path, {}), headers={"X-Baton-Request-Id": "r"})


async def lists(request: web.Request) -> web.Response:
    return web.json_response({"data": [1]} if request.path == "/v1/models" else [])


@pytest.mark.parametrize(
    ("handler", "lacking", "told"),
    [
        (html, ["Model"], "JSONDecodeError"),
        (lists, ["Model"], "AttributeError"),
        (hanging, ["Prefill leg"], "TimeoutError"),
        (routed, ["Prefill leg"], "one of Baton's routers, not an engine"),
        (odd, [], "Side channel"),
    ],
)
async def test_an_engine_that_answers_oddly(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    handler: Handler,
    lacking: list[str],
    told: str,
) -> None:
    monkeypatch.setattr(engine_checks, "ANSWER_S", 0.3)
    async with serving(handler) as url:
        code = await asyncio.to_thread(main, ["doctor", "--engine", url, "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    wrong = [each for each in findings if each["verdict"] == CheckVerdict.MISSING.value]
    assert [each["what"] for each in wrong] == lacking
    assert code == (1 if lacking else 0)
    assert all(each["fix"] for each in wrong)
    assert told in json.dumps(findings)
