"""Heads, lengths, chunks and trailers of all kinds at a router. Each connection gets well-formed HTTP and ends. No byte
of a body is read as a request, no request blocks the event loop for long, and nothing stays open.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from urllib.parse import urlsplit

from support.fuzzing import Beside, Case, Fuzzing, Told, judged, metric, read_answers, router_beside, watched
from support.hostile_engine import HostileEngine
from support.hostile_heads import Said, said

from cluster.instance import Role

TOGETHER = 80
"""Cases that run at once. They mostly wait for the end of a body that does not come; at once, they wait together."""
ENDS_S = 20.0
UPGRADE_S = 3.0
GROWN_BYTES_MAX = 256 << 20


@asynccontextmanager
async def _within(patience_s: float) -> AsyncIterator[None]:
    """Stop the block after `patience_s` without an error. 0: raise `TimeoutError` after `ENDS_S`."""
    with suppress(TimeoutError) if patience_s else nullcontext():
        async with asyncio.timeout(patience_s or ENDS_S):
            yield


async def answers_to(url: str, what: Said) -> list[Told]:
    """All answers on one connection until the router closes it."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    raw = bytearray()

    async def send() -> None:
        with suppress(ConnectionError):
            for piece in what.pieces:
                writer.write(piece)
                await writer.drain()
                if len(what.pieces) > 1:
                    await asyncio.sleep(0)
            if what.resets:
                writer.transport.abort()

    # The router keeps a connection idle for 75 s if it asked for another protocol in vain: the test does not wait.
    sending, patience = (
        asyncio.create_task(send()),
        UPGRADE_S if what.rude and b"pgrade" in b"".join(what.pieces) else 0,
    )
    try:
        async with _within(patience):
            with suppress(ConnectionError) if what.rude else nullcontext():
                while more := await reader.read(1 << 16):
                    raw += more
    finally:
        sending.cancel()
        writer.close()
        with suppress(asyncio.CancelledError, ConnectionError):
            await sending
    return read_answers(bytes(raw))


async def one(engine: HostileEngine, router: Beside, case: Case) -> Said:
    with case:
        what = said(case.chance)
        answers = await answers_to(router.endpoint, what)
        if not what.rude:
            assert answers, "no answer at all"
        for answer in answers:
            assert answer.status < 500 or answer.status == 501, (answer, what.pieces)
        assert not any(what.hidden in asked.path for asked in engine.asked), what.pieces
        assert not router.bugs, router.bugs[0]
        return what


async def test_hostile_heads(fuzz: Fuzzing) -> None:
    gc.collect()
    gc.freeze()
    limits = {"head_timeout_s": 2.0, "body_timeout_s": 2.0}
    try:
        async with AsyncExitStack() as stack:
            engine = HostileEngine("both", Role.BOTH)
            await stack.enter_async_context(engine.open())
            router = await stack.enter_async_context(router_beside([engine.instance], **limits))
            async with watched(router) as watch:
                for cases in fuzz.rounds(fixed=160, together=TOGETHER):
                    await _round(engine, router, cases)
            assert watch.grown_bytes < GROWN_BYTES_MAX
    finally:
        gc.unfreeze()


async def _round(engine: HostileEngine, router: Beside, cases: list[Case]) -> None:
    engine.asked.clear()
    router.turns.longest_s = 0.0
    async with asyncio.TaskGroup() as group:
        for case in cases:
            group.create_task(one(engine, router, case))
    if router.turns.longest_s > 0.05:
        for case in cases:  # find the slow case, and whether it is slow every time
            await judged(router, lambda case=case: _again(engine, router, case), 1 << 20)
    async with asyncio.timeout(ENDS_S):
        while await metric(router, "baton_client_connections") > 2 or await metric(router, "baton_upload_bytes"):
            await asyncio.sleep(0.01)
    assert await metric(router, "baton_open_requests") == 0


async def _again(engine: HostileEngine, router: Beside, case: Case) -> None:
    await one(engine, router, Case(case.seed))
