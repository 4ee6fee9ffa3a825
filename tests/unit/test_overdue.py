"""Requests that have waited for memory for long, or are too long for any cache: where and when they go beyond it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from router.core.journey import Choose
from router.core.values import NO_PROMISE, Promise, Wanted
from router.fleet.view import FleetView
from router.scheduler.flow_control.overdue import OVERDUE_S
from router.scheduler.flow_control.queue import FlowControlQueue
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import LOOK_S, Scheduler
from router.scheduler.scoring.policies import POLICIES

ASK = Choose(frozenset(), hand_over=True)
CAPACITY = 100_000
SHORT = Wanted(
    model="m",
    hand_over=True,
    prompt_tokens=3000,
    output_tokens=200.0,
    output_lengths=(10, 20, 40, 100, 200, 400, 800),
    arrived=1.0,
)
LONG = replace(SHORT, prompt_tokens=98_000)


def scheduler(count: int = 1, *, admission: bool = False, policy: str = "workload") -> Scheduler:
    """So many instances of role both, with one short answer on each."""
    view = FleetView(lambda _: None)
    for number in range(count):
        instance = InstanceId(f"b{number}")
        view.add(Instance(id=instance, role=Role.BOTH, url=f"http://{instance}"))
        view.seen(instance, ({"id": "m"},), Load(kv_tokens=CAPACITY))
    here = Scheduler(view, POLICIES[policy], admission=admission, foresees=True)
    for _ in range(count):
        busy = SchedulingContext(SHORT)
        assert here.choose(busy, ASK, 1.0)[0].decode is not None
        here.opened(busy, 1.1)
    assert all(row.decoding == 1 for row in view.all().inflight.rows[:count])
    return here


def asks(here: Scheduler, context: SchedulingContext, now: float) -> bool:
    """Whether the request finds a place now."""
    found = here.choose(context, ASK, now)[0]
    if found.wait:
        here.found_none(context)
    return found.decode is not None


@pytest.mark.parametrize("count", [1, 70], ids=["few rows", "many rows"])
@pytest.mark.parametrize(
    ("admission", "promise"), [(False, NO_PROMISE), (True, NO_PROMISE), (True, Promise(ttft_ms=20_000, tpot_ms=200))]
)
def test_after_ten_seconds_memory_does_not_hold_a_request_back(count: int, admission: bool, promise: Promise) -> None:
    """Without this it waited until an instance had no answer at all."""
    here = scheduler(count, admission=admission)
    long = SchedulingContext(LONG, promise)
    assert not asks(here, long, 1.2)
    assert not asks(here, long, 1.0 + OVERDUE_S - 0.1)
    assert asks(here, long, 1.0 + OVERDUE_S)


@pytest.mark.parametrize("count", [1, 70], ids=["few rows", "many rows"])
def test_a_prompt_that_no_cache_can_hold_goes_to_an_engine_at_once(count: int) -> None:
    """The engine says that it is too long. Without this the request waited until no answer was left beside it."""
    here = scheduler(count)
    assert asks(here, SchedulingContext(replace(SHORT, prompt_tokens=CAPACITY + 1)), 1.2)


def test_a_prompt_that_one_cache_can_hold_waits_for_it() -> None:
    here = scheduler(2)
    here.view.seen(InstanceId("b1"), ({"id": "m"},), Load(kv_tokens=2 * CAPACITY))
    for _ in range(2):
        assert asks(here, SchedulingContext(LONG), 1.1)
    assert not asks(here, SchedulingContext(replace(SHORT, prompt_tokens=CAPACITY + 1)), 1.2)


def test_an_overload_does_not_flood_an_instance() -> None:
    """An instance is over by one request at most, until that one's answer has begun and as long again has passed."""
    here = scheduler(2)
    waiting = [SchedulingContext(LONG) for _ in range(20)]
    for context in waiting:
        assert not asks(here, context, 1.2)
    now = 1.0 + OVERDUE_S
    first = [context for context in waiting if asks(here, context, now)]
    assert {context.decode for context in first} == {"b0", "b1"} and len(first) == 2
    waiting = [context for context in waiting if context not in first]
    later = now + OVERDUE_S
    assert not any(asks(here, context, later) for context in waiting), "the first two are not computed yet"
    for context in first:
        here.opened(context, later)
    assert sum(asks(here, context, later) for context in waiting) == 2
    assert not any(asks(here, context, later + 1.0) for context in waiting if context.decode is None)


def test_once_answers_fit_the_memory_again_the_next_one_may_go() -> None:
    here = scheduler()
    one, two = SchedulingContext(LONG), SchedulingContext(LONG)
    now = 1.0 + OVERDUE_S
    assert asks(here, one, now) and not asks(here, two, now)
    assert here.finish(one, now + 1.0, 200) == (two,)
    assert asks(here, two, now + 1.0), "beside the short answer"


def test_an_instance_with_memory_is_taken_before_one_without() -> None:
    here = scheduler(2)
    large = here.view.get(InstanceId("b1"))
    here.view.seen(large.id, ({"id": "m"},), Load(kv_tokens=2 * CAPACITY))
    here.view.get(InstanceId("b0")).credits = 1
    for _ in range(8):  # so that its price is higher
        assert asks(here, SchedulingContext(SHORT), 1.2)
    here.view.get(InstanceId("b0")).credits = 64
    cheapest = here.policy(here.view.all(), replace(LONG, beyond_memory=(), now=1.0 + OVERDUE_S))
    assert cheapest.decode == "b0"
    long = SchedulingContext(LONG)
    assert asks(here, long, 1.0 + OVERDUE_S) and long.decode == large.id


def test_a_request_that_waits_for_memory_is_asked_again_without_any_event() -> None:
    here = scheduler()
    long = SchedulingContext(LONG)
    assert not asks(here, long, 1.2)
    wakeup_s = here.next_wakeup()
    assert wakeup_s == pytest.approx(1.0 + OVERDUE_S)
    assert here.look(wakeup_s) == (long,)
    assert asks(here, long, wakeup_s)
    other = SchedulingContext(LONG)
    assert not asks(here, other, wakeup_s + 1.0)
    assert here.next_wakeup() == pytest.approx(wakeup_s + 1.0 + LOOK_S), "it is overdue, and the instance is over"


def test_a_late_request_takes_no_memory_from_those_that_can_be_in_time() -> None:
    """In an overload that lasts, 0.50 of the last quarter were in time without this, and 0.65 are with it."""
    line = FlowControlQueue()
    line.enter("late", replace(SHORT, ttft_ms=50.0, late=True, now=2.0))
    assert not line.yields("late"), "nobody else waits"
    line.enter("soon", replace(SHORT, ttft_ms=60_000.0, now=2.0))
    assert line.yields("late") and not line.yields("soon") and not line.yields("unknown")
    line.leave("soon", placed=True)
    assert not line.yields("late")
