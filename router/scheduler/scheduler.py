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
from router.core.early_leg import early_in_s
from router.core.journey import Choose, Chosen
from router.core.values import Wanted
from router.fleet import events as d
from router.fleet.snapshot import FleetSnapshot
from router.fleet.view import FleetView
from router.predict.early_cost import EarlyLegCosts
from router.predict.inflight_request import InflightRequest
from router.scheduler.admission import Admission
from router.scheduler.flow_control.overdue import Overdue, overdue_s
from router.scheduler.flow_control.queue import FlowControlQueue
from router.scheduler.placements import Placements, SchedulingContext, rows_of
from router.scheduler.scoring.handoff_guard import HandoffGuard
from router.scheduler.scoring.prices import Scoring

SECOND_LEGS_SHARE = 0.1
"""Second legs (`Choose.second`) for each choice with a prefill leg or a source. In a fleet where all instances are
slow, each second leg makes all others slower; a tenth cannot overload it (the retry budget of Site Reliability
Engineering, chapter 21)."""

SECOND_LEGS_SAVED = 10.0
"""The number of second legs that may be sent at once: one P that hangs has about as many legs of one router."""

HANDSHAKE_S = 0.5
"""The time of a first handshake between two engines, with margin (0.1 to 0.3 s on loopback)."""

LOOK_S: Final = 0.5
"""Seconds after which a request that found no room asks again, if nothing has happened. Room may come by time alone:
the longer ago prompts were computed, the faster decode steps are expected to be. A later look, set for a prompt, is of
no use to a request that may begin and found no room."""

BEYOND = "it has waited for memory, or is too long for any cache, and the engine is to make room"
"""What `because` says, in addition, of a request that goes beyond an instance's memory (`Overdue`)."""

LOSES = "handing over loses for its class, so it was not offered"
"""What `because` says, in addition, of a request that the guard serves aggregated."""

Calls = tuple[object, ...]
"""Requests that are to ask for a place again."""


class LegCounts:
    """One router's legs, counted: the places of its answers, and what decides about second prefill legs and early
    legs.
    """

    def __init__(self, view: FleetView) -> None:
        self._view: Final = view
        self.placed: Final[dict[tuple[InstanceId, str], int]] = {}
        """Places of answers, by instance and tenant."""
        self._ended: Final[dict[InstanceId, int]] = {}
        """The number of ended legs, by instance."""
        self._second_legs = SECOND_LEGS_SAVED
        """The number of second legs that may be sent now."""
        self.early: Final = EarlyLegCosts()
        """What early legs cost against pulls."""

    def takes_place(self, instance: InstanceId, tenant: str) -> None:
        """An answer has a place there."""
        at = (instance, tenant)
        self.placed[at] = self.placed.get(at, 0) + 1
        self._view.leg_started(instance)

    def gives_back(self, instance: InstanceId, tenant: str) -> None:
        """An answer has left its place."""
        at = (instance, tenant)
        self.placed[at] -= 1
        if not self.placed[at]:
            del self.placed[at]
        self.ended(instance)

    def ended(self, instance: InstanceId) -> None:
        """A leg is over."""
        self._view.leg_ended(instance)
        if self._view.knows(instance):
            self._ended[instance] = self._ended.get(instance, 0) + 1

    def forget(self) -> None:
        """Drop what was counted of instances that have left."""
        for instance in [each for each in self._ended if not self._view.knows(each)]:
            del self._ended[instance]
        self.early.forget(self._view.knows)

    def prompt_leg(
        self, context: SchedulingContext, instance: InstanceId, *, second: bool, aggregated: bool = False
    ) -> None:
        """The request's prefill leg goes to this instance; `aggregated`: its only leg, which may pull."""
        more = -1.0 if second else SECOND_LEGS_SHARE
        self._second_legs = min(SECOND_LEGS_SAVED, self._second_legs + more)
        context.prefill, context.answers_too = instance, aggregated
        context.ended, context.left = self._all_ended(context)
        view = self._view.get(instance)
        row = self._view.all().inflight.rows[view.row]
        context.ahead = row.prompts if aggregated else view.inflight + row.peers_prompts

    def allows_second(self, context: SchedulingContext) -> bool:
        """Whether a second leg may be sent for the request."""
        return not self._has_a_queue(context) and self._second_legs >= 1

    def _has_a_queue(self, context: SchedulingContext) -> bool:
        """Whether its instance has, since the last look, answered legs that were there before this one, and no
        later ones, as far as counting tells: it works, and in order. Elsewhere the queue is as long, or the policy
        would have chosen it.
        """
        ended, left = self._all_ended(context)
        answered, context.ended = ended - context.ended, ended
        context.ahead -= left - context.left
        context.left = left
        unknown = self._view.routers - 1  # a prompt of each peer, which its last note does not have yet
        return answered > 0 and context.ahead >= -unknown

    def _all_ended(self, context: SchedulingContext) -> tuple[int, int]:
        """The number of legs there that have ended, with peers' prompts that were computed; and with all of those that
        have left. Of an aggregated leg, the number of prompts there that have left: an answer's end tells no order.
        """
        instance = context.prefill
        assert instance is not None
        view, own = self._view.get(instance) if self._view.knows(instance) else None, self._ended.get(instance, 0)
        if view is None:
            return own, own
        row = self._view.all().inflight.rows[view.row]
        if context.answers_too:
            left = row.limits.prompts - row.prompts
            return left, left
        return own + row.peers_ended, own + row.peers_left


