"""The request driver: carries out one `Journey` on real connections, effects in, events back. It makes no decisions.

No call waits: reports of connections and timers are fed to the journey as they come, and its effects are carried out at
once. Tasks are used only for rare work that outlives an answer (`router.request.releases`). Parts with a subject of
their own: the prefill legs, the answering leg, the legs' content, the request at the scheduler, its waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, cast

from cluster.http.headers import Headers
from cluster.ids import InstanceId
from cluster.request import Request
from router.core import journey as j
from router.core.clients import Client
from router.core.eligibility import Verdict
from router.core.slo import SHED
from router.http.outlet import Outlet
from router.http.upstream import Answer, EngineLost
from router.predict.predictors import PredictedRequest
from router.request.answering import Answering
from router.request.engine_words import EngineWords
from router.request.legs import AnswerLeg, AwaitedSource, LegOwner, PrefillLeg, PrefillSaid
from router.request.outgoing import Outgoing
from router.request.parts import Parts
from router.request.prefilling import Prefilling
from router.request.refusals import broken
from router.request.reply import Reply
from router.request.scheduled import ScheduledRequest
from router.request.seeding import Seeding
from router.request.trace import RequestTrace
from router.request.waiting import ClientPatience, Waiting
from router.scheduler.scheduler import SchedulingContext

logger = logging.getLogger("baton.router")

_FAILED: Final = frozenset({j.Lost, j.Refused})

_BUG = "%s: a request failed in the router"


class RequestDriver(LegOwner):
    """One client request on its way through the fleet.

    The class is long, and has more attributes than others, because every effect of `router.core.journey` and every
    event of legs and client has its line here, which names the part of the request that handles it.
    """

    __slots__ = (
        "_answering", "_driven", "_journey", "_over", "_parted", "_parts", "_patience", "_pending", "_prefilling",
        "_request", "_scheduled", "_seeding", "_shed", "_trace", "_waiting", "_words", "reply",
    )  # fmt: skip

    def __init__(
        self,
        parts: Parts,
        outlet: Outlet,
        headers: Headers,
        request: Request,
        journey: j.Journey,
        context: SchedulingContext,
        verdict: Verdict,
        client: Client,
        predicted: PredictedRequest | None,
    ) -> None:
        """A request that is about to begin.

        Args:
            parts: what its router's requests share.
            outlet: where its answer goes.
            headers: the request's own.
            request: its parsed parameters.
            journey: the machine, at its beginning.
            context: its context at the scheduler.
            verdict: how it may be served.
            client: its tenant and class.
            predicted: its predictions; None: none are made.
        """
        self._parts: Final = parts
        self._request: Final = request
        self._journey: Final = journey
        trace = RequestTrace(parts.telling, request, verdict, headers, client)
        resumable = verdict.resumable and request.stream
        self.reply: Final = Reply(
            outlet,
            request,
            trace,
            resumable=resumable,
            counts=predicted is not None,
            event_bytes_max=parts.limits.answer_bytes_max,
        )
        self._trace: Final = trace
        words = self._words = EngineWords(parts, request)
        outgoing = Outgoing(parts, request, headers, trace)
        scheduled = self._scheduled = ScheduledRequest(parts, context, predicted, trace)
        seeding = self._seeding = Seeding(parts, request, verdict, context, trace)
        self._prefilling: Final = Prefilling(parts, request, outgoing, scheduled, seeding, words, trace)
        self._answering: Final = Answering(parts, request, outgoing, scheduled, words, self.reply, trace)
        self._waiting: Final = Waiting(parts, journey, context, trace, self.feed)
        self._patience: Final = ClientPatience(parts, request, outlet)
        self._shed = False
        self._driven = False
        """Effects are being carried out: events fed meanwhile become pending."""
        self._over = False
        self._parted = False
        """All work at the request's end is done."""
        self._pending: Final[deque[j.Effect]] = deque()

    def begin(self) -> None:
        """Begin. From now on events drive everything. The request has ended once `Parts.open` forgets it."""
        self._parts.open.add(self)
        self.reply.outlet.exchange = self
        try:
            self._trace.begin()
            self._pending.extend(self._journey.begin())
            self._drive()
        except Exception:  # as in `_try`
            logger.exception(_BUG, self._request.label)
            self._abandon()

    def feed(self, event: j.Event) -> None:
        """Take an event."""
        self._try(None, event)

    def _try(self, step: Callable[..., j.Event | None] | None, *given: Any) -> None:
        """Run a step, or without one take an event, feed the result to the journey, and carry out its effects. A bug in
        any of it ends this request and no other: places are given back.
        """
        if self._over:
            return
        try:
            event = given[0] if step is None else step(*given)
            if event is not None:
                self._fold(event)
                if not self._driven:
                    self._drive()
        except Exception:  # any error: all other clients of this process must be served on
            logger.exception(_BUG, self._request.label)
            self._abandon()

    def _fold(self, event: j.Event) -> None:
        if type(event) in _FAILED:  # `isinstance` of a Struct costs as much as all else that is done here
            self._trace.failed(cast("j.Lost | j.Refused", event))
        self._pending.extend(self._journey.handle(event, time.monotonic()))

    def _drive(self) -> None:
        """Carry out what is pending. Events fed meanwhile become pending, too."""
        self._driven = True
        pending = self._pending
        try:
            while pending and not self._over:
                effect = pending.popleft()
                event = _CARRY_OUT[type(effect)](self, effect)
                if event is not None:
                    self._fold(event)
            if not self._over:
                self._waiting.begin()
        finally:
            self._driven = False

    # -- effects --

    def _choose(self, effect: j.Choose) -> j.Event:
        return self._scheduled.choose(effect, relayed=self._answering.relayed)

    def _await_fleet(self, _: j.AwaitFleet) -> None:
        self._scheduled.found_none()

    def _send_prefill(self, effect: j.SendPrefill) -> None:
        self._prefilling.send(effect, self)

    def _send_seed(self, _: j.SendSeed) -> None:
        self._seeding.send(self.reply)

    def _send_early(self, effect: j.SendEarly) -> j.Event | None:
        exact = not self._parts.view.not_exact(effect.producer, effect.instance)
        return self._answering.send_early(effect, self, pins=exact and self._seeding.may())

    def _use_early(self, effect: j.UseEarly) -> j.Event | None:
        return self._answering.use_early(effect.transfer)

    def _close_early(self, _: j.CloseEarly) -> None:
        self._answering.drop_early()

    def _send_decode(self, effect: j.SendDecode) -> j.Event | None:
        return self._answering.send(effect, self, self._prefilling.producer, self._journey.attempt)

    def _forgo_prefill(self, effect: j.ForgoPrefill) -> None:
        self._prefilling.forgo(effect.instance)

    def _begin_cancel(self, effect: j.CancelPrefill) -> None:
        self._prefilling.cancel(effect.instance)

    def _close_prefill(self, _: j.ClosePrefill | None = None) -> None:
        self._prefilling.close()

    def _outlast_prefill(self, effect: j.OutlastPrefill) -> None:
        self._prefilling.outlast(effect.instance)

    def _close_decode(self, _: j.CloseDecode | None = None) -> None:
        self._answering.close()

    def _relay(self, _: j.Relay) -> j.Event | None:
        return self._answering.relay(seeded=self._seeding.seed is not None)

    def _answer_from_prefill(self, _: j.AnswerFromPrefill) -> None:
        self._prefilling.answer_with(self.reply)

    def _forward_refusal(self, _: j.ForwardRefusal) -> None:
        self._words.forward(self.reply)

    def _fail(self, effect: j.Fail) -> None:
        self._shed = effect.error.retry_after_s is not None
        self.reply.refuse(effect.error)

    def _fail_stream(self, effect: j.FailStream) -> None:
        self.reply.fail(effect.error)

    def _begin_release(self, effect: j.Release) -> None:
        self._prefilling.release(effect, self._released)

    def _released(self, task: asyncio.Task[j.Event]) -> None:
        self._try(self._prefilling.released, task)

    # -- events of the client's connection --

    def client_left(self) -> None:
        """The client will read nothing more."""
        self._patience.end()
        self.feed(j.ClientLeft())

    def client_full(self) -> None:
        """The client reads too slowly: stop reading from the engine, and cut the client off after `client_stall_s`."""
        self._answering.pause()
        self._patience.begin()

    def client_drained(self) -> None:
        """The client has read what was sent."""
        self._patience.end()
        self._answering.resume()

    # -- events of legs --

    def engine_lost(self, instance: InstanceId, lost: EngineLost) -> j.Lost | j.Refused:
        """The journey's event for a broken leg."""
        return self._words.lost(instance, lost)

    def prefill_over(self, leg: PrefillLeg) -> None:
        """The leg's place is free again, however the leg ended."""
        try:
            self._prefilling.over(leg)
        except Exception:  # the place is given to another request: this one continues
            logger.exception(_BUG, self._request.label)

    def prefill_said(self, leg: PrefillLeg, said: PrefillSaid | j.Lost | j.Refused) -> None:
        """The leg has ended by itself."""
        if self._prefilling.take(leg):
            self._try(self._read_prefill, leg, said)

    def _read_prefill(self, leg: PrefillLeg, said: PrefillSaid | j.Lost | j.Refused) -> j.Event:
        newest = leg.attempt == self._journey.attempt
        return self._prefilling.read(leg, said, newest=newest, unpinned=self._answering.early_unpinned)

    def prefill_left(self, leg: PrefillLeg) -> None:
        """The leg's instance is lost; the leg may still do its work and hold blocks for this request."""
        if self._prefilling.take(leg):
            self._prefilling.see_out(leg)
            self.feed(j.Lost("the instance was lost", by=leg.instance))

    def answer_began(self, leg: AnswerLeg, because: str) -> None:
        """The beginning of a stream with a good status has arrived. `because`: why it is not valid; empty: it is."""
        answering = self._answering
        if leg is not answering.leg:
            return
        if because:
            self._try(answering.no_stream, leg, because)
        else:
            self._try(answering.opened, leg, None)

    def answer_ended(self, leg: AnswerLeg) -> None:
        """The whole answer has arrived."""
        if leg is self._answering.leg:
            if leg.relays:
                self._try(self.reply.ended)
            else:
                self._try(self._answering.ended, leg)

    def answer_lost(self, leg: AnswerLeg, lost: EngineLost) -> None:
        """The leg broke off."""
        if leg is not self._answering.leg:
            return
        if leg.relays:
            self._try(partial(self.reply.broke_off, waited=lost.silent), str(lost))
        else:
            self._try(self._lost_unopened, leg, lost)

    def _lost_unopened(self, leg: AnswerLeg, lost: EngineLost) -> j.Event:
        return self._answering.opened(leg, self._words.lost(leg.instance, lost))

    def answer_left(self, leg: AnswerLeg) -> None:
        """The leg's instance is lost."""
        if leg is self._answering.leg and leg.opening:
            self._try(self._answering.opened, leg, j.Lost("the instance was lost"))

    def passed_on(self, event: object) -> None:
        """A chunk has led to this event."""
        assert isinstance(event, j.Lost)
        self.feed(event)

    def relayed(self, data: bytes) -> None:
        """More bytes of the stream have arrived."""
        self._try(self.reply.feed, data)

    def source_over(self, source: AwaitedSource, said: Answer | EngineLost | None) -> None:
        """A source has answered, or its leg broke off; None: it has not answered in time."""
        self._try(source.take, said)

    # -- the end --

    def _finish(self, effect: j.Finish) -> None:
        answering, reply, parts = self._answering, self.reply, self._parts
        answering.presume_no_more()
        tokens = self._scheduled.count_tokens(self._request, reply.sent.tokens())
        complete = effect.outcome == "served"
        cut_off = reply.cut_off or not complete
        here = None if self._scheduled.resumed else tokens
        now = time.monotonic()
        told_ms = answering.engine_said(here)
        self._scheduled.finish(now, here, told_ms, cut_off=cut_off, complete=complete, paused=answering.paused)
        self._forget()
        outcome = SHED if self._shed else effect.outcome
        parts.meters.ended(self._request.path, answering.way, outcome, now - self._request.arrived)
        if reply.broken_splices and not complete:
            parts.meters.broken_seams.inc()
        self._trace.finish(outcome, self._scheduled.context, tokens)
        if reply.outlet.exchange is self:  # the client got no end: better a cut connection than waiting for ever
            reply.outlet.abort()
        self._part()

    def _abandon(self) -> None:
        """A bug of the router's has ended this request. Each step is tried, whatever became of the others: places are
        given back, the request is no longer open, and its client is told.
        """
        if self._parted:
            return
        self._over = True
        steps: tuple[Callable[[], None], ...] = (
            self._close_prefill,
            self._close_decode,
            self._scheduled.leave,
            self._forget,
            self._trace.broken,
            self._tell_broken,
            self._part,
        )
        for step in steps:
            try:
                step()
            except Exception:  # the next step may still succeed
                logger.exception(_BUG, self._request.label)

    def _tell_broken(self) -> None:
        outlet = self.reply.outlet
        if outlet.begun:
            outlet.abort()
        else:
            self._parts.refusals.refuse(outlet, broken())

    def stop(self) -> None:
        """The router ends: ignore all further events."""
        self._forget()

    def _part(self) -> None:
        """Drop the references from its legs: the cycle would keep request, body and tokens until the garbage collector
        runs.
        """
        self._prefilling.part()
        self._answering.part()
        self._parted = True

    def _forget(self) -> None:
        """No more events are expected."""
        self._over = True
        self._waiting.end()
        self._patience.end()
        if self in self._parts.open:
            self._parts.open.discard(self)
            self._parts.clients.leave(self._scheduled.context.wanted.tenant)


