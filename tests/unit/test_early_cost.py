"""Early legs against pulls: which way a decode leg takes, by what both have cost. All times are virtual."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.ids import InstanceId
from router.predict.early_cost import (
    ENOUGH,
    LATER,
    LEAST_MS,
    RUN,
    RUN_MOST,
    SOON,
    EarlyLegCosts,
    EarlyLegPlace,
    HandOverTrial,
)

Delay = Callable[[bool], float]
"""The delay in ms of a request that has an early leg, or has none."""

SOON_AGAIN, LATER_AGAIN = (SOON + 1) * RUN, (LATER + 1) * RUN
"""Requests from run to run, one at a time."""
FIRST_VERDICT = ENOUGH * SOON_AGAIN + RUN
"""The requests until the first verdict, one at a time."""


class Load:
    """Requests at one place, `together` of them under way at each time."""

    def __init__(self, delay: Delay, *, together: int = 1, place: EarlyLegPlace | None = None) -> None:
        self.place = EarlyLegPlace() if place is None else place
        self.delay = delay
        self.together = together
        self.under_way: deque[tuple[bool, HandOverTrial]] = deque()
        self.now = 100.0

    def ask(self, count: int) -> list[bool]:
        """So many requests come. Returns for each whether its leg is early."""
        told = []
        for _ in range(count):
            choice = self.place.choose(self.now, counts=True)
            assert choice.trial is not None
            told.append(choice.early)
            self.under_way.append((choice.early, choice.trial))
            if len(self.under_way) == self.together:
                self.end()
        return told

    def end(self) -> None:
        """The first of those that are under way gets D's token."""
        early, trial = self.under_way.popleft()
        trial.over(trial._due_s + self.delay(early) / 1000.0)


def costs(early_ms: float, pull_ms: float) -> Delay:
    return lambda early: early_ms if early else pull_ms


def noisy(seed: int, spread_ms: float, extra_ms: float = 0.0) -> Delay:
    random = Random(seed)
    return lambda early: random.gauss(50.0 + (extra_ms if early else 0.0), spread_ms)


# --- which way -------------------------------------------------------------------------------------------------------


def test_legs_are_early_but_for_runs_that_are_compared() -> None:
    assert Load(costs(5, 9)).ask(3 * SOON_AGAIN) == 3 * ([True] * SOON * RUN + [False] * RUN)


def test_once_compared_one_request_of_32_takes_the_other_way() -> None:
    load = Load(costs(5, 9))
    load.ask(FIRST_VERDICT)
    assert load.ask(10 * LATER_AGAIN).count(False) == 10 * RUN
    assert 32 * RUN == LATER_AGAIN
    assert not load.place.dearer and load.place.extra_ms == pytest.approx(-4)


@pytest.mark.parametrize("together", [1, 3, 8])
def test_where_early_legs_are_dearer_legs_pull(together: int) -> None:
    load = Load(costs(21, 9), together=together)
    load.ask(2 * together * FIRST_VERDICT)
    assert load.place.dearer and load.place.extra_ms == pytest.approx(12)
    usual = load.place.choose(0.0, counts=False)
    assert (usual.early, usual.because, usual.trial) == (False, "pulls: early legs took 12 ms longer here", None)
    told = load.ask(10 * LATER_AGAIN)
    assert 0 < told.count(True) <= 10 * (RUN + together), "early legs are tried now and then"


def test_a_request_of_a_run_is_explained() -> None:
    load = Load(costs(5, 9))
    load.ask(SOON * RUN)
    assert load.place.choose(0.0, counts=False).because == "pulls, to compare with early legs"
    load.place.dearer = True
    assert load.place.choose(0.0, counts=False).because == "an early leg, to compare with pulls"


def test_a_loss_that_the_next_quiet_moment_returns_does_not_count() -> None:
    load = Load(costs(9 + LEAST_MS, 9))
    load.ask(2000)
    assert not load.place.dearer
    load.delay = costs(9.1 + LEAST_MS, 9)
    load.ask(16 * LATER_AGAIN)
    assert load.place.dearer


def test_early_legs_that_slow_each_other_are_seen() -> None:
    """One pull among early legs would be slowed like them, and cost as much: only runs show the difference."""
    load = Load(costs(0, 0), together=4)
    load.delay = lambda _: 20.0 + 5.0 * sum(other for other, _ in load.under_way)
    load.ask(FIRST_VERDICT * 2)
    assert load.place.dearer and 10 < load.place.extra_ms <= 20


# --- noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread_ms", [1, 50])
def test_without_a_difference_early_legs_are_the_usual_way(spread_ms: float) -> None:
    pulled = sum(Load(noisy(seed, spread_ms)).ask(3000).count(False) for seed in range(8))
    assert pulled / 24_000 < 1 / 32 + 0.06, "chance alone decides against them now and then, and not for long"


def test_a_difference_of_half_the_scatter_is_found() -> None:
    loads = [Load(noisy(seed, 50, 25)) for seed in range(6)]
    told = [load.ask(5000)[-1000:].count(False) for load in loads]
    assert sum(told) / 6000 > 0.6


def test_an_engine_that_stands_still_is_one_late_request() -> None:
    still = iter([100_000.0])
    load = Load(costs(5, 9))
    load.ask(SOON * RUN)
    load.delay = lambda early: 5 if early else next(still, 9)
    load.ask(FIRST_VERDICT)
    assert not load.place.dearer and load.place.extra_ms == pytest.approx(-4)


