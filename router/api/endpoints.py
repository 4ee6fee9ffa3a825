"""The endpoints of a router that aiohttp serves: the OpenAI API, passthrough of whole paths, readiness; and its admin
side. Errors have OpenAI's shape. A shell: HTTP, a clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from cluster.errors import (
    ApiError,
    bad_request,
    deadline_passed,
    no_instance,
    no_room,
    not_allowed,
    too_large,
    upstream_failed,
)
from cluster.http.answers import HEAD_BYTES_MAX
from cluster.http.headers import VALUE_CHARS_MAX, printable
from cluster.instance import Instance, Role
from cluster.readable import SMALL_BYTES_MAX
from router.admin.operators import Operators
from router.admin.scrape import Scrape
from router.api import paths
from router.api.aliases import Aliases, check_served
from router.api.config import RouterConfig
from router.api.generation import Generation
from router.api.openapi import document
from router.api.passthrough import Passthrough
from router.api.paths import OUTSIDE_V1
from router.core import eligibility
from router.core.clients import client_of
from router.fleet.columns import InstanceView
from router.fleet.discovery import Discovery
from router.fleet.prover import Prover
from router.http.bodies import read_body
from router.http.cold import as_response, json_response
from router.http.uploads import Uploads
from router.http.upstream import EngineLost, limit_silence, say
from router.request.parts import Parts
from router.request.refusals import broken, headers_of, names_of, new_id

logger = logging.getLogger("baton.router")

_ADMIN_SIDE: Final = web.AppKey("admin side", bool)
"""Whether an application is the operators' side."""

_OPERATORS_PATHS: Final = ("/ui", "/explain", "/quarantine", "/drain", "/resume")

