"""Places at the router's scheduler: taken before the prefill leg, given back once, and offered to waiting requests."""

from __future__ import annotations

import msgspec
import pytest

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from router.core.journey import Choose, Chosen, Lost, PrefixSource
from router.core.load_notes import BookingState, LoadNote, PromptState
from router.core.values import ProofStanding, Reported, Wanted
from router.fleet import events as d
from router.fleet.snapshot import FleetSnapshot
from router.fleet.view import FleetView, can_pin, turned_away
from router.predict.prefix_cache import PrefixCacheIndex
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import SECOND_LEGS_SAVED, SECOND_LEGS_SHARE, Scheduler, _keeps_apart
from router.scheduler.scoring.policies import POLICIES

P, D, D2 = (InstanceId(name) for name in ("p", "d", "d2"))
ASK = Choose(frozenset(), hand_over=True)


def scheduler(*, places: int = 1, pins: bool = False, early: bool = False) -> Scheduler:
    view = FleetView()
    for name, role in ((P, Role.PREFILL), (D, Role.DECODE)):
        view.add(Instance(id=name, role=role, url=f"http://{name}", pins=pins, early=early))
        view.seen(name, ({"id": "m"},), Load())
        view.get(name).credits = 64 if role is Role.PREFILL else places
    return Scheduler(view, POLICIES["least_load"])


def context() -> SchedulingContext:
    return SchedulingContext(Wanted(model="m", hand_over=True))


def test_a_place_is_taken_with_the_choice_and_given_back_at_the_end() -> None:
    here, one = scheduler(), context()
    chosen, called = here.choose(one, ASK, 0.0)
    assert (chosen.prefill, chosen.decode, called) == (P, D, ())
    assert (here.view.get(D).inflight, one.decode) == (1, D)
    assert here.finish(one, 0.0) == ()
    assert (here.view.get(D).inflight, one.decode) == (0, None)
    assert here.finish(one, 0.0) == (), "given back once only"


def test_a_place_that_is_given_back_is_offered_to_the_waiting_requests() -> None:
    here, one, two, three = scheduler(), context(), context(), context()
    here.choose(one, ASK, 0.0)
    for late in (two, three):
        chosen, called = here.choose(late, ASK, 0.0)
        assert (chosen.wait, called) == (True, ())
        assert here.found_none(late) == ()
    assert here.finish(one, 0.0) == (two,)
    chosen, called = here.choose(two, ASK, 0.0)
    assert (chosen.decode, called) == (D, (three,)), "memory may be left for another one"
    assert here.choose(three, ASK, 0.0)[0].wait and here.found_none(three) == ()
    assert len(here.line) == 1


def test_a_called_request_that_leaves_passes_its_place_on() -> None:
    here, one, two, three = scheduler(), context(), context(), context()
    for each in (one, two, three):
        here.choose(each, ASK, 0.0)
    assert here.finish(one, 0.0) == (two,)
    assert here.finish(two, 0.0) == (three,)


def test_choosing_again_gives_the_former_place_back_first() -> None:
    here, one = scheduler(), context()
    here.choose(one, ASK, 0.0)
    chosen, _ = here.choose(one, Choose(frozenset(), hand_over=True), 0.0)
    assert chosen.decode == D, "the request's own place does not make D full for it"
    assert here.view.get(D).inflight == 1


def test_places_of_a_new_instance_are_offered_to_the_waiting_requests() -> None:
    here, one, two, three = scheduler(), context(), context(), context()
    for each in (one, two, three):
        here.choose(each, ASK, 0.0)
    here.view.add(Instance(id=D2, role=Role.DECODE, url="http://d2"))
    here.view.seen(D2, ({"id": "m"},), Load())
    assert here.fleet_changed() == (two,)
    assert here.choose(two, ASK, 0.0)[1] == (three,)
    assert here.choose(three, ASK, 0.0)[0].decode == D2


def test_an_instance_that_went_away_turns_legs_away() -> None:
    here = scheduler()
    assert turned_away(here.view, D) is None
    here.view.unreachable(D)
    assert isinstance(turned_away(here.view, D), Lost)
    assert isinstance(turned_away(here.view, InstanceId("nobody")), Lost)


