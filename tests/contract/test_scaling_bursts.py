"""Eight mocks that may flip, and the product's own controller: a burst of long prompts; a load that goes on and off."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from support.bursts import Clients
from support.cluster import Cluster, within

pytestmark = [pytest.mark.timed, pytest.mark.long, pytest.mark.timeout(900)]

FILE = """\
models:
  - name: meta-llama/Llama-3.1-8B
    pools:
      prefill: {min: 2, max: 8, gpu: L4, flips: true}
      decode: {min: 6, max: 8, gpu: L4, flips: true}
hardware:
  L4: {count: 8}
slo:
  chat: {ttft_ms: 4000, tpot_ms: 150, attainment: 0.9}
"""
"""The fleet is full and may not shrink: the controller can only change roles."""
BURST = 240
"""The number of prompts: the first half come at once, the others within twelve seconds."""
CYCLES = 4
"""Cycles of 45 s each: all together much less than an hour, in which eight instances together may flip six times."""
FLIPS_HOUR = 6


@asynccontextmanager
async def clients(tmp_path: Path) -> AsyncIterator[Clients]:
    path = tmp_path / "baton.yaml"
    path.write_text(FILE)
    cluster = Cluster.start(tmp_path / "state", str(path), "--engine", "mock")
    try:
        await asyncio.to_thread(cluster.wait_ready)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as session:
            yield Clients(cluster, session)
        agents = cluster.urls
        await asyncio.to_thread(within, 35, lambda: not any(_holds(url) for url in agents.values()))
    finally:
        cluster.stop()


def _holds(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/mock/state", timeout=10) as answer:
        state = json.loads(answer.read())
    return bool(state["load"]["running"] or state["requests"] or state["holds"])


def short(number: int) -> list[int]:
    return [5 + number % 90] * 300


def long(number: int) -> list[int]:
    return [5 + at % (90 + number) for at in range(2500)]


async def test_a_burst_of_long_prompts_gets_a_first_token_of_a_flipped_instance_in_ten_seconds(tmp_path: Path) -> None:
    async with clients(tmp_path) as at, asyncio.TaskGroup() as group:
        for number in range(60):
            group.create_task(at.ask(f"quiet-{number}", short(number), 40))
            await asyncio.sleep(0.5)
        assert at.flips() == []
        burst_s = time.monotonic()
        names, asked = [f"burst-{number}" for number in range(BURST)], list[asyncio.Task[None]]()
        for number, name in enumerate(names):
            asked.append(group.create_task(at.ask(name, long(number), 20)))
            await asyncio.sleep(0.1 if number >= BURST / 2 else 0)
        await asyncio.wait(asked)
        at.check_burst(names, burst_s)


async def test_a_load_that_goes_on_and_off_flips_six_times_an_hour_at_most(tmp_path: Path) -> None:
    async with clients(tmp_path) as at:
        async with asyncio.TaskGroup() as group:
            for cycle in range(CYCLES):
                for number in range(100):
                    group.create_task(at.ask(f"on-{cycle}-{number}", long(number), 20))
                for number in range(60):
                    group.create_task(at.ask(f"off-{cycle}-{number}", short(number), 40))
                    await asyncio.sleep(0.75)
        assert at.faults == []
        flips = at.flips()
        print(f"flips in {CYCLES} cycles: {flips}")
        assert 1 <= len(flips) <= FLIPS_HOUR
