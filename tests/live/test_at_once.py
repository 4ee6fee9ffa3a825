"""The very first requests to a fleet that has just become ready.

This file's name sorts before those of all other tests of the shared fleet, because its engines shake hands only once.
"""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from support.cluster import Cluster

REQUESTS = 16
APART_S = 0.3
SLOWEST_S = 10.0
"""The most that a first token may take. The handshakes of the three pairs take 0.1 to 0.6 s. While two engines were
pinned to one core (`engine.vllm.placement`), handshakes took 5 to 24 s in six of eight starts, and requests waited."""


@pytest.mark.timeout(300)  # the fixture starts three engines in it; SLOWEST_S and the client's timeout bound a request
async def test_the_very_first_requests_wait_for_no_slow_handshake(cluster: Cluster) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=100)) as session:

        async def first_token_s(number: int) -> float:
            await asyncio.sleep(number * APART_S)  # the time of arrival: some requests come during handshakes
            prompt = [(7 * number + at) % 200 + 10 for at in range(200)]
            body = {"model": cluster.model, "prompt": prompt, "max_tokens": 24, "stream": True, "ignore_eos": True}
            begun = asyncio.get_running_loop().time()
            async with session.post(f"{cluster.endpoint}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                first = await answer.content.readline()
                seconds = asyncio.get_running_loop().time() - begun
                assert json.loads(first.removeprefix(b"data: "))["choices"]
                await answer.read()
            return seconds

        waits = await asyncio.gather(*map(first_token_s, range(REQUESTS)))
    assert max(waits) < SLOWEST_S, [round(wait, 2) for wait in waits]
