"""What the scheduler keeps of each request, and the predictions about it from arrival to end: its answer's length, its
part of the load in flight, prefixes, what the handoff guard compares. Pure.

The scheduler reports events; policies and admission read the results (`FleetSnapshot.inflight`,
`FleetSnapshot.prefixes`). Predictions are compared with results, so that later ones are better: lengths of answers
(`router.predict.answer_lengths`), step times (`router.predict.step_model`), which instance still has which prefix
(`router.predict.prefix_cache`).
"""

from __future__ import annotations

import math
from typing import Final

from cluster.ids import InstanceId
from router.core.journey import Chosen
from router.core.values import NO_PROMISE, Promise, Sent, Wanted
from router.fleet import events as d
from router.fleet.snapshot import FleetSnapshot
from router.predict.answer_lengths import MIDDLE, OUTPUT_UNKNOWN, SHORT, AnswerLengths, Predictor
from router.predict.chunks import CHUNK_BYTES
from router.predict.early_cost import HandOverTrial
from router.predict.inflight_request import InflightRequest
from router.predict.shared_beginnings import Beginnings
from router.predict.transfer_model import ExpectedTransfer
from router.scheduler.scoring.handoff_guard import Foretold, HandoffGuard
from router.scheduler.scoring.prices import Prices, prices_of
from router.scheduler.scoring.workload import gains


class Placement:
    """The predictions for one request."""

    __slots__ = ("booking", "foretold", "lengths", "pulled", "pulls_beginning", "sent")

    def __init__(self) -> None:
        self.lengths: AnswerLengths | None = None
        self.booking: InflightRequest | None = None
        self.sent: list[Sent] = []
        """The instances whose prefix cache is expected to have its prompt from now on, because they compute it."""
        self.pulled: Sent | None = None
        """The same of the instance that pulls it: that one reports nothing of its cache."""
        self.pulls_beginning = False
        """Its prompt's beginning comes from another instance. So the prompt's time, and the cached tokens that its
        engine reports, say nothing about that engine's speed and cache."""
        self.foretold: Foretold | None = None
        """The prediction at its first placement, for the guard, until its answer begins."""


class SchedulingContext:
    """One request at the scheduler. It has many attributes: queue, choice, places and learning each keep theirs here,
    one object for a request in place of four.
    """

    __slots__ = (
        "aggregated", "ahead", "answers_too", "begun", "decode", "degraded", "ended", "entered", "expected", "lane",
        "late", "left", "prefill", "promise", "tpot_ms", "trial", "tried", "ttft_ms", "wanted",
    )  # fmt: skip

    def __init__(self, wanted: Wanted, promise: Promise = NO_PROMISE) -> None:
        self.wanted = wanted
        self.promise = promise
        self.decode: InstanceId | None = None
        """The instance where its answer has a place."""
        self.prefill: InstanceId | None = None
        """The instance of its last prefill leg, or of an aggregated leg with a source."""
        self.answers_too = False
        """The leg at `prefill` is aggregated."""
        self.ahead = 0
        """The legs of this router and the prompts of its peers that were at `prefill` before its prefill leg, less
        those that have left; before an aggregated leg, the prompts."""
        self.ended = 0
        """This router's ended legs there, and its peers' computed prompts, at the last look (`LegCounts`)."""
        self.left = 0
        """The same, with peers' prompts that left without being computed."""
        self.late = False
        """The request is expected to miss its TTFT target."""
        self.tried = False
        """The request would be late or refused by its prediction, and is let in as a try (`router.predict.tries`)."""
        self.lane = -1
        """The row whose lane for late prompts it uses."""
        self.expected = Placement()
        self.ttft_ms = 0.0
        """The predicted time of its first token from its arrival, at its last choice; 0: no prediction."""
        self.tpot_ms = 0.0
        """The predicted time of each later token."""
        self.trial: HandOverTrial | None = None
        """What is to learn when D's own answer begins, until it does."""
        self.degraded = False
        """The request has its class's second promise."""
        self.begun = False
        """Its client had the first token before its last choice."""
        self.aggregated: bool | None = None
        """The guard's decision to serve it aggregated; None: the guard was not asked."""
        self.entered: tuple[int, Wanted] | None = None
        """Its number in a decision log, and what it wants by that log (`router.scheduler.decision_log`)."""