_FIRST_PAIR: Final = "the proof of a first pair"
"""What a router lacks that has all roles, and does not know yet whether any two instances may hand over."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoints:
    """The endpoints of one router."""

    def __init__(
        self,
        parts: Parts,
        config: RouterConfig,
        *,
        generation: Generation,
        passthrough: Passthrough,
        operators: Operators,
        scrape: Scrape,
        names: Aliases,
        uploads: Uploads,
        watch: Discovery | None,
        prover: Prover | None,
    ) -> None:
        """`watch`: None without a registry. `prover`: None if no proofs are needed."""
        self.parts: Final = parts
        self.config: Final = config
        self.operators: Final = operators
        self._generation: Final = generation
        self._passthrough: Final = passthrough
        self._scrape: Final = scrape
        self._names: Final = names
        self._uploads: Final = uploads
        self._watch: Final = watch
        self._prover: Final = prover

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """``/v1/completions`` and ``/v1/chat/completions``, where a connection's `Front` did not recognise the path."""
        tenant = _tenant_of(http)
        self.parts.clients.enter(tenant, self.parts.view.routers)
        try:
            raw = await self._read_body(http)
        except BaseException:  # also a cancellation: the request no longer counts as open
            self.parts.clients.leave(tenant)
            raise
        return await self._generation.over_aiohttp(http, tenant, raw)

    async def relay_whole(self, http: web.Request) -> web.StreamResponse:
        """Any other path: passed through to one instance, unchanged except for transfer fields. If the request does not
        reach that instance, another one gets it.
        """
        paths.check(http.rel_url.raw_path, http.method)  # before its body is read
        tenant, raw = _tenant_of(http), await self._read_body(http)
        client, bodies = client_of(tenant, http.remote), self.parts.bodies
        bodies.check(client, len(raw))
        bodies.add(client, len(raw))
        try:
            return await self._pass_on_somewhere(http, tenant, raw)
        finally:
            bodies.drop(client, len(raw))

    async def _pass_on_somewhere(self, http: web.Request, tenant: str, raw: bytes) -> web.StreamResponse:
        deadline = self._passthrough.deadline()
        for last in (False, False, True):
            try:
                return await self._pass_on(http, tenant, raw, deadline)
            except EngineLost as lost:
                if lost.ours:
                    raise no_room(str(lost)) from None
                if lost.reached or last:
                    raise upstream_failed(str(lost)) from None
        raise AssertionError("the last try returns or raises")

    async def _pass_on(self, http: web.Request, tenant: str, raw: bytes, deadline: float) -> web.StreamResponse:
        """Pass the request to one instance, which has a place before the deadline. Raises EngineLost: nothing of an
        answer has come.
        """
        instance, clean = await self._passthrough.place(http, tenant, raw, deadline)
        if not self.parts.view.knows(instance.id) or self.parts.view.get(instance.id).instance.url != instance.url:
            # This instance left while engines were asked for the response.
            raise no_instance(f"{instance.id} has just left")
        headers = self.parts.engines.credentials.headers_for(http.headers)
        _check_sendable(headers)
        headers["X-Request-Id"] = http[_NAME] = self._generation.new_id()
        self.parts.dispatch.leg_started(instance.id)
        try:
            return await self._relay(http, instance, clean, headers)
        except EngineLost as lost:
            if not lost.reached and not lost.ours:
                self.parts.dispatch.unreachable(instance.id)
            raise
        finally:
            self.parts.dispatch.leg_ended(instance.id)

    async def _relay(
        self, http: web.Request, instance: Instance, body: bytes, headers: dict[str, str]
    ) -> web.StreamResponse:
        limit = self.config.whole_s
        try:
            async with asyncio.timeout(limit):
                answer = await self.parts.engines.upstream.open(
                    instance, http.method, http.path_qs, body or None, headers
                )
        except TimeoutError:
            raise deadline_passed(limit) from None
        limit_silence(answer, self.config.stall_s)
        try:
            odd = _oddity(answer)
            if odd:
                self.parts.meters.unfit.labels("malformed").inc()
                raise EngineLost(f"{instance.id}: no HTTP answer: {odd}", reached=True)
            response = _relayed_head(answer, http)
            response.headers.update(names_of(http.headers.get("X-Request-Id"), headers["X-Request-Id"]))
            try:
                await response.prepare(http)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                broken = "" if _says_its_end(http.method, answer) else "the answer has neither a length nor chunks"
            except (aiohttp.ClientPayloadError, TimeoutError) as error:
                broken = say(error)
            except ConnectionResetError:  # the client has left: aiohttp raises this for writes
                logger.debug("%s: the client left before the answer's end", headers["X-Request-Id"])
                return response
            if broken:
                logger.warning("%s broke off: %s", instance.id, broken)
                if http.transport is not None:
                    http.transport.abort()  # a broken answer must not look like a finished one
                return response
            with contextlib.suppress(ConnectionResetError):  # as above
                await response.write_eof()
            return response
        finally:
            answer.close()

    async def refuse_operator_path(self, http: web.Request) -> web.Response:
        """Refuse a path that changes one engine. Raises ApiError (403)."""
        raise ApiError(
            403, "PermissionDeniedError", f"`{http.path}` changes one engine: call it on each engine itself."
        )

    async def models(self, http: web.Request) -> web.Response:
        """``/v1/models``: the models that ready instances serve to this tenant, each once, with the engines' own
        entries.
        """
        return json_response({"object": "list", "data": self._cards(_tenant_of(http))})

    def _cards(self, tenant: str) -> list[Mapping[str, Any]]:
        entries: dict[str, dict[str, object]] = {}
        for seen in self.parts.view.all():
            for entry in seen.models_json if seen.ready and seen.instance.serves(tenant) else ():
                entries.setdefault(str(entry.get("id")), entry)
        return self._names.cards(entries)

    async def model(self, http: web.Request) -> web.Response:
        """``/v1/models/NAME``: the entry of one model. Raises ApiError: 404 if this tenant has no such model; 503 if no
        instance that serves it is ready.
        """
        name, tenant = http.match_info["name"], _tenant_of(http)
        for entry in self._cards(tenant):
            if entry.get("id") == name:
                return json_response(entry)
        real = self._names.real(name)
        known = name if self.parts.view.served.hides(real, tenant) else real
        check_served(self._names, self.parts.view, known, tenant)
        raise no_instance(f"no ready instance serves `{name[:200]}`")

    async def openapi(self, _: web.Request) -> web.Response:
        """``/openapi.json``: the paths of the clients' side."""
        return web.Response(body=_OPENAPI, content_type="application/json")

    async def health(self, _: web.Request) -> web.Response:
        """200 as long as this process serves."""
        return web.Response()

    async def ready(self, _: web.Request) -> web.Response:
        """200 when every leg has an instance to run it; 503 otherwise. If the router has keys, this answer does not
        name the instances, as it needs no key.
        """
        return self._readiness(
            () if self.parts.clients.closed else self.parts.view.all(), shows_unproven=not self.parts.clients.closed
        )

    async def ready_and_who(self, http: web.Request) -> web.Response:
        """``/ready`` on the admin side: names all instances for operators, and for a tenant those that serve it."""
        try:
            reader = self.operators.access.reader(http)
        except ApiError:
            return self._readiness(())
        shown = [seen for seen in self.parts.view.all() if seen.instance.serves(reader)]
        return self._readiness(shown, shows_unproven=reader is None)

    def _readiness(self, shown: Iterable[InstanceView], *, shows_unproven: bool = False) -> web.Response:
        ready = [seen for seen in self.parts.view.all() if seen.ready]
        missing = [] if any(seen.role.prefills for seen in ready) else [Role.PREFILL.value]
        missing += [] if any(seen.role.decodes for seen in ready) else [Role.DECODE.value]
        if not missing and self._prover is not None and not self._prover.settled(time.monotonic()):
            missing = [_FIRST_PAIR]
        complete = not missing
        heard = self._watch is None or self._watch.heard
        told: dict[str, object] = {"ready": complete, "registry": "heard" if heard else "away"}
        if missing:
            told["missing"] = missing
        told["instances"] = _instances(shown)
        unproven = self._scrape.unproven() if shows_unproven else {}
        if unproven:
            told["unproven"] = unproven
        return json_response(told, 200 if complete else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus text."""
        return web.Response(body=self._scrape.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def no_metrics_here(self, _: web.Request) -> web.Response:
        """Refuse ``/metrics`` on the clients' port. With tenants, metrics would name them; with several processes on
        the port, each scrape would reach another process. Raises ApiError (403).
        """
        why = "Metrics name tenants" if self.parts.clients.closed else "Several processes share this port"
        raise ApiError(403, "PermissionDeniedError", f"{why}: metrics are on the admin side.")

    async def _read_body(self, http: web.Request) -> bytes:
        limit = self.config.body_bytes_max
        client = client_of(_tenant_of(http), http.remote)
        return await read_body(http, limit, self.config.body_timeout_s, too_large(limit), self._uploads, client)


def _relayed_head(answer: aiohttp.ClientResponse, http: web.Request) -> web.StreamResponse:
    """An engine's answer to this request, as the client gets it, still without its body."""
    response = web.StreamResponse(status=answer.status)
    for name, chars_max in _RELAYED.items():
        said = printable(answer.headers.get(name, ""), chars_max)
        if said:
            response.headers[name] = said
    if http.version < (1, 1):  # it cannot come in chunks: only the connection's end marks its own
        response.force_close()
    return response


def _oddity(answer: aiohttp.ClientResponse) -> str:
    """What is not HTTP in an answer's head; empty: nothing."""
    if not 200 <= answer.status < 600:
        return f"its status is {answer.status}"
    transfer = answer.headers.get("Transfer-Encoding", "chunked").strip()
    return "" if transfer.lower() == "chunked" else f"its transfer encoding is {transfer[:40]!r}"


def _says_its_end(method: str, answer: aiohttp.ClientResponse) -> bool:
    """Whether the answer's end is marked, so that a truncated answer differs from a complete one."""
    if method == "HEAD" or answer.status in {204, 304}:
        return True
    chunked = "chunked" in answer.headers.get("Transfer-Encoding", "").lower()
    return chunked or "Content-Length" in answer.headers


def _tenant_of(http: web.Request) -> str:
    """The tenant that the middleware `_keys` has found; empty without tenants."""
    tenant: str = http.get(_TENANT, "")
    return tenant


def _check_sendable(headers: Mapping[str, str]) -> None:
    """Refuse headers that are not UTF-8: aiohttp would drop them silently. Raises ApiError."""
    for name, value in headers.items():
        if not value.isascii() and value != value.encode("utf-8", "replace").decode():
            raise bad_request(f"The header `{name}` is no UTF-8.")


def _instances(shown: Iterable[InstanceView]) -> list[dict[str, object]]:
    return [
        {
            "id": seen.id,
            "role": seen.role.value,
            "state": seen.said_state,
            "epoch": seen.instance.epoch,
            "inflight": seen.inflight,
            "running": seen.load.running,
            "waiting": seen.load.waiting,
            "kv_usage": seen.load.kv_usage,
            "models": seen.models,
        }
        for seen in shown
    ]


_SHORT: Final = ("Allow", "Content-Type", "Content-Encoding", "Cache-Control", "Content-Disposition")
_RELAYED: Final = dict.fromkeys(_SHORT, VALUE_CHARS_MAX) | {"Metadata": HEAD_BYTES_MAX}
"""The headers about an answer that is passed on unread, and their longest values. ``Metadata`` describes embeddings
that are sent as bytes (vLLM's ``encoding_format: bytes``), some 100 characters for each.
"""

_TENANT = web.RequestKey("tenant", str)
_NAME = web.RequestKey("name", str)
"""The router's name for a request that is passed through."""
_OPENAPI = msgspec.json.encode(document())
_OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/openapi.json"})
"""Paths without a key: load balancers call them."""

_OPERATORS_ONLY = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""They change one engine, not the fleet: behind a router they would make instances differ."""


def public_app(endpoints: Endpoints) -> web.Application:
    """The clients' side."""
    closed = endpoints.parts.clients.closed
    layers = [_errors(endpoints), _keys(endpoints)] if closed else [_errors(endpoints)]
    app = web.Application(client_max_size=endpoints.config.body_bytes_max, middlewares=layers)
    metrics = endpoints.no_metrics_here if closed or endpoints.config.shares_port else endpoints.metrics
    app.router.add_post(eligibility.COMPLETIONS, endpoints.generate)
    app.router.add_post(eligibility.CHAT, endpoints.generate)
    app.router.add_get("/openapi.json", endpoints.openapi)
    app.router.add_get("/v1/models", endpoints.models)
    app.router.add_get("/v1/models/{name:.+}", endpoints.model)
    for path, handler in (("/health", endpoints.health), ("/ready", endpoints.ready), ("/metrics", metrics)):
        app.router.add_get(path, handler)
    for path in _OPERATORS_ONLY:
        app.router.add_route("*", path, endpoints.refuse_operator_path)
    for path in ("/v1/{rest:.+}", *OUTSIDE_V1):
        app.router.add_route("*", path, endpoints.relay_whole)
    return app


def admin_app(endpoints: Endpoints) -> web.Application:
    """The operators' side: a port of its own, so that it can stay closed to clients."""
    app = web.Application(client_max_size=SMALL_BYTES_MAX, middlewares=[_errors(endpoints)])
    for path, handler in (("/health", endpoints.health), ("/ready", endpoints.ready_and_who)):
        app.router.add_get(path, handler)
    endpoints.operators.routes(app)
    app[_ADMIN_SIDE] = True
    return app


def _errors(endpoints: Endpoints) -> Any:
    """The one boundary where errors become answers."""

    @web.middleware
    async def middleware(http: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            return await handler(http)
        except ApiError as error:
            problem = error
        except web.HTTPException as error:
            if error.status < 400:
                raise
            problem = _http_problem(http, error)
        except Exception:  # the per-request boundary: one broken request must not end others
            logger.exception("%s %s failed", http.method, http.path)
            problem = broken()
        problem.__traceback__ = problem.__context__ = None  # they hold this frame, and others that hold the body
        if not http.app.get(_ADMIN_SIDE):  # operators' own mistakes are no clients' errors
            endpoints.parts.meters.rejected.labels(str(problem.status)).inc()
        headers = headers_of(problem) | names_of(http.headers.get("X-Request-Id"), http.get(_NAME) or new_id())
        if problem.status in {408, 413}:
            headers["Connection"] = "close"  # do not read the rest of the body
        response = as_response(problem)
        response.headers.update(headers)
        return response

    return middleware


def _keys(endpoints: Endpoints) -> Any:
    """If the router has keys, requests without a key stop here, and their bodies are not read."""

    @web.middleware
    async def middleware(http: web.Request, handler: _Handler) -> web.StreamResponse:
        if http.path in _OPEN_PATHS:
            return await handler(http)
        tenant = http[_TENANT] = endpoints.parts.clients.tenant(http.headers, time.monotonic())
        if http.match_info.handler == endpoints.generate:  # it counts itself
            return await handler(http)
        endpoints.parts.clients.enter(tenant, endpoints.parts.view.routers)
        try:
            return await handler(http)
        finally:
            endpoints.parts.clients.leave(tenant)

    return middleware


def _hint(http: web.Request) -> str:
    """Where the path of a request may be, that is not on this side."""
    if http.app.get(_ADMIN_SIDE):
        clients = http.path.startswith("/v1/")
        return "Clients' paths are on the clients' side (--port)." if clients else "Try `/ui`."
    operators = http.path.startswith(_OPERATORS_PATHS)
    return "It is on the admin side (--admin-port)." if operators else "Try `/v1/chat/completions`."


def _http_problem(http: web.Request, error: web.HTTPException) -> ApiError:
    if error.status == 404:
        return ApiError(404, "NotFoundError", f"There is no `{http.path[:200]}` here. {_hint(http)}")
    if error.status == 405:
        return not_allowed(http.method, tuple(sorted(getattr(error, "allowed_methods", ()))))
    return ApiError(error.status, "BadRequestError", error.reason)
