"""The page at `/ui`: it loads nothing from elsewhere and names the bottleneck. Chromium shows it, where installed."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.mock import mock_settings
from support.mocked_router import MockedRouter, mocked_router

from cluster.instance import Role
from engine.mock.settings import MockSettings, SimpleCosts
from router.admin import operators
from router.admin.operators import PAGE_HEADERS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
PAGE = Path(operators.__file__).parent / "ui"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync "
    "--no-first-run --disable-extensions --virtual-time-budget=3000"
).split()


def fleet(prefill_ms_per_1k: float, contexts: int) -> list[MockSettings]:
    """Mocks with this prefill time, and this many places for streams at decode."""
    costs = SimpleCosts(step_ms=4.0, prefill_ms_per_1k=prefill_ms_per_1k)
    return [
        mock_settings("prefill-0", Role.PREFILL, costs=costs, max_num_batched_tokens=256, max_model_len=2048),
        mock_settings("decode-0", Role.DECODE, costs=costs, max_num_seqs=contexts),
    ]


async def under_load(router: MockedRouter, seconds: float, rate: float) -> list[asyncio.Future[Any]]:
    """Send `rate` requests a second until `/ui/data` names a bottleneck. The requests are left running."""
    asking = []
    async with asyncio.timeout(seconds):
        while True:
            prompt = [1000 + len(asking) % 500 + at for at in range(200)]
            body = {"model": "fake", "prompt": prompt, "max_tokens": 40, "stream": True}
            asking.append(asyncio.ensure_future(router.ask(body)))
            await asyncio.sleep(1 / rate)
            if len(asking) % 20 == 0 and (await data(router))["bottleneck"]["where"] not in {"nowhere", "idle"}:
                return asking


async def data(router: MockedRouter) -> dict[str, Any]:
    async with router.client.get(f"{router.admin}/ui/data") as answer:
        assert answer.status == 200
        told: dict[str, Any] = await answer.json()
        return told


async def leave(asking: list[asyncio.Future[Any]]) -> None:
    for each in asking:
        each.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def dom(url: str, profile: Path) -> str:
    """The page's DOM after Chromium has run its script."""
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", url,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    return out.decode()


SLOW_DECODE, SLOW_PREFILL = (5.0, 2), (400.0, 64)


@pytest.mark.parametrize(("slow", "where"), [(SLOW_DECODE, "decode"), (SLOW_PREFILL, "prefill")])
async def test_it_says_which_pool_is_the_bottleneck(
    slow: tuple[float, int], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.admin.bottleneck.LATE_S", float("inf"))  # this machine may be busy with other tests
    async with mocked_router(fleet(*slow)) as router:
        asking = await under_load(router, seconds=30, rate=40)
        told = await data(router)
        page = await dom(f"{router.admin}/ui", tmp_path / "profile") if CHROMIUM else ""
        await leave(asking)
    assert told["bottleneck"]["where"] == where, told["bottleneck"]
    assert told["bottleneck"]["sentence"].startswith(f"{where.capitalize()} is the bottleneck: ")
    if not CHROMIUM:
        pytest.skip("Chromium is not on PATH: apt install chromium")
    assert re.search(rf'<p id="sentence"[^>]*>{where.capitalize()} is the bottleneck: \d+ requests? waits? for', page)
    assert re.search(rf'<li class="held">\s*<h3>{where.capitalize()}<span class="tag">bottleneck', page)
    assert "prefill-0 → decode-0" in page
    assert "least load: prefill-0" in page, "a decision and its because"


async def shows(told: dict[str, Any], profile: Path) -> str:
    """The page's DOM in Chromium if `/ui/data` answers this."""

    async def answers(_: web.Request) -> web.Response:
        return web.json_response(told)

    async def page(_: web.Request) -> web.FileResponse:
        return web.FileResponse(PAGE / "index.html")

    app = web.Application()
    app.add_routes([web.get("/ui/data", answers), web.get("/ui", page), web.static("/ui/", PAGE)])
    async with TestServer(app) as server:
        return await dom(str(server.make_url("/ui")), profile)


@pytest.mark.skipif(not CHROMIUM, reason="Chromium is not on PATH: apt install chromium")
async def test_it_names_the_tenants_of_instances_and_the_classes_served_whole(tmp_path: Path) -> None:
    async with mocked_router(fleet(5.0, 8)) as router:
        told = await data(router)
    plain = await shows(told, tmp_path / "plain")
    assert "only for" not in plain and "Served whole" not in plain and ">decode-0<" in plain
    told["instances"][1]["tenants"], told["served_whole"] = ["acme", "<b>"], ["interactive", ""]
    page = await shows(told, tmp_path / "kept")
    assert re.search(r">fake · only for acme, &lt;b&gt;<", page)
    assert "Served whole for now, since handing over loses: interactive, without a class" in page


async def test_it_loads_nothing_from_elsewhere() -> None:
    """No inline script or style, no foreign address, and the router's `PAGE_HEADERS` with every file."""
    policy = PAGE_HEADERS["Content-Security-Policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= {*policy}
    assert not any(word in each for each in policy for word in ("unsafe", "*", "http", "data:"))
    async with mocked_router(fleet(5.0, 8)) as router:
        for path in ("/ui", "/ui/", "/ui/ui.css", "/ui/ui.js"):
            async with router.client.get(router.admin + path) as answer:
                text = await answer.text()
                assert answer.status == 200, path
                assert {name: answer.headers[name] for name in PAGE_HEADERS} == PAGE_HEADERS
            addresses = set(re.findall(r"https?://[\w./]+", text))
            assert addresses <= {"http://www.w3.org/2000/svg"}, path
            assert "innerHTML" not in text
            if path == "/ui":
                assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text)
        async with router.client.get(f"{router.endpoint}/ui") as answer:
            assert answer.status == 404, "it is not for clients"


async def test_no_prompt_text_is_in_it() -> None:
    async with mocked_router(fleet(5.0, 8)) as router:
        assert (await router.ask({"model": "fake", "prompt": "unmistakable marker", "max_tokens": 3}))[0] == 200
        async with router.client.get(f"{router.admin}/ui/data") as answer:
            text = await answer.text()
    assert "unmistakable" not in text
    assert '"state":"served"' in text
