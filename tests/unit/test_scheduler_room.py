"""Which waiting requests are asked again when a prompt is computed; requests without predictions; late requests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from costs.step import StepCost
from router.core.journey import Choose
from router.core.values import Promise, Wanted
from router.fleet.snapshot import FleetSnapshot
from router.fleet.view import FleetView
from router.predict.inflight_load import DUTY_S
from router.predict.margins import PROMPTLY, WIDEST
from router.predict.step_model import SURE, UNKNOWN, Make
from router.scheduler.flow_control.queue import AGING_S_MIN
from router.scheduler.flow_control.saturation import SaturationDetector
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import LOOK_S, Calls, Scheduler
from router.scheduler.scoring.policies import POLICIES
from router.scheduler.scoring.prices import Scoring

ASK = Choose(frozenset(), hand_over=True)
STEP = StepCost(floor_ms=5.0, start_ms=0.0, token_ms=0.01, area_ms=0.0, decode_ms=5.0, context_ms=0.0, request_ms=0.05)
WANTED = Wanted(model="m", hand_over=True, prompt_tokens=1000, arrived=1.0)
FORETOLD = replace(WANTED, output_tokens=200.0, output_lengths=(10, 20, 40, 100, 200, 400, 800))


P, P2, D = InstanceId("p"), InstanceId("p2"), InstanceId("d")


def scheduler(
    *,
    admission: bool,
    makes: Callable[[Instance], Make | None] = lambda _: None,
    prefills: int = 1,
    policy: str = "workload",
    foresees: bool = False,
) -> Scheduler:
    view = FleetView(makes)
    for name, role in ((P, Role.PREFILL), (D, Role.DECODE), (P2, Role.PREFILL))[: 1 + prefills]:
        view.add(Instance(id=name, role=role, url=f"http://{name}"))
        view.seen(name, ({"id": "m"},), Load())
    return Scheduler(view, POLICIES[policy], admission=admission, foresees=foresees)


class Shut(SaturationDetector):
    """A saturation detector that finds every instance full."""

    def opens_until_ms(self, wanted: Wanted) -> float:
        return 0.0

    def lanes(self, wanted: Wanted, fleet: FleetSnapshot) -> list[int] | None:
        return []


@pytest.mark.interpreted
def test_a_request_without_predictions_waits_for_credits_only() -> None:
    here = scheduler(admission=True)
    fleet = here.view.all()
    scoring = Scoring(Shut(here.line))
    asked = Wanted(model=None, hand_over=False)
    assert here.policy(fleet, replace(asked, scoring=scoring)).wait
    assert here.pick(replace(asked)).decode is not None
    for each in fleet:
        each.credits, each.inflight = 1, 1
    assert here.pick(replace(asked)).decode is None


@pytest.mark.interpreted
def test_waiting_requests_are_asked_when_a_prompt_is_computed_if_admission_is_on() -> None:
    here = scheduler(admission=True)
    here.scoring.saturation = Shut(here.line)  # type: ignore[misc]
    waits = SchedulingContext(WANTED, Promise(ttft_ms=60_000))
    assert here.choose(waits, ASK, 1.0)[0].wait
    assert here.room() == (waits,)
    best_effort = scheduler(admission=False)
    assert best_effort.room() == ()


@pytest.mark.interpreted
def test_a_tenants_share_counts_by_the_part_of_its_demand_at_this_router() -> None:
    here = scheduler(admission=True)
    here.shares = {"acme": 4.0}
    given = []
    here.line.gave = lambda _, work: given.append(work)  # type: ignore[method-assign]
    for local in ({}, {"acme": 1.0}):
        here.local_shares = local
        context = SchedulingContext(Wanted(model="m", hand_over=True, prompt_tokens=1000, arrived=1.0, tenant="acme"))
        assert here.choose(context, ASK, 1.0)[0].decode is not None
        here.finish(context, 2.0)
    assert given[1] > 3 * given[0]


def test_the_scheduling_context_keeps_the_predicted_times() -> None:
    here = scheduler(admission=True)
    context = SchedulingContext(WANTED, Promise(ttft_ms=60_000, tpot_ms=500))
    here.choose(context, ASK, 1.25)
    assert context.ttft_ms > 250, "the time that the request has waited is included"
    assert context.tpot_ms > 0


def ask_all(here: Scheduler, called: Calls) -> list[SchedulingContext]:
    """Let the called requests ask, and those that they pass the call on to, until no request asks any more. Returns
    the requests that found a place.
    """
    placed: list[SchedulingContext] = []
    while called:
        each, *rest = called
        assert isinstance(each, SchedulingContext)
        chosen, more = here.choose(each, ASK, 4.0)
        called = (*rest, *more, *(here.found_none(each) if chosen.wait else ()))
        placed += [] if chosen.wait else [each]
    return placed


@pytest.mark.parametrize("admission", [False, True])
def test_a_request_that_needs_more_memory_than_is_free_does_not_hold_up_smaller_ones(admission: bool) -> None:
    """The prompt has more tokens than the busy instance's KV cache has free. A freed place was offered to it alone, so
    all requests behind it waited until their deadlines.
    """
    here = scheduler(admission=admission, foresees=True)
    for each in here.view.all():
        each.credits = 2
    one, two, small = (SchedulingContext(FORETOLD) for _ in range(3))
    large = SchedulingContext(replace(FORETOLD, prompt_tokens=399_900))
    for context in (one, two):
        assert here.choose(context, ASK, 1.0)[0].decode == D
    for context in (large, small):
        assert here.choose(context, ASK, 2.0)[0].wait
        assert here.found_none(context) == ()
    called = here.finish(two, 3.0)
    assert called == (large,), "the requests ask in the order of their arrival"
    assert ask_all(here, called) == [small]
    called = here.finish(one, 4.0) + here.finish(small, 4.0)
    assert ask_all(here, called) == [large], "an instance without answers has room for any request"


def test_memory_that_one_answer_leaves_is_offered_to_as_many_as_fit() -> None:
    """One was asked for each answer that ended: an engine that one long prompt had filled stayed all but empty."""
    here = scheduler(admission=False, foresees=True)
    for each in here.view.all():
        each.credits = 64
    free = here.view.all().inflight.step_model.rows[here.view.get(D).row].capacity
    large = SchedulingContext(replace(FORETOLD, prompt_tokens=int(free) - 4000))
    assert here.choose(large, ASK, 1.0)[0].decode == D
    chats = [SchedulingContext(replace(FORETOLD, prompt_tokens=int(free) // 30)) for _ in range(24)]
    for context in chats:
        assert here.choose(context, ASK, 2.0)[0].wait
        here.found_none(context)
    assert len(ask_all(here, here.finish(large, 3.0))) > 15


def test_a_request_for_a_long_answer_does_not_hold_up_shorter_ones() -> None:
    here = scheduler(admission=False, foresees=True)
    for each in here.view.all():
        each.credits = 2
    one, two, short = (SchedulingContext(FORETOLD) for _ in range(3))
    long = SchedulingContext(replace(FORETOLD, output_tokens=1e9, output_lengths=(10**9,) * 7))
    for context in (one, two):
        assert here.choose(context, ASK, 1.0)[0].decode == D
    for context in (long, short):
        assert here.choose(context, ASK, 2.0)[0].wait
        here.found_none(context)
    assert ask_all(here, here.finish(two, 3.0)) == [short]


@pytest.mark.parametrize("prefill_up", [True, False], ids=["all up", "decode instances alone"])
def test_a_request_with_a_target_is_called_when_an_instance_that_serves_it_whole_has_a_place(prefill_up: bool) -> None:
    """Without prefill instances no prompt was expected to begin anywhere, so a free place was offered to no request."""
    here = scheduler(admission=True, foresees=True)
    here.view.get(P).up, here.view.get(D).credits = prefill_up, 1
    one, two = (SchedulingContext(FORETOLD, Promise(ttft_ms=2000, tpot_ms=50)) for _ in range(2))
    assert here.choose(one, ASK, 1.0)[0].decode == D
    here.opened(one, 1.1)
    assert here.choose(two, ASK, 1.2)[0].wait
    here.found_none(two)
    assert here.room() == (two,)
    assert here.choose(two, ASK, 1.3)[0].wait
    here.found_none(two)
    assert here.finish(one, 1.5, 200) == (two,)
    assert here.choose(two, ASK, 1.5)[0].decode == D


def test_a_request_that_waits_for_steps_to_get_faster_is_asked_again_without_any_event() -> None:
    """A long prompt has just taken much of the instance's time. Its answers are expected to be slow for some seconds,
    and then to have room for another one: no event tells when.
    """
    here = scheduler(admission=True, foresees=True)
    here.view.get(P).up = False
    promise = Promise(ttft_ms=20_000, tpot_ms=10)
    first, long = SchedulingContext(FORETOLD, promise), SchedulingContext(replace(FORETOLD, prompt_tokens=250_000))
    assert here.choose(first, ASK, 1.0)[0].decode == D
    here.opened(first, 1.1)
    assert here.choose(long, ASK, 1.1)[0].decode == D
    here.opened(long, 8.6)
    here.finish(long, 8.6, 1)
    waits = SchedulingContext(replace(FORETOLD, arrived=8.7), promise)
    assert here.choose(waits, ASK, 8.7)[0].wait
    here.wakeup_s = 39.0  # set for a prompt that has been given up since
    assert here.found_none(waits) == ()
    now, asked = 8.7, 0
    while waits.decode is None:
        wakeup_s = here.next_wakeup()
        assert wakeup_s == pytest.approx(now + LOOK_S)
        now, asked = wakeup_s, asked + 1
        assert here.look(now) == (waits,)
        if here.choose(waits, ASK, now)[0].wait:
            assert here.found_none(waits) == ()
    assert asked > 1 and now < 8.7 + 2 * DUTY_S
    here.finish(waits, now + 1.0, 20)
    here.look(now + 1.0)
    assert here.next_wakeup() is None, "no request waits"


def test_without_promises_only_events_make_room() -> None:
    here = scheduler(admission=False, foresees=True)
    here.view.get(D).credits = 1
    one, two = SchedulingContext(FORETOLD), SchedulingContext(FORETOLD)
    assert here.choose(one, ASK, 1.0)[0].decode == D
    assert here.choose(two, ASK, 1.0)[0].wait
    here.found_none(two)
    assert here.next_wakeup() is None


def test_lateness_is_known_although_the_decode_instance_never_computed_a_prompt() -> None:
    """No costs are known, and D never computes a prompt. The observed times of P's prompts decide which requests are
    late.
    """
    here = scheduler(admission=True)
    fleet = here.view.all()
    step_model, p, d = fleet.inflight.step_model, *(fleet.by_id[InstanceId(name)].row for name in "pd")
    for at in range(SURE):
        hopeless = SchedulingContext(WANTED, Promise(ttft_ms=50))
        here.choose(hopeless, ASK, 1.0)
        assert not hopeless.late, f"{at} observed prompts are too few to judge by"
        here.finish(hopeless, 1.0)
        tokens = 100 + 37 * (at % 9)
        step_model.prompt_took(p, UNKNOWN.prompt_ms(tokens), 50 * UNKNOWN.prompt_ms(tokens))
    assert step_model.sure(np.array([p])) and not step_model.sure(np.array([d]))
    hopeless, easy = SchedulingContext(WANTED, Promise(ttft_ms=50)), SchedulingContext(WANTED, Promise(ttft_ms=60_000))
    for context in (hopeless, easy):
        here.choose(context, ASK, 1.0)
    assert hopeless.late and not easy.late


@pytest.mark.parametrize(("sheds", "counted"), [(True, True), (False, True), (True, False)])
def test_a_class_that_refuses_late_requests_refuses_a_first_token_at_the_edge_of_its_target(
    sheds: bool, counted: bool
) -> None:
    """The first token would be in time if all went as predicted. A class that refuses (`sheds`) keeps a margin, because
    an accepted request must meet its target.
    """
    make = Make(prefill=STEP, decode=STEP)
    here = scheduler(admission=True, makes=lambda _: make if counted else None)
    context = SchedulingContext(WANTED, Promise(ttft_ms=1000, sheds=sheds))
    chosen, _ = here.choose(context, ASK, WANTED.arrived + (PROMPTLY + 0.01))
    refused = sheds and counted
    assert (chosen.shed_s is not None, chosen.decode is None, context.late) == (refused, refused, refused)
    in_time = SchedulingContext(WANTED, Promise(ttft_ms=1000, sheds=sheds))
    assert here.choose(in_time, ASK, WANTED.arrived + 0.5)[0].decode is not None


def test_a_second_choice_is_not_refused_for_the_margin() -> None:
    """The request was accepted before; it chooses again because its engine failed or its prefill leg is silent."""
    make = Make(prefill=STEP, decode=STEP)
    here = scheduler(admission=True, makes=lambda _: make)
    context = SchedulingContext(WANTED, Promise(ttft_ms=1000, sheds=True))
    again = Choose(frozenset({InstanceId("another")}), hand_over=True)
    assert here.choose(context, again, WANTED.arrived + (PROMPTLY + 0.01))[0].decode is not None


@pytest.mark.parametrize(("cut_off", "complete"), [(False, True), (True, True), (True, False)])
def test_only_complete_answers_teach_margins_also_if_cut_off_by_their_limit(cut_off: bool, complete: bool) -> None:
    make = Make(prefill=STEP, decode=STEP)
    here = scheduler(admission=True, makes=lambda _: make)
    inflight = here.view.all().inflight
    context = SchedulingContext(WANTED, Promise(ttft_ms=1000, tpot_ms=40, sheds=True))
    here.choose(context, ASK, WANTED.arrived)
    here.opened(context, WANTED.arrived + 2.0)
    assert inflight.first_margins.of(1000) < PROMPTLY, (
        "the first token is a second late, and the margin learns this at once"
    )
    here.finish(context, WANTED.arrived + 2.0 + 0.05 * 19, 20, cut_off=cut_off, complete=complete)
    assert (inflight.margins.shed.of(40) < WIDEST) == complete


@pytest.mark.parametrize("paused", [False, True])
def test_answers_whose_clients_read_slowly_teach_nothing_of_their_engine(paused: bool) -> None:
    """Before, one slow reader made its engine look slow, and narrowed the margin of its class."""
    make = Make(prefill=STEP, decode=STEP)
    here = scheduler(admission=True, makes=lambda _: make)
    inflight = here.view.all().inflight
    for number in range(6):
        now = WANTED.arrived + 60.0 * number
        context = SchedulingContext(replace(WANTED, arrived=now), Promise(ttft_ms=1000, tpot_ms=40, sheds=True))
        assert here.choose(context, ASK, now)[0].decode is not None
        here.opened(context, now + 0.1)
        here.finish(context, now + 0.1 + 0.05 * 19, 20, paused=paused)
    row = here.view.get(InstanceId("p")).row, here.view.get(InstanceId("d")).row
    seen = sum(inflight.step_model.rows[each].steps_seen for each in row)
    assert seen == (0 if paused else 6)
    margins = inflight.margins.shed
    assert margins.of(40) == WIDEST if paused else margins.of(40) < WIDEST


def test_the_first_prompt_still_delays_answers_while_a_second_leg_is_sent() -> None:
    """The first leg is not aborted: its instance only seems to be free."""
    here = scheduler(admission=True, foresees=True, prefills=2, policy="least_load")
    context = SchedulingContext(replace(FORETOLD, prompt_tokens=20_000), Promise())
    first = here.choose(context, ASK, 1.0)[0].prefill
    assert first is not None
    at = here.view.all().inflight.rows[here.view.get(first).row]
    before = at.recent, at.stalled
    assert min(before) > 0
    second = here.choose(context, Choose(frozenset({first}), hand_over=True, second=True), 1.5)[0].prefill
    assert second not in (None, first)
    assert (at.recent, at.stalled) == before


@pytest.mark.parametrize("sheds", [True, False])
def test_an_answer_that_has_begun_is_continued_elsewhere_however_long_ago_it_came(sheds: bool) -> None:
    """The client had the first token in time. If the request were judged by its arrival again, it would be given up as
    late in mid-stream.
    """
    make = Make(prefill=STEP, decode=STEP)
    here = scheduler(admission=True, makes=lambda _: make)
    context = SchedulingContext(WANTED, Promise(ttft_ms=1000, tpot_ms=40, sheds=sheds))
    first = here.choose(context, ASK, WANTED.arrived)[0]
    assert first.decode is not None
    here.opened(context, WANTED.arrived + 0.1)
    again = Choose(frozenset({first.decode}), hand_over=True)
    chosen, _ = here.choose(context, again, WANTED.arrived + 5.0)
    assert chosen.decode is not None and not context.late
    here.finish(context, WANTED.arrived + 6.0, None, complete=True)


TOLD = Make(prefill=STEP, decode=STEP)
LATE_S = WANTED.arrived + 5.0
"""Long after each TTFT target below has passed."""


def asks(*, second: bool, of: InstanceId) -> Choose:
    """The choice that a journey asks for when its prefill instance is silent (`second`) or has failed."""
    return Choose(frozenset({of}), hand_over=True, second=second)


def hands_over(prefills: int) -> Scheduler:
    """A scheduler that hands over even if a hand-over costs more."""
    return scheduler(admission=True, makes=lambda _: TOLD, prefills=prefills, policy="least_load")


def two_prefills(promise: Promise, *, places: int = 64) -> tuple[Scheduler, SchedulingContext, InstanceId]:
    """A request that was placed in time, and its prefill instance."""
    here = hands_over(2)
    here.view.get(D).credits = places
    context = SchedulingContext(WANTED, promise)
    chosen, _ = here.choose(context, ASK, WANTED.arrived)
    assert chosen.prefill is not None and chosen.decode == D
    return here, context, chosen.prefill


def test_a_request_with_several_answers_takes_the_room_of_so_many_until_it_ends() -> None:
    here = hands_over(1)
    rows = here.view.all().inflight.rows
    context = SchedulingContext(replace(WANTED, answers=16))
    chosen, _ = here.choose(context, ASK, WANTED.arrived)
    assert chosen.decode == D
    at = rows[here.view.get(D).row]
    assert at.decoding == 16
    here.opened(context, WANTED.arrived + 0.1)
    here.finish(context, WANTED.arrived + 1.0, 20)
    assert (at.decoding, at.kv_mean, at.answer_context) == (0, 0.0, 0.0)


def in_lanes(here: Scheduler) -> int:
    """The number of late prompts that count against the instances kept for prompts in time."""
    assert here.admission is not None
    return sum(here.admission.saturation._late.values())


@pytest.mark.parametrize("second", [True, False], ids=["silent", "failed"])
@pytest.mark.parametrize("sheds", [True, False])
def test_a_request_that_was_let_in_goes_to_another_prefill_instance_after_its_target(sheds: bool, second: bool) -> None:
    """A second leg begins after half of the deadline, so the TTFT target is long past. Before, a class that refuses
    refused the request: its second leg never began, or its client got 429 for an instance that had failed.
    """
    here, context, first = two_prefills(Promise(ttft_ms=1000, tpot_ms=40, sheds=sheds))
    chosen, _ = here.choose(context, asks(second=second, of=first), LATE_S)
    assert (chosen.shed_s, chosen.wait) == (None, False), chosen.because
    assert {first, chosen.prefill} == {P, P2} and chosen.decode == D
    assert (context.decode, here.view.get(D).inflight) == (D, 1)
    assert context.late, "its first token is late nevertheless"
    assert in_lanes(here) == 0
    here.finish(context, LATE_S + 1.0)
    assert here.view.get(D).inflight == 0


@pytest.mark.parametrize("sheds", [True, False])
def test_without_a_second_prefill_instance_a_request_keeps_its_place(sheds: bool) -> None:
    here = hands_over(1)
    context = SchedulingContext(WANTED, Promise(ttft_ms=1000, sheds=sheds))
    here.choose(context, ASK, WANTED.arrived)
    chosen, _ = here.choose(context, asks(second=True, of=P), LATE_S)
    assert (chosen.prefill, chosen.decode, chosen.wait, chosen.shed_s) == (None, None, False, None)
    assert (context.decode, here.view.get(D).inflight) == (D, 1)


def test_a_request_that_lost_its_instance_and_waits_is_not_refused_by_those_that_come() -> None:
    """Before, each arriving request made the scheduler give the waiting request up as late, and so refuse it."""
    here, context, first = two_prefills(Promise(ttft_ms=1000, tpot_ms=40, sheds=True), places=1)
    other = SchedulingContext(WANTED, Promise())
    assert here.choose(other, ASK, WANTED.arrived)[0].wait
    here.occupy(context, None)
    assert here.choose(other, ASK, WANTED.arrived)[0].decode == D, "its place goes to the other request"
    again = asks(second=False, of=first)
    assert here.choose(context, again, WANTED.arrived + 0.5)[0].wait
    fresh = SchedulingContext(replace(WANTED, arrived=LATE_S), Promise(ttft_ms=1000, tpot_ms=40, sheds=True))
    _, called = here.choose(fresh, ASK, LATE_S)
    for each in called:
        assert each is context, "its target has passed: it asks again, without a target"
        chosen, more = here.choose(context, again, LATE_S)
        assert (chosen.wait, more) == (True, ()), "it goes on waiting"
    called = here.finish(other, LATE_S + 0.1)
    while context not in called:
        (one,) = called
        chosen, called = here.choose(one, ASK, LATE_S + 0.1)
        called += here.found_none(one) if chosen.wait else here.finish(one, LATE_S + 0.1)
    assert here.choose(context, again, LATE_S + 0.1)[0].decode == D


def test_requests_that_were_not_let_in_are_refused_after_their_target_as_before() -> None:
    here, _, _ = two_prefills(Promise(ttft_ms=1000, sheds=True))
    fresh = SchedulingContext(WANTED, Promise(ttft_ms=1000, sheds=True))
    assert here.choose(fresh, ASK, LATE_S)[0].shed_s is not None


def test_a_late_prompt_whose_instance_is_silent_leaves_its_lane() -> None:
    """Before, the second leg could only go to an instance of that lane. If it went to another instance, the lane stayed
    taken for ever.
    """
    here = hands_over(2)
    assert here.admission is not None
    busy = replace(WANTED, now=LATE_S)
    here.admission.saturation.took_in_time(busy, 1e6, 0.0)  # prompts in time keep all but one lane
    context = SchedulingContext(WANTED, Promise(ttft_ms=1000))
    first = here.choose(context, ASK, LATE_S)[0].prefill
    assert first is not None and context.late and in_lanes(here) == 1
    chosen, _ = here.choose(context, asks(second=True, of=first), LATE_S + 1.0)
    assert {first, chosen.prefill} == {P, P2}
    here.finish(context, LATE_S + 2.0)
    assert in_lanes(here) == 0


def test_an_answer_that_has_begun_late_waits_with_those_in_time_when_its_instance_fails() -> None:
    """The answer has begun, so its TTFT target no longer counts. The request must not wait behind all requests that can
    be in time.
    """
    here = hands_over(1)
    here.view.get(D).credits = 1
    context = SchedulingContext(WANTED, Promise(ttft_ms=1000, tpot_ms=40))
    assert here.choose(context, ASK, LATE_S)[0].decode == D and context.late
    here.opened(context, LATE_S + 0.1)
    here.occupy(context, None)
    other = SchedulingContext(replace(WANTED, arrived=LATE_S), Promise())
    assert here.choose(other, ASK, LATE_S + 0.1)[0].decode == D
    assert here.choose(context, Choose(frozenset({InstanceId("d2")}), hand_over=True), LATE_S + 0.1)[0].wait
    assert not here.line._entries[context].late


def test_a_request_that_has_been_late_for_long_stays_in_the_lanes_when_it_goes_first() -> None:
    """Otherwise, in a long overload, old late requests would take every instance, and no request would be in time."""
    here, promise = hands_over(1), Promise(ttft_ms=1000)
    here.view.get(D).credits = 1
    placed, old = SchedulingContext(WANTED, Promise()), SchedulingContext(WANTED, promise)
    assert here.choose(placed, ASK, WANTED.arrived)[0].decode == D
    assert here.choose(old, ASK, LATE_S)[0].wait and old.late
    later_s = WANTED.arrived + AGING_S_MIN + 1.0
    fresh = SchedulingContext(replace(WANTED, arrived=later_s), promise)
    assert here.choose(fresh, ASK, later_s)[0].wait
    assert (old.late, fresh.late) == (True, False)
    here.line.took(replace(WANTED, now=later_s), 1e6)  # work of requests in time, of which it is owed its share
    assert here.finish(placed, later_s) == (old,)
    assert here.choose(old, ASK, later_s)[0].decode == D
    assert in_lanes(here) == 1
