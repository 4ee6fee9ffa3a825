"""The request driver: carries out one `Journey` on real connections, effects in, events back. It makes no decisions.

No call waits: reports of connections and timers are fed to the journey as they come, and its effects are carried out at
once. Tasks are used only for rare work that outlives an answer (`router.request.releases`). These have a part of their
own: the prefill legs, the answering leg, an early leg, the legs' content, the request at the scheduler, its waits. Each
part gets the reports about its legs and timers, and hands the events on (`EventSink`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from cluster.http.headers import Headers
from cluster.request import Request
from router.core import journey as j
from router.core.clients import Client
from router.core.eligibility import Verdict
from router.core.events import BROKEN
from router.core.slo import SHED
from router.http.outlet import Outlet
from router.predict.predictors import PredictedRequest
from router.request.answering import Answering
from router.request.early import EarlyLeg
from router.request.engine_words import EngineWords
from router.request.legs import EventSink
from router.request.outgoing import Outgoing
from router.request.parts import BUG, Parts
from router.request.prefilling import Prefilling
from router.request.refusals import broken
from router.request.reply import Reply
from router.request.scheduled import ScheduledRequest
from router.request.seeding import Seeding
from router.request.trace import RequestTrace
from router.request.waiting import ClientListener, Waiting
from router.scheduler.placements import SchedulingContext

logger = logging.getLogger("baton.router")

_FAILED: Final = frozenset({j.Lost, j.Refused})


class RequestDriver(EventSink):
    """One client request on its way through the fleet.

    It has many attributes, as it holds each part of the request, and is long, as each effect is a short method here.
    """

    __slots__ = (
        "_answering", "_body_of", "_client", "_counted", "_driven", "_early", "_journey", "_outgoing", "_over",
        "_parted", "_parts", "_pending", "_prefilling", "_request", "_scheduled", "_seeding", "_shed", "_trace",
        "_waiting", "_words", "reply",
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
        body_of: str,
    ) -> None:
        """A request that is about to begin: `journey` is its machine, `context` its state at the scheduler, `verdict`
        says how it may be served. `predicted`: None if no predictions are made. `body_of`: the client whose body is
        counted (`Parts.bodies`); empty: it is not.
        """
        self._parts: Final = parts
        self._request: Final = request
        self._journey: Final = journey
        self._body_of: Final = body_of
        trace = RequestTrace(parts.telling, request, verdict, headers, client)
        self.reply: Final = Reply(
            outlet,
            request,
            trace,
            resumable=verdict.resumable and request.stream,
            counts=predicted is not None,
            event_bytes_max=parts.limits.answer_bytes_max,
        )
        self._trace: Final = trace
        words = self._words = EngineWords(parts, request)
        outgoing = self._outgoing = Outgoing(parts, request, headers, trace)
        scheduled = self._scheduled = ScheduledRequest(parts, context, predicted, trace)
        seeding = self._seeding = Seeding(parts, request, verdict, context, trace)
        self._prefilling: Final = Prefilling(parts, request, outgoing, scheduled, seeding, words, trace, self)
        self._answering: Final = Answering(parts, request, outgoing, scheduled, words, self.reply, trace, self)
        self._early: EarlyLeg | None = None
        """The early leg that was sent last."""
        self._waiting: Final = Waiting(parts, journey, context, trace, self.feed)
        self._client: Final = ClientListener(parts, request, outlet, self._answering, self)
        self._shed = self._counted = False
        self._driven = False
        """Effects are being carried out: events fed meanwhile become pending."""
        self._over = False
        self._parted = False
        """All work at the request's end is done."""
        self._pending: Final[deque[j.Effect]] = deque()

    def begin(self) -> None:
        """Begin. From now on events drive everything. The request has ended once `Parts.open` forgets it."""
        self._parts.open.add(self)
        if self._body_of:
            self._parts.bodies.add(self._body_of, len(self._request.raw))
        self.reply.outlet.exchange = self._client
        try:
            self._trace.begin()
            self._pending.extend(self._journey.begin())
            self._drive()
        except Exception:  # as in `run`
            logger.exception(BUG, self._request.label)
            self._abandon()

    def feed(self, event: j.Event) -> None:
        """Take an event."""
        self.run(None, event)

    def run(self, step: Callable[..., j.Event | None] | None, *given: Any) -> None:
        """Run a step, or without one take an event. Feed the resulting event to the journey, and carry out its effects.
        A bug in any of that ends this request and no other: places are given back.
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
            logger.exception(BUG, self._request.label)
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
        if effect.unbound:
            self._seeding.give_up()
            self._scheduled.unbind()
        return self._scheduled.choose(effect, relayed=self._answering.relayed)

    def _await_fleet(self, _: j.AwaitFleet) -> None:
        self._scheduled.found_none()

    def _send_prefill(self, effect: j.SendPrefill) -> None:
        self._prefilling.send(effect)

    def _send_seed(self, _: j.SendSeed) -> None:
        self._seeding.send(self.reply)

    def _send_early(self, effect: j.SendEarly) -> j.Event | None:
        self._early = EarlyLeg(
            self._parts, self._request, self._outgoing, self._answering, self._seeding, self._words, self
        )
        return self._early.send(effect)

    def _use_early(self, effect: j.UseEarly) -> j.Event | None:
        assert self._early is not None
        return self._early.use(effect.transfer)

    def _close_early(self, _: j.CloseEarly) -> None:
        if self._early is not None:
            self._early.drop("closed")

    def _send_decode(self, effect: j.SendDecode) -> j.Event | None:
        adapter = self._seeding.adapter(effect.first_token)
        return self._answering.send(effect, self._prefilling.producer, self._journey.attempt, adapter)

    def _forgo_prefill(self, effect: j.ForgoPrefill) -> None:
        self._prefilling.forgo(effect.instance)

    def _begin_cancel(self, effect: j.CancelPrefill) -> None:
        self._prefilling.cancel(effect.instance)

    def _close_prefill(self, _: j.ClosePrefill | None = None) -> None:
        self._prefilling.close()

    def _outlast_prefill(self, effect: j.OutlastPrefill) -> None:
        self._prefilling.outlast(effect.instance)

    def _close_decode(self, effect: j.CloseDecode | j.DropDecode | None = None) -> None:
        if self._early is not None:
            self._early.drop()
        self._answering.close(keeps_place=type(effect) is j.DropDecode)

    def _relay(self, _: j.Relay) -> j.Event | None:
        return self._answering.relay(seeded=self._seeding.sent)

    def _answer_from_prefill(self, _: j.AnswerFromPrefill) -> None:
        self._prefilling.answer_with(self.reply)

    def _forward_refusal(self, _: j.ForwardRefusal) -> None:
        self._words.forward(self.reply)

    def _fail(self, effect: j.Fail) -> None:
        self._shed = effect.error.retry_after_s is not None
        self._parts.meters.rejected.labels(str(effect.error.status)).inc()
        self.reply.refuse(effect.error)

    def _fail_stream(self, effect: j.FailStream) -> None:
        self.reply.fail(effect.error)

    def _begin_release(self, effect: j.Release) -> None:
        self._prefilling.release(effect)

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
        self._counted = True
        if reply.broken_splices and not complete:
            parts.meters.broken_seams.inc()
        self._trace.finish(outcome, self._scheduled.context, tokens)
        if reply.outlet.exchange is self._client:  # the answer got no end: do not let the client wait for ever
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
            self._count_broken,
            self._tell_broken,
            self._part,
        )
        for step in steps:
            try:
                step()
            except Exception:  # the next step may still succeed
                logger.exception(BUG, self._request.label)

    def _count_broken(self) -> None:
        if not self._counted:
            request = self._request
            self._parts.meters.ended(request.path, self._answering.way, BROKEN, time.monotonic() - request.arrived)

    def _tell_broken(self) -> None:
        outlet = self.reply.outlet
        if outlet.begun:
            outlet.abort()
        else:
            self._parts.refusals.refuse(outlet, broken(), self._request.client_id, ours=self._request.id)

    def stop(self) -> None:
        """The router ends: ignore all further events, and give up what prefill legs may hold."""
        self._forget()
        self._prefilling.close()

    def _part(self) -> None:
        """Drop the references from its parts and legs: the cycle would keep request, body and tokens until the garbage
        collector runs.
        """
        self._prefilling.part()
        self._answering.part()
        self._early = None
        self._parted = True

    def _forget(self) -> None:
        """No more events are expected."""
        self._over = True
        self._waiting.end()
        self._client.end()
        if self in self._parts.open:
            self._parts.open.discard(self)
            if self._body_of:
                self._parts.bodies.drop(self._body_of, len(self._request.raw))
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
    j.DropDecode: RequestDriver._close_decode,
    j.Relay: RequestDriver._relay,
    j.AnswerFromPrefill: RequestDriver._answer_from_prefill,
    j.ForwardRefusal: RequestDriver._forward_refusal,
    j.Fail: RequestDriver._fail,
    j.FailStream: RequestDriver._fail_stream,
    j.Release: RequestDriver._begin_release,
    j.Finish: RequestDriver._finish,
}
"""How each effect is carried out; the result is fed to the journey."""
