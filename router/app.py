"""Opens the router's ports, runs until told to stop, and drains."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import cast

from aiohttp import web

from cluster.errors import ApiError, UsageError
from cluster.readable import SMALL_BYTES_MAX
from cluster.registry.registry import Registry
from router.config import RouterConfig
from router.generation import Generation
from router.http.front import KEEPALIVE_S, LINE_BYTES_MAX, Front
from router.http.headers import Headers
from router.http.outlet import Outlet
from router.server import Router, admin_app, public_app
from router.tls import limit_untaken, server_context

BACKLOG = 1024
"""Connections the kernel may queue while the loop is busy."""

ADMIN_CONNECTIONS_MAX = 256
"""Of the admin side, at once: pages, scrapers and siblings keep a few each."""


async def serve(
    config: RouterConfig,
    announce: Callable[[str, str], None],
    stop: asyncio.Event,
    registry: Registry | None = None,
) -> None:
    """Serve until `stop` is set, then finish open requests for at most ``drain_s`` and return.

    `announce` gets the endpoint and the admin URL once both ports are open.

    Raises:
        UsageError: a port is taken, naming the flag.
    """
    router = Router(config, registry)
    async with AsyncExitStack() as closing:
        await router.start()
        closing.push_async_callback(router.close)
        tls = None if config.tls_cert_file is None else server_context(config.tls_cert_file, config.tls_key_file)
        front = Front(
            router.generation,
            await _handlers(public_app(router), config, closing),
            body_bytes_max=config.body_bytes_max,
            body_timeout_s=config.body_timeout_s,
            head_timeout_s=config.head_timeout_s,
        )
        closing.push_async_callback(front.drain, config.drain_s)
        shared = config.shares_port or None
        public = await _listen(front.connect, config, config.host, config.port, "--port", closing, tls, shared=shared)
        operators = Front(
            _NoGeneration(router.generation),
            await _handlers(admin_app(router), config, closing),
            body_bytes_max=SMALL_BYTES_MAX,
            body_timeout_s=config.body_timeout_s,
            head_timeout_s=config.head_timeout_s,
        )
        closing.push_async_callback(operators.drain, config.drain_s)
        connect = _up_to(ADMIN_CONNECTIONS_MAX, operators)
        admin = await _listen(connect, config, config.admin_host, config.admin_port, "--admin-port", closing)
        router.announce(public, admin)
        announce(public, admin)
        await stop.wait()


async def _handlers(app: web.Application, config: RouterConfig, closing: AsyncExitStack) -> web.Server:
    """What makes aiohttp's connections."""
    # handler_cancellation: a client that leaves cancels its handler; without it we would generate for nobody.
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=config.drain_s,
        keepalive_timeout=KEEPALIVE_S,
        max_line_size=LINE_BYTES_MAX,
        max_field_size=LINE_BYTES_MAX,
    )
    await runner.setup()
    closing.push_async_callback(runner.cleanup)
    assert runner.server is not None
    return runner.server


async def _listen(
    factory: Callable[[], asyncio.BaseProtocol],
    config: RouterConfig,
    host: str,
    port: int,
    flag: str,
    closing: AsyncExitStack,
    tls: ssl.SSLContext | None = None,
    *,
    shared: bool | None = None,
) -> str:
    try:
        server = await asyncio.get_running_loop().create_server(
            factory,
            host,
            port,
            backlog=BACKLOG,
            ssl=tls,
            reuse_port=shared,
            ssl_handshake_timeout=None if tls is None else config.head_timeout_s,
        )
    except OSError as error:
        if error.errno in {errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL}:
            raise UsageError(f"cannot listen on {host}:{port} ({error.strerror}): choose another {flag}") from None
        raise
    for listening in server.sockets:
        limit_untaken(listening, config.client_stall_s)
    closing.callback(server.close)  # runs first: no new connections while open ones are finished
    bound = server.sockets[0].getsockname()[1]
    return f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{bound}"


def _up_to(connections_max: int, front: Front) -> Callable[[], asyncio.Protocol]:
    """Connections of `front`, up to so many at once."""

    def connect() -> asyncio.Protocol:
        return front.connect() if len(front.open) < connections_max else _OneTooMany()

    return connect


class _OneTooMany(asyncio.Protocol):
    """A connection that is closed at once: whoever fills the admin side with connections gets no answers for it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).abort()  # uvloop's is none by descent


class _NoGeneration:
    """Nothing is generated on the admin side: `Front` is told so before it reads a body."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def admit(self, _: Mapping[str, str]) -> str:
        """Nobody. Raises ApiError (404)."""
        raise ApiError(404, "NotFoundError", "Nothing is generated on the admin side: ask on the clients' port.")

    def answer(self, outlet: Outlet, path: str, headers: Headers, raw: bytes, tenant: str) -> None:
        """Never: nobody is admitted."""
        raise AssertionError((outlet, path, headers, raw, tenant))

    def refuse(self, outlet: Outlet, problem: Exception, *, close: bool = False) -> None:
        """Answer with what was raised."""
        self._generation.refuse(outlet, problem, close=close)
