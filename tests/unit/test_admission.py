"""The flow-control queue: its order, its fairness, requests it gives up. The saturation detector: where room is."""

import math

import pytest
from msgspec.structs import replace

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from router.core.values import Wanted
from router.fleet.view import FleetView
from router.scheduler.flow_control.aged_share import AGED_SHARE
from router.scheduler.flow_control.in_time import IN_TIME_S, PLACES_MAX, PlacesInTime
from router.scheduler.flow_control.queue import AGING_S_MIN, FAIR_MS, FlowControlQueue
from router.scheduler.flow_control.saturation import AHEAD_MS, IN_TIME_SPARE, SaturationDetector

ANY = Wanted(model="m", hand_over=True, prompt_tokens=1000, ttft_ms=500.0)


def enter(line: FlowControlQueue, who: str, *, now: float = 0.0, work_ms: float = 20.0, **more: object) -> None:
    line.enter(who, replace(ANY, arrived=now, **more), work_ms)  # type: ignore[arg-type]


def order(line: FlowControlQueue) -> list[object]:
    """All waiting requests, in the order in which they get places that become free one by one."""
    found: list[object] = []
    while len(line):
        (who,) = line.call_first()
        found.append(who)
        assert line.leave(who, placed=True) == ()
    return found


def test_the_earliest_deadline_is_next_and_no_target_counts_as_30_s() -> None:
    line = FlowControlQueue()
    enter(line, "patient", ttft_ms=0.0)
    enter(line, "loose", ttft_ms=20_000.0)
    enter(line, "tight", ttft_ms=300.0)
    enter(line, "late to come", now=0.1, ttft_ms=300.0)
    enter(line, "very loose", ttft_ms=60_000.0)
    assert order(line) == ["tight", "late to come", "loose", "patient", "very loose"]


def test_without_targets_first_come_first_served() -> None:
    line = FlowControlQueue()
    for at in range(5):
        enter(line, f"{at}", now=at * 0.1, ttft_ms=0.0)
    assert order(line) == ["0", "1", "2", "3", "4"]


def test_a_tenant_that_was_given_more_waits_for_the_others() -> None:
    line = FlowControlQueue()
    line.gave("rich", FAIR_MS * 2)
    for at in range(3):
        enter(line, f"rich {at}", tenant="rich", ttft_ms=100.0)
    enter(line, "poor", tenant="poor", ttft_ms=400.0)
    assert line.call_first() == ("rich 0",), "a tenant that arrives anew has no claim on the time it was away"
    line.leave("rich 0", placed=True)
    line.gave("rich", FAIR_MS * 1.1)
    assert order(line) == ["poor", "rich 1", "rich 2"]


def test_a_tenant_that_comes_to_an_empty_queue_has_no_claim_on_the_weeks_before() -> None:
    line = FlowControlQueue()
    line.gave("regular", 7 * 86_400_000.0)
    for at in range(8):
        enter(line, f"new {at}", tenant="new", ttft_ms=20_000.0)
    enter(line, "regular 0", now=1.0, tenant="regular", ttft_ms=500.0)
    assert line.call_first() == ("regular 0",), "its deadline is the first"
    line.leave("regular 0", placed=True)
    line.gave("regular", FAIR_MS / 2)
    enter(line, "regular 1", now=1.0, tenant="regular", ttft_ms=500.0)
    assert line.call_first() == ("new 0",), "the new one is behind by what counts as a burst"
    line.leave("new 0", placed=True)
    line.gave("new", FAIR_MS)
    assert order(line)[0] == "regular 1"


def test_shares_are_kept_over_time() -> None:
    line, given = FlowControlQueue(), {"one": 0.0, "three": 0.0}
    for tenant in given:
        for at in range(400):
            enter(line, f"{tenant} {at}", tenant=tenant, ttft_ms=0.0)
    for _ in range(400):
        (who,) = line.call_first()
        tenant = str(who).split()[0]
        line.leave(who, placed=True)
        line.gave(tenant, 1000.0 / (1 if tenant == "one" else 3))
        given[tenant] += 1000.0
    assert given["three"] / given["one"] == pytest.approx(3.0, rel=0.1)


