"""A listener with a bound on its connections: a new one takes the place of the one that is idle longest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def oldest_make_room(host: str, port: int, kept: int, healthy: Callable[[], Awaitable[int]]) -> int:
    """Open 20 connections that say nothing, and then ask for `/health` (`healthy` gives its status), which is answered.
    Returns how many of all but the last `kept` connections are closed within five seconds.
    """
    idle = [await asyncio.open_connection(host, port) for _ in range(20)]
    assert await healthy() == 200
    async with asyncio.timeout(5):
        closed = sum([await reader.read() == b"" for reader, _ in idle[:-kept]])
    for _, writer in idle:
        writer.close()
    return closed
