"""The answering leg of one request, until its bytes are relayed: sent, opened or failed, closed. A shell."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from cluster import wire
from cluster.ids import InstanceId
from cluster.instance import Instance
from cluster.request import Request
from router.core import engine_answers
from router.core import journey as j
from router.fleet import events as d
from router.http.upstream import Answer
from router.request.engine_words import EngineWords
from router.request.in_one_piece import AnswerInOnePiece
from router.request.legs import AnswerLeg, LegOwner, PrefillLeg
from router.request.outgoing import Outgoing
from router.request.parts import Parts
from router.request.reply import Reply
from router.request.scheduled import ScheduledRequest
from router.request.sourcing import Sourcing
from router.request.trace import RequestTrace
from router.telemetry.timing import Stage


class Answering:
    """The answering leg of one request."""

    __slots__ = (
        "_in_one_piece", "_outgoing", "_parts", "_reply", "_request", "_scheduled", "_trace", "_words", "leg",
        "paused", "relayed", "way",
    )  # fmt: skip

    def __init__(
        self,
        parts: Parts,
        request: Request,
        outgoing: Outgoing,
        scheduled: ScheduledRequest,
        words: EngineWords,
        reply: Reply,
        trace: RequestTrace,
    ) -> None:
        self._parts: Final = parts
        self._request: Final = request
        self._outgoing: Final = outgoing
        self._scheduled: Final = scheduled
        self._words: Final = words
        self._reply: Final = reply
        self._trace: Final = trace
        self.leg: AnswerLeg | None = None
        self.paused = False
        """Its client once read more slowly than its engine wrote: its times say nothing about the engine."""
        self.way = "whole"
        """The label in metrics: by hand-over, or aggregated ("whole")."""
        self.relayed = False
        """The client has received a part of an engine's answer."""
        self._in_one_piece: Final = None if request.stream else AnswerInOnePiece(parts, request, scheduled, trace)

    def send(self, effect: j.SendDecode, owner: LegOwner, producer: PrefillLeg | None, attempt: int) -> j.Event | None:
        """Send the leg and report its events to `owner`. `producer`: the leg whose hold it pulls."""
        instance, transfer, parts = effect.instance, effect.transfer, self._parts
        away = parts.scheduler.turned_away(instance)
        if away is not None:
            return away
        pulls = transfer is not None
        self.way = "handoff" if pulls else "whole"
        holder = producer if pulls else None
        held_by, held_at = (instance, attempt) if holder is None else (holder.instance, holder.attempt)
        self._scheduled.occupy(instance)
        leg = self._new_leg(instance, owner)
        if transfer is not None:
            leg.pulled, leg.producer = transfer.producer, None if producer is None else producer.instance
        elif self._in_one_piece is not None:
            self._in_one_piece.presume(leg.started)
        target = parts.view.get(instance).instance
        headers = self._outgoing.lines(Stage.DECODE_LEG if pulls else Stage.AGGREGATED_LEG, target)

        def send(held: wire.TransferFields | None) -> None:
            fields = wire.decode_body({}, held, effect.first_token)
            if fields:
                fields = self._outgoing.stamped(fields, instance, held_by, held_at)
            # A leg that pulls is sent once: a hold that may have been pulled must not be pulled again.
            self._send(leg, target, headers, fields, once=held is not None)

        def send_with(held: wire.TransferFields | None) -> None:
            send(None if held is None else held.untold())  # its usage counts what it had, and what it pulled

        if effect.source is None or pulls:
            send(transfer)
            return None
        wanted = self._scheduled.context.wanted
        sourcing = Sourcing(parts, self._request, self._outgoing, owner, effect.source, wanted, attempt, send_with)
        leg.source = sourcing
        sourcing.begin()
        return None

    def _new_leg(self, instance: InstanceId, owner: LegOwner) -> AnswerLeg:
        parts, streams = self._parts, self._request.stream
        leg = AnswerLeg(owner, instance, self._reply.outlet, streams=streams, bytes_max=parts.limits.answer_bytes_max)
        parts.losses.watch(instance, leg, leg.left)
        self.leg = leg
        return leg

    def _send(self, leg: AnswerLeg, target: Instance, headers: bytes, fields: Mapping[str, Any], *, once: bool) -> None:
        leg.http = self._parts.engines.legs.send(
            target.url,
            self._request.path,
            headers,
            self._outgoing.body(fields),
            leg,
            once=once,
            silence_s=self._parts.limits.stall_s if self._request.stream else 0.0,
        )

    def send_early(self, effect: j.SendEarly, owner: LegOwner, *, pins: bool) -> j.Event | None:
        """Send the leg while its producer computes the prompt, under the name of the hold-to-be. `pins`: D's answer is
        to begin with P's token. Its place is taken already.
        """
        instance, parts = effect.instance, self._parts
        away = parts.scheduler.turned_away(instance)
        if away is not None:
            return j.EarlyLost(away.because)  # once P has answered, another instance is chosen
        name = self._outgoing.transfer_id(effect.producer, effect.attempt)
        unsigned = wire.early_fields(name, effect.producer, pins=pins)
        fields = self._outgoing.stamped(unsigned, instance, effect.producer, effect.attempt)
        leg = self._new_leg(instance, owner)
        leg.early, leg.pins, leg.producer = True, pins, effect.producer
        target = parts.view.get(instance).instance
        self._send(leg, target, self._outgoing.early_lines(Stage.DECODE_LEG, target), fields, once=True)
        return None

    @property
    def early_unpinned(self) -> bool:
        """Whether an early leg is under way that need not begin with P's token."""
        return self.leg is not None and self.leg.early and not self.leg.pins

    def use_early(self, transfer: wire.TransferFields) -> j.Event | None:
        """Its producer has answered: the leg pulls this hold."""
        leg = self.leg
        if leg is None:
            return j.Lost("its early leg is gone")
        leg.pulled = transfer.producer
        if self._request.stream:
            leg.limit_silence(self._parts.limits.stall_s)  # it was silent while P computed
        self._is_decode_leg(leg, "used")
        return None

    def _is_decode_leg(self, leg: AnswerLeg, because: str) -> None:
        """The early leg is the decode leg from now on."""
        ahead_s = leg.becomes_decode(time.monotonic())
        self.way = "handoff"
        self._parts.meters.early_legs.labels(because).inc()
        if self._parts.view.knows(leg.instance):
            self._trace.sends(Stage.DECODE_LEG, self._parts.view.get(leg.instance).instance, ahead_s=ahead_s)

    def drop_early(self, because: str = "closed") -> None:
        """Close the early leg, if there is one; the place at its instance stays taken."""
        leg = self.leg
        if leg is not None and leg.early:
            self.leg = None
            self._forget_answer()
            self._parts.losses.unwatch(leg.instance, leg)
            leg.close()
            self._parts.meters.early_legs.labels(because).inc()

    def _early_over(self, leg: AnswerLeg, failure: j.Event | None) -> j.Event:
        """The early leg has failed, or has its answer before its producer has answered."""
        if failure is not None:
            self.drop_early("lost")
            because = failure.because if type(failure) is j.Lost else "its engine refused it"
            return j.EarlyLost(because)
        self._is_decode_leg(leg, "answered first")
        return self.opened(leg, None)

    # -- how it begins --

    def no_stream(self, leg: AnswerLeg, because: str) -> j.Event:
        """The leg's answer did not begin as a stream."""
        return self.opened(leg, self._words.no_stream(leg.instance, leg.pieces, because))

    def ended(self, leg: AnswerLeg) -> j.Event:
        """The whole answer has arrived, and none of it was relayed."""
        return self.opened(leg, self._why_none(leg))

    def _why_none(self, leg: AnswerLeg) -> j.Event | None:
        """Why what has arrived whole is no answer; None for an answer in one piece."""
        answer = Answer(leg.status, leg.content_type, leg.pieces)
        if answer.status != 200:
            return self._words.refused(leg.instance, answer)
        if self._in_one_piece is None:
            return self._words.unfit(leg.instance, "the stream ended before its first token")
        because = self._in_one_piece.read(answer)
        return None if because is None else self._words.unfit(leg.instance, because)

    def opened(self, leg: AnswerLeg, failure: j.Event | None) -> j.Event:
        """The leg's status is known: its answer begins, or it has failed."""
        if leg.early:
            return self._early_over(leg, failure)
        parts = self._parts
        leg.opening = False
        self._outgoing.forget_body()
        parts.losses.unwatch(leg.instance, leg)
        parts.meters.leg("decode", time.monotonic() - leg.started)
        if leg.pulled and leg.producer is not None and (failure is None or type(failure) is j.Lost):
            because = None if failure is None else failure.because
            parts.meters.pulled(leg.producer, leg.instance, because)
        if failure is not None:
            self.close()
            return failure
        leg.source = None  # it has pulled, or computed
        if leg.pulled:
            parts.view.pair_met(leg.pulled, leg.instance)
        self.presume_no_more()
        if self._request.stream or self._scheduled.context.wanted.prefill_only:
            self._scheduled.opened()  # else the whole answer has arrived, which tells no time
        self._trace.opened()
        return j.Opened()

    # -- relaying --

    def relay(self, *, seeded: bool) -> j.Event | None:
        """Relay its bytes to the client from now on. `seeded`: the client already has its first token."""
        if not self.relayed and not seeded:
            self._parts.meters.first_byte(time.monotonic() - self._request.arrived)
        self.relayed = True
        if self._in_one_piece is not None and self._in_one_piece.arrived is not None:
            answer, told = self._in_one_piece.arrived
            self._reply.respond(200, answer.body, engine_answers.json_type(answer.content_type), told=told)
            return j.Ended()
        leg = self.leg
        assert leg is not None
        self._scheduled.spoken_by(leg.instance)
        # While another engine may continue the stream, this one has only its turn of the time that a client waits.
        leg.relay(self._reply.pass_on, self._parts.limits.stall_s * j.TURN if self._reply.sent.resumable else 0.0)
        if self._reply.outlet.full:
            self.pause()
        return self._reply.relay(leg.content_type, leg.cache_control) or self._reply.feed(leg.pieces)

    def pause(self) -> None:
        """Stop reading from the engine: the client reads too slowly (backpressure)."""
        if self.leg is not None and self.leg.pause():
            self.paused = True

    def resume(self) -> None:
        """Read from the engine again."""
        if self.leg is not None:
            self.leg.resume()

    def close(self) -> None:
        """Break the leg off, if there is one; its place is free."""
        leg, self.leg = self.leg, None
        self._forget_answer()
        if leg is not None:
            self._parts.losses.unwatch(leg.instance, leg)
            leg.close()
        if self._in_one_piece is not None:
            self._in_one_piece.leg_closed()
        self._scheduled.occupy(None)

    def _forget_answer(self) -> None:
        if self._in_one_piece is not None:
            self._in_one_piece.arrived = None

    def presume_no_more(self) -> None:
        """The prompt is known to be computed, or the request is over."""
        if self._in_one_piece is not None:
            self._in_one_piece.presume_no_more()

    def engine_said(self, tokens: int | None) -> d.EngineMs | None:
        """Of an answer in one piece with so many tokens: see `AnswerInOnePiece.engine_said`."""
        return None if self._in_one_piece is None else self._in_one_piece.engine_said(tokens)

    def part(self) -> None:
        """Drop the reference to the leg, which refers to the driver."""
        self.leg = None
