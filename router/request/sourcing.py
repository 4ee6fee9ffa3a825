"""A source leg: another instance is asked to hold what its cache has of a prompt, before the leg that pulls it is sent.

A shell. The source's answer, its failure and the end of the wait all send the leg, at most once. A hold that is not
pulled is given up by its name, which the router knows before the source has answered. To a source that does not take
the name another instance says it, once the source's answer has described the hold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from cluster import wire
from cluster.request import Request
from router.core import journey as j
from router.core.engine_answers import object_in
from router.core.values import Wanted
from router.fleet import events as d
from router.http.tasks import RELEASE
from router.http.upstream import Answer, EngineLost
from router.request.legs import AwaitedSource, EventSink
from router.request.outgoing import Outgoing
from router.request.parts import Parts
from router.request.releases import Releases, hold_in

logger = logging.getLogger("baton.router")


class Sourcing(AwaitedSource):
    """One source leg. It has many attributes: the parts of the request that it uses, and how far the leg has come."""

    __slots__ = (
        "_attempt", "_began", "_hold", "_last", "_outgoing", "_over", "_parts", "_request", "_send", "_sink", "_timer",
        "_wanted", "source",
    )  # fmt: skip

    def __init__(
        self,
        parts: Parts,
        request: Request,
        outgoing: Outgoing,
        sink: EventSink,
        source: j.PrefixSource,
        wanted: Wanted,
        attempt: int,
        send: Callable[[wire.TransferFields | None], j.Event | None],
    ) -> None:
        """`send` sends the leg that waits, with the hold that it is to pull, or without one. Returns what the journey
        is told.
        """
        super().__init__(parts.limits.answer_bytes_max)
        self._parts: Final = parts
        self._request: Final = request
        self._outgoing: Final = outgoing
        self._sink: Final = sink
        self.source: Final = source
        self._wanted: Final = wanted
        self._attempt: Final = attempt + j.SOURCE_ATTEMPTS
        self._send: Final = send
        self._timer: asyncio.TimerHandle | None = None
        self._began = 0.0
        self._over = False
        self._hold: wire.TransferFields | None = None
        """The hold that the leg was sent with, to pull it."""
        self._last: asyncio.Future[Answer | EngineLost] | None = None
        """The end of a source leg that is over, and is still read for the hold that it may describe."""

    def begin(self) -> None:
        """Ask the source. It may have gone since it was chosen: then the leg is sent at once."""
        parts, name = self._parts, self.source.instance
        if not parts.view.knows(name) or not parts.view.get(name).ready:
            self._stop("gone")
            self._send(None)
            return
        target = parts.view.get(name).instance
        body = self._outgoing.source_body(name, self._attempt)
        parts.dispatch.leg_started(name)
        self._began = time.monotonic()
        self._outgoing.asks_source()
        self._timer = parts.engines.loop.call_later(self.source.wait_s, self._late)
        headers = self._outgoing.untraced(target)
        self.http = parts.engines.legs.send(target.url, self._request.path, headers, body, self, once=True)

    # -- its end: a bug in what follows must end the request --

    def _late(self) -> None:
        self._sink.run(self.take, None)

    def ended(self) -> None:
        """The answer is complete (`LegListener`, as below)."""
        self._end(self.answer)

    def lost(self, lost: EngineLost) -> None:
        self._end(lost)

    def _end(self, said: Answer | EngineLost) -> None:
        if self._last is None:
            self._sink.run(self.take, said)
        elif not self._last.done():
            self._last.set_result(said)

    def take(self, said: Answer | EngineLost | None) -> j.Event | None:
        if self._over:
            return None
        held, outcome = self._read(said)
        self._hold = held
        self._stop(outcome, 0 if held is None else held.tokens)
        if said is None:
            self._give_up(None, listens=True)
        elif held is None and _may_hold(said):
            self._give_up(None)
        self._outgoing.source_over()
        return self._send(held)

    def _read(self, said: Answer | EngineLost | None) -> tuple[wire.TransferFields | None, str]:
        """The hold, if there is one, and the outcome as a label for metrics."""
        if said is None:
            self._tell_time()
            return None, "late"
        if isinstance(said, EngineLost):
            if not said.reached and not said.ours:
                self._parts.dispatch.unreachable(self.source.instance)
            logger.info("%s: no source: %s: %s", self._request.label, self.source.instance, said)
            return None, "lost"
        if said.status != 200 or object_in(said.body) is None:
            return None, "refused"
        self._tell_time()
        held = hold_in(said)
        if held is not None and not held.is_from_cache:
            self._give_up(held)  # an engine that does not know source legs has computed the prompt
            return None, "nothing"
        self._tell_cached(0 if held is None else held.tokens)
        return held, "nothing" if held is None else "held"

    def _tell_cached(self, tokens: int) -> None:
        """Report to the prefix-cache index how many of the prompt's tokens the source has."""
        wanted, now = self._wanted, time.monotonic()
        told = d.SourceSaid(self.source.instance, wanted.prefix, wanted.prefix_block_tokens, tokens, now)
        self._parts.dispatch.fleet.handle(told, now)

    def _tell_time(self) -> None:
        """The source has answered, or is late: report by how much, for the price of the next source."""
        now = time.monotonic()
        late_ms = (now - self._began) * 1000.0 - self.source.leg_ms
        self._parts.dispatch.fleet.handle(d.Sourced(late_ms, now), now)

    def close(self) -> None:
        """The leg will not pull, whether it was sent or not: give the hold up, made or not."""
        hold, self._hold = self._hold, None
        if self._over and hold is None:
            return
        listens = not self._over
        if listens:
            self._stop("unwanted")
        self._give_up(hold, listens=listens)

    def _give_up(self, hold: wire.TransferFields | None, *, listens: bool = False) -> None:
        """Give up the hold, made or not. None: the source has not described it; `listens`: its answer still may."""
        if self._timer is None:
            return  # it was not asked
        if listens:
            self._last = self._parts.engines.loop.create_future()
        self._parts.tasks.spawn(self._given_up(hold), f"{RELEASE}source-{self._request.id}")

    async def _given_up(self, hold: wire.TransferFields | None) -> None:
        releases, holder = Releases(self._parts, self._request, self._outgoing), self.source.instance
        try:
            if await releases.give_up(holder, self._attempt, last=False):
                return
            if self._last is not None:
                hold = await self._described(self._last)
            if hold is not None:
                await releases.reject(hold, holder, self._attempt)
        finally:
            http, self.http = self.http, None
            if http is not None:
                http.close()  # without effect if the leg has ended

    async def _described(self, last: asyncio.Future[Answer | EngineLost]) -> wire.TransferFields | None:
        """The hold in an answer that comes after all."""
        try:
            async with asyncio.timeout(j.CANCEL_WAIT_S):
                said = await last
        except TimeoutError:
            return None
        return None if isinstance(said, EngineLost) else hold_in(said)

    def _stop(self, outcome: str, tokens: int = 0) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
            self._parts.dispatch.leg_ended(self.source.instance)
        self._parts.meters.sources.asked(outcome, tokens)


def _may_hold(said: Answer | EngineLost) -> bool:
    """Whether a source that has described no hold may have one: it was lost, has failed or was aborted at its work."""
    if isinstance(said, EngineLost):
        return said.reached
    fields = object_in(said.body) if said.status == 200 else None
    if fields is None:
        return not 400 <= said.status < 500
    return wire.first_finish_reason(fields) == "abort"