@pytest.mark.parametrize("weights", ["w1", "w2"])
@pytest.mark.parametrize("restarted", [P, D])
def test_an_engine_that_was_started_anew_during_the_prefill_leg_pulls_nothing(
    restarted: InstanceId, weights: str
) -> None:
    """It has other weights, or the same ones without a proof."""
    here, one = scheduler(), context()
    lives = {P: reported(P, epoch=1, weights="w1"), D: reported(D, epoch=1, weights="w1")}
    here.view.fold(tuple(lives.values()))
    if weights == "w1":
        here.view.proven(ProofStanding({P: 1}, {D: 1}, {}, {}))
    assert here.choose(one, ASK, 0.0)[0].prefill == P
    assert turned_away(here.view, D, P) is None
    lives[restarted] = reported(restarted, epoch=2, weights=weights)
    here.view.fold(tuple(lives.values()))
    assert here.view.get(restarted).ready
    assert turned_away(here.view, D) is None, "it may answer what pulls nothing"
    lost = turned_away(here.view, D, P)
    assert lost is not None and lost.untouched and "anew" in lost.because
    again = Choose(frozenset({D}), hand_over=True, holders=(P,))
    assert here.choose(one, again, 1.0)[0].prefill is None, "no other instance can decode"


def test_a_leg_pulls_nothing_once_its_pair_has_failed_a_proof() -> None:
    here = scheduler()
    here.view.proven(ProofStanding({P: 1}, {D: 1}, {}, {}))
    assert turned_away(here.view, D, P) is None
    here.view.distrust({(P, D): "other answers"})
    lost = turned_away(here.view, D, P)
    assert lost is not None and lost.untouched and "proof" in lost.because
    assert turned_away(here.view, D) is None


def test_only_an_engine_with_the_pin_processor_is_pinned() -> None:
    one, two = context(), context()
    able, unable = scheduler(pins=True), scheduler()
    assert not can_pin(able.view, one.decode), "no place yet"
    able.choose(one, ASK, 0.0)
    unable.choose(two, ASK, 0.0)
    assert can_pin(able.view, one.decode)
    assert not can_pin(unable.view, two.decode)


SECOND = Choose(frozenset({P}), hand_over=True, second=True)
P2 = InstanceId("p2")


def with_second(*, places: int = 1) -> Scheduler:
    here = scheduler(places=places)
    here.view.add(Instance(id=P2, role=Role.PREFILL, url="http://p2"))
    here.view.seen(P2, ({"id": "m"},), Load())
    here.view.get(P2).credits = 64
    return here


def test_a_second_leg_keeps_the_place_for_the_answer() -> None:
    here, one = with_second(), context()
    here.choose(one, ASK, 0.0)
    chosen, _ = here.choose(one, SECOND, 0.0)
    assert (chosen.prefill, chosen.decode) == (P2, D), "its own place on D does not make D full"
    assert (one.decode, here.view.get(D).inflight) == (D, 1)


def test_a_second_leg_goes_to_an_excluded_instance_where_there_is_no_other() -> None:
    """The exclusions are tried one after the other; none of them is met while a pair is found."""
    without = msgspec.structs.replace(SECOND, excluded=frozenset({P, D}))
    others = (frozenset({P}), frozenset({D}), frozenset[InstanceId]())
    for here, prefill in ((with_second(), P2), (scheduler(places=9), P)):
        one = context()
        here.choose(one, ASK, 0.0)
        assert here.choose(one, without, 0.0)[0].prefill is None
        chosen, _ = here.choose(one, msgspec.structs.replace(without, otherwise=others), 0.0)
        assert (chosen.prefill, chosen.decode, one.decode) == (prefill, D, D)


