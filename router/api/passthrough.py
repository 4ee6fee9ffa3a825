"""Passthrough: finds the one instance for a whole request, and prepares its body. A shell: it may ask engines.

Everything but completions and chats passes here: it goes to an instance that has the path and the model that the body
names, and waits for a place there. Responses (``/v1/responses``) live in the engine that made them; their ids name that
engine to every router.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Hashable
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

from aiohttp import web

from cluster.errors import ApiError, deadline_passed, no_instance
from cluster.ids import InstanceId
from cluster.instance import Instance
from router.api import aliases, paths
from router.api.aliases import Aliases
from router.core.clients import client_of
from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet import events
from router.fleet.engine_paths import Catalogue
from router.http.upstream import EngineLost
from router.request import body as bodies
from router.request.heavy import is_heavy
from router.request.heavy import read as heavy_steps
from router.request.parts import Parts
from router.request.slices import Slices

ASKED_MAX: Final = 16
"""The number of engines that are asked in turn for a response. Only ids that no Baton router made need it."""

ASK_S: Final = 2.0
"""An engine that does not answer within this time counts as not knowing the response."""


class Passthrough:
    """The passthrough of one router."""

    def __init__(self, parts: Parts, names: Aliases, slices: Slices, catalogue: Catalogue, *, wait_s: float) -> None:
        """`wait_s`: how long a request waits for a place."""
        self._parts: Final = parts
        self._names: Final = names
        self._slices: Final = slices
        self._catalogue: Final = catalogue
        self._wait_s: Final = wait_s
        self._lines: Final[WeakValueDictionary[Hashable, asyncio.Lock]] = WeakValueDictionary()
        """By kind of request, the lock of the one that asks for a place: the others of its kind would get the same
        reply. They follow in the order of their arrival."""

    def deadline(self) -> float:
        """The event loop's time until which a request that comes now may wait for a place, all tries together."""
        return asyncio.get_running_loop().time() + self._wait_s

    async def place(self, http: web.Request, tenant: str, raw: bytes, deadline: float) -> tuple[Instance, bytes]:
        """The instance that is to get a request, and the body to send. `deadline`: see the method of this name.

        Raises:
            ApiError: 400 for a body that cannot be read; 404 for a path, a model or a response that no instance has;
                405; 503 if no instance that has them is ready; 504 if none had a place in time.
        """
        path = http.rel_url.raw_path  # as it came: an escape would make another path of it at the engine
        paths.check(path, http.method)
        content_type = http.headers.get("Content-Type", "")
        client = client_of(tenant, http.remote)
        body: dict[str, Any] = {}
        if bodies.is_form(content_type):
            steps = bodies.form_steps(raw, content_type)
            parts = await self._slices.through(steps, size=len(raw), client=client)
            hides = partial(self._parts.view.served.hides, tenant=tenant)
            clean, model = aliases.in_form(self._names, raw, parts, hides)
        else:
            clean, body = await self._json(path, tenant, raw, content_type, client)
            model = bodies.model_of(body)
        aliases.check_served(self._names, self._parts.view, model, tenant)
        instance = await self._instance(path, tenant, model, body, deadline)
        if path == paths.RESPONSES and body:
            ours = {"request_id": paths.response_id(secrets.token_hex(16), _tag(tenant, instance.id))}
            clean = bodies.spliced(clean, ours)
        return instance, clean

    async def _json(
        self, path: str, tenant: str, raw: bytes, content_type: str, client: str
    ) -> tuple[bytes, dict[str, Any]]:
        """A body that is not a form, without the fields that clients must not set and with those that the router adds;
        and its fields if it is an object.
        """
        if not is_heavy(raw):
            read: list[dict[str, Any]] = []
            salt = partial(self._read, tenant, path, read)
            clean = bodies.clean_json(raw, content_type, namespace=tenant, salt=salt)
            return clean, read[0] if read else {}
        bodies.check_no_form(content_type)
        steps = heavy_steps(raw, namespace=tenant)
        heavy = await self._slices.through(steps, size=len(raw), client=client)
        if not heavy.is_object:
            return heavy.raw, {}
        body = dict(heavy.body)
        ours: list[dict[str, Any]] = []
        self._read(tenant, path, ours, body)
        changed = {name: value for name, value in body.items() if heavy.body.get(name) is not value}
        return bodies.spliced(heavy.raw, changed), body

    def _read(self, tenant: str, path: str, read: list[dict[str, Any]], body: dict[str, Any]) -> None:
        """Prepare a stripped JSON object: add and change the router's fields."""
        if path.startswith("/v1/"):
            self._parts.clients.salt(tenant, body)
        self._names.apply(body, partial(self._parts.view.served.hides, tenant=tenant))
        read.append(body)

    async def _instance(
        self, path: str, tenant: str, model: str | None, body: dict[str, Any], deadline: float
    ) -> Instance:
        found = paths.find(path)
        identifier = paths.body_id(path, body)
        if found is not None and found[0].how is paths.How.OWNER:
            identifier = found[1]["response_id"]
        if identifier is not None:
            return await self._owner(tenant, path, identifier)
        try:
            async with asyncio.timeout_at(deadline):
                return await self._free(path, tenant, model)
        except TimeoutError:
            raise deadline_passed(self._wait_s) from None

    async def _free(self, path: str, tenant: str, model: str | None) -> Instance:
        """An instance with a place for the request. The caller takes the place before it awaits anything."""
        kind = (self._lacking(path, model, tenant), tenant, model)
        line = self._lines.get(kind)
        if line is None:
            line = self._lines[kind] = asyncio.Lock()
        async with line:
            while True:
                now = time.monotonic()  # policies fade the load in flight up to this time
                lacking = self._lacking(path, model, tenant)
                wanted = Wanted(model=model, hand_over=False, excluded=lacking, tenant=tenant, arrived=now, now=now)
                chosen = self._parts.dispatch.scheduling.handle(events.Picked(wanted), now)[0]
                assert isinstance(chosen, Chosen)
                if chosen.decode is not None:
                    self._parts.dispatch.outside_took()
                    return self._parts.view.get(chosen.decode).instance
                if not chosen.wait:
                    raise no_instance(chosen.because)
                await self._room()

    async def _room(self) -> None:
        """Wait until an instance may have a free place."""
        outside, room = self._parts.dispatch.outside, asyncio.get_running_loop().create_future()
        outside[room] = None
        try:
            await room
        finally:
            del outside[room]

    def _lacking(self, path: str, model: str | None, tenant: str) -> frozenset[InstanceId]:
        """Instances that have reported that they do not have this path.

        Raises:
            ApiError: 404 if these are all instances that serve the model to this tenant.
        """
        fleet = self._parts.view.all()
        lacking = self._catalogue.lacking(path, fleet.by_id)
        serve = [seen.id for seen in fleet if seen.instance.serves(tenant) and (model is None or model in seen.models)]
        if serve and lacking.issuperset(serve):
            raise paths.not_here(path, model)
        return lacking

    # -- responses --

    async def _owner(self, tenant: str, path: str, identifier: str) -> Instance:
        """The instance that has a response. With tenants, only responses of the same tenant are found: the id has the
        tenant's tag. Raises ApiError: 404, or 503 if that instance is not ready.
        """
        fleet, lacking = self._parts.view.all(), self._lacking(path, None, tenant)
        tag = paths.tag_in(identifier)
        named = next((seen for seen in fleet if seen.instance.serves(tenant) and _tag(tenant, seen.id) == tag), None)
        if named is not None and not named.ready:
            raise no_instance(f"`{identifier[:80]}` is on {named.id}, which is not ready")
        if named is not None:
            return named.instance
        able = [seen for seen in fleet if seen.ready and seen.id not in lacking and seen.instance.serves(tenant)]
        asked = [seen.instance for seen in able[:ASKED_MAX]]
        if not self._parts.clients.closed and paths.is_plain_id(identifier):
            for instance in asked:
                if await self._knows(instance, identifier):
                    return instance
        raise ApiError(404, "NotFoundError", f"No response `{identifier[:80]}` is known here.", "response_id")

    async def _knows(self, instance: Instance, identifier: str) -> bool:
        headers = self._parts.engines.credentials.own
        try:
            async with asyncio.timeout(ASK_S):
                status = await self._parts.engines.upstream.status(instance, f"{paths.RESPONSES}/{identifier}", headers)
        except (EngineLost, TimeoutError):
            return False
        return status == 200


def _tag(tenant: str, instance: InstanceId) -> str:
    """The owner's tag in an id. It needs no key: an id with a forged tag is another id, which no engine knows."""
    return paths.owner_tag(hashlib.sha256(f"{tenant}\0{instance}".encode()).hexdigest())
