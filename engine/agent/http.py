"""The agent's own HTTP: what it says of its instance, and how it is told to drain. A shell.

``GET /health /ready /state /metrics``, ``POST /drain {"deadline_s": …}``, ``/resume``,
``/role {"role": …}``. It binds loopback by default; whoever reaches it can take the instance out of service, so keep it
inside the cluster's network.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web

from cluster.errors import ApiError, UsageError, bad_request
from cluster.instance import Role
from cluster.readable import deadline_in, object_in, too_large_here

BODY_BYTES_MAX = 4096
DRAIN_S = 60.0
"""Deadline of a drain asked without one: a long stream may need it; an operator in a hurry names a shorter one."""


class Answers(Protocol):
    """What the agent can tell and do; implemented by `engine.agent.agent.Agent`."""

    def state(self) -> dict[str, Any]:
        """Everything known of the instance, for people and programs."""

    def is_ready(self) -> bool:
        """Whether it takes work."""

    def metrics(self) -> str:
        """Prometheus text."""

    def ask_drain(self, deadline_s: float) -> None:
        """Take no new work."""

    def ask_resume(self) -> None:
        """Take work again."""

    def ask_role(self, role: Role) -> str | None:
        """Take another role; why it cannot, or None."""


def agent_app(agent: Answers) -> web.Application:
    """The routes."""

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def ready(_: web.Request) -> web.Response:
        return web.json_response(agent.state(), status=200 if agent.is_ready() else 503)

    async def state(_: web.Request) -> web.Response:
        return web.json_response(agent.state())

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=agent.metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def drain(http: web.Request) -> web.Response:
        agent.ask_drain(await _deadline(http))
        return web.json_response(agent.state(), status=202)

    async def resume(_: web.Request) -> web.Response:
        agent.ask_resume()
        return web.json_response(agent.state(), status=202)

    async def role(http: web.Request) -> web.Response:
        refusal = agent.ask_role(await _role(http))
        if refusal is not None:
            raise ApiError(409, "ConflictError", refusal)
        return web.json_response(agent.state(), status=202)

    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_errors])
    app.add_routes([web.get("/health", health), web.get("/ready", ready), web.get("/state", state)])
    app.add_routes([web.get("/metrics", metrics), web.post("/drain", drain), web.post("/resume", resume)])
    app.add_routes([web.post("/role", role)])
    return app


async def _object(http: web.Request, *fields: str) -> dict[str, Any]:
    try:
        return object_in(await http.read(), fields)
    except web.HTTPRequestEntityTooLarge:
        raise too_large_here(BODY_BYTES_MAX) from None


async def _role(http: web.Request) -> Role:
    asked = (await _object(http, "role")).get("role")
    if asked not in [role.value for role in Role]:
        words = ", ".join(role.value for role in Role)
        raise bad_request(f"`role` is {str(asked)[:40]}: it must be one of {words}.", "role")
    return Role(asked)


async def _deadline(http: web.Request) -> float:
    return deadline_in(await _object(http, "deadline_s"), DRAIN_S)


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(error.body(), status=error.status)


async def listen(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, str]:
    """Open the agent's port; the runner to clean up, and the base URL.

    Raises:
        UsageError: the port is taken, naming the flag.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        if error.errno in {errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL}:
            raise UsageError(
                f"cannot listen on {host}:{port} ({error.strerror}): choose another --agent-port"
            ) from None
        raise
    bound = runner.addresses[0][1]
    return runner, f"http://{f'[{host}]' if ':' in host else host}:{bound}"
