"""What a router counts for the goodput controller."""

from __future__ import annotations

from cluster.flow import OTHERS, SERIES_MAX
from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from cluster.registry.membership import Heartbeat, MemberKind, decode, encode
from goodput.sketch import bucket_of
from router.core.slo import LEFT, MET, SHED
from router.core.values import Wanted
from router.fleet.view import FleetView
from router.scheduler.demand import backlog
from router.scheduler.placements import SchedulingContext
from router.telemetry.flow import RouterFlow


def test_arrivals_and_ends_are_counted_apart() -> None:
    flow = RouterFlow()
    for tokens in (10, 1000, 1000):
        flow.arrived("m", "chat", tokens)
    flow.prefilled("m", "chat", 1000, 300)
    flow.ended("m", "chat", 200, MET, late_first=False)
    flow.ended("m", "chat", None, SHED, late_first=True)
    (told,) = flow.told()
    assert (told.arrivals, told.prompt_tokens, told.ended, told.answer_tokens) == (3, 2010, 2, 200)
    assert (told.met, told.missed, told.shed) == (1, 0, 1)
    assert (told.cached_tokens, told.computed_tokens, told.late_first) == (300, 700, 1)
    assert told.prompts == {bucket_of(10): 1, bucket_of(1000): 2}
    assert told.answers == {bucket_of(200): 1}


def test_a_request_whose_client_left_has_ended_and_neither_met_nor_missed() -> None:
    flow = RouterFlow()
    flow.arrived("m", "chat", 10)
    flow.ended("m", "chat", 3, LEFT, late_first=False)
    (told,) = flow.told()
    assert (told.ended, told.met, told.missed, told.shed) == (1, 0, 0, 0)


def test_counters_never_shrink_however_many_models_there_are() -> None:
    flow = RouterFlow()
    for number in range(3 * SERIES_MAX):
        flow.arrived(f"m{number}", "", 1)
    first = {(each.model, each.slo_class): each.arrivals for each in flow.told()}
    for number in reversed(range(3 * SERIES_MAX)):
        flow.arrived(f"m{number}", "", 1)
    flow.arrived("x" * 1000, "", 1)
    second = {(each.model, each.slo_class): each.arrivals for each in flow.told()}
    assert len(second) == SERIES_MAX
    assert all(second[series] >= count for series, count in first.items())
    assert sum(second.values()) == 6 * SERIES_MAX + 1
    assert second[OTHERS, ""] > 0


def test_adapters_that_come_and_go_count_for_their_model() -> None:
    """Also at the end of a request whose adapter was unloaded meanwhile. Other models' counters stay their own."""
    view, flow = FleetView(), RouterFlow()
    flow.base = view.served.base
    view.add(Instance(id=InstanceId("both-0"), role=Role.BOTH, url="http://e:1"))
    for number in range(3 * SERIES_MAX):
        name = f"lora-{number}"
        view.seen(InstanceId("both-0"), ({"id": "base"}, {"id": name, "parent": "org/base"}), None)
        flow.arrived(name, "", 10)
        view.seen(InstanceId("both-0"), ({"id": "base"},), None)
        flow.ended(name, "", 5, MET, late_first=False)
        waiting = [SchedulingContext(Wanted(model=name, hand_over=True, arrived=1.0))]
        assert [each.model for each in backlog(waiting, 2.0, flow.model_of)] == ["base"]
    flow.arrived("other", "", 10)
    assert [(each.model, each.arrivals, each.ended) for each in flow.told()] == [
        ("base", 3 * SERIES_MAX, 3 * SERIES_MAX),
        ("other", 1, 0),
    ]


def test_the_backlog_says_how_many_wait_and_since_when() -> None:
    contexts = [
        SchedulingContext(Wanted(model=model, hand_over=True, arrived=at))
        for model, at in (("a", 5.0), ("a", 2.0), ("b", 9.0))
    ]
    found = {each.model: (each.waiting, each.oldest_s) for each in backlog(contexts, 10.0)}
    assert found == {"a": (2, 8.0), "b": (1, 1.0)}


def test_an_announcement_of_all_counters_can_be_read_and_leaves_room() -> None:
    flow = RouterFlow()
    for number in range(2 * SERIES_MAX):
        for power in range(21):
            flow.arrived(f"{'model' * 10}{number}", "interactive", 2**power)
            flow.ended(f"{'model' * 10}{number}", "interactive", 2**power, MET, late_first=False)
    beat = Heartbeat(id=InstanceId("r"), agent="a", kind=MemberKind.ROUTER, url="http://h:1", counted=flow.told())
    payload = encode(beat)
    read, fault = decode(payload)
    assert not fault
    assert read is not None
    assert read.counted == beat.counted
    assert len(payload) < 16 * 1024