class Scheduler:
    """The places of one router."""

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
            admission: keep promises by order, and by admitting no request that would break them.
            foresees: keep predictions of requests for the policy; admission keeps them in any case. A policy that uses
                them is guarded: while handing over loses, it is not offered.
        """
        self.view: Final = view
        self.policy: Final = policy
        self.guard: Final = HandoffGuard() if foresees else None
        self.placements: Final = Placements(view.all(), self.guard) if foresees or admission else None
        self.line: Final = FlowControlQueue()
        self.admission: Final = Admission(view.all(), self.line) if admission else None
        self.overdue: Final = Overdue()
        self.scoring: Final = Scoring(None if self.admission is None else self.admission.saturation)
        self.legs: Final = LegCounts(view)
        self.shares: Mapping[str, float] = {}
        """The tenants' weights; others have 1."""
        self.local_shares: Mapping[str, float] = {}
        """The tenants' weights at this router, if other routers serve the same tenants (`cluster.credits`)."""
        self._now = 0.0
        """The time of the last event."""
        self.wakeup_s: float | None = None
        """When a queued request may find room without any event: call `look` then. Set by any method."""

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
        """Whether the scheduler needs each request's events between its choice and its end. Without this it needs those
        of requests with a `trial`: when they are opened.
        """
        return self.placements is not None

    # --- choosing -----------------------------------------------------------------------------------------------------

    def choose(self, context: SchedulingContext, effect: Choose, now: float) -> tuple[Chosen, Calls]:
        """Ask the policy, and take D's place before P begins. Without a place the request waits in the queue; a request
        that asks for its second leg keeps its place. A request whose prompt is held (`Choose.holders`) needs only a D
        that may pull it: the chosen P computes nothing.
        """
        counted = effect.second and not effect.lost  # among the second legs
        if counted and not self.legs.allows_second(context):
            return Chosen(None, None, "its instance has a queue, or there are enough second legs"), ()
        self._now = max(self._now, now)
        fleet, admission, former, booking = self.view.all(), self.admission, context.decode, context.expected.booking
        context.begun = context.begun or (booking is not None and booking.first_s >= 0)
        context.tried = False
        calls = self.occupy(context, None) if effect.second else self._leave_place(context, now)
        wanted, let_in = _as_wanted(self, context, effect, now), effect.second or bool(effect.excluded)
        if admission is not None:
            wanted = admission.judged(context, wanted, let_in=let_in)
            if wanted.late and context.promise.sheds:
                calls += self.line.leave(context, placed=False)
                return admission.refusal(wanted), calls
        chosen = _choose_second(self.policy, fleet, wanted, effect) if effect.second else self.policy(fleet, wanted)
        if chosen.wait and not effect.second:
            wanted, chosen = self._beyond_memory(context, wanted, chosen)
        if effect.second and not _is_second_pair(fleet, effect, wanted, chosen):
            kept = former if former is not None and self.view.knows(former) else None
            return Chosen(None, None, chosen.because), calls + self.occupy(context, kept)
        held, prefill = False, chosen.prefill
        if prefill is not None:
            if _keeps_apart(fleet, effect, wanted, chosen):
                chosen = replace(chosen, anew=True)
            held = bool(effect.holders) and not effect.second and not chosen.anew
            if not held:
                self.legs.prompt_leg(context, prefill, second=counted)
        elif chosen.decode is not None and (chosen.source is not None or effect.instead):
            _end_trial(context)
            self.legs.prompt_leg(context, chosen.decode, second=counted, aggregated=True)
        if chosen.wait:
            if admission is not None:
                return chosen, calls + admission.enter(context, wanted)
            self.line.enter(context, wanted)
            return chosen, calls
        if admission is not None and not let_in and admission.refuses(context, wanted, chosen):
            return admission.refusal(wanted), calls + self.line.leave(context, placed=False)
        calls += self.line.leave(context, placed=chosen.decode is not None)
        if chosen.decode is not None:
            _goes_on(effect, booking)
            self._take_place(context, wanted, chosen, held=held)
            if context.aggregated:
                chosen = replace(chosen, because=f"{chosen.because}; {LOSES}")
            if prefill is not None and not held:
                chosen = _with_early(fleet, self.legs.early, context, effect, chosen, now)
        return chosen, calls + self.occupy(context, chosen.decode)

    def pick(self, wanted: Wanted) -> Chosen:
        """An instance for a request without prediction and outside the queue: as soon as credits allow, whatever is
        promised to others. Such requests are few, and with the other limits they would never be served. If all
        instances are full (`Chosen.wait`), the request asks again once one may have room (`Dispatch.outside`).
        """
        return self.policy(self.view.all(), wanted)

    def _beyond_memory(self, context: SchedulingContext, wanted: Wanted, chosen: Chosen) -> tuple[Wanted, Chosen]:
        """The request found no place: choose again for one that may go beyond the memory of instances (`Overdue`)."""
        fleet = self.view.all()
        full = None if self.placements is None else self.overdue.except_at(fleet, wanted)
        if full is None or self.line.yields(context):
            return wanted, chosen
        beyond = replace(wanted, beyond_memory=full)
        again = self.policy(fleet, beyond)
        return (wanted, chosen) if again.wait else (beyond, replace(again, because=f"{again.because}; {BEYOND}"))

    def _take_place(self, context: SchedulingContext, wanted: Wanted, chosen: Chosen, *, held: bool) -> None:
        if self.placements is None:
            return
        prices = self.placements.placed(context.expected, wanted, chosen, tried=context.tried, held=held)
        row, answer_row = rows_of(self.view.all(), chosen)
        if wanted.beyond_memory is not None:
            self.overdue.took(context, answer_row, wanted.now)
        context.ttft_ms, context.tpot_ms = prices.first_ms(row, answer_row), prices.tpot_at(answer_row)
        if self.admission is not None:
            share = self.local_shares.get(wanted.tenant, self.shares.get(wanted.tenant, 1.0))
            self.admission.placed(context, wanted, chosen, prices, share)

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
        """The request's prompt is computed (`done`), or will not be; the arguments are those of `events.PromptOver`."""
        self._now = max(self._now, now)
        if self.placements is not None:
            self.placements.prompt_over(
                context.expected, context.wanted, now, done=done, presumed=presumed, cached_tokens=cached_tokens
            )
        self._leave_lane(context)

    def opened(self, context: SchedulingContext, now: float) -> None:
        """The first token of its answer has come from the decoding instance."""
        self._now = max(self._now, now)
        _end_trial(context, now)
        if self.placements is not None:
            self.placements.opened(context.expected, context.wanted, now)
        if self.overdue.unopened:
            self.overdue.opened(context)
        self._leave_lane(context)

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
        """The request is over; the arguments are those of `events.Finished`."""
        self._now = max(self._now, now)
        _end_trial(context)
        expected, wanted = context.expected, context.wanted
        if self.placements is not None:
            self.placements.ended(
                expected, wanted, now, tokens, cut_off=cut_off, engine_ms=engine_ms, complete=complete, paused=paused
            )
        if self.overdue.unopened:
            self.overdue.opened(context)
        self._leave_lane(context)
        return self.occupy(context, None) + self.line.leave(context, placed=False)

    def _leave_place(self, context: SchedulingContext, now: float) -> Calls:
        if context.trial is not None:
            _end_trial(context)
        if self.placements is not None:
            self.placements.let_go(context.expected, now)
        if self.overdue.unopened:
            self.overdue.opened(context)
        self._leave_lane(context)
        return self.occupy(context, None)

    def _leave_lane(self, context: SchedulingContext) -> None:
        if self.admission is not None:
            self.admission.leave_lane(context)

    def room(self) -> Calls:
        """A prompt is computed: there may be room for another one before its leg ends."""
        return () if self.admission is None else self._call_first()

    def look(self, now: float) -> Calls:
        """The time `wakeup_s` has come."""
        self._now, self.wakeup_s = max(self._now, now), None
        return self._call_first()

    def _call_first(self, *, again: bool = False) -> Calls:
        """Offer a place to the queue, if a queued request may find one. `again`: there may be several, as the memory
        that an answer has left may be enough for several others.
        """
        if not self._may_begin():
            return ()
        return self.line.call_all() if again else self.line.call_first()

    def _may_begin(self) -> bool:
        if self.admission is None or self.line.patient:
            return True
        if not len(self.line):
            return False
        opens_s = self.admission.saturation.opens_at(self.view.all(), self._now)
        if opens_s <= self._now:
            return True
        self.wakeup_s = opens_s if math.isfinite(opens_s) else None  # else an instance has to come first
        return False

    def found_none(self, context: SchedulingContext) -> Calls:
        """The request waits (`journey.AwaitFleet`): if it was called, the call passes to another request."""
        may_begin, soon_s = self._may_begin(), self._now + LOOK_S
        if self.admission is None:
            soon_s = max(soon_s, self._overdue_s(context))
        if self.wakeup_s is None or (may_begin and self.wakeup_s > soon_s):
            self.wakeup_s = soon_s if soon_s < math.inf else self.wakeup_s
        if not may_begin:
            self.line.rests(context)
            return ()
        return self.line.found_none(context)

    def _overdue_s(self, context: SchedulingContext) -> float:
        """When the request, which found no place, will be overdue (`Overdue`); infinite: it waits for no memory."""
        if self.placements is None:
            return math.inf
        return overdue_s(self.view.all(), context.wanted, self._now, self.view.routers)

    def occupy(self, context: SchedulingContext, instance: InstanceId | None) -> Calls:
        """Count its answering leg at this instance, and at no other."""
        if instance == context.decode:
            return ()
        former, context.decode = context.decode, instance
        calls: Calls = ()
        if former is not None:
            self.legs.gives_back(former, context.wanted.tenant)
            calls = self._call_first(again=True)
        if instance is not None:
            self.legs.takes_place(instance, context.wanted.tenant)
        return calls

    def leg_ended(self, instance: InstanceId) -> Calls:
        """A place is free again."""
        self.legs.ended(instance)
        return self._call_first()

    def fleet_changed(self) -> Calls:
        """An instance came, left, or reported a change."""
        self.legs.forget()
        return self.line.call_all()


