"""The scheduler: the places of requests, and the requests that wait for one. Pure: the router and the simulator run
this module.

Invariants: a request has at most one place for its answer, from the choice until the request is over, so that a hold
never waits for a place on D; a place that is given back is offered to the flow-control queue.

The requests that are *called* (the methods' results) are to be asked again: their drivers feed `journey.FleetChanged`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from cluster.ids import InstanceId
from router.core.arrays import Ints
from router.core.early_leg import early_in_s
from router.core.journey import Choose, Chosen, Lost
from router.core.values import NO_PROMISE, Promise, Wanted
from router.fleet import events as d
from router.fleet.snapshot import FleetSnapshot
from router.fleet.view import FleetView
from router.predict.margins import PROMPTLY
from router.predict.step_model import ASSUMED
from router.predict.tries import TRY_S
from router.scheduler.flow_control.queue import FlowControlQueue
from router.scheduler.flow_control.saturation import AHEAD_MS, SaturationDetector
from router.scheduler.placements import Placement, Placements
from router.scheduler.scoring.handoff_guard import Foretold, HandoffGuard
from router.scheduler.scoring.prices import Scoring, prices_of
from router.scheduler.scoring.workload import gains

SECOND_LEGS_SHARE = 0.1
"""Second legs (`Choose.second`) for each choice with a prefill leg. In a fleet where all instances are slow, each
second leg makes all others slower; a tenth cannot overload it (the retry budget of Site Reliability Engineering,
chapter 21)."""

SECOND_LEGS_SAVED = 10.0
"""The number of second legs that may be sent at once: one P that hangs has about as many legs of one router."""

TRIED_ROWS: Final = 64
"""In a larger fleet, the first rows stand for all when a try is looked for."""

HANDSHAKE_S = 0.5
"""The time of a first handshake between two engines, with margin (0.1 to 0.3 s on loopback)."""

LOSES = "handing over loses for its class, so it was not offered"
"""The reason in such a choice."""

Calls = tuple[object, ...]


class SchedulingContext:
    """One request at the scheduler."""

    __slots__ = (
        "aggregated", "ahead", "begun", "decode", "degraded", "ended", "entered", "expected", "foretold", "lane",
        "late", "prefill", "promise", "tpot_ms", "tried", "ttft_ms",
        "wanted",
    )  # fmt: skip

    def __init__(self, wanted: Wanted, promise: Promise = NO_PROMISE) -> None:
        self.wanted = wanted
        self.promise = promise
        self.decode: InstanceId | None = None
        """The instance where its answer has a place."""
        self.prefill: InstanceId | None = None
        """The instance of its last prefill leg."""
        self.ahead = 0
        """This router's legs that were there before it, less those that have ended."""
        self.ended = 0
        """The number of this router's ended legs there when that was counted."""
        self.late = False
        """The request is expected to miss its TTFT target."""
        self.tried = False
        """It is, and is let in as a try (`router.predict.tries`)."""
        self.lane = -1
        """The row whose lane for late prompts it uses."""
        self.expected = Placement()
        self.ttft_ms = 0.0
        """The predicted time of its first token from its arrival, at its last choice; 0: no prediction."""
        self.tpot_ms = 0.0
        """The predicted time of each later token."""
        self.degraded = False
        """The request has its class's second promise."""
        self.begun = False
        """Its client had the first token before its last choice."""
        self.aggregated: bool | None = None
        """The guard's decision to serve it aggregated; None: the guard was not asked."""
        self.foretold: Foretold | None = None
        """The prediction at its first placement, until its answer begins."""
        self.entered: tuple[int, Wanted] | None = None
        """Its number in a decision log, and what it wants by that log (`router.scheduler.decision_log`)."""


