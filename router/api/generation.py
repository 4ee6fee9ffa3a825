"""Generation requests, from a body to a request driver: over two instances where that is exact, else over one. A shell.

`Front`'s connections deliver them. Requests that only aiohttp can read (a strange form of the path, a pipelined
request) come through `Generation.over_aiohttp`, and are answered in the same way.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import web

from cluster.http.headers import Headers
from cluster.ids import RequestId, client_id_in
from cluster.request import Request
from router.api.aliases import Aliases, check_served, usual_model
from router.api.config import RouterConfig
from router.core import eligibility
from router.core.clients import COUNTED_BYTES, Client, client_of
from router.core.eligibility import Way
from router.core.journey import Journey
from router.core.slo import promise_of
from router.core.values import Promise, Wanted
from router.http.front import ClientConnection
from router.http.outlet import Outlet
from router.predict.predictors import PredictedRequest
from router.request import body as bodies
from router.request.driver import RequestDriver
from router.request.heavy import is_heavy
from router.request.heavy import read as heavy_steps
from router.request.parts import Parts
from router.request.slices import ClientGone, Slices
from router.scheduler.placements import SchedulingContext

logger = logging.getLogger("baton.router")

_IDS_AT_ONCE = 64

BYTES_PER_TOKEN = 4
"""Bytes of a body for each token of its prompt, if the policy has no estimate (`router.predict.prompt_tokens` is more
exact)."""


class Generation:
    """The generation requests of one router."""

    def __init__(
        self, parts: Parts, config: RouterConfig, names: Aliases, slices: Slices, promises: Mapping[str, Promise]
    ) -> None:
        """`promises`: the classes' promises at the start."""
        self._parts: Final = parts
        self._config: Final = config
        self._names: Final = names
        self._slices: Final = slices
        self.promises = promises
        self.refuse: Final = parts.refusals.refuse
        self._ids: list[RequestId] = []
        """Random names in stock: asking the kernel for each would cost as much as parsing a body."""

    def new_id(self) -> RequestId:
        """A random name: 128 bits, which cannot be guessed."""
        if not self._ids:
            chance = secrets.token_hex(16 * _IDS_AT_ONCE)
            self._ids = [RequestId(chance[at : at + 32]) for at in range(0, len(chance), 32)]
        return self._ids.pop()

    def admit(self, headers: Mapping[str, str]) -> str:
        """The tenant of this request, which is open from now on. Raises ApiError: 401, 429."""
        clients = self._parts.clients
        tenant = clients.tenant(headers, time.monotonic())
        clients.enter(tenant, self._parts.view.routers)
        return tenant

    def leave(self, tenant: str) -> None:
        """An admitted request has ended before it was answered."""
        self._parts.clients.leave(tenant)

    def answer(self, outlet: Outlet, path: str, headers: Headers, raw: bytes, tenant: str) -> None:
        """Answer an admitted generation request, now or later. If this raises, the request is not open any more.

        Raises:
            ApiError: what is wrong with the request.
        """
        parts = self._parts
        try:
            client = parts.clients.client(tenant, headers)
            arrived = time.monotonic()
            content_type = headers.get("content-type") or ""
            if is_heavy(raw):
                bodies.check_type(content_type)
                parts.tasks.spawn(self._answer_heavy(outlet, path, headers, raw, tenant, client, arrived), "heavy-body")
                return
            body, raw = self._read(raw, content_type, tenant)
            exchange = self._exchange(outlet, path, headers, body, raw, tenant, client, arrived)
        except BaseException:  # any error: the request no longer counts as open
            self.leave(tenant)
            raise
        exchange.begin()

    async def _answer_heavy(
        self, outlet: Outlet, path: str, headers: Headers, raw: bytes, tenant: str, client: Client, arrived: float
    ) -> None:
        """As `answer`, for a body that is read in steps. Errors are answered, not raised."""
        exchange = None
        try:
            body, raw = await self._read_heavy(raw, tenant, outlet)
            if not outlet.gone:
                exchange = self._exchange(outlet, path, headers, body, raw, tenant, client, arrived)
        except ClientGone:
            logger.debug("a client left before its body was read")
        except Exception as problem:  # noqa: BLE001 - a boundary where faults become answers
            self.refuse(outlet, problem, headers.get("x-request-id"))
        finally:
            if exchange is None:
                self.leave(tenant)
        if exchange is not None:
            exchange.begin()

    def _exchange(
        self,
        outlet: Outlet,
        path: str,
        headers: Headers,
        body: dict[str, Any],
        raw: bytes,
        tenant: str,
        client: Client,
        arrived: float,
    ) -> RequestDriver:
        """The driver that answers a parsed request. `arrived` in monotonic seconds."""
        parts = self._parts
        model = bodies.model_of(body)
        request = Request(
            id=self.new_id(),
            client_id=client_id_in(headers.get("x-request-id")),
            path=path,
            model=model or "",
            stream=eligibility.is_on(body, "stream"),
            body=body,
            raw=raw,
            arrived=arrived,
        )
        verdict = eligibility.verdict(path, body)
        hand_over = verdict.way is not Way.AGGREGATED
        wanted = Wanted(
            model=model if model is not None else usual_model(parts.view.all(), tenant),
            hand_over=hand_over,
            one_prompt=hand_over,
            prefill_only=eligibility.single_token(path, body),
            tenant=tenant,
            slo_class=client.slo_class,
            arrived=arrived,
            streamed=request.stream,
            unseeded=request.stream and not (verdict.way is Way.SEEDED and self._config.seeding),
        )
        check_served(self._names, parts.view, model, tenant)
        body_of = ""
        if len(raw) >= COUNTED_BYTES:
            body_of = client_of(tenant, outlet.address)
            parts.bodies.check(body_of, len(raw))
        context, taken = self._take_in(wanted, request)
        prompt_tokens = context.wanted.prompt_tokens or max(1, len(raw) // BYTES_PER_TOKEN)
        parts.meters.flow.arrived(context.wanted.model or "", client.slo_class, prompt_tokens)
        limit = self._config.first_token_s
        journey = Journey(
            hand_over=hand_over,
            stream=request.stream,
            deadline=arrived + limit,
            deadline_s=limit,
            stall_s=self._config.stall_s,
            whole_deadline=arrived + max(limit, self._config.whole_s),
        )
        return RequestDriver(parts, outlet, headers, request, journey, context, verdict, client, taken, body_of)

    def _read(self, raw: bytes, content_type: str, tenant: str) -> tuple[dict[str, Any], bytes]:
        """A parsed body, and the bytes to send on: the client's own, if they contain nothing that must not reach
        engines.
        """
        parts = self._parts
        body = bodies.parse_json(raw, content_type)
        plain = bodies.is_plain(raw, body)
        if not plain:
            body = bodies.strip(body, namespace=tenant)
        salted = "cache_salt" not in body
        parts.clients.salt(tenant, body)
        renamed = self._names.apply(body, partial(parts.view.served.hides, tenant=tenant))
        if not plain:
            return body, msgspec.json.encode(body)
        return body, self._with_ours(raw, body, salted=salted, renamed=renamed)

    async def _read_heavy(self, raw: bytes, tenant: str, outlet: Outlet) -> tuple[dict[str, Any], bytes]:
        """As `_read`, for a heavy body: its large fields stay unread."""
        parts = self._parts
        client = client_of(tenant, outlet.address)
        steps = heavy_steps(raw, namespace=tenant)
        read = await self._slices.through(steps, size=len(raw), client=client, gone=lambda: outlet.gone)
        body = bodies.object_of(read)
        salted = "cache_salt" not in body
        parts.clients.salt(tenant, body)
        renamed = self._names.apply(body, partial(parts.view.served.hides, tenant=tenant))
        return body, self._with_ours(read.raw, body, salted=salted, renamed=renamed)

    def _with_ours(self, raw: bytes, body: dict[str, Any], *, salted: bool, renamed: bool) -> bytes:
        """A client's own bytes with the fields that the router added."""
        ours: dict[str, Any] = {}
        if salted and "cache_salt" in body:
            ours["cache_salt"] = body["cache_salt"]
        if renamed:
            ours["model"] = body["model"]
        return bodies.spliced(raw, ours)

    def _take_in(self, wanted: Wanted, request: Request) -> tuple[SchedulingContext, PredictedRequest | None]:
        """The request's place in the scheduler's load in flight, with its predictions if the router makes any."""
        parts = self._parts
        promise = promise_of(self.promises, wanted.slo_class)
        if parts.predictor is None:
            return SchedulingContext(wanted, promise), None
        scope, context = parts.clients.scope(wanted.tenant), parts.view.all().ready_for(wanted).context
        taken = parts.predictor.take(wanted, request.path, request.body, scope=scope, context=context)
        made = SchedulingContext(taken.wanted, promise)
        made.expected.lengths = taken.lengths
        return made, taken

    # -- through aiohttp --

    async def over_aiohttp(self, http: web.Request, tenant: str, raw: bytes) -> web.StreamResponse:
        """Answer an admitted request that aiohttp has read. Its connection ends with the answer."""
        transport = http.transport
        if transport is None:
            self.leave(tenant)
            return _Written()
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def over(_: Outlet, keep: bool) -> None:  # noqa: ARG001, FBT001 - as the outlet calls it
            if not written.done():
                written.set_result(None)

        outlet = Outlet(transport, over, chunked=http.version >= (1, 1), keep=False)
        connection = transport.get_protocol()
        if isinstance(connection, ClientConnection):
            connection.outlet = outlet
        try:
            headers = Headers()
            for name, value in http.raw_headers:
                headers.add(name, value)
            self.answer(outlet, http.path, headers, raw, tenant)
            await written
        except asyncio.CancelledError:
            outlet.left()
            raise
        finally:
            if isinstance(connection, ClientConnection):
                connection.outlet = None
        return _Written()


class _Written(web.StreamResponse):
    """An answer that is written already."""

    def __init__(self) -> None:
        super().__init__(status=200)
        self.force_close()
        self._keep_alive = False

    async def prepare(self, request: web.BaseRequest) -> None:
        """Do nothing."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing."""