def _as_wanted(scheduler: Scheduler, context: SchedulingContext, effect: Choose, now: float) -> Wanted:
    """The request as the policy sees it at this choice."""
    promise = context.promise
    return replace(
        context.wanted,
        hand_over=effect.hand_over and not _aggregated(scheduler.guard, context, effect, now),
        one_prompt=context.wanted.one_prompt and not effect.second,
        excluded=effect.excluded,
        routers=scheduler.view.routers,
        router_number=scheduler.view.router_number,
        ttft_ms=0.0 if context.begun else promise.ttft_ms,
        tpot_ms=promise.tpot_ms,
        sheds=promise.sheds,
        lengths_within=promise.lengths_within,
        late=context.late and not context.begun,
        whose=scheduler.view.all().whose(context.wanted.tenant),
        now=now,
        scoring=scheduler.scoring,
    )


def _choose_second(
    policy: Callable[[FleetSnapshot, Wanted], Chosen], fleet: FleetSnapshot, wanted: Wanted, effect: Choose
) -> Chosen:
    """The first place for a second leg that any of the effect's exclusions allows; without one, the last reply."""
    chosen = policy(fleet, wanted)
    for excluded in effect.otherwise:
        if _is_second_pair(fleet, effect, wanted, chosen):
            break
        chosen = policy(fleet, replace(wanted, excluded=excluded))
    return chosen