class Placements:
    """The placements of one router's requests."""

    def __init__(self, fleet: FleetSnapshot, guard: HandoffGuard | None = None) -> None:
        """`guard`: learns from them whether handing over loses."""
        self._fleet: Final = fleet
        self._guard: Final = guard
        self.lengths: Final = Predictor()

    def placed(
        self, expected: Placement, wanted: Wanted, chosen: Chosen, *, tried: bool = False, held: bool = False
    ) -> Prices:
        """The policy has found a place. Returns the predicted prices there.

        Args:
            expected: the request's predictions.
            wanted: what the request wants.
            chosen: its place.
            tried: the request is a try (`Tries`).
            held: its prompt is computed, and D pulls it from the instance that holds it: P gets no prompt.
        """
        fleet, inflight = self._fleet, self._fleet.inflight
        prices = prices_of(fleet, wanted)
        prompt_row, answer_row = rows_of(fleet, chosen)
        self.let_go(expected, wanted.now)
        booking = expected.booking = InflightRequest(
            prompt_tokens=wanted.prompt_tokens,
            mean_tokens=wanted.output_tokens or OUTPUT_UNKNOWN,
            short_tokens=float(prices.lengths[SHORT]),
            middle_tokens=float(prices.lengths[MIDDLE]),
            variance=wanted.output_variance,
            tpot_ms=wanted.tpot_ms or math.inf,
            answers=wanted.answers,
        )
        booking.cached_tokens = prices.cached_at(prompt_row)
        booking.margin, booking.sheds = prices.margin_at(answer_row), wanted.sheds
        if wanted.sheds:
            # A request that an instance has failed says nothing of the margin by which it was let in.
            counts = prices.ttft_ms and not wanted.excluded and not tried
            booking.first_margin = inflight.first_margins.of(prices.ttft_ms) if counts else 0.0
            booking.ttft_ms, booking.tried = prices.ttft_ms, tried
            if prices.ttft_ms:
                inflight.tries.let_in(prices.ttft_ms, wanted.now, tried=tried)
        ms, stall_ms = prices.prompt_at(prompt_row), prices.stall_at(prompt_row)
        if not held:
            inflight.prompt_placed(booking, prompt_row, ms, stall_ms, wanted.now)
        expected.pulls_beginning = chosen.source is not None and not held
        if expected.pulls_beginning:
            booking.plain_ms = 0.0
        if answer_row != prompt_row:
            booking.pause_ms = prices.pause_ms(prompt_row, answer_row)
            booking.seeded = not prices.waits(answer_row)
            # Otherwise the pull's end, or the way that its bytes come, is not known.
            if wanted.streamed and not held and prices.learns(answer_row):
                booking.pull = ExpectedTransfer(
                    told_ms=prices.told_ms(prompt_row, answer_row),
                    moving_ms=prices.moving_ms(prompt_row, answer_row),
                    unmoved_ms=prices.unmoved_ms(answer_row),
                    pause_ms=booking.pause_ms,
                    near=fleet.near(prompt_row, answer_row),
                )
        if not wanted.prefill_only:
            if wanted.prefix:
                cached, each = prices.beginnings_in_cache(answer_row), wanted.prefix_block_tokens
                booking.beginnings = Beginnings(prices.beginnings, cached, each, wanted.prompt_tokens)
            inflight.answer_placed(booking, answer_row, wanted.now)
        if prices.match is not None and not held:
            fleet.prefix_uses.count(wanted.prefix, prices.match, wanted.now)
        self._cache(expected, wanted, prompt_row, answer_row, held=held)
        if self._guard is not None and expected.foretold is None and wanted.arrived and not wanted.prefill_only:
            wonders = answer_row != prompt_row and self._guard.wonders(wanted.slo_class)
            wonders = wonders and not prices.copied_at(prompt_row)  # its price is not its own alone
            gained = gains(prices, prompt_row, answer_row) if wonders else None
            expected.foretold = Foretold(prices, prompt_row, answer_row, gained)
        return prices

    def _cache(self, expected: Placement, wanted: Wanted, prompt_row: int, answer_row: int, *, held: bool) -> None:
        """Its instances will have its prompt in their prefix caches."""
        prefixes, each = self._fleet.prefixes, wanted.prefix_block_tokens
        if prefixes is None:
            return
        if not wanted.prefix:
            for row in () if held else {prompt_row, answer_row}:  # too short for a name, it takes space all the same
                prefixes.wrote(row, wanted.prompt_tokens, wanted.now, answer=False)
            return
        if expected.booking is not None:
            expected.booking.chunks = wanted.prefix
        sent = None if held else prefixes.sent(prompt_row, wanted.prefix, wanted.now, each)
        expected.sent = [] if sent is None else [sent]
        pulls = answer_row != prompt_row
        expected.pulled = prefixes.sent(answer_row, wanted.prefix, wanted.now, each) if pulls else None

    def prompt_over(
        self,
        expected: Placement,
        wanted: Wanted,
        now: float,
        *,
        done: bool,
        presumed: bool = False,
        cached_tokens: int | None = None,
    ) -> None:
        """The request's prompt is computed, or will not be, or counts as computed (`presumed`)."""
        if self._guard is not None and expected.foretold is not None and done:
            self._guard.computed(expected.foretold, now)
        if expected.booking is None:
            return
        self._fleet.inflight.prompt_over(expected.booking, now, done=done, presumed=presumed)
        self._first_came(expected.booking, wanted)
        prefixes, sent, expected.sent = self._fleet.prefixes, expected.sent, []
        pulled, expected.pulled = expected.pulled, None
        if not (done or presumed) or prefixes is None or not wanted.prefix_block_tokens:
            return
        text_bytes = round(wanted.prompt_tokens * CHUNK_BYTES / wanted.prefix_block_tokens)
        if expected.pulls_beginning:
            cached_tokens = None
        for each in sent:
            prefixes.answered(
                each, now, prompt_tokens=wanted.prompt_tokens, text_bytes=text_bytes, cached_tokens=cached_tokens
            )
        if pulled is not None:
            prefixes.answered(pulled, now, prompt_tokens=wanted.prompt_tokens, text_bytes=text_bytes)

    def opened(self, expected: Placement, wanted: Wanted, now: float) -> None:
        """The first token of its answer has come from the decoding instance, so its prompt is computed, wherever it
        was.
        """
        if self._guard is not None and expected.foretold is not None:
            self._guard.came(expected.foretold, now)
        expected.foretold = None
        if expected.booking is not None:
            self.prompt_over(expected, wanted, now, done=True)
            self._fleet.inflight.opened(expected.booking, now)
            self._first_came(expected.booking, wanted)

    def _first_came(self, booking: InflightRequest, wanted: Wanted) -> None:
        """Whether its first token was in time, for the margin by which it was let in; once it has come."""
        if not (booking.first_margin or booking.tried) or booking.first_s < 0 or not wanted.arrived:
            return
        inflight, observed_ms = self._fleet.inflight, (booking.first_s - wanted.arrived) * 1000.0
        if booking.first_margin:
            inflight.first_margins.ended(booking.ttft_ms, booking.first_margin, observed_ms)
        elif observed_ms <= booking.ttft_ms:
            inflight.tries.in_time(booking.ttft_ms)
            inflight.first_margins.widen(booking.ttft_ms)
        booking.first_margin, booking.tried = 0.0, False

    def ended(
        self,
        expected: Placement,
        wanted: Wanted,
        now: float,
        tokens: int | None,
        *,
        cut_off: bool = False,
        engine_ms: d.EngineMs | None = None,
        complete: bool = True,
        paused: bool = False,
    ) -> None:
        """The request is over, after `tokens` tokens; None: they were not counted. The other arguments: see
        `events.Finished`.
        """
        booking = expected.booking
        if booking is not None:
            if engine_ms is not None:
                self._fleet.inflight.told(
                    booking, now, engine_ms.prompt, engine_ms.token, engine_ms.first, wanted.prompt_tokens
                )
            if booking.margin and tokens and complete and not paused:
                self._promised(booking, now, tokens, engine_ms)
            if tokens and complete:  # sooner than predicted, if it is in one piece
                self._fleet.inflight.prompt_over(booking, now, done=False, presumed=True)
            if self._fleet.prefixes is not None and self._fleet.inflight.answers_at(booking):
                self._fleet.prefixes.used(booking.decode_row, wanted.prefix, now)
                self._fleet.prefixes.wrote(booking.decode_row, booking.answers * (tokens or 0), now)
            self._fleet.inflight.answer_over(booking, now, 0 if paused else tokens or 0)
        if expected.lengths is not None and tokens:
            self.lengths.learn(expected.lengths, tokens, cut_off=cut_off)
        if self._guard is not None and expected.foretold is not None:
            # the beginning of the answer was not seen: the answer is in one piece, or has not begun
            if tokens and complete and engine_ms is not None and engine_ms.token > 0:
                self._guard.came(expected.foretold, expected.foretold.began_s(now, tokens, engine_ms.token))
            self._guard.gone(expected.foretold)
            expected.foretold = None
        self.let_go(expected, now)

    def _promised(self, booking: InflightRequest, now: float, tokens: int, engine_ms: d.EngineMs | None) -> None:
        """Whether its target was kept, for the margin by which it was let in."""
        observed_ms = 0.0
        if booking.first_s >= 0 and tokens > 1:
            observed_ms = (now - booking.first_s) * 1000.0 / (tokens - 1)
        elif engine_ms is not None:
            observed_ms = engine_ms.token
        if observed_ms > 0:
            margins = self._fleet.inflight.margins.of_class(sheds=booking.sheds)
            margins.ended(booking.tpot_ms, booking.margin, observed_ms)

    def let_go(self, expected: Placement, now: float) -> None:
        """The request has left the place it had."""
        booking, expected.booking, expected.sent = expected.booking, None, []
        if booking is not None:
            self._fleet.inflight.prompt_over(booking, now, done=False)
            self._fleet.inflight.answer_over(booking, now)


def rows_of(fleet: FleetSnapshot, chosen: Chosen) -> tuple[int, int]:
    """The rows of the prompt's and of the answer's instance; the same if one serves the whole request."""
    assert chosen.decode is not None
    return fleet.by_id[chosen.prefill or chosen.decode].row, fleet.by_id[chosen.decode].row
