"""The router's HTTP server: OpenAI endpoints in front, metrics and readiness, errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from cluster import wire
from cluster.errors import ApiError, bad_request, body_timeout, no_instance, too_large, unknown_model, upstream_failed
from cluster.ids import InstanceId, RequestId, accept_request_id
from cluster.instance import Instance
from cluster.registry.registry import Registry
from cluster.request import Request
from cluster.telemetry import tracing
from router import body as bodies
from router import exact
from router.clients import KEY_HEADERS, Clients
from router.config import RouterConfig
from router.decisions import LoggedView, logged
from router.desk import Desk, Seat
from router.exchange import Exchange
from router.intake import KEY_BYTES, Intake, Taken, chunk_key
from router.journey import Journey
from router.line import Line, Losses
from router.memory import Memory
from router.meters import Meters
from router.policy import FORESEEING, POLICIES
from router.policy.candidates import Wanted
from router.prefixes import Prefixes
from router.prober import Prober
from router.promises import promise_of, promises_of
from router.tickets import Tickets
from router.upstream import EngineLost, Upstream
from router.view import Reported, View
from router.watch import Watch

logger = logging.getLogger("baton.router")

_Result = TypeVar("_Result")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Router:
    """Everything one router process owns. `start` opens it, `close` ends it."""

    def __init__(self, config: RouterConfig, registry: Registry | None = None) -> None:
        self.config = config
        self.watch = None if registry is None else Watch(registry, self._fleet_told)
        self._probes: dict[InstanceId, tuple[Instance, asyncio.Task[None]]] = {}
        policy, log = POLICIES[config.chooses_by], config.decision_log
        self.view = View(config.makes) if log is None else LoggedView(log, config.makes)
        self.meters = Meters()
        self.memory = Memory(config.explain_last)
        self.tracing = tracing("baton-router")
        self.desk = Desk(
            self.view,
            policy if log is None else logged(config.chooses_by, policy, log),
            admission=bool(config.classes),
            foresees=policy in FORESEEING,
        )
        self.clients = Clients(config.classes, config.tenants, config.tenant_keys)
        self.promises = promises_of(config.classes)
        self.desk.shares = self.clients.shares
        self.intake = self._intake()
        if self.watch is not None:
            self.watch.desk = self.desk
        self.upstream = Upstream(stall_s=config.stall_s)
        self.tickets = Tickets(config.ticket_keys)
        self.line = Line()
        self._looks_s = -1.0
        self.losses = Losses()
        self._tasks: set[asyncio.Task[Any]] = set()
        for instance in config.instances:
            self.view.add(instance)

    def _intake(self) -> Intake | None:
        """Only where somebody foresees. Routers of a fleet with ticket keys give the same names to prompts; elsewhere
        each has names of its own, which nobody else reads yet.
        """
        if self.desk.foresight is None:
            return None
        keys = self.config.ticket_keys
        secret = secrets.token_bytes(KEY_BYTES) if keys is None else keys()[0].secret
        fleet = self.view.all()
        fleet.prefixes = Prefixes()
        return Intake(fleet, self.desk.foresight, chunk_key(secret))

    async def start(self) -> None:
        """Open connections and begin probing."""
        if self.config.ticket_keys is None:
            logger.info("tickets are off: whoever reaches an engine may start transfers there (--ticket-keys-file)")
        await self.upstream.start()
        key = self.config.engine_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # With agents, load comes with their heartbeats: only reachability is left to ask for.
        self._prober = Prober(self.view, self.upstream, headers, self._probed, read_metrics=self.watch is None)
        self._probe_all()
        if self.watch is not None:
            await self.watch.read()
            self.spawn(self.watch.read_forever(), "probe-registry")

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
        self.call(self.desk.fleet_changed())

    async def close(self) -> None:
        """Stop probing, let what still releases holds finish for a moment, and close every connection."""
        if self.watch is not None:
            self.watch.stop()
        ending = {task for task in self._tasks if not task.get_name().startswith("probe-")}
        if ending:
            await asyncio.wait(ending, timeout=2.0)
        for task in self._tasks:
            task.cancel()
        await self.upstream.close()
        if self.watch is not None:
            await self.watch.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

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
            self.call(self.desk.fleet_changed())
        else:
            self.losses.announce(instance)

    # -- endpoints --

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """``/v1/completions`` and ``/v1/chat/completions``: over two instances where that is exact, else over one."""
        tenant = _tenant_of(http)
        client = self.clients.client(tenant, http.headers)
        raw = await self._read_body(http)
        arrived = time.monotonic()
        parsed = bodies.strip(bodies.parse_json(raw, http.headers.get("Content-Type", "")), namespace=tenant)
        self.clients.salt(tenant, parsed)
        request = self._request(http, parsed, arrived)
        verdict = exact.verdict(request.path, parsed)
        hand_over = verdict.way is not exact.Way.WHOLE
        wanted = Wanted(
            model=bodies.model_of(parsed),
            hand_over=hand_over,
            prefill_only=exact.single_token(parsed),
            tenant=tenant,
            slo_class=client.slo_class,
            arrived=arrived,
        )
        self._check_model(wanted.model)
        seat, taken = self._take_in(wanted, request)
        now = request.arrived
        limit = self.config.first_token_s
        journey = Journey(
            hand_over=hand_over,
            stream=request.stream,
            deadline=now + limit,
            deadline_s=limit,
            stall_s=self.config.stall_s,
            whole_deadline=now + max(limit, self.config.whole_s),
        )
        with self.meters.open.track_inprogress():
            return await Exchange(self, http, request, journey, seat, verdict, client, taken).run()

    def _take_in(self, wanted: Wanted, request: Request) -> tuple[Seat, Taken | None]:
        """Its place in the desk's book, with what can be foretold of it, where anything is."""
        promise = promise_of(self.promises, wanted.slo_class)
        if self.intake is None:
            return Seat(wanted, promise), None
        taken = self.intake.take(wanted, request.path, request.body, scope=self.clients.scope(wanted.tenant))
        seat = Seat(taken.wanted, promise)
        seat.expected.lengths = taken.lengths
        return seat, taken

    def headers_for(self, http: web.Request) -> dict[str, str]:
        """A client's headers that an engine may see. A key of ours is none of an engine's business: it has its own."""
        headers = wire.forwarded_headers(http.headers)
        if not self.clients.closed:
            return headers
        headers = {name: value for name, value in headers.items() if name.lower() not in KEY_HEADERS}
        if self.config.engine_key:
            headers["Authorization"] = f"Bearer {self.config.engine_key}"
        return headers

    def _request(self, http: web.Request, parsed: dict[str, Any], arrived: float) -> Request:
        return Request(
            id=accept_request_id(http.headers.get("X-Request-Id")) or RequestId(uuid.uuid4().hex),
            path=http.path,
            model=bodies.model_of(parsed) or "",
            stream=parsed.get("stream") is True,
            body=parsed,
            arrived=arrived,
        )

    def _check_model(self, name: str | None) -> None:
        known = self.view.models()
        if name is not None and known and name not in known:
            raise unknown_model(name[:200], known)

    async def relay_whole(self, http: web.Request) -> web.StreamResponse:
        """Any other path: to one instance that serves whole requests, as it is but for transfer fields."""
        tenant = _tenant_of(http)
        raw = await self._read_body(http)
        salt = partial(self.clients.salt, tenant) if http.path.startswith("/v1/") else None
        clean = bodies.clean_json(raw, http.headers.get("Content-Type", ""), namespace=tenant, salt=salt)
        chosen = self.desk.pick(Wanted(model=None, hand_over=False))
        if chosen.decode is None:
            raise no_instance(chosen.because)
        instance = self.view.get(chosen.decode).instance
        headers = self.headers_for(http)
        headers["X-Request-Id"] = accept_request_id(http.headers.get("X-Request-Id")) or uuid.uuid4().hex
        self.view.leg_started(instance.id)
        try:
            return await self._relay(http, instance, clean, headers)
        except EngineLost as lost:
            if not lost.reached:
                self.unreachable(instance.id)
            raise upstream_failed(str(lost)) from None
        finally:
            self.leg_ended(instance.id)

    async def _relay(
        self, http: web.Request, instance: Instance, body: bytes, headers: dict[str, str]
    ) -> web.StreamResponse:
        answer = await self.upstream.open(instance, http.method, http.path_qs, body or None, headers, stream=False)
        try:
            response = web.StreamResponse(status=answer.status)
            for name in ("Content-Type", "Cache-Control", "Content-Disposition"):
                if name in answer.headers:
                    response.headers[name] = answer.headers[name]
            response.headers["X-Request-Id"] = headers["X-Request-Id"]
            await response.prepare(http)
            try:
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            except aiohttp.ClientPayloadError as error:
                logger.warning("%s broke off: %s", instance.id, error)
                if http.transport is not None:
                    http.transport.abort()  # a broken answer must not look like a finished one
                return response
            await response.write_eof()
            return response
        finally:
            answer.close()

    async def refuse_operator_path(self, http: web.Request) -> web.Response:
        """Paths that change an engine."""
        raise ApiError(
            403, "PermissionDeniedError", f"`{http.path}` changes one engine: call it on each engine itself."
        )

    async def models(self, _: web.Request) -> web.Response:
        """``/v1/models``: what ready instances serve, each model once, in the engines' own words."""
        entries: dict[str, dict[str, object]] = {}
        for seen in self.view.all():
            for entry in seen.models_json if seen.ready else ():
                entries.setdefault(str(entry.get("id")), entry)
        return _json({"object": "list", "data": list(entries.values())})

    async def model(self, http: web.Request) -> web.Response:
        """``/v1/models/NAME``: one of them."""
        name = http.match_info["name"]
        for seen in self.view.all():
            for entry in seen.models_json if seen.ready else ():
                if entry.get("id") == name:
                    return _json(entry)
        raise unknown_model(name[:200], self.view.models())

    async def health(self, _: web.Request) -> web.Response:
        """200 as long as this process serves."""
        return web.Response()

    async def ready(self, _: web.Request) -> web.Response:
        """200 when every leg has somebody to run it; 503 and who is missing otherwise."""
        ready = [seen for seen in self.view.all() if seen.ready]
        complete = any(seen.role.prefills for seen in ready) and any(seen.role.decodes for seen in ready)
        heard = self.watch is None or self.watch.heard
        told = {"ready": complete, "registry": "heard" if heard else "away", "instances": self._instances()}
        return _json(told, 200 if complete else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus text."""
        text = self.meters.text(self.view, len(self.desk.line))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def no_metrics_here(self, _: web.Request) -> web.Response:
        """``/metrics`` on the clients' port of a router with tenants: it names them."""
        raise ApiError(403, "PermissionDeniedError", "Metrics name tenants: they are on the admin side.")

    async def explain_last(self, http: web.Request) -> web.Response:
        """``/explain``: who is open, and the last that ended, newest first; ``?n=`` of them."""
        given = http.query.get("n", "100")
        if not given.isdecimal():
            raise bad_request(f"`n` is {given[:50]!r}: give a count, as in /explain?n=20", "n")
        now = time.monotonic()
        latest = self.memory.latest(int(given), self._reader(http))
        return _json({"requests": [story.line(now) for story in latest]})

    async def explain(self, http: web.Request) -> web.Response:
        """``/explain/ID``: what was decided about one request, why, and where its time went."""
        name = http.match_info["id"]
        story, reader = self.memory.get(name), self._reader(http)
        if story is None or reader not in {None, story.client.tenant}:
            kept = f"Open requests are remembered, and the last {self.memory.last_max} finished (--explain-last)"
            message = f"No request `{name[:200]}` is known here. {kept}. Answers tell their id in X-Request-Id."
            raise ApiError(404, "NotFoundError", message)
        return _json(story.as_json(time.monotonic()))

    def _reader(self, http: web.Request) -> str | None:
        """Whose requests may be read: with a key its tenant's, all of them on this machine or where nobody has keys.

        Raises:
            ApiError: 401 for an unknown key, and for none from elsewhere.
        """
        keyless = not any(name in http.headers for name in KEY_HEADERS)
        if not self.clients.closed or (keyless and http.remote in LOOPBACK):
            return None
        return self.clients.tenant(http.headers, time.monotonic())

    def _instances(self) -> list[dict[str, object]]:
        return [
            {
                "id": seen.id,
                "role": seen.role.value,
                "state": "up" if seen.ready else seen.state if seen.up and seen.state else "down",
                "epoch": seen.instance.epoch,
                "inflight": seen.inflight,
                "running": seen.load.running,
                "waiting": seen.load.waiting,
                "kv_usage": seen.load.kv_usage,
                "models": seen.models,
            }
            for seen in self.view.all()
        ]

    async def _read_body(self, http: web.Request) -> bytes:
        limit = self.config.body_bytes_max
        if (http.content_length or 0) > limit:
            raise too_large(limit)
        try:
            async with asyncio.timeout(self.config.body_timeout_s):
                return await http.read()
        except TimeoutError:
            raise body_timeout(self.config.body_timeout_s) from None
        except web.HTTPRequestEntityTooLarge:
            raise too_large(limit) from None
        except (aiohttp.ClientPayloadError, web.RequestPayloadError, ValueError) as error:
            raise bad_request(f"The body could not be read: {error}") from None


def _tenant_of(http: web.Request) -> str:
    """As the boundary has found it (`_keys`)."""
    tenant: str = http.get(_TENANT, "")
    return tenant


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


_TENANT = web.RequestKey("tenant", str)
_OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Need no key: load balancers ask them."""

LOOPBACK = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})

_WHOLE_PATHS = (
    "/classify",
    "/detokenize",
    "/pooling",
    "/rerank",
    "/score",
    "/tokenize",
    "/v2/embed",
    "/v2/rerank",
    "/version",
)
"""What clients of vLLM's own server call outside ``/v1``. What operators call there (sleep, weights) stays closed."""

_OPERATORS_ONLY = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Change one engine, not the fleet: behind a router they would make instances differ."""


def public_app(router: Router) -> web.Application:
    """What clients see."""
    closed = router.clients.closed
    layers = [_errors(router), _keys(router)] if closed else [_errors(router)]
    app = web.Application(client_max_size=router.config.body_bytes_max, middlewares=layers)
    metrics = router.no_metrics_here if closed else router.metrics
    app.router.add_post(exact.COMPLETIONS, router.generate)
    app.router.add_post(exact.CHAT, router.generate)
    app.router.add_get("/v1/models", router.models)
    app.router.add_get("/v1/models/{name:.+}", router.model)
    for path, handler in (("/health", router.health), ("/ready", router.ready), ("/metrics", metrics)):
        app.router.add_get(path, handler)
    for path in _OPERATORS_ONLY:
        app.router.add_route("*", path, router.refuse_operator_path)
    for path in ("/v1/{rest:.+}", *_WHOLE_PATHS):
        app.router.add_route("*", path, router.relay_whole)
    return app


def admin_app(router: Router) -> web.Application:
    """What operators see: a port of its own, so that it can stay closed to clients."""
    app = web.Application(middlewares=[_errors(router)])
    for path, handler in (("/health", router.health), ("/ready", router.ready), ("/metrics", router.metrics)):
        app.router.add_get(path, handler)
    app.router.add_get("/explain", router.explain_last)
    app.router.add_get("/explain/{id}", router.explain)
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
            problem = ApiError(500, "InternalServerError", "The router failed on this request; its log says why.")
        router.meters.rejected.labels(str(problem.status)).inc()
        headers = {"Retry-After": "1"} if problem.status == 503 else {}
        if problem.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
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
        if http.path not in _OPEN_PATHS:
            http[_TENANT] = router.clients.tenant(http.headers, time.monotonic())
        return await handler(http)

    return middleware


def _http_problem(http: web.Request, error: web.HTTPException) -> ApiError:
    if error.status == 404:
        return ApiError(404, "NotFoundError", f"There is no `{http.path[:200]}` here. Try `/v1/chat/completions`.")
    if error.status == 405:
        allowed = ", ".join(sorted(getattr(error, "allowed_methods", ())))
        return ApiError(405, "MethodNotAllowedError", f"`{http.method}` is not allowed here; use {allowed}.")
    return ApiError(error.status, "BadRequestError", error.reason)
