"""The agent's own HTTP: the state of its instance, drain and role requests, and which callers may ask. A shell.

``GET /health /ready /state /metrics``, ``POST /drain {"deadline_s": …}``, ``/resume``, ``/role {"role": …}``. `/health`
and `/ready` answer every caller, with a status only. Everything else is for programs on this machine, for requests
signed with the fleet's ticket keys (`kvtransfer.signed`), and for operators' keys. Pages of other sites in a browser on
this machine are refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from aiohttp import web

from cluster.callers import from_another_site, from_here, names_this_machine
from cluster.errors import ApiError, bad_request, cannot_listen, is_address_fault
from cluster.ids import InstanceId, engine_of
from cluster.instance import Role
from cluster.keys import key_in, whose
from cluster.readable import deadline_in, object_in, too_large_here
from cluster.urls import netloc
from kvtransfer.signed import SIGNATURE, TO, Judge, ask_in
from kvtransfer.ticket import SigningKey

if TYPE_CHECKING:
    from cluster.telemetry import Tracing

BODY_BYTES_MAX = 4096
"""Largest body of a request: each is one small JSON object."""

DRAIN_S = 60.0
"""Deadline of a drain whose request names none. A long stream may need it; an operator in a hurry names a shorter one.
"""


BODY_S = 10.0
"""Time limit for a body of `BODY_BYTES_MAX` to arrive."""

CONNECTIONS_MAX: Final = 256
"""Connections that may be open. Routers, the operator, a controller and a scraper keep one each."""

OPEN_PATHS: Final = frozenset({"/health", "/ready"})
"""Paths for probes: without a key, from any machine."""

_UNIX_TIME: Final = time.time  # noqa: TID251 - the clock that two machines share


class AgentReport(Protocol):
    """What the agent says of its instance; implemented by `engine.agent.report.InstanceReport`."""

    def state(self) -> dict[str, Any]:
        """Everything that the agent knows of the instance, for people and programs."""

    def metrics(self) -> str:
        """The metrics as Prometheus text."""


class AgentActions(Protocol):
    """The agent's actions; implemented by `engine.agent.agent.Agent`."""

    def is_ready(self) -> bool:
        """Whether the instance takes work."""

    def ask_drain(self, deadline_s: float) -> None:
        """Take no new work."""

    def ask_resume(self) -> None:
        """Take work again."""

    def ask_role(self, role: Role) -> str | None:
        """Take another role; the reason if it cannot, else None."""


class Gate:
    """Decides which callers one agent answers. Without keys: programs on this machine."""

    def __init__(
        self,
        instance: str,
        *,
        ticket_keys: Callable[[], tuple[SigningKey, ...]] | None = None,
        admin_keys: Callable[[], tuple[str, ...]] | None = None,
        bound: str = "",
        clock: Callable[[], float] = _UNIX_TIME,
    ) -> None:
        """`ticket_keys`: this instance's keys; `admin_keys`: digests of operators' keys; `bound`: the host it listens
        on.
        """
        self._instance: Final = instance
        self._ticket_keys: Final = ticket_keys
        self._admin_keys: Final = admin_keys
        self._bound: Final = bound
        self._clock: Final = clock
        self._judge: Final = Judge(instance, clock())

    async def admit(self, http: web.Request) -> None:
        """Return if the caller may ask.

        Raises:
            ApiError: 401 and 403 say what is missing, 421 that another agent is meant; 408 and 413: the signed body is
                too slow or too large.
        """
        meant = http.headers.get(TO, self._instance)
        if engine_of(InstanceId(meant)) != self._instance:
            raise ApiError(421, "MisdirectedError", f"This is {self._instance}'s agent, not {meant[:200]}'s.")
        if from_another_site(http.headers, http.host, changes=http.method != "GET"):
            raise ApiError(403, "PermissionDeniedError", "A page of another site asks for this: refused.")
        if SIGNATURE in http.headers:
            await self._check_signature(http)
        elif key := key_in(http.headers):
            self._check_key(key)
        elif not from_here(http.remote):
            message = (
                "From other machines this asks for a request signed with the fleet's ticket keys "
                "(routers and `baton status` sign with --ticket-keys-file), or an operator's key (--admin-key-file)."
            )
            raise ApiError(401, "AuthenticationError", message)
        elif not names_this_machine(http.host, self._bound):
            message = "Ask as 127.0.0.1 or localhost: under another name it may be another site's page that asks."
            raise ApiError(403, "PermissionDeniedError", message)

    async def _check_signature(self, http: web.Request) -> None:
        keys = () if self._ticket_keys is None else self._ticket_keys()
        ask = ask_in(http.headers, http.method, http.path_qs, await _body(http))
        fault = self._judge.fault(http.headers[SIGNATURE], ask, keys, self._clock())
        if fault:
            raise ApiError(401, "AuthenticationError", f"The request is refused by {self._instance}'s agent: {fault}.")

    def _check_key(self, key: str) -> None:
        digests = () if self._admin_keys is None else self._admin_keys()
        if whose(key, {"": digests}) is None:
            raise ApiError(401, "AuthenticationError", "The key is not one of this agent's --admin-key-file.")


