"""The prefill legs of one request, and their answers: a hold, a first token, the cached tokens. A shell."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from cluster import wire
from cluster.ids import InstanceId
from cluster.request import Request
from router.core import engine_answers
from router.core import journey as j
from router.core.timing_parts import EngineTold
from router.http.tasks import GIVE_UP, RELEASE
from router.http.upstream import Answer, EngineLost
from router.request.engine_words import EngineWords
from router.request.legs import OVER, EventSink, PrefillLeg, PrefillOwner, PrefillSaid
from router.request.outgoing import Outgoing
from router.request.parts import BUG, Parts
from router.request.releases import Releases
from router.request.reply import Reply
from router.request.scheduled import ScheduledRequest
from router.request.seeding import Seeding
from router.request.sourcing import Sourcing
from router.request.trace import RequestTrace
from router.telemetry.timing import Stage

logger = logging.getLogger("baton.router")


class Prefilling(PrefillOwner):
    """The prefill legs of one request. It has many attributes: one for each other part of the request that it uses."""

    __slots__ = (
        "_attempt", "_had_cached", "_legs", "_outgoing", "_parts", "_releasing", "_request", "_scheduled", "_seeding",
        "_sink", "_trace", "_words", "producer",
    )  # fmt: skip

    def __init__(
        self,
        parts: Parts,
        request: Request,
        outgoing: Outgoing,
        scheduled: ScheduledRequest,
        seeding: Seeding,
        words: EngineWords,
        trace: RequestTrace,
        sink: EventSink,
    ) -> None:
        """`sink` gets the events of the legs."""
        self._parts: Final = parts
        self._request: Final = request
        self._outgoing: Final = outgoing
        self._scheduled: Final = scheduled
        self._seeding: Final = seeding
        self._words: Final = words
        self._trace: Final = trace
        self._sink = sink
        self._legs: Final[dict[InstanceId, PrefillLeg]] = {}
        """The awaited legs, the oldest first."""
        self._attempt = 0
        """The attempt of the leg that was sent last."""
        self.producer: PrefillLeg | None = None
        """The leg whose answer the journey uses; before there is one, the leg that was sent last."""
        self._had_cached: int | None = None
        """Prompt tokens that the first P had cached; None: no P has reported them."""
        self._releasing: asyncio.Task[j.Event] | None = None

    def send(self, effect: j.SendPrefill) -> None:
        """Send a leg."""
        instance, attempt, parts = effect.instance, effect.attempt, self._parts
        self._attempt = attempt
        leg = self.producer = PrefillLeg(self, instance, attempt, parts.limits.answer_bytes_max)
        token_ids = self._seeding.may()
        body = self._outgoing.prefill_body(instance, attempt, token_ids=token_ids) if effect.source is None else ()
        leg.started = time.monotonic()
        target = parts.view.get(instance).instance
        headers = self._outgoing.lines(Stage.PREFILL_LEG, target)
        parts.dispatch.leg_started(instance)
        leg.placed = True
        self._legs[instance] = leg
        parts.losses.watch(instance, leg)
        if effect.source is None:
            leg.http = parts.engines.legs.send(target.url, self._request.path, headers, body, leg)
            return

        source = effect.source

        def send(held: wire.TransferFields | None) -> j.Event | None:
            body = self._outgoing.prefill_body(instance, attempt, token_ids=token_ids, source=held)
            leg.http = parts.engines.legs.send(
                target.url, self._request.path, headers, body, leg, once=held is not None
            )
            return None if held is None else j.SourceHeld(source, instance)

        wanted = self._scheduled.context.wanted
        sourcing = Sourcing(parts, self._request, self._outgoing, self._sink, source, wanted, attempt, send)
        leg.source = sourcing
        sourcing.begin()

    # -- their events --

    def engine_lost(self, instance: InstanceId, lost: EngineLost) -> j.Lost | j.Refused:
        """The journey's event for a broken leg."""
        return self._words.lost(instance, lost)

    def prefill_over(self, leg: PrefillLeg, *, unclear: bool) -> None:
        """The leg's place is free again, however the leg ended. `unclear`: the engine had it, and nothing says whether
        it holds blocks: the hold is given up.
        """
        leg.placed = False
        try:
            try:
                self._parts.losses.unwatch(leg.instance, leg)
            finally:
                self._parts.dispatch.leg_ended(leg.instance)
            if unclear:
                self._give_up(leg)
        except Exception:  # the place is given to another request: this one continues
            logger.exception(BUG, self._request.label)

    def prefill_said(self, leg: PrefillLeg, said: PrefillSaid | j.Lost | j.Refused) -> None:
        """The leg has ended by itself."""
        if self._take(leg):
            self._sink.run(self._read, leg, said)

    def prefill_left(self, leg: PrefillLeg) -> None:
        """The leg's instance is lost; the leg may still do its work and hold blocks for this request. The hold that the
        leg pulls is given up at once: its source is well, and a pull that goes on is found out by its mark.
        """
        if not self._take(leg):
            return
        if not leg.forgo():
            leg.leave_source()
            self._parts.tasks.spawn(self._releases().see_out(leg, j.CANCEL_WAIT_S), f"outlast-{self._request.id}")
        self._sink.feed(j.Lost("the instance was lost", by=leg.instance))

    def _take(self, leg: PrefillLeg) -> bool:
        """The leg has ended or is lost, and is no longer awaited. Returns whether it was."""
        if self._legs.get(leg.instance) is not leg:
            return False
        del self._legs[leg.instance]
        return True

    # -- their answers --

    def _read(self, leg: PrefillLeg, said: PrefillSaid | j.Lost | j.Refused) -> j.Event:
        newest = leg.attempt == self._attempt
        if isinstance(said, PrefillSaid):
            self._parts.meters.leg("prefill", said.at - leg.started)
        fields = self._fields(leg.instance, said.answer) if isinstance(said, PrefillSaid) else said
        if not isinstance(fields, dict):
            if newest:
                self._scheduled.prompt_over(done=False)
            if isinstance(said, PrefillSaid) and isinstance(fields, j.Lost):
                self._give_up(leg)
            return msgspec.structs.replace(fields, by=leg.instance)
        assert isinstance(said, PrefillSaid)
        self.producer = leg
        reason = wire.first_finish_reason(fields)
        usage = fields.get("usage")
        done = newest and reason in j.PREFILLED  # else it computed nothing to learn a time from
        self._scheduled.prompt_over(done=done, usage=usage if isinstance(usage, dict) and done else {})
        # An older leg's own times began before the stage that it ends: they are left out.
        self._trace.prefilled(said.at, reason, fields if newest else {**fields, "metrics": None})
        transfer = self._transfer_in(fields)
        if transfer is None and reason not in j.PREFILLED:
            self._give_up(leg)
        not_first = self._not_first(leg, transfer, fields)
        seed, pinned = self._seeding.read(fields, not_first)
        if seed is not None or pinned is not None:
            self._scheduled.spoken_by(leg.instance)
        first = not not_first and not self._seeding.by_lot
        return j.PrefillAnswered(reason, transfer, seed, first, by=leg.instance, pinned=pinned)

    def _not_first(self, leg: PrefillLeg, transfer: wire.TransferFields | None, fields: Mapping[str, Any]) -> str:
        """Why P's token is not known to be the answer's first, by P's own answer and by the proof of the pair; empty:
        it is the first.
        """
        if transfer is None:
            return "P holds nothing: what it has computed cannot be told"
        because, context, view = transfer.stops_short_of(fields), self._scheduled.context, self._parts.view
        if because or context.decode is None:
            return because
        another = transfer.of_another_adapter(view.adapter(context.decode, context.wanted.model))
        return another or view.not_exact(leg.instance, context.decode)

    def _transfer_in(self, fields: dict[str, Any]) -> wire.TransferFields | None:
        """The hold that P's answer describes; None: none. Its cached tokens are at most those that the request's first
        P reported: a later P may find what an earlier try left in its cache.
        """
        transfer = wire.read_transfer(fields)
        if transfer is None:
            return None
        if self._had_cached is None:
            self._had_cached = transfer.cached_tokens
        return transfer.at_most_cached(self._had_cached)

    def _fields(self, by: InstanceId, answer: Answer) -> dict[str, Any] | j.Lost | j.Refused:
        """The fields of P's answer, or the journey's event if the answer is not valid."""
        if answer.status != 200:
            return self._words.refused(by, answer)
        fields = engine_answers.prefilled_in(answer.body, reads_blocks=self._parts.engines.tickets.signs)
        if fields is not None:
            return fields
        fields, told = engine_answers.object_in(answer.body), engine_answers.completion_in(answer.body)
        if fields is not None and isinstance(told, EngineTold):
            return fields
        lost = self._words.unfit(by, told if isinstance(told, str) else "unreadable answer")
        if fields is None or wire.read_transfer(fields) is None:
            return lost
        return {**fields, "choices": None}  # half done: its hold is pulled or given back

    def answer_with(self, reply: Reply) -> None:
        """Send P's answer to the client as the whole answer: it ended with its first token."""
        assert self.producer is not None
        raw = self.producer.answer.body
        body, told = wire.without_transfer(engine_answers.object_in(raw) or {}), engine_answers.completion_in(raw)
        reply.respond(200, msgspec.json.encode(body), told=told if isinstance(told, EngineTold) else None)

    # -- how they end --

    def close(self) -> None:
        """Cut every prefill leg off."""
        for leg in list(self._legs.values()):
            leg.cut()
        self._legs.clear()

    def forgo(self, instance: InstanceId) -> None:
        """No client waits for this leg's answer: if the leg still waits for its source, do not send it."""
        leg = self._legs.get(instance)
        if leg is not None:
            leg.forgo()

    def cancel(self, instance: InstanceId) -> None:
        """Ask P to abort its leg, and give up the hold that the leg may pull."""
        leg = self._legs.get(instance)
        if leg is not None:
            leg.leave_source()
        self._parts.tasks.spawn(self._releases().cancel_prefill(instance), f"abort-{self._request.id}")

    def outlast(self, instance: InstanceId) -> None:
        """Another leg has answered: let this one end by itself, if it was sent."""
        leg = self._legs.pop(instance)
        if not leg.forgo():
            self._parts.tasks.spawn(self._releases().outlast(leg), f"outlast-{self._request.id}")

    def _give_up(self, leg: PrefillLeg) -> None:
        """A leg has ended, and no answer of it names a hold. Its engine may hold blocks nevertheless (`j.PATIENCE_S`):
        give them up by the router's own name.
        """
        self._parts.tasks.spawn(self._releases().give_up(leg.instance, leg.attempt), f"{GIVE_UP}{self._request.id}")

    def release(self, effect: j.Release) -> None:
        """Give the hold up in a task of its own."""
        assert self.producer is not None
        releasing = self._releases().release(effect.via, effect.transfer, self.producer)
        self._releasing = self._parts.tasks.spawn(releasing, f"{RELEASE}{self._request.id}")
        self._releasing.add_done_callback(self._release_over)

    def _release_over(self, task: asyncio.Task[j.Event]) -> None:
        self._sink.run(self._released, task)

    def _released(self, task: asyncio.Task[j.Event]) -> j.Event | None:
        """The journey's event for a release's end; None: it is not the last release."""
        if task is not self._releasing:
            return None
        failed = task.cancelled() or task.exception() is not None
        return j.Released(ok=False) if failed else task.result()

    def part(self) -> None:
        """The request is over: drop the references to its legs and its driver."""
        self.producer, self._sink = None, OVER

    def _releases(self) -> Releases:
        return Releases(self._parts, self._request, self._outgoing)
