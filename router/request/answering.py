"""The answering leg of one request: sent, opened or failed, relayed, closed. A shell."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from cluster import wire
from cluster.ids import InstanceId
from cluster.instance import Instance
from cluster.request import Request
from router.core import engine_answers
from router.core import journey as j
from router.fleet import events as d
from router.fleet.view import FleetView, can_pin, turned_away
from router.http.upstream import Answer, EngineLost
from router.request.engine_words import EngineWords
from router.request.in_one_piece import AnswerInOnePiece
from router.request.legs import OVER, AnswerLeg, AnswerOwner, EventSink, PrefillLeg
from router.request.outgoing import Outgoing
from router.request.parts import Parts
from router.request.reply import Reply
from router.request.scheduled import ScheduledRequest
from router.request.sourcing import Sourcing
from router.request.trace import RequestTrace
from router.telemetry.timing import Stage


class Answering(AnswerOwner):
    """The answering leg of one request. It has many attributes: one for each other part of the request that it uses;
    and it is long: one short method for each event of a leg (`AnswerOwner`).
    """

    __slots__ = (
        "_in_one_piece", "_outgoing", "_parts", "_reply", "_request", "_scheduled", "_sink", "_trace", "_words",
        "leg", "paused", "relayed", "way",
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
        sink: EventSink,
    ) -> None:
        """`sink` gets the events of the leg."""
        self._parts: Final = parts
        self._request: Final = request
        self._outgoing: Final = outgoing
        self._scheduled: Final = scheduled
        self._words: Final = words
        self._reply: Final = reply
        self._trace: Final = trace
        self._sink = sink
        self.leg: AnswerLeg | None = None
        self.paused = False
        """The client once read more slowly than the engine wrote: the request's times say nothing about the engine."""
        self.way = "whole"
        """The label in metrics: ``handoff``, or ``whole`` for an aggregated answer."""
        self.relayed = False
        """The client has received a part of an engine's answer."""
        self._in_one_piece: Final = None if request.stream else AnswerInOnePiece(parts, request, scheduled, trace)

    def send(
        self, effect: j.SendDecode, producer: PrefillLeg | None, attempt: int, adapter: str | None
    ) -> j.Event | None:
        """Send the leg. Returns an event if the leg cannot be sent.

        Args:
            effect: what to send, and where.
            producer: the prefill leg whose hold it pulls.
            attempt: the journey's attempt.
            adapter: the digest of the adapter that chose the first token (`wire.decode_body`).
        """
        instance, transfer, parts = effect.instance, effect.transfer, self._parts
        pulls = transfer is not None
        holder = producer if pulls else None
        away = _not_sent(effect, parts.view, holder, begun=self._reply.outlet.begun)
        if away is not None:
            return away
        self.way = "handoff" if pulls else "whole"
        held_by, held_at = (instance, attempt) if holder is None else (holder.instance, holder.attempt)
        self._scheduled.occupy(instance)
        leg = self.leg = self.new_leg(instance, self)
        if transfer is not None:
            leg.pulled, leg.producer = transfer.producer, None if producer is None else producer.instance
        elif self._in_one_piece is not None:
            self._in_one_piece.presume(leg.started)
        target = parts.view.get(instance).instance
        headers = self._outgoing.lines(Stage.DECODE_LEG if pulls else Stage.AGGREGATED_LEG, target)
        source = None if pulls else effect.source

        def send(held: wire.TransferFields | None) -> j.Event | None:
            if held is not None and source is not None:
                held = held.untold()  # its usage counts what it had, and what it pulled
            fields = wire.decode_body({}, held, effect.first_token, adapter)
            if fields:
                fields = self._outgoing.stamped(fields, instance, held_by, held_at)
            # A leg that pulls is sent once: a hold that may have been pulled must not be pulled again.
            self.transmit(leg, target, headers, fields, once=held is not None)
            if leg.producer is not None and parts.view.lost(leg.producer):
                return _holder_lost(leg, self._in_one_piece)
            return None if held is None else _source_held(source, instance, self._in_one_piece)

        if source is None:
            return send(transfer)
        wanted = self._scheduled.context.wanted
        sourcing = Sourcing(parts, self._request, self._outgoing, self._sink, source, wanted, attempt, send)
        leg.source = sourcing
        sourcing.begin()
        return None

    def new_leg(self, instance: InstanceId, owner: AnswerOwner) -> AnswerLeg:
        """A leg to this instance, not sent yet."""
        parts, streams = self._parts, self._request.stream
        leg = AnswerLeg(owner, instance, self._reply.outlet, streams=streams, bytes_max=parts.limits.answer_bytes_max)
        parts.losses.watch(instance, leg)
        return leg

    def transmit(
        self, leg: AnswerLeg, target: Instance, headers: bytes, fields: Mapping[str, Any], *, once: bool
    ) -> None:
        """Send the client's body with these fields. `once`: do not send it again on a new connection if the first one
        breaks.
        """
        leg.http = self._parts.engines.legs.send(
            target.url,
            self._request.path,
            headers,
            self._outgoing.body(fields),
            leg,
            once=once,
            silence_s=self._parts.limits.stall_s if self._request.stream else 0.0,
        )

    def adopt(self, leg: AnswerLeg) -> None:
        """An early leg is the decode leg from now on."""
        now = time.monotonic()
        ahead_s, leg.started, leg.owner = now - leg.started, now, self
        self.leg, self.way = leg, "handoff"
        if self._parts.view.knows(leg.instance):
            self._trace.sends(Stage.DECODE_LEG, self._parts.view.get(leg.instance).instance, ahead_s=ahead_s)

    # -- its events --

    def answer_began(self, leg: AnswerLeg, because: str) -> None:
        """The beginning of a stream with a good status has arrived. `because`: why it is not valid; empty: it is."""
        if leg is self.leg:
            self._sink.run(self._began, leg, because)

    def _began(self, leg: AnswerLeg, because: str) -> j.Event:
        return self.opened(leg, self._words.no_stream(leg.instance, leg.pieces, because) if because else None)

    def answer_ended(self, leg: AnswerLeg) -> None:
        """The whole answer has arrived."""
        if leg is not self.leg:
            return
        if leg.relays:
            self._sink.run(self._reply.ended)
        else:
            self._sink.run(self._ended, leg)

    def _ended(self, leg: AnswerLeg) -> j.Event:
        return self.opened(leg, self.why_none(leg))

    def answer_lost(self, leg: AnswerLeg, lost: EngineLost) -> None:
        """The leg broke off."""
        if leg is not self.leg:
            return
        if leg.relays:
            self._sink.run(partial(self._reply.broke_off, waited=lost.silent), str(lost))
        else:
            self._sink.run(self._lost, leg, lost)

    def _lost(self, leg: AnswerLeg, lost: EngineLost) -> j.Event:
        return self.opened(leg, self._words.lost(leg.instance, lost))

    def answer_left(self, leg: AnswerLeg) -> None:
        """The leg's instance is lost."""
        if leg is self.leg and leg.opening:
            self._sink.run(self.opened, leg, j.Lost("the instance was lost"))

    def producer_left(self, leg: AnswerLeg) -> None:
        """The instance with the hold that the leg pulls is lost."""
        if leg is self.leg and leg.opening:
            self._sink.run(_holder_lost, leg, self._in_one_piece)

    def passed_on(self, event: object) -> None:
        """A chunk has led to this event."""
        assert isinstance(event, j.Lost)
        self._sink.feed(event)

    def answer_more(self, data: bytes) -> None:
        """More bytes of the stream have arrived."""
        self._sink.run(self._reply.feed, data)

    # -- how it begins --

    def why_none(self, leg: AnswerLeg) -> j.Event | None:
        """Why the complete answer that has arrived is not valid; None: it is a valid answer in one piece."""
        answer = Answer(leg.status, leg.content_type, leg.pieces)
        if answer.status != 200:
            return self._words.refused(leg.instance, answer)
        if self._in_one_piece is None:
            return self._words.unfit(leg.instance, "the stream ended before its first token")
        because = self._in_one_piece.read(answer)
        return None if because is None else self._words.unfit(leg.instance, because)

    def opened(self, leg: AnswerLeg, failure: j.Event | None) -> j.Event:
        """The leg's status is known: its answer begins, or it has failed."""
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
        """Relay the leg's bytes to the client from now on. `seeded`: the client already has the first token."""
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
        sent, stall_s = self._reply.sent, self._parts.limits.stall_s
        # While another engine may continue the stream, this one has only its turn of the time that a client waits.
        leg.relay(self._reply.pass_on, stall_s * j.TURN if sent.resumable else 0.0)
        sent.when_long = partial(leg.limit_silence, stall_s)
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

    def close(self, *, keeps_place: bool = False) -> None:
        """Break the leg off, if there is one; its place is free, unless another leg of the request has it."""
        leg, self.leg = self.leg, None
        if leg is not None:
            self._reply.sent.when_long = None
            self._parts.losses.unwatch(leg.instance, leg)
            leg.close()
            self._count_given_up(leg)
        if self._in_one_piece is not None:
            self._in_one_piece.leg_closed()
        if not keeps_place:
            self._scheduled.occupy(None)

    def _count_given_up(self, leg: AnswerLeg) -> None:
        """Count a hand-over that came to nothing: its leg is closed before it has answered, and not by its client."""
        if (
            leg.opening
            and leg.pulled
            and leg.producer is not None
            and (self._reply.failed or not self._reply.outlet.gone)
        ):
            self._parts.meters.leg("decode", time.monotonic() - leg.started)
            self._parts.meters.pulled(leg.producer, leg.instance, "given up: it did not answer in time")

    def presume_no_more(self) -> None:
        """The prompt is known to be computed, or the request is over."""
        if self._in_one_piece is not None:
            self._in_one_piece.presume_no_more()

    def engine_said(self, tokens: int | None) -> d.EngineMs | None:
        """The engine's times for an answer in one piece of so many tokens (`AnswerInOnePiece.engine_said`)."""
        return None if self._in_one_piece is None else self._in_one_piece.engine_said(tokens)

    def part(self) -> None:
        """The request is over: drop the references to its leg and its driver."""
        self.leg, self._sink, self._reply.sent.when_long = None, OVER, None


