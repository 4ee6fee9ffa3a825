"""A router in the test's own process, and HTTP servers in place of other programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from cluster.registry.registry import Registry
from router.api.app import serve
from router.api.config import RouterConfig


@asynccontextmanager
async def served(
    config: RouterConfig, registry: Registry | None = None, *, stop: asyncio.Event | None = None
) -> AsyncIterator[tuple[str, str]]:
    """Run a router; yields its endpoint and its admin URL. At the end, stop it and wait for it. A test may set `stop`
    earlier.
    """
    ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    stop = stop or asyncio.Event()
    serving = asyncio.ensure_future(serve(config, lambda *urls: ready.set_result(urls), stop, registry))
    try:
        yield await ready
    finally:
        stop.set()
        await serving


@asynccontextmanager
async def answering(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Run a server that answers every request by `answer`; yields its URL."""
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
