"""The operators' side of one router, which answers for all routers: `/ui`, `/metrics`, `/explain`, drain and
quarantine.

A shell: HTTP. The router passes each question on to its peers (`router.admin.peers`) and answers with the sum; peers
that did not answer are named. Changes (drain, quarantine) need an operator: a caller on this machine, a peer that
vouches for an operator, or an operator's key. A browser's requests from other sites are refused.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from cluster.bounded import PLAIN, Unfit, whole_body
from cluster.callers import from_another_site, from_here, names_this_machine
from cluster.errors import ApiError, bad_request
from cluster.ids import InstanceId, ranks_of
from cluster.keys import key_in, whose
from cluster.readable import SMALL_BYTES_MAX, deadline_in, object_in, text_in, too_large_here
from cluster.registry.membership import Heartbeat
from cluster.spec import SloClass
from kvtransfer.keys import instance_key
from kvtransfer.signed import NONCE_BYTES, READER, SIGNATURE, TO, Ask, signed_headers
from kvtransfer.ticket import SigningKey
from router.admin.expositions import merged
from router.admin.overview import Overview, whole
from router.admin.peer_words import an_object, listed, own_word
from router.admin.peers import FROM, PeerAnswer, RouterPeers
from router.admin.pools import LOOK_S
from router.admin.scrape import Scrape
from router.core.clients import Keys
from router.fleet import events
from router.fleet.discovery import Discovery
from router.fleet.quarantine import Quarantine, Word
from router.http.bodies import read_body
from router.request.parts import Parts
from router.telemetry.explain_store import Story

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

AGENT_S: Final = 5.0
"""An agent that does not answer within this time is treated as lost."""

_UNIX_TIME: Final = time.time  # noqa: TID251 - what two machines have in common
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Operators:
    """What operators see and do at one router.

    The class is long because each path of the admin side is a method, and all of them share the checks of callers and
    the peers.
    """

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
        self._ticket_keys: Final = ticket_keys
        self._admin_keys: Final = admin_keys
        self._body_timeout_s: Final = body_timeout_s
        self.quarantine: Final = Quarantine("router") if watch is None else watch.quarantine
        self.peers: Final = RouterPeers(
            "router" if watch is None else watch.name, (lambda: ()) if watch is None else watch.peers, ticket_keys
        )
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
        self._agents: aiohttp.ClientSession | None = None
        self._off: set[str] = set()
        """Classes that hand nothing over, as last logged."""
        if watch is not None:
            watch.on_quarantine = self._set_aside

    def retarget(self, classes: Mapping[str, SloClass]) -> None:
        """The classes' promises have changed."""
        self._overview.classes = classes

    async def look_forever(self) -> None:
        """Take the figures of the page once a second."""
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
        if self._agents is not None:
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
        app.router.add_get("/explain", self.explain_last)
        app.router.add_get("/explain/{id}", self.explain)
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

    # --- callers ------------------------------------------------------------------------------------------------------

    def reader(self, http: web.Request, body: bytes = b"") -> str | None:
        """The tenant whose requests the caller may read, by its key; None: an operator, who may read all.

        Raises:
            ApiError: 401 for an unknown key, and for no key from another machine; 403 for a page or name of another
                site; 421 if another router is meant.
        """
        meant = http.headers.get(TO, self.peers.name)
        if meant != self.peers.name:
            raise ApiError(421, "MisdirectedError", f"This is {self.peers.name}, not {meant[:200]}.")
        if from_another_site(http.headers, http.host, changes=http.method != "GET"):
            raise ApiError(403, "PermissionDeniedError", "A page of another site asks for this: refused.")
        vouched = self.peers.vouched(http.method, http.path_qs, http.headers, body)
        found = None if vouched else self._by_key(http)
        # A peer's signature counts whatever became of the headers that it does not cover.
        behalf = http.headers.get(READER) if vouched or self.peers.asks(http.headers) else None
        return behalf if found is None else found

    def _by_key(self, http: web.Request) -> str | None:
        """As `reader`, for a caller with a key, or on this machine without one."""
        clients, operators = self._parts.clients, self._admin_keys
        key, here = key_in(http.headers), from_here(http.remote)
        if here and not names_this_machine(http.host):
            message = "Ask as 127.0.0.1 or localhost: under another name it may be another site's page that asks."
            raise ApiError(403, "PermissionDeniedError", message)
        if here and (not key or (operators is None and not clients.closed)):
            return None
        if key and operators is not None and whose(key, {"": operators()}) is not None:
            return None
        if clients.closed:
            return clients.tenant(http.headers, time.monotonic())
        message = "From other machines the admin side asks for an operator's key: --admin-key-file names them."
        raise ApiError(401, "AuthenticationError", message)

    async def _operators_body(self, http: web.Request) -> bytes:
        """The body of a change. Only an operator's body is read. The exception is a peer's request, whose MAC covers
        the body, so the body is read before the judgement.

        Raises:
            ApiError: as `reader`; 403 for tenants and pages of other sites; 408, 413 for a body that is slow or large.
        """
        vouched = SIGNATURE in http.headers
        if not vouched:
            self._must_be_operator(http, b"")
        too_long = too_large_here(SMALL_BYTES_MAX)
        body = await read_body(http, SMALL_BYTES_MAX, self._body_timeout_s, too_long)
        if vouched:
            self._must_be_operator(http, body)
        return body

    def _must_be_operator(self, http: web.Request, body: bytes) -> None:
        """Raises ApiError (403) unless an operator asks, and not another site's page."""
        if self.reader(http, body) is not None:
            raise ApiError(403, "PermissionDeniedError", "A tenant's key changes nothing here: ask as an operator.")

    # --- seeing -------------------------------------------------------------------------------------------------------

    def _page(self, name: str) -> _Handler:
        file, kind = _FILES[name]
        body = files("router.admin").joinpath("ui", file).read_bytes()

        async def page(_: web.Request) -> web.Response:
            return web.Response(body=body, content_type=kind, charset="utf-8", headers=PAGE_HEADERS)

        return page

    async def data(self, http: web.Request) -> web.Response:
        """``/ui/data``: the page's data, of all routers."""
        reader = self.reader(http)
        own = self._overview.own(str(self.peers.name), time.monotonic(), reader)
        if self.peers.asks(http.headers):
            return _json(own)
        answers = await self.peers.ask("/ui/data", reader)
        words = {name: _word(answer, own_word) for name, answer in answers.items()}
        found = whole(own, words, self._scrape.unproven() if reader is None else {})
        return _json({**found, "scaling": self._scaling() if reader is None else None})

    def _scaling(self) -> dict[str, Any] | None:
        """What the controller that sizes the fleet reports; None: this router has heard of none."""
        beat = None if self._watch is None else self._watch.controller
        return None if beat is None else {"controller": beat.where, "url": beat.url, "says": beat.detail}

    async def metrics(self, http: web.Request) -> web.Response:
        """``/metrics``: this router's; ``?all=1``: all routers' as one, with the number of missing ones."""
        if self.reader(http) is not None:
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

    async def explain_last(self, http: web.Request) -> web.Response:
        """``/explain``: open requests, and the last that ended, newest first, of all routers; ``?n=`` of them."""
        given = http.query.get("n", "100")
        if not given.isdecimal() or len(given) > 9:
            raise bad_request(f"`n` is {given[:50]!r}: give a count, as in /explain?n=20", "n")
        now, memory, reader = time.monotonic(), self._parts.telling.memory, self.reader(http)
        found = [
            {**story.line(now), "ago_s": round(now - story.timeline.arrived, 3), "router": str(self.peers.name)}
            for story in memory.latest(int(given), reader)
        ]
        silent: dict[str, str] = {}
        if not self.peers.asks(http.headers):
            for name, answer in (await self.peers.ask(f"/explain?n={given}", reader)).items():
                said = _word(answer, listed)
                if isinstance(said, str):
                    silent[name] = said
                else:
                    found += said["requests"]
            found.sort(key=lambda each: float(each["ago_s"]))
        more = {"silent": silent} if silent else {}
        return _json({"requests": found[: int(given)], **more})

    async def explain(self, http: web.Request) -> web.Response:
        """``/explain/ID``: what was decided about one request, on whichever router it was.

        ID is the router's id or the client's. Clients may use one id several times: the answer is the newest request
        that the reader may see, and the number of such requests (``named_alike``).
        """
        name, reader = http.match_info["id"], self.reader(http)
        story = self._parts.telling.memory.get(name)
        if story is not None and reader in {None, story.client.tenant}:
            return _json(self._told(story))
        alike = self._parts.telling.memory.named(name, reader)
        found = [{**self._told(alike[0]), "named_alike": len(alike)}] if alike else []
        missing = ""
        if not self.peers.asks(http.headers):
            answers = await self.peers.ask(f"/explain/{quote(name, safe='')}", reader)
            found += [said for answer in answers.values() if isinstance(said := _word(answer), dict)]
            silent = [f"{each} ({why})" for each, why in answers.items() if isinstance(why, str)]
            missing = f" Not asked: {'; '.join(silent)}." if silent else ""
        if not found:
            kept = f"Open requests are remembered, and the last {self._parts.telling.memory.last_max} finished"
            message = f"No request `{name[:200]}` is known here. {kept} (--explain-last). Answers tell their id in"
            raise ApiError(404, "NotFoundError", f"{message} X-Baton-Request-Id.{missing}")
        return _json(_newest(found))

    def _told(self, story: Story) -> dict[str, Any]:
        now = time.monotonic()
        ago_s = round(now - story.timeline.arrived, 3)
        return {**story.as_json(now), "ago_s": ago_s, "router": str(self.peers.name)}

    # --- quarantine ---------------------------------------------------------------------------------------------------

    async def quarantined(self, http: web.Request) -> web.Response:
        """``GET /quarantine``: instances that are set aside, and why. A tenant sees the instances that serve it, as on
        `/ui`.
        """
        reader, view = self.reader(http), self._parts.view
        aside = self.quarantine.aside
        if reader is not None:
            theirs = {seen.id for seen in view.all() if seen.instance.serves(reader)}
            aside = {name: because for name, because in aside.items() if name in theirs}
        return _json({"quarantined": aside})

    async def set_aside(self, http: web.Request) -> web.Response:
        """``POST /quarantine/ID {"because": …}``: no router sends new legs to it until it is let in again."""
        return await self._change(http, aside=True)

    async def let_in(self, http: web.Request) -> web.Response:
        """``DELETE /quarantine/ID``: let the instance in again."""
        return await self._change(http, aside=False)

    async def _change(self, http: web.Request, *, aside: bool) -> web.Response:
        raw = await self._operators_body(http)
        instance = InstanceId(http.match_info["id"])
        if self.peers.asks(http.headers):
            self._hear(object_in(raw, ("words",)))
            return _json({"heard": True})
        because = text_in(object_in(raw, ("because",)), "because")
        self._must_know(instance, aside=aside)
        self.quarantine.say(instance, aside=aside, because=because)
        self._set_aside()
        words = {name: list(word) for name, word in self.quarantine.words.items()}
        body = msgspec.json.encode({"words": words})
        # As its receiver reads it: signatures cover paths, and aiohttp reads `%40` as the `@` of a rank's name.
        path = f"/quarantine/{quote(str(instance), safe='@')}"
        answers = await self.peers.ask(path, None, method=http.method, body=body)
        told = {name: "told" if not isinstance(_word(each), str) else _word(each) for name, each in answers.items()}
        return _json({"instance": instance, "quarantined": aside, "routers": {str(self.peers.name): "told", **told}})

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
        """Tell the view; waiting requests may find room."""
        self._parts.dispatch.fleet.handle(events.SetAside(dict(self.quarantine.aside)), time.monotonic())
        self._parts.dispatch.fleet_changed()

    # --- draining -----------------------------------------------------------------------------------------------------

    async def drain(self, http: web.Request) -> web.Response:
        """``POST /drain/ID {"deadline_s": 60}``: passed to the instance's agent, whose state every router reads in the
        registry.
        """
        said = object_in(await self._operators_body(http), ("deadline_s",))
        deadline_in(said, 0.0)
        return await self._tell_agent(http, "/drain", said)

    async def resume(self, http: web.Request) -> web.Response:
        """``POST /resume/ID``: the instance takes work again."""
        return await self._tell_agent(http, "/resume", object_in(await self._operators_body(http), ()))

    async def _tell_agent(self, http: web.Request, path: str, said: dict[str, Any]) -> web.Response:
        instance = http.match_info["id"]
        beat = self._agent_of(instance)
        if self._agents is None:
            limit = aiohttp.ClientTimeout(total=AGENT_S)
            self._agents = aiohttp.ClientSession(timeout=limit, headers=PLAIN, auto_decompress=False)
        sent = msgspec.json.encode(said)
        headers = {**self._signed(instance, path, sent), "Content-Type": "application/json"}
        try:
            url = f"{beat.agent_url}{path}"
            async with self._agents.post(url, data=sent, headers=headers, allow_redirects=False) as answer:
                body = await whole_body(answer)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, Unfit) as error:
            because = f"The agent of `{instance[:200]}` at {beat.agent_url} does not answer ({type(error).__name__})."
            fix = "Without --ticket-keys-file an agent listens on its own machine only. `/quarantine` needs no agent."
            raise ApiError(502, "UpstreamError", f"{because} {fix}") from None
        if not 200 <= answer.status < 600:
            because = f"The agent of `{instance[:200]}` at {beat.agent_url} answers with status {answer.status}."
            raise ApiError(502, "UpstreamError", f"{because} `/quarantine` needs no agent.")
        return web.Response(status=answer.status, body=body, content_type="application/json")

    def _signed(self, instance: str, path: str, body: bytes) -> dict[str, str]:
        """The headers of a request to an instance's agent."""
        keys = self._ticket_keys
        key = None if keys is None else instance_key(keys()[0], InstanceId(instance))
        ask = Ask(method="POST", path=path, body=body, by=str(self.peers.name), to=instance)
        return signed_headers(ask, key, now=_UNIX_TIME(), nonce=secrets.token_bytes(NONCE_BYTES))

    def _agent_of(self, instance: str) -> Heartbeat:
        """The heartbeat of an instance's agent; an engine may be named instead of one of its ranks."""
        names = (instance, ranks_of(InstanceId(instance), 2)[0])
        fleet = None if self._watch is None else self._watch.snapshot()
        member = None if fleet is None else next((each for name in names if (each := fleet.get(name))), None)
        if member is not None and member.beat.agent_url is not None:
            return member.beat
        if not self._parts.view.knows(InstanceId(instance)):
            raise ApiError(404, "NotFoundError", f"There is no instance `{instance[:200]}` here.")
        message = f"`{instance[:200]}` has no agent that could drain it: use `POST /quarantine/{instance[:200]}`."
        raise ApiError(409, "ConflictError", message)


def _newest(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several routers' answers about one name: the request with that router id, else the newest request with that
    client id, and the number of these.
    """
    ours = next((each for each in found if "named_alike" not in each), None)
    if ours is not None:
        return ours
    newest: dict[str, Any] = min(found, key=_ago_s)
    return {**newest, "named_alike": sum(map(_alike, found))}


def _ago_s(said: dict[str, Any]) -> float:
    """How long ago a request came; infinite if the peer sent no number."""
    ago_s = said.get("ago_s")
    return float(ago_s) if isinstance(ago_s, int | float) else math.inf


def _alike(said: dict[str, Any]) -> int:
    """How many requests a router reports of a name; one if it sent no count."""
    count = said.get("named_alike")
    return count if isinstance(count, int) and 0 < count < 1 << 31 else 1


def _word(answer: PeerAnswer | str, read: Callable[[bytes], dict[str, Any] | str] = an_object) -> dict[str, Any] | str:
    """A peer's answer, or why it is of no use."""
    if isinstance(answer, str):
        return answer
    return read(answer.body) if answer.status == 200 else f"it answers with HTTP {answer.status}"


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