def _holder_lost(leg: AnswerLeg, in_one_piece: AnswerInOnePiece | None) -> j.HolderLost | None:
    """What the journey is told of a leg whose producer is lost; None: the longest time of its answer is not known."""
    answer_s = 0.0 if in_one_piece is None else in_one_piece.longest_s(leg.instance)
    return None if leg.producer is None or answer_s is None else j.HolderLost(leg.producer, answer_s)


def _source_held(
    source: j.PrefixSource | None, instance: InstanceId, in_one_piece: AnswerInOnePiece | None
) -> j.SourceHeld | None:
    """What the journey is told of a leg that pulls; None: it pulls no prompt's beginning, or its longest time is not
    known.
    """
    if source is not None and in_one_piece is not None:
        source = in_one_piece.timed(source, instance)
    return None if source is None else j.SourceHeld(source, instance)


def _not_sent(effect: j.SendDecode, view: FleetView, holder: PrefillLeg | None, *, begun: bool) -> j.Lost | None:
    """The loss of a leg that must not be sent: its instance went away (`turned_away`), or its engine would draw another
    first token while the client has no token yet (`begun` false), which no splice would notice. None: send the leg.
    """
    away = turned_away(view, effect.instance, None if holder is None else holder.instance)
    if away is not None or effect.first_token is None or begun or can_pin(view, effect.instance):
        return away
    return j.Lost("its engine cannot be told the answer's first token", untouched=True, unpinned=True)
