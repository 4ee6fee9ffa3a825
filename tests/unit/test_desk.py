"""Places at the router's desk: taken before the prefill leg, given back once, offered to the line."""

from __future__ import annotations

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from router.desk import Desk, Seat
from router.journey import Choose, Lost
from router.policy import POLICIES
from router.policy.candidates import Wanted
from router.view import View

P, D, D2 = (InstanceId(name) for name in ("p", "d", "d2"))
ASK = Choose(frozenset(), hand_over=True)


def desk(*, places: int = 1, pins: bool = False) -> Desk:
    view = View()
    for name, role in ((P, Role.PREFILL), (D, Role.DECODE)):
        view.add(Instance(id=name, role=role, url=f"http://{name}", pins=pins))
        view.seen(name, ({"id": "m"},), Load())
        view.get(name).credits = 64 if role is Role.PREFILL else places
    return Desk(view, POLICIES["least_load"])


def seat() -> Seat:
    return Seat(Wanted(model="m", hand_over=True))


def test_a_place_is_taken_with_the_choice_and_given_back_at_the_end() -> None:
    here, one = desk(), seat()
    chosen, called = here.choose(one, ASK)
    assert (chosen.prefill, chosen.decode, called) == (P, D, ())
    assert (here.view.get(D).inflight, one.decode) == (1, D)
    assert here.finish(one) == ()
    assert (here.view.get(D).inflight, one.decode) == (0, None)
    assert here.finish(one) == (), "once"


def test_a_place_that_is_given_back_is_offered_to_the_line() -> None:
    here, one, two, three = desk(), seat(), seat(), seat()
    here.choose(one, ASK)
    for late in (two, three):
        chosen, called = here.choose(late, ASK)
        assert (chosen.wait, called) == (True, ())
        assert here.found_none(late) == ()
    assert here.finish(one) == (two,)
    chosen, called = here.choose(two, ASK)
    assert (chosen.decode, called) == (D, ())
    assert len(here.waiting) == 1


def test_who_is_called_and_leaves_passes_the_place_on() -> None:
    here, one, two, three = desk(), seat(), seat(), seat()
    for each in (one, two, three):
        here.choose(each, ASK)
    assert here.finish(one) == (two,)
    assert here.finish(two) == (three,)


def test_choosing_again_gives_the_former_place_back_first() -> None:
    here, one = desk(), seat()
    here.choose(one, ASK)
    chosen, _ = here.choose(one, Choose(frozenset(), hand_over=True))
    assert chosen.decode == D, "its own place does not stand in its way"
    assert here.view.get(D).inflight == 1


def test_the_fleet_that_grows_is_offered_to_all_who_wait() -> None:
    here, one, two, three = desk(), seat(), seat(), seat()
    for each in (one, two, three):
        here.choose(each, ASK)
    here.view.add(Instance(id=D2, role=Role.DECODE, url="http://d2"))
    here.view.seen(D2, ({"id": "m"},), Load())
    assert here.fleet_changed() == (two,)
    assert here.choose(two, ASK)[1] == (three,)
    assert here.choose(three, ASK)[0].decode == D2


def test_an_instance_that_went_away_turns_legs_away() -> None:
    here = desk()
    assert here.turned_away(D) is None
    here.view.unreachable(D)
    assert isinstance(here.turned_away(D), Lost)
    assert isinstance(here.turned_away(InstanceId("nobody")), Lost)


def test_only_an_engine_that_can_be_told_is_pinned() -> None:
    one, two = seat(), seat()
    able, unable = desk(pins=True), desk()
    assert not able.pins(one), "no place yet"
    able.choose(one, ASK)
    unable.choose(two, ASK)
    assert able.pins(one)
    assert not unable.pins(two)
