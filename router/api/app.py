"""Opens the router's ports, runs until told to stop, and drains."""

from __future__ import annotations

import asyncio
import errno
import resource
import ssl
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from aiohttp import web

from cluster.accepting import closed_server
from cluster.errors import ApiError, UsageError, cannot_listen
from cluster.http.headers import Headers
from cluster.readable import SMALL_BYTES_MAX
from cluster.registry.registry import Registry
from router.api.config import RouterConfig
from router.api.endpoints import admin_app, public_app
from router.api.generation import Generation
from router.api.server import Router
from router.http import cold
from router.http.doors import CLIENTS_MAX, SPARE, Doors, guests_of
from router.http.front import Front
from router.http.outlet import Outlet
from router.http.tls import limit_untaken, server_context
from router.http.uploads import Uploads

BACKLOG = 1024
"""The number of connections that the kernel may queue while the loop is busy."""

ADMIN_GUESTS_MAX = 256
"""The number of connections of the admin side: pages, scrapers and router peers keep a few each. Fewer if the process
has few descriptors."""


async def serve(
    config: RouterConfig,
    announce: Callable[[str, str], None],
    stop: asyncio.Event,
    registry: Registry | None = None,
) -> None:
    """Serve until `stop` is set, then finish open requests for at most ``drain_s`` and return.

    `announce` gets the endpoint and the admin URL once both ports are open.

    Raises:
        UsageError: a port is taken, or more connections are wanted than the process may open; it names the flag.
    """
    doors = Doors(_guests_max(config))
    router = Router(config, registry, doors)
    async with AsyncExitStack() as closing:
        await router.start()
        closing.push_async_callback(router.close)
        tls = None if config.tls_cert_file is None else server_context(config.tls_cert_file, config.tls_key_file)
        front = Front(
            router.generation,
            cold.handlers(await _server(public_app(router.endpoints), config, closing)),
            body_bytes_max=config.body_bytes_max,
            body_timeout_s=config.body_timeout_s,
            head_timeout_s=config.head_timeout_s,
            doors=doors,
            uploads=router.uploads,
        )
        closing.push_async_callback(front.drain, config.drain_s)
        shared = config.shares_port or None
        public = await _listen(front.connect, config, config.host, config.port, "--port", closing, tls, shared=shared)
        operators = Front(
            _NoGeneration(router.generation),
            cold.handlers(await _server(admin_app(router.endpoints), config, closing)),
            body_bytes_max=SMALL_BYTES_MAX,
            body_timeout_s=config.body_timeout_s,
            head_timeout_s=config.head_timeout_s,
            doors=Doors(min(ADMIN_GUESTS_MAX, doors.guests_max)),
            uploads=Uploads(ADMIN_GUESTS_MAX * SMALL_BYTES_MAX),
        )
        closing.push_async_callback(operators.drain, config.drain_s)
        connect = operators.connect
        admin = await _listen(connect, config, config.admin_host, config.admin_port, "--admin-port", closing)
        router.announce(public, admin)
        announce(public, admin)
        await stop.wait()


def _guests_max(config: RouterConfig) -> int:
    """The number of connections that clients may have open.

    Raises:
        UsageError: more than the process can have descriptors for.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return config.connections_max or CLIENTS_MAX
    if config.connections_max + SPARE > limit:
        raise UsageError(
            f"--connections-max {config.connections_max}: this process may open {limit} files in all "
            f"(`ulimit -n`), and needs {SPARE} for others: raise that, or give less"
        )
    return config.connections_max or guests_of(limit, sum(1 for _ in Path("/proc/self/fd").iterdir()))


async def _server(app: web.Application, config: RouterConfig, closing: AsyncExitStack) -> web.Server:
    """aiohttp's side of a port."""
    # handler_cancellation: a client that leaves cancels its handler; otherwise engines would generate for clients that
    # have left.
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=config.drain_s,
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
            raise cannot_listen(host, port, error, flag) from None
        raise
    for listening in server.sockets:
        limit_untaken(listening, config.client_stall_s)
    closing.push_async_callback(closed_server, server)  # runs first: no new connections while open ones are finished
    bound = server.sockets[0].getsockname()[1]
    return f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{bound}"


class _NoGeneration:
    """The admin side generates nothing: `Front` learns that before it reads a body."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def admit(self, _: Mapping[str, str]) -> str:
        """Refuses every request. Raises ApiError (404)."""
        raise ApiError(404, "NotFoundError", "Nothing is generated on the admin side: ask on the clients' port.")

    def answer(self, outlet: Outlet, path: str, headers: Headers, raw: bytes, tenant: str) -> None:
        """Never called: no request is admitted."""
        raise AssertionError((outlet, path, headers, raw, tenant))

    def leave(self, tenant: str) -> None:
        """Never called: no request is admitted."""
        raise AssertionError(tenant)

    def refuse(self, outlet: Outlet, problem: Exception, *, close: bool = False) -> None:
        """Answer with the raised error."""
        self._generation.refuse(outlet, problem, close=close)
