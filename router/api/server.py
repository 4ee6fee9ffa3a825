"""The router's HTTP server: OpenAI endpoints in front, metrics and readiness, errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from cluster import wire
from cluster.errors import (
    ApiError,
    bad_request,
    deadline_passed,
    no_instance,
    no_room,
    too_large,
    unknown_model,
    upstream_failed,
)
from cluster.ids import InstanceId, client_id_in
from cluster.instance import Instance
from cluster.keys import KEY_HEADERS
from cluster.readable import SMALL_BYTES_MAX
from cluster.registry.registry import Registry
from cluster.telemetry import tracing
from router.admin.operators import Operators
from router.api.aliases import Aliases
from router.api.config import Renewed, RouterConfig
from router.api.generation import Generation, broken, headers_of
from router.api.openapi import document
from router.api.passthrough import Whole
from router.api.paths import OUTSIDE_V1, Catalogue
from router.core import eligibility
from router.core.clients import Clients
from router.core.slo import promises_of
from router.core.values import Reported
from router.fleet.discovery import Watch
from router.fleet.probes import Prober
from router.fleet.prover import Prover
from router.fleet.snapshot import InstanceView
from router.http.bodies import read_body
from router.http.doors import CLIENTS_MAX, Doors
from router.http.headers import printable
from router.http.legs import Legs
from router.http.uploads import Uploads, client_of
from router.http.upstream import EngineLost, Upstream, limit_silence, say
from router.predict.estimates import KEY_BYTES, Intake, chunk_key
from router.request.driver import Exchange
from router.request.slices import Slices
from router.request.tickets import Tickets
from router.scheduler.decision_log import Log, desk_of, prefixes_of, view_of
from router.scheduler.flow_control.waiters import Line, Losses
from router.scheduler.log_writer import FLUSH_S, LogWriter
from router.scheduler.scoring.policies import FORESEEING, POLICIES
from router.telemetry.explain_store import Memory
from router.telemetry.metrics import Meters

logger = logging.getLogger("baton.router")

CLOSE_S = 2.0
"""So long may what still releases holds take once the server is closed."""

RENEW_EVERY_S = 2.0
"""Between two looks at an edited cluster file."""

_Result = TypeVar("_Result")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Router:
    """Everything one router process owns: `start` opens it, `close` ends it. Long, as each endpoint is a method."""

    def __init__(self, config: RouterConfig, registry: Registry | None = None, doors: Doors | None = None) -> None:
        """`doors`: where clients' connections are counted."""
        self.config = config
        self.watch = None if registry is None else Watch(registry, self._fleet_told)
        self._knows_engines = registry is None or registry.all_proven
        """Whether engines are those they say they are: named by URL, or proven by their agents' ticket keys. Others
        get no key at all.
        """
        self._probes: dict[InstanceId, tuple[Instance, asyncio.Task[None]]] = {}
        policy, write = POLICIES[config.policy], config.decision_log
        self.meters = Meters()
        self._log_writer = None if write is None else LogWriter(write, self.meters.log_dropped.inc)
        self._log = log = None if self._log_writer is None else Log(self._log_writer.add, config.policy)
        self.view = view_of(log, config.makes)
        self.uploads = Uploads(config.uploads_bytes)
        self.slices = Slices(self.uploads)
        """Where large bodies are read."""
        self.memory = Memory(config.explain_last)
        self.tracing = tracing("baton-router")
        self.desk = desk_of(log, self.view, policy, admission=bool(config.classes), foresees=policy in FORESEEING)
        self.meters.handoffs_off.guard = self.desk.guard
        self.clients = Clients(config.classes, config.tenants, config.tenant_keys)
        self.promises = promises_of(config.classes)
        self.desk.shares = self.clients.shares
        self.intake = self._intake()
        if self.watch is not None:
            self.watch.desk, self.watch.flow = self.desk, self.meters.flow
        self.aliases = Aliases(config.aliases)
        self.catalogue = Catalogue()
        self.whole = Whole(self)
        self.upstream = Upstream()
        self.tickets = Tickets(config.ticket_keys)
        self.line = Line()
        self._looks_s = -1.0
        self.losses = Losses()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.doors = doors or Doors(CLIENTS_MAX)
        self.exchanges: set[Exchange] = set()
        """Requests that are not over."""
        self.generation = Generation(self)
        self.operators = Operators(self)
        for instance in config.instances:
            self.view.add(instance)
        self.prover = Prover(self) if config.proves else None

    def _intake(self) -> Intake | None:
        """Only where somebody foresees. Routers of a fleet with ticket keys give the same names to prompts; elsewhere
        each has names of its own, which nobody else reads yet.
        """
        if self.desk.foresight is None:
            return None
        keys = self.config.ticket_keys
        secret = secrets.token_bytes(KEY_BYTES) if keys is None else keys()[0].secret
        fleet = self.view.all()
        fleet.prefixes = prefixes_of(self._log)
        return Intake(fleet, self.desk.foresight, chunk_key(secret))

    async def start(self) -> None:
        """Open connections and begin probing."""
        if self.config.ticket_keys is None:
            logger.info("tickets are off: programs that reach an engine may start transfers there (--ticket-keys-file)")
        if not self._knows_engines:
            logger.warning(
                "instances and routers need not prove themselves: holders of the registry's password can put in false "
                "ones, which get prompts. No API key goes to engines, neither clients' nor VLLM_API_KEY "
                "(give --ticket-keys-file, and leave --accept-unproven out)"
            )
        await self.upstream.start()
        self.loop = asyncio.get_running_loop()
        self.legs = Legs()
        # With agents, load comes with their heartbeats: only reachability is left to ask for.
        self._prober = Prober(
            self.view,
            self.upstream,
            self.engine_headers,
            self._probed,
            read_metrics=self.watch is None,
            catalogue=self.catalogue,
        )
        self._probe_all()
        self.spawn(self.operators.look_forever(), "probe-operators")
        if self._log_writer is not None:
            self.spawn(self._flush_forever(self._log_writer), "probe-log")
        if self.config.renewed is not None:
            self.spawn(self._renew_forever(self.config.renewed), "probe-config")
        if self.prover is not None:
            self.spawn(self.prover.run(), "probe-pairs")
        if self.watch is not None:
            await self.watch.read()
            self.spawn(self.watch.read_forever(), "probe-registry")

    async def _renew_forever(self, renewed: Callable[[], Renewed | str | None]) -> None:
        """Classes and tenants of an edited cluster file, without a restart. A bad file leaves them as they are."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            found = await asyncio.to_thread(renewed)
            if isinstance(found, Renewed):
                found = self.renew(found)
            if found:
                logger.warning("%s", found)

    def renew(self, to: Renewed) -> str:
        """Go by these classes and tenants from now on; why not, or an empty text."""
        started_with = self.config
        for what, had, has in (
            ("slo", bool(started_with.classes), bool(to.classes)),
            ("tenants", bool(started_with.tenants), bool(to.tenants)),
        ):
            if had != has:
                change = "has become empty" if had else "was empty at the start"
                return f"the cluster file's `{what}` {change}: that takes a restart; the old classes and tenants hold"
        self.clients.renew(to.classes, to.tenants, to.tenant_keys)
        self.promises = promises_of(to.classes)
        self.desk.shares = self.clients.shares
        self.meters.attainment.retarget(to.classes)
        self.operators.retarget(to.classes)
        logger.info("classes and tenants are those of the edited cluster file from now on")
        return ""

    async def _flush_forever(self, log: LogWriter) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            log.flush()

    @property
    def engine_headers(self) -> dict[str, str]:
        """Of what we ask of engines ourselves."""
        key = self.config.engine_key
        return {"Authorization": f"Bearer {key}"} if key and self._knows_engines else {}

    def announce(self, endpoint: str, admin_url: str) -> None:
        """Both ports are open: other routers and agents may know."""
        if self.watch is not None:
            self.spawn(self.watch.announce_forever(endpoint, admin_url), "probe-announce")

    def _probe_all(self) -> None:
        """One probing task for each instance that is there, none for the others."""
        wanted = {seen.id: seen.instance for seen in self.view.all() if seen.state != "gone"}
        for name, (instance, task) in list(self._probes.items()):
            if wanted.get(name) != instance:
                task.cancel()
                del self._probes[name]
                self.catalogue.forget(name)
        for name, instance in wanted.items():
            if name not in self._probes:
                self._probes[name] = (instance, self.spawn(self._prober.watch(instance), f"probe-{name}"))

    def _fleet_told(self, reported: tuple[Reported, ...], routers: int) -> None:
        self.view.routers = routers
        if self.watch is not None and self.clients.closed:
            self.desk.local_shares = self.watch.local_shares()
        for lost in self.view.fold(reported):
            self.losses.announce(lost)
        self._probe_all()
        self._look_for_proofs()
        self.call(self.desk.fleet_changed())

    def _look_for_proofs(self) -> None:
        if self.prover is not None:
            self.prover.news.set()

    async def close(self) -> None:
        """Stop probing, let what still releases holds finish for a moment, and close every connection."""
        if self.watch is not None:
            self.watch.stop()
        give_up = time.monotonic() + CLOSE_S
        while (ending := self._ending()) or self.exchanges:
            left_s = give_up - time.monotonic()
            if left_s <= 0:
                break
            if ending:
                await asyncio.wait(ending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(min(left_s, 0.02))
        for exchange in list(self.exchanges):
            exchange.stop()
        for task in self._tasks:
            task.cancel()
        if self._log_writer is not None:
            self._log_writer.flush()
        self.legs.close()
        await self.upstream.close()
        await self.operators.close()
        if self.watch is not None:
            await self.watch.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    def _ending(self) -> set[asyncio.Task[Any]]:
        """Tasks that end by themselves."""
        return {task for task in self._tasks if not task.get_name().startswith("probe-")}

    def spawn(self, work: Coroutine[Any, Any, _Result], name: str) -> asyncio.Task[_Result]:
        """A task with a name and an owner; its failure is logged, never lost."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("task %s failed", task.get_name(), exc_info=task.exception())

    # -- what exchanges report and ask --

    def call(self, whom: tuple[object, ...]) -> None:
        """These are to ask for a place again; and when the desk says so, look whether there is one for anybody."""
        if whom:
            self.line.call(whom)
        wakeup_s = self.desk.wakeup_s
        if wakeup_s is not None and wakeup_s != self._looks_s:
            self._looks_s = wakeup_s
            asyncio.get_running_loop().call_later(max(0.0, wakeup_s - time.monotonic()), self._look, wakeup_s)

    def _look(self, wakeup_s: float) -> None:
        """There may be room in the fleet, if nothing has happened since."""
        if wakeup_s == self._looks_s:
            self._looks_s = -1.0
            self.call(self.desk.look(time.monotonic()))

    def leg_ended(self, instance: InstanceId) -> None:
        """A place is free again."""
        self.call(self.desk.leg_ended(instance))

    def unreachable(self, instance: InstanceId) -> None:
        """A leg could not connect: all others on it had better look elsewhere, too."""
        if self.view.knows(instance) and self.view.unreachable(instance):
            logger.warning("%s is down: it accepts no connection", instance)
            self.losses.announce(instance)

    def _probed(self, instance: InstanceId, *, up: bool) -> None:
        if up:
            self._look_for_proofs()
            self.call(self.desk.fleet_changed())
        else:
            self.losses.announce(instance)

    # -- endpoints --

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """``/v1/completions`` and ``/v1/chat/completions``, where a connection's `Front` has not known them."""
        tenant = _tenant_of(http)
        self.clients.enter(tenant, self.view.routers)
        try:
            raw = await self._read_body(http)
        except BaseException:  # a cancellation too: the request is counted no longer
            self.clients.leave(tenant)
            raise
        return await self.generation.over_aiohttp(http, tenant, raw)

    def headers_for(self, given: Mapping[str, str]) -> dict[str, str]:
        """A client's headers that an engine may see. A key of ours is none of an engine's business: it has its own. An
        engine that may be a stranger's sees no key at all.
        """
        headers = wire.forwarded_headers(given)
        if not self.clients.closed and self._knows_engines:
            return headers
        headers = {name: value for name, value in headers.items() if name.lower() not in KEY_HEADERS}
        if self.config.engine_key and self._knows_engines:
            headers["Authorization"] = f"Bearer {self.config.engine_key}"
        return headers

    async def relay_whole(self, http: web.Request) -> web.StreamResponse:
        """Any other path: to one instance that serves whole requests, as it is but for transfer fields."""
        tenant = _tenant_of(http)
        instance, clean = await self.whole.place(http, tenant, await self._read_body(http))
        if not self.view.knows(instance.id) or self.view.get(instance.id).instance.url != instance.url:
            # While engines were asked which of them has a response, this one left.
            raise no_instance(f"{instance.id} has just left")
        headers = self.headers_for(http.headers)
        _check_sendable(headers)
        headers["X-Request-Id"] = self.generation.new_id()
        self.view.leg_started(instance.id)
        try:
            return await self._relay(http, instance, clean, headers)
        except EngineLost as lost:
            if lost.ours:
                raise no_room(str(lost)) from None
            if not lost.reached:
                self.unreachable(instance.id)
            raise upstream_failed(str(lost)) from None
        finally:
            self.leg_ended(instance.id)

    async def _relay(
        self, http: web.Request, instance: Instance, body: bytes, headers: dict[str, str]
    ) -> web.StreamResponse:
        limit = self.config.whole_s
        try:
            async with asyncio.timeout(limit):
                answer = await self.upstream.open(instance, http.method, http.path_qs, body or None, headers)
        except TimeoutError:
            raise deadline_passed(limit) from None
        limit_silence(answer, self.config.stall_s)
        try:
            odd = _oddity(answer)
            if odd:
                self.meters.unfit.labels("malformed").inc()
                raise EngineLost(f"{instance.id}: no HTTP answer: {odd}", reached=True)
            response = web.StreamResponse(status=answer.status)
            for name in _RELAYED:
                said = printable(answer.headers.get(name, ""))
                if said:
                    response.headers[name] = said
            ours = response.headers["X-Baton-Request-Id"] = headers["X-Request-Id"]
            response.headers["X-Request-Id"] = client_id_in(http.headers.get("X-Request-Id")) or ours
            try:
                await response.prepare(http)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                broken = "" if _says_its_end(http.method, answer) else "only its connection's end tells the answer's"
            except (aiohttp.ClientPayloadError, TimeoutError) as error:
                broken = say(error)
            except ConnectionResetError:  # the client has left: aiohttp says so of its writes
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
        """Paths that change an engine."""
        raise ApiError(
            403, "PermissionDeniedError", f"`{http.path}` changes one engine: call it on each engine itself."
        )

    async def models(self, http: web.Request) -> web.Response:
        """``/v1/models``: what ready instances serve for who asks, each model once, in the engines' own words."""
        return _json({"object": "list", "data": self._cards(_tenant_of(http))})

    def _cards(self, tenant: str) -> list[Mapping[str, Any]]:
        entries: dict[str, dict[str, object]] = {}
        for seen in self.view.all():
            for entry in seen.models_json if seen.ready and seen.instance.serves(tenant) else ():
                entries.setdefault(str(entry.get("id")), entry)
        return self.aliases.cards(entries)

    async def model(self, http: web.Request) -> web.Response:
        """``/v1/models/NAME``: one of them."""
        name, tenant = http.match_info["name"], _tenant_of(http)
        for entry in self._cards(tenant):
            if entry.get("id") == name:
                return _json(entry)
        raise unknown_model(name[:200], self.aliases.names(self.view.models(tenant)))

    async def openapi(self, _: web.Request) -> web.Response:
        """``/openapi.json``: this side's paths."""
        return web.Response(body=_OPENAPI, content_type="application/json")

    async def health(self, _: web.Request) -> web.Response:
        """200 as long as this process serves."""
        return web.Response()

    async def ready(self, _: web.Request) -> web.Response:
        """200 when every leg has somebody to run it; 503 otherwise. Who is there is nobody's business without a key,
        where there are any.
        """
        return self._readiness(() if self.clients.closed else self.view.all(), everybody=not self.clients.closed)

    async def ready_and_who(self, http: web.Request) -> web.Response:
        """The same on the admin side: with everybody for operators, and for a tenant with those that serve it."""
        try:
            reader = self.operators.reader(http)
        except ApiError:
            return self._readiness(())
        shown = [seen for seen in self.view.all() if seen.instance.serves(reader)]
        return self._readiness(shown, everybody=reader is None)

    def _readiness(self, shown: Iterable[InstanceView], *, everybody: bool = False) -> web.Response:
        ready = [seen for seen in self.view.all() if seen.ready]
        complete = any(seen.role.prefills for seen in ready) and any(seen.role.decodes for seen in ready)
        if complete and self.prover is not None:
            complete = self.prover.settled(time.monotonic())
        heard = self.watch is None or self.watch.heard
        told: dict[str, object] = {"ready": complete, "registry": "heard" if heard else "away"}
        told["instances"] = _instances(shown)
        unproven = self.unproven() if everybody else {}
        if unproven:
            told["unproven"] = unproven
        return _json(told, 200 if complete else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus text."""
        return web.Response(body=self.metrics_text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def unproven(self) -> dict[str, str]:
        """Instances and routers in the registry that prove nothing and are ignored; and why."""
        return {} if self.watch is None else self.watch.unproven()

    def metrics_text(self) -> bytes:
        """What `/metrics` says."""
        stale_s = 0.0 if self.watch is None else self.watch.stale_s(time.monotonic())
        self.meters.open.set(len(self.exchanges))
        self.meters.clients.show(self.doors, self.uploads)
        controlled = self.watch is not None and self.watch.controller is not None
        return self.meters.text(self.view, len(self.desk.line), stale_s, len(self.unproven()), controlled=controlled)

    async def no_metrics_here(self, _: web.Request) -> web.Response:
        """``/metrics`` on the clients' port of a router with tenants: it names them. With processes that share it, it
        would be one's, another one's each time.
        """
        why = "Metrics name tenants" if self.clients.closed else "Several processes share this port"
        raise ApiError(403, "PermissionDeniedError", f"{why}: metrics are on the admin side.")

    async def _read_body(self, http: web.Request) -> bytes:
        limit = self.config.body_bytes_max
        client = client_of(_tenant_of(http), http.remote)
        return await read_body(http, limit, self.config.body_timeout_s, too_large(limit), self.uploads, client)


def _oddity(answer: aiohttp.ClientResponse) -> str:
    """What no HTTP answer says in its head; empty: nothing."""
    if not 200 <= answer.status < 600:
        return f"its status is {answer.status}"
    transfer = answer.headers.get("Transfer-Encoding", "chunked").strip()
    return "" if transfer.lower() == "chunked" else f"its transfer encoding is {transfer[:40]!r}"


def _says_its_end(method: str, answer: aiohttp.ClientResponse) -> bool:
    """Whether an answer that ended with its connection would have been told from one that was cut short."""
    if method == "HEAD" or answer.status in {204, 304}:
        return True
    chunked = "chunked" in answer.headers.get("Transfer-Encoding", "").lower()
    return chunked or "Content-Length" in answer.headers


def _tenant_of(http: web.Request) -> str:
    """As the boundary has found it (`_keys`)."""
    tenant: str = http.get(_TENANT, "")
    return tenant


def _check_sendable(headers: Mapping[str, str]) -> None:
    """aiohttp leaves out what is no UTF-8, without a word. Raises ApiError."""
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


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


_RELAYED = ("Content-Type", "Content-Encoding", "Cache-Control", "Content-Disposition")
"""What an engine says about an answer that is passed on unread."""

_TENANT = web.RequestKey("tenant", str)
_OPENAPI = msgspec.json.encode(document())
_OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/openapi.json"})
"""Need no key: load balancers ask them."""

_OPERATORS_ONLY = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Change one engine, not the fleet: behind a router they would make instances differ."""


def public_app(router: Router) -> web.Application:
    """What clients see."""
    closed = router.clients.closed
    layers = [_errors(router), _keys(router)] if closed else [_errors(router)]
    app = web.Application(client_max_size=router.config.body_bytes_max, middlewares=layers)
    metrics = router.no_metrics_here if closed or router.config.shares_port else router.metrics
    app.router.add_post(eligibility.COMPLETIONS, router.generate)
    app.router.add_post(eligibility.CHAT, router.generate)
    app.router.add_get("/openapi.json", router.openapi)
    app.router.add_get("/v1/models", router.models)
    app.router.add_get("/v1/models/{name:.+}", router.model)
    for path, handler in (("/health", router.health), ("/ready", router.ready), ("/metrics", metrics)):
        app.router.add_get(path, handler)
    for path in _OPERATORS_ONLY:
        app.router.add_route("*", path, router.refuse_operator_path)
    for path in ("/v1/{rest:.+}", *OUTSIDE_V1):
        app.router.add_route("*", path, router.relay_whole)
    return app


def admin_app(router: Router) -> web.Application:
    """What operators see: a port of its own, so that it can stay closed to clients."""
    app = web.Application(client_max_size=SMALL_BYTES_MAX, middlewares=[_errors(router)])
    for path, handler in (("/health", router.health), ("/ready", router.ready_and_who)):
        app.router.add_get(path, handler)
    router.operators.routes(app)
    return app


def _errors(router: Router) -> Any:
    """The one boundary where faults become answers."""

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
        except Exception:  # the per-request boundary: one broken request must not take others with it
            logger.exception("%s %s failed", http.method, http.path)
            problem = broken()
        problem.__traceback__ = problem.__context__ = None  # they hold this frame, and others that hold the body
        router.meters.rejected.labels(str(problem.status)).inc()
        headers = headers_of(problem)
        if problem.status in {408, 413}:
            headers["Connection"] = "close"  # the rest of the body is not worth reading
        response = _json(problem.body(), problem.status)
        response.headers.update(headers)
        return response

    return middleware


def _keys(router: Router) -> Any:
    """Nobody without a key gets beyond this, where there are keys: no body of his is read."""

    @web.middleware
    async def middleware(http: web.Request, handler: _Handler) -> web.StreamResponse:
        if http.path in _OPEN_PATHS:
            return await handler(http)
        tenant = http[_TENANT] = router.clients.tenant(http.headers, time.monotonic())
        if http.path in eligibility.GENERATING_PATHS:  # an exchange counts itself
            return await handler(http)
        router.clients.enter(tenant, router.view.routers)
        try:
            return await handler(http)
        finally:
            router.clients.leave(tenant)

    return middleware


def _http_problem(http: web.Request, error: web.HTTPException) -> ApiError:
    if error.status == 404:
        return ApiError(404, "NotFoundError", f"There is no `{http.path[:200]}` here. Try `/v1/chat/completions`.")
    if error.status == 405:
        allowed = ", ".join(sorted(getattr(error, "allowed_methods", ())))
        return ApiError(405, "MethodNotAllowedError", f"`{http.method}` is not allowed here; use {allowed}.")
    return ApiError(error.status, "BadRequestError", error.reason)