def test_a_second_leg_looks_for_no_source() -> None:
    one, asked = context(), []
    one.wanted = msgspec.structs.replace(one.wanted, one_prompt=True)

    def noted(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
        asked.append(wanted.one_prompt)
        return POLICIES["least_load"](fleet, wanted)

    here = Scheduler(with_second().view, noted)
    here.choose(one, ASK, 0.0)
    here.choose(one, SECOND, 0.0)
    assert asked == [True, False]


def test_without_a_second_prefill_instance_nothing_changes() -> None:
    here, one, late = scheduler(), context(), context()
    here.choose(one, ASK, 0.0)
    here.choose(late, ASK, 0.0)
    chosen, called = here.choose(one, SECOND, 0.0)
    assert (chosen.prefill, chosen.decode, chosen.wait) == (None, None, False), "and not aggregated on D either"
    assert (one.decode, here.view.get(D).inflight) == (D, 1)
    assert len(here.line) == 1, "the request itself does not wait in the queue"
    assert called == (late,) and here.choose(late, ASK, 0.0)[0].wait


def test_second_legs_are_few_where_all_instances_are_slow() -> None:
    here, one, count, sent = with_second(places=10_000), context(), 200, 0
    here.choose(one, ASK, 0.0)
    for _ in range(count):
        here.choose(context(), ASK, 0.0)
        sent += here.choose(one, SECOND, 0.0)[0].prefill is not None
    assert SECOND_LEGS_SAVED + count * SECOND_LEGS_SHARE - 2 <= sent <= SECOND_LEGS_SAVED + count * SECOND_LEGS_SHARE


def test_no_second_leg_while_the_instance_answers_earlier_legs() -> None:
    """An instance that answers earlier legs is working. An instance that answers no leg, or only later legs, has lost
    this leg.
    """
    here = with_second(places=100)
    ahead, one = [context() for _ in range(3)], context()
    for each in (*ahead, one):
        here.choose(each, Choose(frozenset({P2}), hand_over=True), 0.0)
        here.view.leg_started(P)
    here.leg_ended(P)
    assert here.choose(one, SECOND, 0.0)[0].prefill is None, "one of three has been answered"
    here.leg_ended(P)
    assert here.choose(one, SECOND, 0.0)[0].prefill is None, "and another"
    assert here.choose(one, SECOND, 0.0)[0].prefill == P2, "and no leg since the last question"


def test_a_second_leg_is_sent_if_later_legs_are_answered_first() -> None:
    here, one = with_second(places=100), context()
    for each in (context(), one, context(), context()):
        here.choose(each, Choose(frozenset({P2}), hand_over=True), 0.0)
        here.view.leg_started(P)
    here.leg_ended(P)
    here.leg_ended(P)
    assert here.choose(one, SECOND, 0.0)[0].prefill == P2


def with_predictions(*, others: str = "w") -> Scheduler:
    """Two prefill and two decode instances, and a scheduler that keeps predictions. `others`: weights of P2 and D2."""
    view = FleetView()
    view.all().prefixes = PrefixCacheIndex()
    for name in (P, P2, D, D2):
        role = Role.PREFILL if name in (P, P2) else Role.DECODE
        weights = "w" if name in (P, D) else others
        view.add(Instance(id=name, role=role, url=f"http://{name}", weights=weights))
        view.seen(name, ({"id": "m"},), Load())
    return Scheduler(view, POLICIES["least_load"], foresees=True)


INSTEAD = Choose(frozenset({D, D2}), hand_over=False, second=True, otherwise=(frozenset({D2}),), instead=True)
"""In place of an aggregated leg at D, with D2 as its source."""


def whole_with_source(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """Serve whole on D; without D on P2; without a place nowhere. D2 is the source."""
    views = [fleet.by_id[each] for each in (D, P2) if each not in wanted.excluded]
    free = [each.id for each in views if each.inflight < (each.credits or 0)]
    if not free:
        return Chosen(None, None, "full", wait=True)
    return Chosen(None, free[0], "whole", source=PrefixSource(D2, 100, 1.0, cold_s=1.0))


def aggregating(*, places: int = 100) -> Scheduler:
    here = with_predictions()
    for each in (D, P2):
        here.view.get(each).credits = places
    return Scheduler(here.view, whole_with_source, foresees=True)


def test_a_leg_in_place_of_an_aggregated_one_may_be_aggregated() -> None:
    """It has the place of the first one, which keeps its own if no other instance can begin."""
    here, one, late = aggregating(places=1), context(), context()
    here.choose(one, ASK, 0.0)
    here.choose(late, ASK, 0.0)
    assert (one.decode, late.decode) == (D, P2)
    only = msgspec.structs.replace(INSTEAD, otherwise=())
    assert here.choose(one, only, 0.0)[0].decode is None and one.decode == D, "P2 is full"
    assert len(here.line) == 0, "the request itself does not wait in the queue"
    chosen, _ = here.choose(one, INSTEAD, 0.0)
    assert (chosen.prefill, chosen.decode, one.decode) == (None, D, D), "its own place does not make D full for it"
    here.finish(one, 0.0)
    here.finish(late, 0.0)
    here.choose(one, ASK, 0.0)
    assert here.choose(one, INSTEAD, 0.0)[0].decode == one.decode == P2
    assert [here.view.get(each).inflight for each in (D, P2)] == [0, 1]
    here.finish(one, 0.0)
    rows = here.view.all().inflight.rows
    assert not any(each.inflight for each in here.view.all()) and not any(each.prompts for each in rows)


def test_an_aggregated_leg_is_not_replaced_while_its_instance_computes_earlier_prompts() -> None:
    """Answers that end there tell nothing: prompts begin in order, answers end in none."""
    here, one = aggregating(), context()
    older, ahead, behind = context(), [context() for _ in range(2)], [context() for _ in range(2)]
    for each in (older, *ahead):
        here.choose(each, ASK, 0.0)
    here.opened(older, 0.5)
    for each in (one, *behind):
        here.choose(each, ASK, 1.0)
    asked = msgspec.structs.replace(INSTEAD, otherwise=())
    here.opened(ahead[0], 2.0)
    assert here.choose(one, asked, 2.0)[0].decode is None, "one of two is computed"
    here.opened(ahead[1], 3.0)
    assert here.choose(one, asked, 3.0)[0].decode is None, "and the other"
    here.finish(older, 4.0)
    assert here.choose(one, asked, 4.0)[0].decode == P2, "and none since the last question"


def test_an_aggregated_leg_is_replaced_if_later_prompts_are_computed_first() -> None:
    here, one, behind = aggregating(), context(), context()
    for each in (one, behind):
        here.choose(each, ASK, 0.0)
    here.opened(behind, 1.0)
    assert here.choose(one, INSTEAD, 1.0)[0].decode == P2


def test_legs_in_place_of_others_are_few() -> None:
    """They count as second legs do: with a tenth of the legs that pull."""
    here, count, sent = aggregating(places=10_000), 200, 0
    for _ in range(count):
        one = context()
        here.choose(one, ASK, 0.0)
        sent += here.choose(one, INSTEAD, 0.0)[0].decode is not None
    assert SECOND_LEGS_SAVED + count * SECOND_LEGS_SHARE - 2 <= sent <= SECOND_LEGS_SAVED + count * SECOND_LEGS_SHARE


def handed_over(here: Scheduler) -> SchedulingContext:
    """A request whose prompt P has computed in a second, and whose decode instance is lost before its leg came there.
    P2 has less to do than P.
    """
    one = SchedulingContext(
        Wanted(model="m", hand_over=True, prompt_tokens=9000, arrived=1.0, prefix=(1, 2, 3), prefix_block_tokens=256)
    )
    chosen, _ = here.choose(one, Choose(frozenset({P2, D2}), hand_over=True), 1.0)
    assert (chosen.prefill, chosen.decode) == (P, D)
    here.prompt_over(one, 2.0, done=True)
    here.view.leg_started(P)
    return one


def test_a_hold_that_another_decode_instance_pulls_is_no_prompt_at_any_prefill_instance() -> None:
    """The chosen prefill instance is not used: the blocks are on P. Before, its prompt counted as computed in the time
    until D2's first token, so each lost decode instance made a prefill instance look faster.
    """
    here = with_predictions()
    one, fleet = handed_over(here), here.view.all()
    rows, second_legs = fleet.inflight.rows, here.legs._second_legs
    before = [(at.prompts, at.stalled, at.recent) for at in rows]
    chosen, _ = here.choose(one, Choose(frozenset({D}), hand_over=True, holders=(P,)), 2.1)
    assert (chosen.prefill, chosen.decode, chosen.anew) == (P2, D2, False)
    assert [(at.prompts, at.stalled, at.recent) for at in rows] == before
    assert (rows[fleet.by_id[D2].row].decoding, one.prefill, here.legs._second_legs) == (1, P, second_legs)
    here.opened(one, 2.15)
    here.finish(one, 3.0, 100)
    assert rows[fleet.by_id[P2].row].timed_s < 0, "no time of P2 was learned"
    assert [at.decoding for at in rows] == [0] * len(rows)
    match = fleet.prefixes.match((1, 2, 3)) if fleet.prefixes is not None else None
    assert match is not None
    assert [match.chunks_of(fleet.by_id[name].row) for name in (P, P2, D2)] == [3, 0, 3]


def test_an_instance_pulls_nothing_from_itself() -> None:
    """An instance that does both was given its own hold: it drops such fields, and the blocks stay for the lease."""
    here, wanted = scheduler(), context().wanted
    ask = Choose(frozenset({D}), hand_over=True, holders=(P,))
    assert _keeps_apart(here.view.all(), ask, wanted, Chosen(P2, P, ""))
    assert not _keeps_apart(here.view.all(), ask, wanted, Chosen(P2, D, ""))


def test_a_prompt_that_must_be_computed_again_is_booked_although_it_is_held() -> None:
    here = with_predictions(others="v")
    one = handed_over(here)
    chosen, _ = here.choose(one, Choose(frozenset({D, P}), hand_over=True, holders=(P,)), 2.1)
    assert (chosen.prefill, chosen.decode, chosen.anew) == (P2, D2, True)
    assert here.view.all().inflight.rows[here.view.get(P2).row].prompts == 1
    assert one.prefill == P2
    here.finish(one, 3.0)


def told(number: int, prompts: tuple[int, ...], prompt: PromptState) -> d.LoadNoted:
    """A router peer's load note on these prompts at P."""
    states = tuple(
        BookingState(
            number=each, prefill=P, prompt=prompt, plain_ms=20.0, prompt_ms=20.0, stall_ms=0.0, placed_ago_ms=0.0,
            ended_ago_ms=0.0, decode="", opened=False, prompt_tokens=100, mean_tokens=9.0, short_tokens=2.0,
            middle_tokens=8.0, variance=1.0, tpot_ms=0.0, pause_ms=0.0,
        )
        for each in prompts
    )  # fmt: skip
    return d.LoadNoted(LoadNote("b", number, states), 0.0)


def test_no_second_leg_while_earlier_prompts_of_other_routers_are_computed() -> None:
    """Before, a leg that waited behind other routers' prompts counted as lost, and its prompt was computed twice."""
    here, one = with_second(places=100), context()
    here.view.routers = 2
    here.view.handle(told(0, (1, 2, 3), PromptState.WAITS), 0.0)
    here.choose(one, Choose(frozenset({P2}), hand_over=True), 0.0)
    here.view.leg_started(P)
    here.view.handle(told(1, (1,), PromptState.DONE), 0.0)
    assert here.choose(one, SECOND, 0.0)[0].prefill is None, "one of three has been computed"
    here.view.handle(told(2, (2, 3), PromptState.DONE), 0.0)
    assert here.choose(one, SECOND, 0.0)[0].prefill is None, "and the others"
    assert here.choose(one, SECOND, 0.0)[0].prefill == P2, "and no prompt since the last question"


def test_prompts_of_a_router_that_is_lost_are_not_ahead_of_others_any_more() -> None:
    here, one, later = with_second(places=100), context(), [context() for _ in range(3)]
    here.view.routers = 2
    here.view.handle(told(0, tuple(range(20)), PromptState.WAITS), 0.0)
    here.choose(one, Choose(frozenset({P2}), hand_over=True), 0.0)
    here.view.leg_started(P)
    here.view.handle(d.RouterPeerLost("b", 0.0), 0.0)
    for each in later:
        here.choose(each, Choose(frozenset({P2}), hand_over=True), 0.0)
        here.view.leg_started(P)
        here.leg_ended(P)
    assert here.choose(one, SECOND, 0.0)[0].prefill == P2, "three later legs have been answered"


def reported(name: InstanceId, *, epoch: int = 0, weights: str = "") -> Reported:
    role = Role.PREFILL if name in (P, P2) else Role.DECODE
    instance = Instance(id=name, role=role, url=f"http://{name}", epoch=epoch, weights=weights)
    return Reported(instance=instance, state="ready", accepting=True, credits=9, load=Load(), models=({"id": "m"},))


def test_legs_of_instances_that_have_left_are_not_counted_for_ever() -> None:
    """Before, an instance that left while it had no legs stayed in the counts, so they grew by an entry for each name
    ever used.
    """
    here = with_second(places=100)
    here.view.fold(tuple(reported(name) for name in (P, P2, D, D2)))
    one = context()
    here.choose(one, Choose(frozenset({D}), hand_over=True), 0.0)
    here.finish(one, 0.0)
    assert D2 in here.legs._ended
    here.view.fold(tuple(reported(name) for name in (P, P2, D)))
    assert not here.view.knows(D2)
    here.fleet_changed()
    assert D2 not in here.legs._ended


# --- early legs ------------------------------------------------------------------------------------------------------


def served(here: Scheduler, count: int, *, early_s: float) -> list[bool]:
    """So many requests, one after the other; with an early leg D's first token comes after `early_s`, else after 9 ms.
    Returns for each whether its leg was early.
    """
    told = []
    for number in range(count):
        one, now = context(), 10.0 + number
        chosen, _ = here.choose(one, ASK, now)
        told.append(chosen.early_s is not None)
        here.opened(one, now + (early_s if told[-1] else 0.009))
        here.finish(one, now + 0.1)
    return told


def test_legs_that_could_be_early_pull_where_early_ones_have_cost_more() -> None:
    here = scheduler(early=True)
    assert served(here, 136, early_s=0.040) == [*(4 * (24 * [True] + 8 * [False])), *(8 * [True])]
    chosen, _ = here.choose(context(), ASK, 500.0)
    assert chosen.early_s is None and chosen.because.endswith("; pulls: early legs took 31 ms longer here")


def test_legs_stay_early_where_they_have_cost_less() -> None:
    here = scheduler(early=True)
    assert served(here, 240, early_s=0.004)[128:] == 112 * [True]
    chosen, _ = here.choose(context(), ASK, 500.0)
    assert chosen.early_s == 0.0 and "early" not in chosen.because


@pytest.mark.parametrize(
    ("ask", "streamed", "begun"),
    [(ASK, False, False), (Choose(frozenset({D2}), hand_over=True), True, False), (ASK, True, True)],
    ids=["in one piece", "second try", "the client has a token"],
)
def test_a_request_that_tells_nothing_goes_the_usual_way(ask: Choose, streamed: bool, begun: bool) -> None:
    here, one = scheduler(early=True), SchedulingContext(Wanted(model="m", hand_over=True, streamed=streamed))
    one.begun = begun
    assert here.choose(one, ask, 0.0)[0].early_s == 0.0 and one.trial is None
    here.opened(one, 5.0)
    here.finish(one, 5.0)
    assert served(here, 32, early_s=0.004) == 24 * [True] + 8 * [False], "it was not counted"


def test_a_request_that_is_placed_again_tells_nothing_of_its_first_place() -> None:
    here, one = scheduler(early=True), context()
    here.choose(one, ASK, 0.0)
    first = one.trial
    here.choose(one, Choose(frozenset({D2}), hand_over=True), 1.0)
    assert first is not None and one.trial is None
    here.opened(one, 99.0)
    here.finish(one, 99.0)
    assert served(here, 135, early_s=0.004).count(False) == 32, "nothing of it is under way, or no pull would count"
    assert [each[-1] for each in here.legs.early.found()] == [pytest.approx(-5)]