class Scheduler:
    """The places of one router.

    The class is long because queue, choice and places change together at each event of a request.
    """

    def __init__(
        self,
        view: FleetView,
        policy: Callable[[FleetSnapshot, Wanted], Chosen],
        *,
        admission: bool = False,
        foresees: bool = False,
    ) -> None:
        """The scheduler of one router.

        Args:
            view: its fleet.
            policy: makes the choices.
            admission: keep promises by order, and by admitting no request that would break them
                (`router.scheduler.flow_control.queue`).
            (`router.scheduler.flow_control.queue`).
            foresees: keep predictions of requests for the policy; admission keeps them in any case. A policy that uses
                them is guarded: while handing over loses, it is not offered.
        """
        self.view: Final = view
        self.policy: Final = policy
        self.placements: Final = Placements(view.all()) if foresees or admission else None
        self.guard: Final = HandoffGuard() if foresees else None
        self.line: Final = FlowControlQueue()
        self.saturation: Final = SaturationDetector(self.line) if admission else None
        self.scoring: Final = Scoring(self.saturation)
        self.placed: Final[dict[tuple[InstanceId, str], int]] = {}
        """Places taken, by instance and tenant."""
        self.shares: Mapping[str, float] = {}
        """The tenants' weights; others have 1."""
        self.local_shares: Mapping[str, float] = {}
        """The tenants' weights at this router, if other routers serve the same tenants (`cluster.credits`)."""
        self._now = 0.0
        """The time of the last event."""
        self.wakeup_s: float | None = None
        """When a queued request may find room without any event: call `look` then. Set by any method."""
        self._second_legs = SECOND_LEGS_SAVED
        """The number of second legs that may be sent now."""
        self._ended: Final[dict[InstanceId, int]] = {}
        """The number of this router's ended legs, by instance."""

    # --- as a machine -------------------------------------------------------------------------------------------------

    def handle(self, event: d.SchedulerEvent, now: float) -> tuple[Chosen | SchedulingContext, ...]:
        """Apply one event. Effects: the reply to a request that asked, then the requests that are to ask again.

        `now`: events whose outcome depends on the time carry it themselves.
        """
        effects: tuple[Chosen | SchedulingContext, ...] = _FOLD[type(event)](self, event)
        return effects

    def next_wakeup(self) -> float | None:
        """When a queued request may find room without any event: send `Looked` then."""
        return self.wakeup_s

    @property
    def remembers(self) -> bool:
        """Whether the scheduler needs a request's events between its choice and its end."""
        return self.placements is not None

    # --- choosing -----------------------------------------------------------------------------------------------------

    def choose(self, context: SchedulingContext, effect: Choose, now: float) -> tuple[Chosen, Calls]:
        """Ask the policy, and take D's place before P begins. Without a place the request waits in the queue; a request
        that asks for its second leg keeps its place.
        """
        if effect.second and (self._has_a_queue(context) or self._second_legs < 1):
            return Chosen(None, None, "its prefill instance has a queue, or there are enough second legs"), ()
        self._now = max(self._now, now)
        former, booking = context.decode, context.expected.booking
        context.begun = context.begun or (booking is not None and booking.first_s >= 0)
        context.tried = False
        calls = self.occupy(context, None) if effect.second else self._leave_place(context, now)
        wanted = self._judged(context, self._asks(context, effect, now))
        if context.late and context.promise.sheds:
            calls += self.line.leave(context, placed=False)
            return self._shed(wanted), calls
        chosen = self.policy(self.view.all(), wanted)
        if effect.second and (chosen.prefill is None or self._keeps_apart(effect, wanted, chosen)):
            kept = former if former is not None and self.view.knows(former) else None
            return Chosen(None, None, chosen.because), calls + self.occupy(context, kept)
        if chosen.prefill is not None:
            more = -1.0 if effect.second else SECOND_LEGS_SHARE
            self._second_legs = min(SECOND_LEGS_SAVED, self._second_legs + more)
            context.prefill, context.ended = chosen.prefill, self._ended.get(chosen.prefill, 0)
            context.ahead = self.view.get(chosen.prefill).inflight
            if self._keeps_apart(effect, wanted, chosen):
                chosen = replace(chosen, anew=True)
        if chosen.wait:
            return chosen, calls + self._stand_in_line(context, wanted)
        first = not (effect.second or effect.excluded)  # else it has been let in
        if first and wanted.sheds and self._breaks(context, wanted, chosen):
            self._cannot(context)
            return self._shed(wanted), calls + self.line.leave(context, placed=False)
        calls += self.line.leave(context, placed=chosen.decode is not None)
        if chosen.decode is not None:
            self._take_place(context, wanted, chosen)
            if context.aggregated:
                chosen = replace(chosen, because=f"{chosen.because}; {LOSES}")
            if chosen.prefill is not None:
                chosen = self._with_early(context, chosen, now)
        return chosen, calls + self.occupy(context, chosen.decode)

    def _with_early(self, context: SchedulingContext, chosen: Chosen, now: float) -> Chosen:
        """The choice of two instances, with the time of an early leg if it may have one."""
        prefill, decode = chosen.prefill, chosen.decode
        assert prefill is not None and decode is not None
        if not self.view.get(decode).instance.early:
            return chosen
        expected_s = context.wanted.arrived + context.ttft_ms / 1000 - now if context.ttft_ms > 0 else None
        able = self.view.get(prefill).instance.early
        early_s = early_in_s(able=able, expected_s=expected_s, queued=context.ahead > 0)
        return chosen if early_s is None else replace(chosen, early_s=early_s)

    def _keeps_apart(self, effect: Choose, wanted: Wanted, chosen: Chosen) -> bool:
        """Whether the chosen decode instance must not use the blocks of an instance that holds or computes them."""
        fleet, decode = self.view.all(), chosen.decode
        return decode is not None and not all(
            fleet.pairing.pairs(each, decode, wanted.model) for each in effect.holders
        )

    def pick(self, wanted: Wanted) -> Chosen:
        """An instance for a request without prediction and outside the queue: as soon as credits allow, whatever is
        promised to others. Such requests are few, and with the other limits they would never be served.
        """
        return self.policy(self.view.all(), wanted)

    def _asks(self, context: SchedulingContext, effect: Choose, now: float) -> Wanted:
        promise = context.promise
        return replace(
            context.wanted,
            hand_over=effect.hand_over and not self._aggregated(context, effect, now),
            excluded=effect.excluded,
            routers=self.view.routers,
            ttft_ms=0.0 if context.begun else promise.ttft_ms,
            tpot_ms=promise.tpot_ms,
            sheds=promise.sheds,
            lengths_within=promise.lengths_within,
            late=context.late,
            whose=self.view.all().whose(context.wanted.tenant),
            now=now,
            scoring=self.scoring,
        )

    def _aggregated(self, context: SchedulingContext, effect: Choose, now: float) -> bool:
        """Whether the request is served aggregated although it could be handed over."""
        if (
            context.aggregated is None
            and self.guard is not None
            and effect.hand_over
            and not context.wanted.prefill_only
        ):
            context.aggregated = not self.guard.allows(context.wanted.slo_class, now)
        return bool(context.aggregated)

    def _judged(self, context: SchedulingContext, wanted: Wanted) -> Wanted:
        """Mark whether it can still have its first token in time, on the best instance and without other prompts."""
        if self.saturation is None or context.late or not wanted.ttft_ms:
            return wanted
        rows = self._timed(wanted)
        if not len(rows) or not self.view.all().inflight.step_model.sure(rows):
            return wanted
        prices = prices_of(self.view.all(), wanted)
        if prices.least_alone_ms(rows) <= wanted.ttft_ms:
            return wanted
        if wanted.sheds and self._may_try(wanted, rows):
            context.tried = True
            return wanted
        self._cannot(context)
        return replace(wanted, ttft_ms=context.promise.ttft_ms, tpot_ms=context.promise.tpot_ms, late=context.late)

    def _timed(self, wanted: Wanted) -> Ints:
        """The rows that may compute its prompt. Rows that only decode have timed none."""
        found = self.view.all().ready_for(wanted)
        return found.any if self.view.all().inflight.step_model.sure(found.any) else found.prefills

    def _may_try(self, wanted: Wanted, rows: Ints) -> bool:
        """Whether a request that cannot be in time on any of these rows is let in as a try: they are idle, no prompt
        was timed there of late, and it could be in time if they were as quick as their costs say.
        """
        inflight, late_s = self.view.all().inflight, wanted.now - TRY_S
        if not inflight.tries.due(wanted.ttft_ms, wanted.now):
            return False
        among: list[int] = rows.tolist()
        if any(inflight.rows[row].prompts or inflight.rows[row].timed_s > late_s for row in among):
            return False
        prices, speeds, plain_ms = prices_of(self.view.all(), wanted), inflight.step_model.rows, math.inf
        for row in among[:TRIED_ROWS]:
            plain_ms = min(plain_ms, prices.prompt_at(row) / speeds[row].prefill_factor + speeds[row].first)
        return plain_ms + prices.waited_ms <= PROMPTLY * wanted.ttft_ms

    def _breaks(self, context: SchedulingContext, wanted: Wanted, chosen: Chosen) -> bool:
        """Whether its first token would be late where the policy would send it, by the margin that is learned for it.
        What a hand-over adds is known here. Assumed speeds refuse nothing, and tries are not refused.
        """
        if self.saturation is None or chosen.decode is None or not wanted.ttft_ms or context.tried:
            return False
        inflight = self.view.all().inflight
        row, answer_row = (self.view.get(name).row for name in (chosen.prefill or chosen.decode, chosen.decode))
        first_ms = prices_of(self.view.all(), wanted).first_ms(row, answer_row)
        late = first_ms > inflight.first_margins.limit_ms(wanted.ttft_ms)
        if not late or inflight.step_model.known(row, answer_row) == ASSUMED:
            return False
        if first_ms <= PROMPTLY * wanted.ttft_ms:  # the margin alone refuses it
            due = inflight.tries.due(wanted.ttft_ms, wanted.now)
            context.tried = due and not inflight.rows[row].prompts
        else:
            context.tried = self._may_try(wanted, self._timed(wanted))
        return not context.tried

    def _cannot(self, context: SchedulingContext) -> None:
        """The request's promise cannot be kept: it gets its class's second one, or is late."""
        if context.promise.degraded is not None:
            context.promise, context.degraded = context.promise.degraded, True
        else:
            context.late = True

    def _stand_in_line(self, context: SchedulingContext, wanted: Wanted) -> Calls:
        if self.saturation is None:
            self.line.enter(context, wanted)
            return ()
        fleet = self.view.all()
        rows = fleet.ready_for(wanted).prefills
        prices = prices_of(fleet, wanted)
        work_ms = prices.least_prompt_ms(rows) if len(rows) else 0.0
        speeds = fleet.inflight.step_model.rows
        lead_ms = AHEAD_MS + min([speeds[row].lead for row in rows.tolist()]) if len(rows) else 0.0
        promptly = PROMPTLY
        if wanted.sheds:
            promptly = fleet.inflight.first_margins.of(wanted.ttft_ms)
        lead_ms += self.saturation.pause_ms + (1 - promptly) * wanted.ttft_ms
        self.line.enter(context, wanted, work_ms, lead_ms)
        calls: Calls = ()
        sure = len(rows) and fleet.inflight.step_model.sure(rows)
        for who in self.line.hopeless(wanted.now, len(rows), wanted.whose) if sure else ():
            assert isinstance(who, SchedulingContext)
            self._cannot(who)
            if not who.late or who.promise.sheds:
                calls += (who,)  # it is to ask again, on other terms
        for who in self.line.aged(wanted.now):
            assert isinstance(who, SchedulingContext)
            who.late = False
        return calls

    def _shed(self, wanted: Wanted) -> Chosen:
        rows = self.view.all().ready_for(wanted).prefills
        wait_s = self.line.drains_s(max(1, len(rows)))
        because = f"its first token would come after {wanted.ttft_ms:g} ms, and its class is refused then"
        return Chosen(None, None, because, shed_s=max(1, math.ceil(wait_s)))

    def _take_place(self, context: SchedulingContext, wanted: Wanted, chosen: Chosen) -> None:
        if self.placements is None:
            return
        prices = self.placements.placed(context.expected, wanted, chosen, tried=context.tried)
        assert chosen.decode is not None
        row, answer_row = (self.view.get(name).row for name in (chosen.prefill or chosen.decode, chosen.decode))
        context.ttft_ms, context.tpot_ms = prices.first_ms(row, answer_row), prices.tpot_at(answer_row)
        if self.guard is not None and context.foretold is None and wanted.arrived and not wanted.prefill_only:
            wonders = row != answer_row and self.guard.wonders(wanted.slo_class)
            context.foretold = Foretold(prices, row, answer_row, gains(prices, row, answer_row) if wonders else None)
        if self.saturation is None:
            return
        prompt_ms = prices.prompt_at(row)
        answer_ms = prices.output * prices.longer_at(answer_row)
        self.line.gave(wanted.tenant, (prompt_ms + answer_ms) / self._share(wanted.tenant))
        self.line.took(prompt_ms, wanted.now)
        if wanted.ttft_ms and not context.late:
            self.line.given_up.add(wanted.prompt_tokens, gone=False)
            pause_ms = context.ttft_ms - prices.ttft_at(row)
            self.saturation.took_in_time(prompt_ms, pause_ms, wanted.now)
        if context.late:
            context.lane = row
            self.saturation.took(row)

    def _share(self, tenant: str) -> float:
        return self.local_shares.get(tenant, self.shares.get(tenant, 1.0))

    # --- results ------------------------------------------------------------------------------------------------------

    def prompt_over(
        self,
        context: SchedulingContext,
        now: float,
        *,
        done: bool,
        presumed: bool = False,
        cached_tokens: int | None = None,
    ) -> None:
        """The request's prompt is computed, with `cached_tokens` from the prefix cache (`done`), or will not be, or
        counts as computed as its predicted time has passed (`presumed`).
        """
        self._now = max(self._now, now)
        if self.placements is not None:
            self.placements.prompt_over(
                context.expected,
                context.wanted,
                now,
                done=done,
                presumed=presumed,
                cached_tokens=cached_tokens,
            )
        self._leave_lane(context)
        if self.guard is not None and context.foretold is not None and done:
            self.guard.computed(context.foretold, now)

    def opened(self, context: SchedulingContext, now: float) -> None:
        """The first token of its answer has come from the decoding instance."""
        self._now = max(self._now, now)
        if self.placements is not None:
            self.placements.opened(context.expected, context.wanted, now)
        self._leave_lane(context)
        self._came(context, now)

    def _came(self, context: SchedulingContext, now: float) -> None:
        """The request's answer has begun."""
        if self.guard is not None and context.foretold is not None:
            self.guard.came(context.foretold, now)
        context.foretold = None

    def finish(
        self,
        context: SchedulingContext,
        now: float,
        tokens: int | None = None,
        *,
        cut_off: bool = False,
        engine_ms: d.EngineMs | None = None,
        complete: bool = True,
        paused: bool = False,
    ) -> Calls:
        """The request is over, after `tokens` tokens; None: they were not counted.

        Args:
            context: the request.
            now: seconds.
            tokens: of its answer.
            cut_off: its answer might have become longer: it ended at its limit, or is not complete. Its length is a
                lower bound then.
            engine_ms: if the router could not see it, the engine's own times for the prompt and for each token after
                the first; 0 for a missing one.
            complete: the answer came to its end, be it at its limit. Its times count then,
            paused: unless its client read so slowly that its engine was not read from for a while.
        """
        self._now = max(self._now, now)
        if self.placements is not None:
            self.placements.ended(
                context.expected,
                context.wanted,
                now,
                tokens,
                cut_off=cut_off,
                engine_ms=engine_ms,
                complete=complete,
                paused=paused,
            )
        self._leave_lane(context)
        if (
            self.guard is not None and context.foretold is not None
        ):  # its beginning was not seen: it is in one piece, or has not begun
            if tokens and complete and engine_ms is not None and engine_ms.token > 0:
                began_s = context.foretold.began_s(now, tokens, engine_ms.token)
                self.guard.came(context.foretold, began_s)
            self.guard.gone(context.foretold)
            context.foretold = None
        return self.occupy(context, None) + self.line.leave(context, placed=False)

    def _leave_place(self, context: SchedulingContext, now: float) -> Calls:
        if self.placements is not None:
            self.placements.let_go(context.expected, now)
        self._leave_lane(context)
        return self.occupy(context, None)

    def _leave_lane(self, context: SchedulingContext) -> None:
        if context.lane >= 0 and self.saturation is not None:
            self.saturation.gave_back(context.lane)
        context.lane = -1

    def room(self) -> Calls:
        """A prompt is computed: there may be room for another one before its leg ends."""
        return () if self.saturation is None else self._call_first()

    def look(self, now: float) -> Calls:
        """The time `wakeup_s` has come."""
        self._now, self.wakeup_s = max(self._now, now), None
        return self._call_first()

    def _call_first(self) -> Calls:
        """Offer a place to the queue, if a queued request may find one."""
        return self.line.call_first() if self._may_begin() else ()

    def _may_begin(self) -> bool:
        if self.saturation is None or self.line.patient:
            return True
        if not len(self.line):
            return False
        opens_s = self.saturation.opens_at(self.view.all(), self._now)
        if opens_s <= self._now:
            return True
        self.wakeup_s = opens_s if math.isfinite(opens_s) else None  # else an instance has to come first
        return False

    def found_none(self, context: SchedulingContext) -> Calls:
        """The request waits (`journey.AwaitFleet`): if it was called, the call passes to another request."""
        if not self._may_begin():
            self.line.rests(context)
            return ()
        return self.line.found_none(context)

    def occupy(self, context: SchedulingContext, instance: InstanceId | None) -> Calls:
        """Count its answering leg at this instance, and at no other."""
        if instance == context.decode:
            return ()
        former, context.decode = context.decode, instance
        calls: Calls = ()
        if former is not None:
            self._count(former, context, -1)
            calls = self.leg_ended(former)
        if instance is not None:
            self._count(instance, context, 1)
            self.view.leg_started(instance)
        return calls

    def _count(self, instance: InstanceId, context: SchedulingContext, more: int) -> None:
        at = (instance, context.wanted.tenant)
        places = self.placed.get(at, 0) + more
        if places:
            self.placed[at] = places
        else:
            del self.placed[at]

    def leg_ended(self, instance: InstanceId) -> Calls:
        """A place is free again."""
        self.view.leg_ended(instance)
        if self.view.knows(instance):
            self._ended[instance] = self._ended.get(instance, 0) + 1
        else:
            self._ended.pop(instance, None)
        return self._call_first()

    def _has_a_queue(self, context: SchedulingContext) -> bool:
        """Whether its prefill instance has, since the last look, answered legs that were there before this one, and no
        later ones, as far as counting tells: it works, and in order. Elsewhere the queue is as long, or the policy
        would have chosen it.
        """
        assert context.prefill is not None
        ended = self._ended.get(context.prefill, 0)
        answered, context.ended = ended - context.ended, ended
        context.ahead -= answered
        return answered > 0 and context.ahead >= 0

    def fleet_changed(self) -> Calls:
        """An instance came, left, or reported a change."""
        return self.line.call_all()

    def speaks_for(self, holder: InstanceId, *not_: InstanceId) -> InstanceId | None:
        """Another instance that can tell `holder` to free a hold: a D if there is one, else a P. None: no ready one."""
        others = [seen for seen in self.view.all() if seen.ready and seen.id not in {holder, *not_}]
        found = max(others, key=lambda seen: seen.role.decodes, default=None)
        return None if found is None else found.id

    def pins(self, context: SchedulingContext) -> bool:
        """Whether D's engine can be told which token its answer begins with."""
        known = context.decode is not None and self.view.knows(context.decode)
        return known and context.decode is not None and self.view.get(context.decode).instance.pins

    def turned_away(self, instance: InstanceId) -> Lost | None:
        """The loss that an answering leg gets if its instance takes no more legs; None: send the leg."""
        if self.view.knows(instance) and self.view.get(instance).ready:
            return None
        return Lost("it went away while the prompt was prefilled", untouched=True)  # draining, down, or a new epoch


