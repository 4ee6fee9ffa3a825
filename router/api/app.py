"""Opens the router's ports, runs until told to stop, and drains."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import resource
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from aiohttp import web

from cluster.accepting import closed_server
from cluster.errors import ApiError, UsageError, cannot_listen, is_address_fault
from cluster.http.headers import Headers
from cluster.readable import SMALL_BYTES_MAX
from cluster.registry.registry import Registry
from cluster.urls import netloc
from router.api.config import RouterConfig
from router.api.endpoints import admin_app, public_app
from router.api.generation import Generation
from router.api.server import Router
from router.http import cold
from router.http.doors import CLIENTS_MAX, SPARE, Doors, guests_of
from router.http.front import Front, FrontHandler
from router.http.outlet import Outlet
from router.http.tls import limit_untaken, server_context
from router.http.uploads import Uploads

ADMIN_PORT = "--admin-port (router.admin_port of the cluster file)"
"""The admin side's port in errors. `baton up`, which starts routers, has no flag for the address."""

BACKLOG = 1024
"""The number of connections that the kernel may queue while the loop is busy."""

ADMIN_GUESTS_MAX = 256
"""The number of connections of the admin side: pages, scrapers and router peers keep a few each. Fewer if the process
has few descriptors."""

CUT_OFF_S = 0.1
"""Once `drain_s` is over, aiohttp waits so many seconds for a request, cancels it, and waits as long for its end."""


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
        sides = _Sides(config)
        closing.push_async_callback(sides.close)
        front = await sides.front(
            router.generation,
            public_app(router.endpoints),
            body_bytes_max=config.body_bytes_max,
            doors=doors,
            uploads=router.uploads,
        )
        tls = None
        if config.tls_cert_file is not None:
            tls = server_context(config.tls_cert_file, config.tls_key_file, doors.handshakes)
        shared = config.shares_port or None
        hosts = (config.host, *config.hosts_beside)
        public = await sides.listen(front, hosts, config.port, "--port", tls, shared=shared)
        operators = await sides.front(
            _NoGeneration(router.generation),
            admin_app(router.endpoints),
            body_bytes_max=SMALL_BYTES_MAX,
            doors=Doors(min(ADMIN_GUESTS_MAX, doors.guests_max)),
            uploads=Uploads(ADMIN_GUESTS_MAX * SMALL_BYTES_MAX),
        )
        hosts = (config.admin_host, *config.admin_hosts_beside)
        admin = await sides.listen(operators, hosts, config.admin_port, ADMIN_PORT)
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


class _Sides:
    """The clients' and the operators' side of one router. They end together: the router stops within ``drain_s``."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._servers: list[asyncio.Server] = []
        self._fronts: list[Front] = []
        self._runners: list[web.AppRunner] = []

    async def front(
        self, answers: FrontHandler, app: web.Application, *, body_bytes_max: int, doors: Doors, uploads: Uploads
    ) -> Front:
        """One side: `answers` gets generation requests, and aiohttp's `app` all others."""
        # handler_cancellation: a client that leaves cancels its handler; otherwise engines would generate for clients
        # that have left.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=CUT_OFF_S)
        await runner.setup()
        self._runners.append(runner)
        assert runner.server is not None
        front = Front(
            answers,
            cold.handlers(runner.server),
            body_bytes_max=body_bytes_max,
            body_timeout_s=self._config.body_timeout_s,
            head_timeout_s=self._config.head_timeout_s,
            doors=doors,
            uploads=uploads,
        )
        self._fronts.append(front)
        return front

    async def listen(
        self,
        front: Front,
        hosts: Sequence[str],
        port: int,
        flag: str,
        tls: ssl.SSLContext | None = None,
        *,
        shared: bool | None = None,
    ) -> str:
        """Open a side's port at each address. Returns the URL of the first address; a port 0 is one free port for all.

        Raises:
            UsageError: it cannot listen at an address. Of further addresses, the loopback or wildcard address of a
                family that this machine lacks is left out.
        """
        first, *others = hosts
        bound = await self._open(front, first, port, flag, tls, shared=shared)
        for other in others:
            if not _lacks_family_of(other):
                await self._open(front, other, bound, flag, tls, shared=shared)
        return f"{'http' if tls is None else 'https'}://{netloc(first, bound)}"

    async def _open(
        self, front: Front, host: str, port: int, flag: str, tls: ssl.SSLContext | None, *, shared: bool | None
    ) -> int:
        """Open a port at one address; returns its number."""
        try:
            server = await asyncio.get_running_loop().create_server(
                front.connect,
                host,
                port,
                backlog=BACKLOG,
                ssl=tls,
                reuse_port=shared,
                ssl_handshake_timeout=None if tls is None else self._config.head_timeout_s,
            )
        except OSError as error:
            if is_address_fault(error):
                raise cannot_listen(host, port, error, flag) from None
            raise
        self._servers.append(server)
        for listening in server.sockets:
            limit_untaken(listening, self._config.client_stall_s)
        return int(server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Accept no more connections, let begun answers end within ``drain_s``, and cut the others off."""
        for server in self._servers:
            await closed_server(server)
        async with asyncio.TaskGroup() as draining:
            for front in self._fronts:
                draining.create_task(front.drain(self._config.drain_s))
        for runner in self._runners:
            await runner.cleanup()


def _lacks_family_of(host: str) -> bool:
    """Whether `host` is the loopback or wildcard address of a family without addresses on this machine, such as IPv6
    where it is switched off.
    """
    try:
        address = ipaddress.ip_address(host)
        if not (address.is_loopback or address.is_unspecified):
            return False
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    except ValueError:
        return False
    try:
        with socket.socket(family, socket.SOCK_STREAM) as look:
            look.bind((host, 0))
    except OSError as error:
        return error.errno in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}
    return False


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

    def refuse(self, outlet: Outlet, problem: Exception, client_id: str | None, *, close: bool = False) -> None:
        """Answer with the raised error."""
        self._generation.refuse(outlet, problem, client_id, close=close)