def test_requests_with_most_work_are_given_up_so_that_most_are_in_time() -> None:
    """The rule of Moore and Hodgson. Of six requests with the same target, one instance can serve five in time if it
    leaves out the large one.
    """
    line = FlowControlQueue()
    for at in range(5):
        enter(line, f"small {at}", work_ms=90.0)
    enter(line, "large", work_ms=400.0)
    assert line.hopeless(ANY, 1) == ["large"]
    assert order(line)[-1] == "large", "late is served last"


def test_no_request_is_given_up_while_all_can_be_in_time() -> None:
    line = FlowControlQueue()
    for at in range(20):
        enter(line, f"{at}", work_ms=80.0)
    assert line.hopeless(ANY, 4) == []
    assert len(line.hopeless(ANY, 1)) == 14, "each must begin by 420 ms; the seventh would begin at 480 ms"


def test_only_a_request_with_a_target_can_miss_it() -> None:
    line = FlowControlQueue()
    enter(line, "whenever", work_ms=1e6, ttft_ms=0.0)
    assert line.hopeless(replace(ANY, now=100.0), 1) == []


def test_late_requests_that_have_aged_get_a_share_while_others_can_be_in_time() -> None:
    """If they went before all others, an overload that lasts would end with late requests alone."""
    line = FlowControlQueue()
    for at in range(40):
        enter(line, f"old {at}", work_ms=600.0)
        assert line.hopeless(ANY, 1) == [f"old {at}"]
    line.age(AGING_S_MIN)
    line.age(AGING_S_MIN)
    now, served = AGING_S_MIN, list[object]()
    for at in range(200):
        for age in ("old", "new"):  # of 1,200 ms of work that come, 600 can be done
            enter(line, f"{age} more {at}", now=now, work_ms=600.0, late=age == "old")
        (who,) = line.call_first()
        line.leave(who, placed=True)
        line.took(replace(ANY, now=now, late=str(who).startswith("old")), 600.0)
        served.append(who)
        now += 0.001
        line.age(now)
    assert sum(str(who).startswith("old") for who in served) == pytest.approx(200 * AGED_SHARE, abs=1)
    assert [who for who in served if str(who).startswith("old")][:3] == ["old 0", "old 1", "old 2"]


def test_an_aged_request_goes_before_other_late_ones_and_needs_no_share_where_all_are_late() -> None:
    line = FlowControlQueue()
    enter(line, "later", now=1.0, late=True)
    enter(line, "old", late=True)
    line.age(AGING_S_MIN)
    enter(line, "new", now=AGING_S_MIN)
    assert order(line) == ["new", "old", "later"]


def test_no_share_is_saved_up_while_no_request_has_aged() -> None:
    line = FlowControlQueue()
    for at in range(50):
        line.took(replace(ANY, now=at * 0.1), 100.0)
    enter(line, "old", late=True)
    line.age(AGING_S_MIN)
    enter(line, "new", now=AGING_S_MIN)
    assert line.call_first() == ("new",)


def test_a_place_that_one_request_cannot_use_is_offered_to_requests_of_another_kind() -> None:
    line = FlowControlQueue()
    enter(line, "long", prompt_tokens=100_000)
    enter(line, "long, too", prompt_tokens=100_000)
    enter(line, "short", prompt_tokens=100)
    enter(line, "other model", model="n")
    assert line.call_first() == ("long",)
    assert line.found_none("long") == ("short",), "not to the request like it, which would find nothing, either"
    assert line.found_none("short") == ("other model",)
    assert line.found_none("other model") == ()
    assert line.call_first() == ("long",), "all of them still wait"


def test_a_called_request_that_leaves_passes_the_place_on() -> None:
    line = FlowControlQueue()
    enter(line, "one")
    enter(line, "two")
    assert line.call_first() == ("one",)
    assert line.leave("one", placed=False) == ("two",)


def test_a_place_that_opens_while_a_request_asks_is_not_forgotten() -> None:
    line = FlowControlQueue()
    for who in ("one", "two", "three"):
        enter(line, who)
    assert line.call_first() == ("one",)
    assert line.call_first() == (), "it is asking already"
    assert line.leave("one", placed=True) == ("two",)
    assert line.leave("two", placed=True) == ("three",)
    assert line.found_none("three") == ()


def test_a_fleet_that_changes_is_offered_to_all_as_long_as_they_find_places() -> None:
    line = FlowControlQueue()
    for who in ("one", "two"):
        enter(line, who)
    assert line.call_all() == ("one",)
    assert line.leave("one", placed=True) == ("two",)


