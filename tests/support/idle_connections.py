"""A listener with a bound on its connections: a new one takes the place of the one that is idle longest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def oldest_make_room(host: str, port: int, kept: int, healthy: Callable[[], Awaitable[int]]) -> None:
    """Open 20 connections that say nothing. `/health` (`healthy` gives its status) is answered still, and all of them
    but the last `kept` are closed.
    """
    idle = [await asyncio.open_connection(host, port) for _ in range(20)]
    assert await healthy() == 200
    async with asyncio.timeout(5):
        for reader, _ in idle[:-kept]:
            assert await reader.read() == b"", "it was closed"
    for _, writer in idle:
        writer.close()