_CARRY_OUT: Mapping[type[j.Effect], Callable[[RequestDriver, Any], j.Event | None]] = {
    j.Choose: RequestDriver._choose,
    j.AwaitFleet: RequestDriver._await_fleet,
    j.SendPrefill: RequestDriver._send_prefill,
    j.SendSeed: RequestDriver._send_seed,
    j.SendDecode: RequestDriver._send_decode,
    j.SendEarly: RequestDriver._send_early,
    j.UseEarly: RequestDriver._use_early,
    j.CloseEarly: RequestDriver._close_early,
    j.ForgoPrefill: RequestDriver._forgo_prefill,
    j.CancelPrefill: RequestDriver._begin_cancel,
    j.ClosePrefill: RequestDriver._close_prefill,
    j.OutlastPrefill: RequestDriver._outlast_prefill,
    j.CloseDecode: RequestDriver._close_decode,
    j.Relay: RequestDriver._relay,
    j.AnswerFromPrefill: RequestDriver._answer_from_prefill,
    j.ForwardRefusal: RequestDriver._forward_refusal,
    j.Fail: RequestDriver._fail,
    j.FailStream: RequestDriver._fail_stream,
    j.Release: RequestDriver._begin_release,
    j.Finish: RequestDriver._finish,
}
"""How each effect is carried out; the result is fed to the journey."""