def _aggregated(guard: HandoffGuard | None, context: SchedulingContext, effect: Choose, now: float) -> bool:
    """Whether the request is served aggregated although it could be handed over."""
    wanted = context.wanted
    if context.aggregated is None and guard is not None and effect.hand_over and not wanted.prefill_only:
        context.aggregated = not guard.allows(wanted.slo_class, now)
    return bool(context.aggregated)


def _goes_on(effect: Choose, booking: InflightRequest | None) -> None:
    """The first leg of a request with a second one goes on: its prompt still keeps answers there waiting."""
    if effect.second and not effect.instead and booking is not None:
        booking.stall_ms = 0.0


def _is_second_pair(fleet: FleetSnapshot, effect: Choose, wanted: Wanted, chosen: Chosen) -> bool:
    """Whether a second leg can be sent by this choice, and the answer can come from either leg, if both go on."""
    if effect.instead:
        return chosen.decode is not None
    return chosen.prefill is not None and not _keeps_apart(fleet, effect, wanted, chosen)


def _keeps_apart(fleet: FleetSnapshot, effect: Choose, wanted: Wanted, chosen: Chosen) -> bool:
    """Whether the chosen decode instance must not use the blocks of an instance that holds or computes them. An
    instance pulls nothing from itself: it would leave its own hold to the lease.
    """
    decode = chosen.decode
    if decode is None:
        return False
    return not all(each != decode and fleet.pairing.pairs(each, decode, wanted.model) for each in effect.holders)


