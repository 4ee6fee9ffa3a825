"""Opens the router's ports, runs until told to stop, and drains."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from cluster.errors import UsageError
from cluster.registry.registry import Registry
from router.config import RouterConfig
from router.http.front import KEEPALIVE_S, LINE_BYTES_MAX, Front
from router.server import Router, admin_app, public_app
from router.tls import limit_untaken, server_context

BACKLOG = 1024
"""Connections the kernel may queue while the loop is busy."""


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
        handlers = _impatient(await _handlers(admin_app(router), config, closing), config.head_timeout_s)
        admin = await _listen(handlers, config, config.admin_host, config.admin_port, "--admin-port", closing)
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


def _impatient(server: web.Server, head_timeout_s: float) -> Callable[[], RequestHandler]:
    """aiohttp's connections, but cut off when no whole request head comes in time: it has no such limit of its own."""

    def connect() -> RequestHandler:
        connection = server()
        asyncio.get_running_loop().call_later(head_timeout_s, _cut_off_if_silent, connection)
        return connection

    return connect


def _cut_off_if_silent(connection: RequestHandler) -> None:
    transport = connection.transport
    if transport is not None and connection._request_count == 0:  # noqa: SLF001 - the only place where aiohttp says it
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(_TIMEOUT)
        transport.close()


_BODY = (
    b'{"error":{"message":"The request head did not arrive in time.","type":"RequestTimeoutError",'
    b'"param":null,"code":408}}'
)
_TIMEOUT = (
    b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)
