"""Bodies of all kinds at a router: each gets an answer or an error that says what is wrong. No body blocks the event
loop for long, takes much more memory than three times its size, or carries a transfer field to an engine.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from support.fuzzing import (
    HEALTH_S,
    Beside,
    Case,
    Fuzzing,
    judged,
    metric,
    post,
    read_answer,
    router_beside,
    told,
    watched,
)
from support.hostile_bodies import Sent, sent
from support.hostile_engine import HostileEngine

from cluster import wire
from cluster.instance import Role

FIXED_BYTES_MAX, BYTES_MAX = 6_000_000, 33_000_000
"""Largest body: of the cases that `make test` runs, and of all other cases."""
FIXED = 60
FORBIDDEN = wire.TRANSFER_KEYS
TOGETHER_BYTES_MAX = 512 << 20
ANSWER_S = 60.0


@asynccontextmanager
async def one_engine() -> AsyncIterator[tuple[HostileEngine, Beside]]:
    """A router and one engine, which serves aggregated requests and so sees the clients' bodies."""
    async with AsyncExitStack() as stack:
        engine = HostileEngine("both", Role.BOTH)
        await stack.enter_async_context(engine.open())
        yield engine, await stack.enter_async_context(router_beside([engine.instance], policy="workload"))


def _exchange(url: str, each: Sent) -> bytes:
    """Send the request and read the answer's bytes. Makes no copy of the body, since memory is measured."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=ANSWER_S) as connection:
        answer = bytearray()
        try:
            connection.sendall(each.head())
            connection.sendall(each.raw)
        except ConnectionError:
            pass  # refused while it was sent: the reason is read below
        try:
            while piece := connection.recv(1 << 16):
                answer += piece
        except ConnectionError:
            pass
    return bytes(answer)


async def answered(router: Beside, each: Sent) -> None:
    """Check that the request gets a 200, or a 4xx with a short message."""
    answer = read_answer(await asyncio.to_thread(_exchange, router.endpoint, each))
    assert answer.whole and (answer.status == 200 or 400 <= answer.status < 500), (answer, each.raw[:500])
    if answer.status != 200:
        error = json.loads(answer.body)["error"]
        assert error["message"] and len(answer.body) < 4096, answer.body[:500]
    assert not router.bugs, router.bugs[0]


def carried(value: Any) -> bool:
    """Whether a transfer field stands anywhere in this value."""
    if isinstance(value, dict):
        return not FORBIDDEN.isdisjoint(value) or any(map(carried, value.values()))
    return isinstance(value, list) and any(map(carried, value))


async def test_hostile_bodies(fuzz: Fuzzing) -> None:
    gc.collect()
    gc.freeze()  # as `baton router` does: what a test process has gathered is none of the router's
    try:
        async with one_engine() as (engine, router), watched(router) as watch:
            for number, case in enumerate(fuzz.cases(fixed=FIXED)):
                with case:
                    await _one(engine, router, case, FIXED_BYTES_MAX if case.seed < FIXED else BYTES_MAX)
                if number % 20 == 19:
                    await _served_right(router)
        assert watch.grown_bytes < TOGETHER_BYTES_MAX
        assert watch.slowest_health_s < HEALTH_S
    finally:
        gc.unfreeze()


async def _one(engine: HostileEngine, router: Beside, case: Case, bytes_max: int) -> None:
    each = sent(case.chance, bytes_max)
    engine.asked.clear()
    await judged(router, lambda: answered(router, each), len(each.raw))
    assert not any(carried(asked.body) for asked in engine.asked), engine.asked
    async with asyncio.timeout(HEALTH_S):
        while await metric(router, "baton_upload_bytes"):
            await asyncio.sleep(0.01)


async def _served_right(router: Beside) -> None:
    body = {"model": "fake", "prompt": "hello", "max_tokens": 5}
    answer = await told(router.endpoint, post("/v1/completions", json.dumps(body).encode()))
    assert (answer.status, answer.whole) == (200, True), answer
    assert (await metric(router, "baton_open_requests")) == 0
