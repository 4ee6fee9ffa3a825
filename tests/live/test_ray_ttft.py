"""Time to the first token through the router, with engines on Ray and without: Ray adds nothing to a request's path."""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import aiohttp
import pytest
from support.cluster import Cluster
from support.ray_fleet import BATON, FILE, MODEL, RayFleet
from support.ray_nodes import RayNodes

pytestmark = [pytest.mark.live, pytest.mark.timed, pytest.mark.long, pytest.mark.timeout(300)]

REQUESTS = 200
"""Requests to each fleet. They go to both in turns, so that other load of the machine is the same for both."""
APART_MS = 1.0


@pytest.fixture
def fleets(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The endpoints of two fleets with one prefill and one decode mock each: on Ray, and without Ray."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("fleets on Ray: Ray (pip install 'baton-serve[ray]')")
    nodes = RayNodes()
    try:
        on_ray = RayFleet(nodes.address, f"t{uuid4().hex[:6]}", program=BATON)
        path = tmp_path / "baton.yaml"
        path.write_text(FILE.replace("max: 3", "max: 1"))
        off_ray = Cluster.start(tmp_path / "state", str(path), "--engine", "mock")
        try:
            on_ray.wait_for(2, 120)
            off_ray.wait_ready()
            yield on_ray.endpoint, off_ray.endpoint
        finally:
            off_ray.stop()
            on_ray.close()
    finally:
        nodes.close()


async def first_token_ms(session: aiohttp.ClientSession, endpoint: str, number: int) -> float:
    body = {"model": MODEL, "prompt": [5 + number % 90] * 200, "max_tokens": 2, "temperature": 0, "stream": True}
    begun, first = time.perf_counter(), 0.0
    async with session.post(f"{endpoint}/v1/completions", json=body) as answer:
        assert answer.status == 200
        async for line in answer.content:
            if line.startswith(b"data: {") and not first:
                first = time.perf_counter() - begun
    assert first, "no token came"
    return 1000 * first


async def test_a_first_token_on_ray_is_within_a_millisecond_of_one_without(fleets: tuple[str, str]) -> None:
    times: tuple[list[float], list[float]] = ([], [])
    async with aiohttp.ClientSession() as session:
        for number in range(REQUESTS):
            for endpoint, found in zip(fleets, times, strict=True):
                found.append(await first_token_ms(session, endpoint, number))
                await asyncio.sleep(0)
    on_ray, off_ray = map(statistics.median, times)
    print(f"first token, median of {REQUESTS}: {on_ray:.2f} ms on Ray, {off_ray:.2f} ms without")
    assert abs(on_ray - off_ray) < APART_MS
