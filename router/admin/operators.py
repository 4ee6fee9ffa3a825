"""The operators' side of one router, which answers for all routers: `/ui`, `/metrics`, `/explain`, drain and
quarantine.

A shell: HTTP. The router passes each question on to its peers (`router.admin.peers`) and answers with the sum; peers
that did not answer are named. Changes (drain, quarantine) need an operator: a caller on this machine, a peer that
vouches for an operator, or an operator's key. A browser's requests from other sites are refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any, Final
from urllib.parse import quote

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from cluster.errors import ApiError, bad_request
from cluster.ids import InstanceId
from cluster.readable import deadline_in, object_in, text_in
from cluster.spec import SloClass
from kvtransfer.signed import READER
from kvtransfer.ticket import SigningKey
from router.admin.access import AdminAccess
from router.admin.agents import AgentCalls
from router.admin.explanations import Explanations
from router.admin.expositions import merged
from router.admin.overview import Overview, whole
from router.admin.peer_words import own_word
from router.admin.peers import FROM, PeerAnswer, RouterPeers, read_answer
from router.admin.pools import LOOK_S
from router.admin.scrape import Scrape
from router.core.clients import Keys
from router.fleet import events
from router.fleet.discovery import Discovery
from router.fleet.quarantine import WORDS_MAX, Quarantine, Word
from router.http.cold import json_response
from router.request.parts import Parts

logger = logging.getLogger("baton.router")

PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_FILES: Final = {
    "": ("index.html", "text/html"),
    "ui.css": ("ui.css", "text/css"),
    "ui.js": ("ui.js", "text/javascript"),
}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Operators:
    """What operators see and do at one router."""

    def __init__(
        self,
        parts: Parts,
        scrape: Scrape,
        watch: Discovery | None,
        *,
        classes: Mapping[str, SloClass],
        ticket_keys: Callable[[], tuple[SigningKey, ...]] | None,
        admin_keys: Keys | None,
        body_timeout_s: float,
    ) -> None:
        """See `router.api.config.RouterConfig`. `watch`: None without a registry."""
        self._parts: Final = parts
        self._scrape: Final = scrape
        self._watch: Final = watch
        self.quarantine: Final = Quarantine("router") if watch is None else watch.quarantine
        self.peers: Final = RouterPeers(
            "router" if watch is None else watch.name, (lambda: ()) if watch is None else watch.peers, ticket_keys
        )
        self.access: Final = AdminAccess(parts.clients, admin_keys, self.peers, body_timeout_s)
        self._explanations: Final = Explanations(parts.telling.memory, self.peers, self.access)
        self._agents: Final = AgentCalls(self.peers.name, parts.view, watch, ticket_keys)
        meters = parts.meters
        self._overview: Final = Overview(
            parts.scheduler,
            parts.telling.memory,
            meters.lately,
            meters.pairs,
            meters.recomputed,
            classes,
            parts.predictor,
        )
        self._off: set[str] = set()
        """Classes that hand nothing over, as last logged."""
        if watch is not None:
            watch.on_quarantine = self._set_aside

    def retarget(self, classes: Mapping[str, SloClass]) -> None:
        """The classes' promises have changed."""
        self._overview.classes = classes

    async def look_forever(self) -> None:
        """Take the figures of `/ui` once a second, and log classes whose hand-overs were switched off or on."""
        while True:
            self._parts.meters.recomputed.look(self._parts.view.all())
            self._overview.look(time.monotonic(), self._parts.meters.times.parts_of_ttft())
            self._say_what_is_off()
            await asyncio.sleep(LOOK_S)

    def _say_what_is_off(self) -> None:
        guard = self._parts.scheduler.guard
        found = set() if guard is None else set(guard.served_whole())
        for name in found - self._off:
            logger.warning("requests of class %r are served whole from now on: handing them over loses", name)
        for name in self._off - found:
            logger.info("requests of class %r are handed over again", name)
        self._off = found

    async def close(self) -> None:
        """Close connections."""
        await self.peers.close()
        await self._agents.close()

    def routes(self, app: web.Application) -> None:
        """Add the routes to the admin side."""
        app.on_response_prepare.append(self._sign)
        for path in ("/ui", "/ui/"):
            app.router.add_get(path, self._page(""))
        for name in ("ui.css", "ui.js"):
            app.router.add_get(f"/ui/{name}", self._page(name))
        app.router.add_get("/ui/data", self.data)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/explain", self._explanations.latest)
        app.router.add_get("/explain/{id}", self._explanations.one)
        app.router.add_get("/quarantine", self.quarantined)
        app.router.add_post("/quarantine/{id}", self.set_aside)
        app.router.add_delete("/quarantine/{id}", self.let_in)
        app.router.add_post("/drain/{id}", self.drain)
        app.router.add_post("/resume/{id}", self.resume)

    async def _sign(self, http: web.Request, response: web.StreamResponse) -> None:
        """Name this router on every answer, refusals included. After a body in chunks, unread bytes are not counted, so
        the connection ends. A peer's answer names the reader on whose behalf it was asked.
        """
        response.headers[FROM] = str(self.peers.name)
        if self.peers.asks(http.headers) and READER in http.headers:
            response.headers[READER] = http.headers[READER]
        if "Transfer-Encoding" in http.headers or "Upgrade" in http.headers:
            response.force_close()

    # --- seeing -------------------------------------------------------------------------------------------------------

    def _page(self, name: str) -> _Handler:
        file, kind = _FILES[name]
        body = files("router.admin").joinpath("ui", file).read_bytes()

        async def page(_: web.Request) -> web.Response:
            return web.Response(body=body, content_type=kind, charset="utf-8", headers=PAGE_HEADERS)

        return page

    async def data(self, http: web.Request) -> web.Response:
        """``/ui/data``: the page's data, of all routers."""
        reader = self.access.reader(http)
        own = self._overview.own(str(self.peers.name), time.monotonic(), reader)
        if self.peers.asks(http.headers):
            return json_response(own)
        answers = await self.peers.ask("/ui/data", reader)
        words = {name: read_answer(answer, own_word) for name, answer in answers.items()}
        found = whole(own, words, self._scrape.unproven() if reader is None else {})
        return json_response({**found, "scaling": self._scaling() if reader is None else None})

    def _scaling(self) -> dict[str, Any] | None:
        """What the goodput controller reports; None: this router has heard of no controller."""
        beat = None if self._watch is None else self._watch.controller
        return None if beat is None else {"controller": beat.where, "url": beat.url, "says": beat.detail}

    async def metrics(self, http: web.Request) -> web.Response:
        """``/metrics``: this router's; ``?all=1``: all routers' as one, with the number of missing ones."""
        if self.access.reader(http) is not None:
            raise ApiError(403, "PermissionDeniedError", "Metrics name every tenant: they are for operators.")
        own = self._scrape.text()
        if http.query.get("all") != "1":
            return web.Response(body=own, headers={"Content-Type": CONTENT_TYPE_LATEST})
        answers = await self.peers.ask("/metrics", None)
        texts = [each.body for each in answers.values() if isinstance(each, PeerAnswer) and each.status == 200]
        missing = len(answers) - len(texts)
        silent = (
            "# HELP baton_routers_silent Routers that did not answer, whose counts are missing here.\n"
            f"# TYPE baton_routers_silent gauge\nbaton_routers_silent {missing}\n"
        )
        return web.Response(body=merged([own, *texts, silent.encode()]), headers={"Content-Type": CONTENT_TYPE_LATEST})

    # --- quarantine ---------------------------------------------------------------------------------------------------

    async def quarantined(self, http: web.Request) -> web.Response:
        """``GET /quarantine``: instances that are set aside, and why. A tenant sees the instances that serve it, as on
        `/ui`.
        """
        reader, view = self.access.reader(http), self._parts.view
        aside = self.quarantine.aside
        if reader is not None:
            theirs = {seen.id for seen in view.all() if seen.instance.serves(reader)}
            aside = {name: because for name, because in aside.items() if name in theirs}
        return json_response({"quarantined": aside})

    async def set_aside(self, http: web.Request) -> web.Response:
        """``POST /quarantine/ID {"because": …}``: no router sends new legs to it until it is let in again."""
        return await self._change(http, aside=True)

    async def let_in(self, http: web.Request) -> web.Response:
        """``DELETE /quarantine/ID``: let the instance in again."""
        return await self._change(http, aside=False)

    async def _change(self, http: web.Request, *, aside: bool) -> web.Response:
        raw = await self.access.operators_body(http)
        instance = InstanceId(http.match_info["id"])
        if self.peers.asks(http.headers):
            self._hear(object_in(raw, ("words",)))
            return json_response({"heard": True})
        because = text_in(object_in(raw, ("because",)), "because")
        self._must_know(instance, aside=aside)
        refusal = self.quarantine.refusal(instance) if aside else ""
        if refusal:
            raise ApiError(409, "ConflictError", refusal)
        self.quarantine.say(instance, aside=aside, because=because)
        self._set_aside()
        words = {name: list(word) for name, word in self.quarantine.words.items()}
        body = msgspec.json.encode({"words": words})
        # As its receiver reads it: signatures cover paths, and aiohttp reads `%40` as the `@` of a rank's name.
        path = f"/quarantine/{quote(str(instance), safe='@')}"
        answers = await self.peers.ask(path, None, method=http.method, body=body)
        told: dict[str, str] = {str(self.peers.name): "told"}
        for name, answer in answers.items():
            said = read_answer(answer)
            told[name] = said if isinstance(said, str) else "told"
        stands = instance in self.quarantine.aside  # another router's words may have displaced it meanwhile
        return json_response({"instance": instance, "quarantined": stands, "routers": told})

    def _must_know(self, instance: InstanceId, *, aside: bool) -> None:
        known = self._parts.view.knows(instance) or (not aside and instance in self.quarantine.aside)
        if not known:
            raise ApiError(404, "NotFoundError", f"There is no instance `{instance[:200]}` here.")

    def _hear(self, said: dict[str, Any]) -> None:
        try:
            words = msgspec.convert(said.get("words", {}), dict[InstanceId, Word])
        except msgspec.ValidationError as error:
            raise bad_request(f"`words`: {error}", "words") from None
        if self.quarantine.hear(words):
            self._set_aside()

    def _set_aside(self) -> None:
        """Tell the view; waiting requests may find room. Say which instances are back, as others displaced them."""
        for instance, word in self.quarantine.take_displaced().items():
            self._parts.meters.displaced.inc()
            logger.warning(
                "%s is not set aside any more (%s had set it aside: %s): several routers together have set more than "
                "%d instances aside, the most that they announce. Let another one in first (`GET /quarantine` lists "
                "them, `DELETE /quarantine/ID` lets one in), then set %s aside again",
                *(instance, word.router, word.because or "no reason given", WORDS_MAX, instance),
            )
        self._parts.dispatch.fleet.handle(events.SetAside(dict(self.quarantine.aside)), time.monotonic())
        self._parts.dispatch.fleet_changed()

    # --- draining -----------------------------------------------------------------------------------------------------

    async def drain(self, http: web.Request) -> web.Response:
        """``POST /drain/ID {"deadline_s": 60}``: passed to the instance's agent, whose state every router reads in the
        registry.
        """
        said = object_in(await self.access.operators_body(http), ("deadline_s",))
        deadline_in(said, 0.0)
        return await self._agents.tell(http.match_info["id"], "/drain", said)

    async def resume(self, http: web.Request) -> web.Response:
        """``POST /resume/ID``: the instance takes work again."""
        return await self._agents.tell(
            http.match_info["id"], "/resume", object_in(await self.access.operators_body(http), ())
        )