def agent_app(agent: AgentActions, report: AgentReport, gate: Gate, traced: Tracing | None = None) -> web.Application:
    """The routes. `traced` makes a span of each request that changes something."""

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def ready(http: web.Request) -> web.Response:
        try:
            await gate.admit(http)
        except ApiError:
            told = {"ready": agent.is_ready()}
        else:
            told = report.state()
        return web.json_response(told, status=200 if agent.is_ready() else 503)

    async def state(_: web.Request) -> web.Response:
        return web.json_response(report.state())

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=report.metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def drain(http: web.Request) -> web.Response:
        agent.ask_drain(await _deadline(http))
        return web.json_response(report.state(), status=202)

    async def resume(_: web.Request) -> web.Response:
        agent.ask_resume()
        return web.json_response(report.state(), status=202)

    async def role(http: web.Request) -> web.Response:
        refusal = agent.ask_role(await _role(http))
        if refusal is not None:
            raise ApiError(409, "ConflictError", refusal)
        return web.json_response(report.state(), status=202)

    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_traces(traced), _errors, _admission(gate)])
    app.add_routes([web.get("/health", health), web.get("/ready", ready), web.get("/state", state)])
    app.add_routes([web.get("/metrics", metrics), web.post("/drain", drain), web.post("/resume", resume)])
    app.add_routes([web.post("/role", role)])
    return app


async def _body(http: web.Request) -> bytes:
    """The whole body; aiohttp keeps it for the next reader."""
    try:
        async with asyncio.timeout(BODY_S):
            return await http.read()
    except TimeoutError:
        raise ApiError(408, "RequestTimeoutError", f"The body did not arrive within {BODY_S:g} s.") from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large_here(BODY_BYTES_MAX) from None


async def _object(http: web.Request, *fields: str) -> dict[str, Any]:
    return object_in(await _body(http), fields)


async def _role(http: web.Request) -> Role:
    asked = (await _object(http, "role")).get("role")
    if asked not in [role.value for role in Role]:
        words = ", ".join(role.value for role in Role)
        raise bad_request(f"`role` is {str(asked)[:40]}: it must be one of {words}.", "role")
    return Role(asked)


async def _deadline(http: web.Request) -> float:
    return deadline_in(await _object(http, "deadline_s"), DRAIN_S)


def _traces(traced: Tracing | None) -> Any:
    """Middleware that makes a span of each POST, in the caller's trace, with the status of its answer."""

    @web.middleware
    async def middleware(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if traced is None or request.method != "POST":
            return await handler(request)
        span = traced.request(f"baton.agent.{request.path.strip('/') or 'root':.40}", request.headers)
        status = 500
        try:
            answer = await handler(request)
            status = answer.status
        finally:
            span.end("" if status < 400 else str(status), {"http.response.status_code": status})
        return answer

    return middleware


def _admission(gate: Gate) -> Any:
    """Middleware that stops every caller that may not ask, except on probes' paths."""

    @web.middleware
    async def middleware(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            await gate.admit(request)
        return await handler(request)

    return middleware


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(error.body(), status=error.status)


async def listen(app: web.Application, host: str, port: int, flag: str = "--agent-port") -> tuple[web.AppRunner, str]:
    """Open a port of an agent, a controller or the operator; the runner to clean up, and the base URL.

    Raises:
        UsageError: the port is taken; the message names its `flag`.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    assert runner.server is not None
    _limit_connections(runner.server)
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        if is_address_fault(error):
            raise cannot_listen(host, port, error, flag) from None
        raise
    bound = runner.addresses[0][1]
    return runner, f"http://{netloc(host, bound)}"


def _limit_connections(server: web.Server) -> None:
    """Close the oldest connection for each new one above `CONNECTIONS_MAX`. Requests here take milliseconds, so it is
    one that waits, or that sends no whole request: without a limit such ones use up the process's file descriptors.
    """
    opened = server.connection_made

    def made(handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        opened(handler, transport)
        for oldest in server.connections[:-CONNECTIONS_MAX]:
            oldest.force_close()

    server.connection_made = made  # type: ignore[method-assign]
