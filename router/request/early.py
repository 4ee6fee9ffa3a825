"""An early leg: sent to D while P computes the prompt. It becomes the decode leg, or is given up. A shell: it sends.

It is sent with the name of the hold that P is to make. Its place at D is taken already, and stays taken if it is given
up.
"""

from __future__ import annotations

from typing import Final

from cluster import wire
from cluster.request import Request
from router.core import journey as j
from router.fleet.view import turned_away
from router.http.upstream import EngineLost
from router.request.answering import Answering
from router.request.engine_words import EngineWords
from router.request.legs import AnswerLeg, AnswerOwner, EventSink
from router.request.outgoing import Outgoing
from router.request.parts import Parts
from router.request.seeding import Seeding
from router.telemetry.timing import Stage


class EarlyLeg(AnswerOwner):
    """One early leg of a request."""

    __slots__ = ("_answering", "_leg", "_outgoing", "_parts", "_request", "_seeding", "_sink", "_words")

    def __init__(
        self,
        parts: Parts,
        request: Request,
        outgoing: Outgoing,
        answering: Answering,
        seeding: Seeding,
        words: EngineWords,
        sink: EventSink,
    ) -> None:
        """`sink` gets the leg's events, until it becomes the decode leg."""
        self._parts: Final = parts
        self._request: Final = request
        self._outgoing: Final = outgoing
        self._answering: Final = answering
        self._seeding: Final = seeding
        self._words: Final = words
        self._sink: Final = sink
        self._leg: AnswerLeg | None = None
        """None: the leg is not sent yet, has ended, or has become the decode leg."""

    def send(self, effect: j.SendEarly) -> j.Event | None:
        """Send the leg. Where that is exact, D is to begin with P's token. Returns an event if the leg was not sent."""
        instance, producer, parts = effect.instance, effect.producer, self._parts
        pins = not parts.view.not_exact(producer, instance) and self._seeding.may()
        away = turned_away(parts.view, instance, producer)
        if away is not None:
            return j.EarlyLost(away.because)  # once P has answered, another instance is chosen
        unsigned = wire.early_fields(self._outgoing.transfer_id(producer, effect.attempt), producer, pins=pins)
        fields = self._outgoing.stamped(unsigned, instance, producer, effect.attempt)
        leg = self._leg = self._answering.new_leg(instance, self)
        leg.producer = producer
        self._seeding.early_unpinned = not pins
        target = parts.view.get(instance).instance
        headers = self._outgoing.early_lines(Stage.DECODE_LEG, target)
        self._answering.transmit(leg, target, headers, fields, once=True)
        return None

    def use(self, transfer: wire.TransferFields) -> j.Event | None:
        """P has answered: the leg pulls this hold, and is the decode leg now. Returns an event if the leg has ended."""
        leg = self._leg
        if leg is None:
            return j.Lost("its early leg is gone")
        leg.pulled = transfer.producer
        if self._request.stream:
            leg.limit_silence(self._parts.limits.stall_s)  # it was silent while P computed
        self._becomes_decode(leg, "used")
        return None

    def _becomes_decode(self, leg: AnswerLeg, because: str) -> None:
        self._forget(because)
        self._answering.adopt(leg)

    def drop(self, because: str = "") -> None:
        """Close the leg, if it is still early. `because`: its label in metrics; empty: the request is over, and the leg
        is not counted.
        """
        leg = self._leg
        if leg is not None:
            self._forget(because)
            if because:
                self._outgoing.early_over(because)
            self._parts.losses.unwatch(leg.instance, leg)
            leg.close()

    def _forget(self, because: str) -> None:
        self._leg, self._seeding.early_unpinned = None, False
        if because:
            self._parts.meters.early_legs.labels(because).inc()

    # -- its events --

    def answer_began(self, leg: AnswerLeg, because: str) -> None:
        """The beginning of a stream with a good status has arrived. `because`: why it is not valid; empty: it is."""
        if leg is self._leg:
            self._sink.run(self._began, leg, because)

    def _began(self, leg: AnswerLeg, because: str) -> j.Event:
        return self._over(leg, self._words.no_stream(leg.instance, leg.pieces, because) if because else None)

    def answer_ended(self, leg: AnswerLeg) -> None:
        """The whole answer has arrived."""
        if leg is self._leg:
            self._sink.run(self._ended, leg)

    def _ended(self, leg: AnswerLeg) -> j.Event:
        return self._over(leg, self._answering.why_none(leg))

    def answer_lost(self, leg: AnswerLeg, lost: EngineLost) -> None:
        """The leg broke off."""
        if leg is self._leg:
            self._sink.run(self._lost, leg, lost)

    def _lost(self, leg: AnswerLeg, lost: EngineLost) -> j.Event:
        return self._over(leg, self._words.lost(leg.instance, lost))

    def answer_left(self, leg: AnswerLeg) -> None:
        """The leg's instance is lost."""
        if leg is self._leg:
            self._sink.run(self._over, leg, j.Lost("the instance was lost"))

    def producer_left(self, leg: AnswerLeg) -> None:
        """The prefill leg is lost, too: the journey closes the early leg."""

    def passed_on(self, event: object) -> None:
        """Never called: an early leg relays nothing."""

    def answer_more(self, data: bytes) -> None:
        """Never called: an early leg relays nothing."""

    def _over(self, leg: AnswerLeg, failure: j.Event | None) -> j.Event:
        """The leg has failed, or has its answer before P has answered."""
        if failure is None:
            self._becomes_decode(leg, "answered first")
            return self._answering.opened(leg, None)
        self.drop("lost")
        return j.EarlyLost(failure.because if type(failure) is j.Lost else "its engine refused it")