@pytest.mark.parametrize("each_ms", [-2.0, -0.5, 0.05, 2.0])
def test_what_changes_slowly_is_no_difference(each_ms: float) -> None:
    """Each request takes so much longer than the one before: those with early legs and those without. On engines
    delays fell by more than that, as predictions had just begun to learn (docs/decisions/0015-early-leg.md).
    """
    load = Load(costs(0, 0))
    ticks = iter(range(100_000))
    load.delay = lambda early: each_ms * next(ticks) + (0 if early else 4)
    load.ask(3000)
    assert not load.place.dearer and load.place.extra_ms == pytest.approx(-4)


def test_predictions_that_learn_are_no_difference() -> None:
    """At first a prompt ends 300 ms after its predicted end, after 200 requests a third of that."""
    load = Load(costs(0, 0))
    ticks = iter(range(100_000))
    load.delay = lambda early: 300 * math.exp(-next(ticks) / 200) + (0 if early else 4)
    load.ask(FIRST_VERDICT)
    assert not load.place.dearer and load.place.extra_ms == pytest.approx(-4, abs=0.5)


# --- change ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dearer", [True, False])
def test_a_verdict_changes_with_what_is_seen(dearer: bool) -> None:
    """Two runs contradict what was found; then the comparisons begin again."""
    load = Load(costs(60, 9) if dearer else costs(5, 9))
    load.ask(16 * LATER_AGAIN)
    assert load.place.dearer is dearer
    load.delay = costs(5, 9) if dearer else costs(60, 9)
    load.ask(2 * LATER_AGAIN + FIRST_VERDICT)
    assert load.place.dearer is not dearer
    assert load.ask(SOON_AGAIN).count(dearer) >= SOON_AGAIN - RUN


# --- requests that tell nothing --------------------------------------------------------------------------------------


def test_a_run_without_answers_is_no_comparison() -> None:
    load = Load(costs(5, 9))
    load.ask(SOON * RUN)
    trials = [load.place.choose(0.0, counts=True).trial for _ in range(RUN)]
    for trial in trials:
        assert trial is not None
        trial.over(None)
    load.ask(LATER * RUN)
    assert load.place.compared == 0
    assert load.ask(2 * RUN) == [False] * RUN + [True] * RUN, "another run"
    assert load.place.compared == 1


def test_a_request_that_waits_for_ever_holds_up_the_comparison_and_nothing_else() -> None:
    load = Load(costs(5, 9))
    load.ask(SOON * RUN)
    assert not load.place.choose(0.0, counts=True).early
    load.ask(RUN - 1)
    assert load.ask(500) == [True] * 500, "its leg pulls, so no early leg counts beside it"


def test_a_request_whose_tokens_are_not_seen_takes_the_usual_way() -> None:
    load = Load(costs(5, 9))
    assert [load.place.choose(0.0, counts=False).early for _ in range(200)] == [True] * 200
    load.ask(SOON * RUN)
    assert not load.place.choose(0.0, counts=False).early, "in a run all legs go one way"


def test_a_run_ends_where_there_are_always_too_many_requests() -> None:
    load = Load(costs(50, 9), together=RUN_MOST + RUN)
    told = load.ask(10_000)
    assert load.place.compared == 0 and not load.place.dearer
    assert told.count(False) / 10_000 < 0.06, "what tells nothing is not tried more often"


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(["ask", "first", "last", "gone"]), max_size=300), st.floats(-50, 50))
def test_any_order_of_ends(words: list[str], extra_ms: float) -> None:
    """Each request is under way once, and a verdict against early legs needs enough comparisons."""
    place = EarlyLegPlace()
    under_way: list[tuple[bool, HandOverTrial]] = []
    for word in words:
        if word == "ask" or not under_way:
            choice = place.choose(0.0, counts=True)
            assert choice.trial is not None
            under_way.append((choice.early, choice.trial))
            continue
        early, trial = under_way.pop(0 if word == "first" else -1)
        trial.over(None if word == "gone" else (extra_ms if early else 0.0) / 1000.0)
        assert place._under_way == [sum(not early for early, _ in under_way), sum(early for early, _ in under_way)]
        assert not place.dearer or (place.compared >= ENOUGH and place.extra_ms > LEAST_MS)


# --- places ----------------------------------------------------------------------------------------------------------


def test_each_p_has_a_verdict_of_its_own_by_machine_and_queue() -> None:
    every = EarlyLegCosts()
    dear = (InstanceId("p0"), True, True)
    for _ in range(FIRST_VERDICT):
        for prefill in (InstanceId("p0"), InstanceId("p1")):
            for near in (True, False):
                for queued in (True, False):
                    choice = every.choose(prefill, 0.0, near=near, queued=queued, counts=True)
                    assert choice.trial is not None
                    early_ms = 40.0 if (prefill, near, queued) == dear else 5.0
                    choice.trial.over((early_ms if choice.early else 9.0) / 1000.0)
    found = {each[:3]: each[3] for each in every.found()}
    assert len(found) == 8 and {each for each, extra_ms in found.items() if extra_ms > 0} == {dear}
    assert not every.choose(dear[0], 0.0, near=True, queued=True, counts=False).early
    assert every.pulled == {"dearer": 1, "compared": 8 * ENOUGH * RUN}
    every.forget(lambda instance: instance == "p1")
    assert {each[0] for each in every.found()} == {"p1"}
    assert every.choose(dear[0], 0.0, near=True, queued=True, counts=False).early, "nothing is known of it any more"
    assert every.pulled["dearer"] == 1, "a counter never falls"
