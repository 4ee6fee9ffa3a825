"""The simulator repeats a live router's decisions from the router's decision log alone."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from support.fleet import Fleet, Starter

from router.fleet.events import Decided, entry_of
from sim.replay import replay


async def test_a_live_routers_log_replays_to_the_same_choices(start: Starter) -> None:
    """Engines fail, and answer in any order: choices depend only on what the log has."""
    lines: list[bytes] = []
    fleet = await start(prefill=3, decode=3, decision_log=lines.append)
    async with asyncio.TaskGroup() as group:
        for number in range(40):
            group.create_task(_ask(fleet, number))
    fleet.engines["prefill-1"].finish_reason = "abort"
    fleet.engines["decode-2"].behave = _broken
    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(_ask(fleet, number))
    entries = [entry_of(line) for line in b"".join(lines).splitlines()]
    replayed = replay(entries)
    assert replayed.choices > 60, "some requests were tried again"
    assert replayed.differences == ()
    assert {entry.chosen.decode for entry in entries if isinstance(entry, Decided)} >= {
        "decode-0",
        "decode-1",
        "decode-2",
    }


async def _ask(fleet: Fleet, number: int) -> None:
    body = {
        "model": "fake",
        "prompt": f"hello {number}",
        "max_tokens": 1 if number % 7 == 0 else 5,
        "stream": number % 2 == 0,
    }
    async with fleet.client.post(fleet.endpoint + "/v1/completions", json=body) as response:
        await response.read()


async def _broken(_: web.Request, body: dict[str, Any]) -> web.Response:
    return web.json_response({"error": {"message": "broken", "code": 500}}, status=500)