def test_several_places_are_offered_until_one_finds_none() -> None:
    """Places that open together are not counted: one request after another asks, until one finds no place."""
    line = FlowControlQueue()
    for who in ("one", "two", "three", "four"):
        enter(line, who)
    assert line.call_all() == ("one",)
    assert line.leave("one", placed=True) == ("two",)
    assert line.leave("two", placed=True) == ("three",)
    assert line.found_none("three") == ()
    assert line.call_first() == ("three",), "one place, one call"
    assert line.call_first() == line.call_first() == (), "it is asking already"
    assert line.leave("three", placed=True) == ("four",)
    assert line.leave("four", placed=True) == ()


def test_entering_the_queue_twice_keeps_the_place() -> None:
    line = FlowControlQueue()
    enter(line, "one")
    enter(line, "two")
    enter(line, "one")
    assert len(line) == 2 and order(line) == ["one", "two"]


def test_how_long_the_queue_takes() -> None:
    line = FlowControlQueue()
    for at in range(10):
        enter(line, f"{at}", work_ms=200.0)
    assert line.drains_s(ANY, 1) == pytest.approx(2.0)
    assert line.drains_s(ANY, 4) == pytest.approx(0.5)
    for at in range(200):
        line.took(replace(ANY, now=at * 0.1), 50.0)  # half of one instance: 50 ms of work each 100 ms
    assert line.drains_s(ANY, 1) == pytest.approx(4.0, rel=0.05)


def test_what_was_seen_in_an_earlier_overload_is_forgotten() -> None:
    """Then the memory of answers was the limit, say. Now ten prompts come at once to an idle fleet, and all can be in
    time.
    """
    line = FlowControlQueue()
    enter(line, "waits", work_ms=100.0)
    for at in range(200):
        line.took(replace(ANY, now=at * 1.0), 100.0)
    assert line.drains_s(ANY, 1) == pytest.approx(0.4, rel=0.05), "a quarter of one instance at least"
    line.leave("waits", placed=False)
    for at in range(10):
        line.enter(f"{at}", replace(ANY, ttft_ms=2000.0, arrived=3600.0, now=3600.0), 100.0)
    assert line.hopeless(replace(ANY, now=3600.0), 1) == []
    assert line.drains_s(ANY, 1) == pytest.approx(1.0, rel=0.05)


def test_an_overload_of_one_model_gives_no_request_for_another_up() -> None:
    """The largest prompt of all is given up first, of those that wait for the same instances."""
    line = FlowControlQueue()
    for at in range(16):
        enter(line, f"small {at}", work_ms=100.0, ttft_ms=1000.0)
    other = replace(ANY, model="large", ttft_ms=1000.0)
    line.enter("other", other, 400.0)
    assert line.hopeless(other, 1) == []
    gone = line.hopeless(ANY, 1)
    assert gone and "other" not in gone
    assert line.drains_s(other, 1) == pytest.approx(0.4)
    assert line.drains_s(replace(ANY, model="idle"), 1) == 0.0


def test_instances_of_one_tenant_judge_its_requests_alone() -> None:
    line = FlowControlQueue()
    for at in range(5):
        enter(line, f"ann {at}", tenant="ann", whose="ann", work_ms=200.0)
        enter(line, f"eve {at}", tenant="eve", work_ms=200.0)
    assert {str(who)[:3] for who in line.hopeless(ANY, 1)} == {"eve"}
    assert {str(who)[:3] for who in line.hopeless(replace(ANY, tenant="ann", whose="ann"), 1)} == {"ann"}


def test_no_request_is_asked_because_another_tenants_instance_opens() -> None:
    view = FleetView()
    for name, whose, opens_ms in (("shared", (), 9000.0), ("anns", ("ann",), 0.0)):
        view.add(Instance(id=InstanceId(name), role=Role.PREFILL, url=name, tenants=frozenset(whose)))
        view.seen(InstanceId(name), ({"id": "m"},), Load())
        view.all().inflight.rows[view.get(InstanceId(name)).row].opens = opens_ms
    line = FlowControlQueue()
    saturation = SaturationDetector(line)
    enter(line, "eve", tenant="eve")
    assert saturation.opens_at(view.all(), 1.0) == pytest.approx((9000.0 - AHEAD_MS) / 1000.0)
    enter(line, "ann", tenant="ann", whose="ann")
    assert saturation.opens_at(view.all(), 1.0) == 1.0
    assert saturation.opens_at(FleetView().all(), 1.0) == math.inf


