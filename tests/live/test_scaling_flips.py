"""The product's controller flips a real engine during a burst of long prompts: answers stay the same, only sooner."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import aiohttp
import pytest
from support.bursts import Clients
from support.cluster import Cluster, within

pytestmark = [pytest.mark.live, pytest.mark.timed, pytest.mark.long, pytest.mark.timeout(900)]

FILE = """\
models:
  - name: baton-tiny
    pools:
      prefill: {min: 1, max: 3, flips: true}
      decode: {min: 2, max: 3, flips: true}
router: {policy: least_load}
slo:
  chat: {ttft_ms: 2000, tpot_ms: 500, attainment: 0.9}
"""
"""Decode starts with two instances that may flip: the last instance of a role never flips."""


async def test_a_burst_is_answered_by_a_flipped_engine_and_tokens_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text(FILE)
    cluster = Cluster.start(tmp_path / "state", str(path), program=("-m", "support.flipping_up"))
    chance = random.Random(5)
    prompts = {f"burst-{at}": [chance.randrange(3, 250) for _ in range(900)] for at in range(150)}
    try:
        await asyncio.to_thread(cluster.wait_ready)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as session, asyncio.TaskGroup() as group:
            at = Clients(cluster, session)
            for number in range(50):
                group.create_task(at.ask(f"quiet-{number}", [5 + number] * 20, 8))
                await asyncio.sleep(0.4)
            burst_s = time.monotonic()
            await asyncio.wait([group.create_task(at.ask(name, prompt, 8)) for name, prompt in prompts.items()])
        theirs = at.check_burst([*prompts], burst_s)
        async with aiohttp.ClientSession() as session:
            for name in theirs[:20]:
                body = {"model": "baton-tiny", "prompt": prompts[name], "max_tokens": 8, "temperature": 0}
                async with session.post(f"{cluster.urls['prefill-0']}/v1/completions", json=body) as answer:
                    alone = (await answer.json())["choices"][0]["text"]
                assert at.texts[name] == alone
        await asyncio.to_thread(within, 35, cluster.idle)
    finally:
        cluster.stop()