def _asked(scheduler: Scheduler, event: Any) -> Any:
    chosen, called = scheduler.choose(event.context, event.effect, event.now)
    return (chosen, *called)


def _picked(scheduler: Scheduler, event: Any) -> Any:
    return (scheduler.pick(event.wanted),)


def _shared(scheduler: Scheduler, event: Any) -> Any:
    scheduler.view.routers = event.routers
    scheduler.shares, scheduler.local_shares = event.shares, event.local_shares
    return ()


def _prompt_over(scheduler: Scheduler, event: Any) -> Any:
    scheduler.prompt_over(
        event.context,
        event.now,
        done=event.done,
        presumed=event.presumed,
        cached_tokens=event.cached_tokens,
    )
    return ()


def _opened(scheduler: Scheduler, event: Any) -> Any:
    scheduler.opened(event.context, event.now)
    return ()


def _finished(scheduler: Scheduler, event: Any) -> Any:
    return scheduler.finish(
        event.context,
        event.now,
        event.tokens,
        cut_off=event.cut_off,
        engine_ms=event.engine_ms,
        complete=event.complete,
        paused=event.paused,
    )


def _found_none(scheduler: Scheduler, event: Any) -> Any:
    return scheduler.found_none(event.context)


def _occupied(scheduler: Scheduler, event: Any) -> Any:
    return scheduler.occupy(event.context, event.instance)


def _leg_ended(scheduler: Scheduler, event: Any) -> Any:
    return scheduler.leg_ended(event.instance)


def _room(scheduler: Scheduler, _: Any) -> Any:
    return scheduler.room()


def _look(scheduler: Scheduler, event: Any) -> Any:
    return scheduler.look(event.now)


def _fleet_changed(scheduler: Scheduler, _: Any) -> Any:
    return scheduler.fleet_changed()


_FOLD: Final[Mapping[type, Callable[[Scheduler, Any], Any]]] = {
    d.Shared: _shared,
    d.Asked: _asked,
    d.Picked: _picked,
    d.PromptOver: _prompt_over,
    d.AnswerOpened: _opened,
    d.Finished: _finished,
    d.FoundNone: _found_none,
    d.Occupied: _occupied,
    d.LegEnded: _leg_ended,
    d.Roomy: _room,
    d.Looked: _look,
    d.FleetMoved: _fleet_changed,
}
"""The handler of each event; it returns the effects."""