def _with_early(
    fleet: FleetSnapshot, costs: EarlyLegCosts, context: SchedulingContext, effect: Choose, chosen: Chosen, now: float
) -> Chosen:
    """The choice of two instances, with the time of an early leg if it is to have one."""
    if context.trial is not None:  # of the first prefill leg, and this is a second one
        _end_trial(context)
    prefill, decode = chosen.prefill, chosen.decode
    assert prefill is not None and decode is not None
    if not fleet.by_id[decode].instance.early:
        return chosen
    due_s = context.wanted.arrived + context.ttft_ms / 1000 if context.ttft_ms > 0 else None
    able, queued = fleet.by_id[prefill].instance.early, context.ahead > 0
    early_s = early_in_s(able=able, expected_s=None if due_s is None else due_s - now, queued=queued)
    if early_s is None:
        return chosen
    near, wanted = fleet.near(*rows_of(fleet, chosen)), context.wanted
    first = not (effect.excluded or effect.second or context.begun)
    counts = first and wanted.streamed and not wanted.prefill_only
    leg = costs.choose(prefill, now if due_s is None else due_s, near=near, queued=queued, counts=counts)
    context.trial = leg.trial
    because = f"{chosen.because}; {leg.because}" if leg.because else chosen.because
    return replace(chosen, because=because, early_s=early_s if leg.early else None)


def _end_trial(context: SchedulingContext, now: float | None = None) -> None:
    """The request's own answer has begun at D, `now`; None: that will not be seen."""
    trial, context.trial = context.trial, None
    if trial is not None:
        trial.over(now)


def _asked(scheduler: Scheduler, event: Any) -> Any:
    chosen, called = scheduler.choose(event.context, event.effect, event.now)
    return (chosen, *called)


def _picked(scheduler: Scheduler, event: Any) -> Any:
    return (scheduler.pick(event.wanted),)


def _shared(scheduler: Scheduler, event: Any) -> Any:
    scheduler.view.routers, scheduler.view.router_number = event.routers, event.router_number
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
