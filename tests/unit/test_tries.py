"""Tries: requests that are let in although a prediction refuses them, so that a wrong prediction is corrected."""

from __future__ import annotations

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from costs.step import StepCost
from router.core.journey import Choose
from router.core.values import Promise, Wanted
from router.fleet.view import FleetView
from router.predict.margins import NARROWEST, PROMPTLY, WIDEST
from router.predict.step_model import Make
from router.predict.tries import TRIES, TRY_S, TRY_S_MAX, Tries
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import Scheduler
from router.scheduler.scoring.policies import POLICIES

ASK = Choose(frozenset(), hand_over=False)
STEP = StepCost(floor_ms=0.0, start_ms=10.0, token_ms=0.04, area_ms=0.0, decode_ms=10.0, context_ms=0.0, request_ms=0.0)
MAKE = Make(prefill=STEP, decode=STEP)
ALONE_MS = MAKE.prompt_ms(1000)
TARGET_MS = 2 * ALONE_MS


def test_tries_that_are_late_become_rarer_and_one_in_time_makes_them_as_frequent_as_at_first() -> None:
    tries, now = Tries(), 0.0
    assert tries.due(100.0, now)
    for _ in range(TRIES):
        tries.let_in(100.0, now, tried=True)
        assert not tries.due(100.0, now + 0.9 * TRY_S) and tries.due(200.0, now)
        now += TRY_S
        assert tries.due(100.0, now)
    waits = []
    for _ in range(20):
        tries.let_in(100.0, now, tried=True)
        waits.append(next(wait for wait in range(1, 1000) if tries.due(100.0, now + wait)))
        now += waits[-1]
    assert waits[:3] == [2 * TRY_S, 4 * TRY_S, 8 * TRY_S] and waits[-1] == TRY_S_MAX
    assert not tries.due(100.0, now - 1.0)
    tries.let_in(100.0, now, tried=False)
    assert not tries.due(100.0, now + TRY_S), "a request that is let in without a try does not change the wait"
    tries.in_time(100.0)
    assert tries.due(100.0, now + TRY_S)


def test_old_tries_do_not_count() -> None:
    tries = Tries()
    for _ in range(TRIES + 4):
        tries.let_in(100.0, 0.0, tried=True)
    assert not tries.due(100.0, 10 * TRY_S)
    now = 2 * TRY_S_MAX
    tries.let_in(100.0, now, tried=False)
    assert not tries.due(100.0, now) and tries.due(100.0, now + TRY_S)
    tries.let_in(100.0, now + TRY_S, tried=True)
    assert tries.due(100.0, now + 2 * TRY_S)


class Life:
    """Requests of one class, on one instance."""

    def __init__(self, promise: Promise) -> None:
        self.view = FleetView(lambda _: MAKE)
        self.view.add(Instance(id=InstanceId("b"), role=Role.BOTH, url="http://b"))
        self.view.seen(InstanceId("b"), ({"id": "m"},), Load())
        self.here = Scheduler(self.view, POLICIES["workload"], admission=True, foresees=True)
        self.inflight = self.view.all().inflight
        self.promise = promise
        self.now = 100.0

    def asks(self, tokens: int = 1000) -> SchedulingContext | None:
        """One more request; None: the scheduler refused it."""
        wanted = Wanted(model="m", hand_over=False, prompt_tokens=tokens, output_tokens=50.0, arrived=self.now)
        context = SchedulingContext(wanted, self.promise)
        chosen, _ = self.here.choose(context, ASK, self.now)
        assert (chosen.decode is None) == (chosen.shed_s is not None)
        return context if chosen.decode is not None else None

    def serve(self, context: SchedulingContext, times: float, tpot_ms: float = 12.0) -> None:
        at = self.now + times * ALONE_MS / 1000
        self.here.opened(context, at)
        self.here.finish(context, at + 49 * tpot_ms / 1000, 50)

    def served(self, count: int, times: float, gap_s: float = 1.0, tpot_ms: float = 12.0) -> int:
        """The number of the next `count` requests that are served. A prompt takes `times` as long as by its costs."""
        found = 0
        for _ in range(count):
            context = self.asks()
            if context is not None:
                found += 1
                self.serve(context, times, tpot_ms)
            self.now += gap_s
        return found


def test_an_engine_that_was_slow_is_not_refused_for_ever() -> None:
    """Before, no request was served any more, even an hour or a day later."""
    life = Life(Promise(ttft_ms=TARGET_MS, tpot_ms=500.0, sheds=True))
    assert life.served(20, 1.0) == 20
    life.served(60, 4.0)
    tried = life.served(60, 4.0)
    assert 1 <= tried <= 6, "only tries are served, ever more rarely"
    life.served(120, 1.0)
    assert life.served(100, 1.0) == 100


def test_one_request_at_a_time_is_tried_and_none_that_is_late_by_its_costs() -> None:
    life = Life(Promise(ttft_ms=TARGET_MS, tpot_ms=500.0, sheds=True))
    life.served(30, 4.0)
    life.now += 2 * TRY_S_MAX
    assert life.asks(3000) is None, "it would be late even on an engine as fast as its costs"
    tried = life.asks()
    assert tried is not None and tried.tried
    assert life.asks() is None, "only one try at a time"
    life.serve(tried, 4.0)
    life.now += 0.5
    assert life.asks() is None, "a prompt was timed just now, so the prediction is up to date"


def test_an_engine_that_serves_other_classes_is_not_tried() -> None:
    """Requests of a class without targets already teach the engine's present speed."""
    life = Life(Promise(ttft_ms=TARGET_MS, tpot_ms=500.0, sheds=True))
    life.served(30, 4.0)
    life.now += 2 * TRY_S_MAX
    life.promise = Promise()
    assert life.served(1, 4.0, gap_s=0.5) == 1
    life.promise = Promise(ttft_ms=TARGET_MS, tpot_ms=500.0, sheds=True)
    assert life.asks() is None


def test_tries_widen_a_margin_that_refuses_requests_on_an_idle_engine() -> None:
    """First tokens were late for a reason that has passed. Before, none of the next 2,000 requests was served."""
    life = Life(Promise(ttft_ms=1.4 * ALONE_MS, tpot_ms=500.0, sheds=True))
    margins = life.inflight.first_margins
    for _ in range(50):
        margins.ended(life.promise.ttft_ms, margins.of(life.promise.ttft_ms), 1e6)
    assert margins.of(life.promise.ttft_ms) == NARROWEST < 1 / 1.4
    life.served(60, 1.0)
    assert life.served(500, 1.0) == 500
    assert 1 / 1.4 < margins.of(life.promise.ttft_ms) <= PROMPTLY


def test_an_answer_that_is_alone_widens_a_margin_that_is_too_narrow_for_it() -> None:
    """An answer that is alone on its engine is always let in. Before, it taught the margin nothing, and no second
    answer was let in beside it.
    """
    target_ms = MAKE.decode.decode_ms / 0.7
    life = Life(Promise(ttft_ms=1000.0, tpot_ms=target_ms, sheds=True))
    margins = life.inflight.margins.shed
    for _ in range(50):
        margins.ended(target_ms, margins.of(target_ms), 1e6)
    assert margins.of(target_ms) == NARROWEST < 0.7
    assert life.served(400, 1.0, tpot_ms=10.0) == 400
    assert 0.7 < margins.of(target_ms) <= WIDEST