def prefills(*models: str) -> FleetView:
    """Prefill instances of these models."""
    view = FleetView()
    for number, model in enumerate(models):
        name = InstanceId(f"p{number}")
        view.add(Instance(id=name, role=Role.PREFILL, url=name))
        view.seen(name, ({"id": model},), Load())
    return view


def in_time(model: str, now: float = 0.0, whose: str = "") -> Wanted:
    """A request that can be in time."""
    return Wanted(model=model, hand_over=True, ttft_ms=500.0, now=now, whose=whose)


def lanes(saturation: SaturationDetector, now: float, servers: int = 8) -> int:
    """How many instances of this fleet take late prompts, one after the other."""
    late, fleet = Wanted(model="m", hand_over=True, ttft_ms=500.0, late=True, now=now), prefills(*["m"] * servers)
    for row in range(servers):
        if saturation.lanes(late, fleet.all()) is not None:
            return row
        saturation.took(row)
    return servers


def test_a_late_prompt_of_one_model_takes_no_lane_of_another() -> None:
    fleet, saturation = prefills("a", "b").all(), SaturationDetector(FlowControlQueue())
    late = Wanted(model="a", hand_over=True, ttft_ms=500.0, late=True)
    for model in ("a", "b"):
        saturation.took_in_time(replace(late, model=model), 1e6, 0.0)
    saturation.took(0)
    assert saturation.lanes(late, fleet) == [0]
    assert saturation.lanes(replace(late, model="b"), fleet) is None


def test_a_busy_model_keeps_no_instance_of_another_from_late_prompts() -> None:
    """Before, the work of all models kept instances of each: four idle ones took one late prompt at a time."""
    saturation = SaturationDetector(FlowControlQueue())
    for busy in (in_time("a", 100.0), in_time("m", 100.0, whose="ann")):
        saturation.took_in_time(busy, 1e6, 70.0)
    assert lanes(saturation, 100.0, servers=4) == 4
    saturation.took_in_time(in_time("m", 100.0), 1e6, 0.0)
    for row in range(4):
        saturation.gave_back(row)
    assert lanes(saturation, 100.0, servers=4) == 1
    assert saturation.pause_ms(in_time("a")) == pytest.approx(7.0)
    assert saturation.pause_ms(in_time("m")) == 0.0, "its hand-overs delay no first token"


def test_places_of_prompts_in_time_are_bounded() -> None:
    places = PlacesInTime()
    for number in range(PLACES_MAX):
        places.took(number, 1000.0, 10.0, 0.0)
    places.took(0, 1000.0, 10.0, 0.0)
    places.took("new", 1000.0, 10.0, 0.0)
    known = [place for place in (*range(PLACES_MAX), "new") if places.of(place).pause_ms]
    assert known == [0, *range(2, PLACES_MAX), "new"], "that without a prompt for longest is forgotten"


def test_late_prompts_have_every_instance_that_prompts_in_time_do_not_need() -> None:
    assert lanes(SaturationDetector(FlowControlQueue()), 0.0) == 8
    busy = SaturationDetector(FlowControlQueue())
    for at in range(200):  # prompts that keep two instances busy, for ten times `IN_TIME_S`
        busy.took_in_time(in_time("m", at * IN_TIME_S / 20), 2000.0 * IN_TIME_S / 20, 0.0)
    assert lanes(busy, 10 * IN_TIME_S) == 8 - math.ceil(2 * IN_TIME_SPARE)


def test_a_quarter_is_left_to_late_prompts_and_more_as_prompts_in_time_stay_away() -> None:
    for after_s, free in ((0.0, 2), (30 * IN_TIME_S, 8)):
        saturation = SaturationDetector(FlowControlQueue())
        saturation.took_in_time(in_time("m", 100.0), 1e6, 0.0)
        assert lanes(saturation, 100.0 + after_s) == free


def test_requests_in_time_may_go_anywhere() -> None:
    saturation = SaturationDetector(FlowControlQueue())
    saturation.took_in_time(in_time("m"), 1e6, 0.0)
    saturation.took(0)
    assert saturation.lanes(Wanted(model="m", hand_over=True, ttft_ms=500.0), prefills("m", "m").all()) is None
