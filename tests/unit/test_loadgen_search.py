"""The search for goodput on queues of known capacity, on virtual time: its error, and its interval's coverage."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from loadgen.search import (
    ALONE_LEAST,
    LATE_TRIES,
    WINDOW,
    Aim,
    Bisection,
    Limit,
    RunTrial,
    Search,
    SearchFinished,
    StopSearch,
    TrialDone,
    TrialTick,
    Try,
    held_at,
    interval,
    misses_alone,
)

SHARE = 0.95
MU, WITHIN_S = 100.0, 0.2
"""An M/M/1 queue: its answers a second, and the target for the time in the system, in seconds."""

STEADY = MU - math.log(1 / (1 - SHARE)) / WITHIN_S
"""Its goodput in the long run: a sojourn exceeds t with probability exp(−(μ − λ)·t)."""


def times_in_queue(seed: Sequence[int], requests: int, rate: float) -> np.ndarray:
    """Sojourn times of one load: the same draws at every rate, by Lindley's recursion as a running maximum."""
    rng = np.random.default_rng(list(seed))
    arrivals = np.cumsum(rng.exponential(1, requests)) / rate
    service = rng.exponential(1 / MU, requests)
    done = np.cumsum(service)
    before = np.concatenate([[0.0], done[:-1]])
    return done + np.maximum.accumulate(arrivals - before) - arrivals


def tried(trial: RunTrial, seed: int) -> Try:
    first, last = math.floor(WINDOW[0] * trial.requests), math.ceil(WINDOW[1] * trial.requests)
    window = times_in_queue((seed, trial.repeat), trial.requests, trial.rate)[first:last]
    attained = int((window <= WITHIN_S).sum())
    return made(trial, attained >= SHARE * len(window), len(window), attained)


def made(trial: RunTrial, holds: bool, counted: int = 100, attained: int = 0, late: str = "") -> Try:
    return Try(repeat=trial.repeat, rate=trial.rate, holds=holds, counted=counted, attained=attained, sender_late=late)


def searched(search: Search, answer: Callable[[RunTrial], Try], trials_max: int = 500) -> SearchFinished:
    (effect,) = search.start(0.0)
    for now in range(trials_max):
        if isinstance(effect, SearchFinished):
            return effect
        (effect,) = search.handle(TrialDone(answer(effect)), float(now))
    raise AssertionError(f"no end after {trials_max} trials")


def goodputs(requests: int, loads: int) -> list[float]:
    """The goodput of each of many loads, far more finely than a search would find it."""
    found = []
    for number in range(loads):
        low, high = 1.0, 3 * MU
        for _ in range(12):
            middle = math.sqrt(low * high)
            trial = RunTrial(number=0, repeat=number, requests=requests, rate=middle)
            low, high = (middle, high) if tried(trial, 10**6).holds else (low, middle)
        found.append(low)
    return found


def test_a_server_that_takes_the_whole_pilot_at_once_is_found_too() -> None:
    """Fifty requests attain their target however fast they arrive. So the pilot's load must grow with its rate."""

    def answer(trial: RunTrial) -> Try:
        return made(trial, holds=trial.requests <= 50 or trial.rate <= 400)

    found = searched(Search(Aim(attainment=SHARE, repeats=1)), answer)
    assert found.limit is Limit.SERVER and found.rate == pytest.approx(400, rel=0.05)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """60 searches on a queue: 96.9 % of intervals are to hold the median of all loads of that many requests."""
    requests = 512
    truth = statistics.median(goodputs(requests, 300))
    held, errors, confidences = 0, [], set()
    for seed in range(60):
        aim = Aim(attainment=SHARE, trial_s=0.1, requests_least=requests)
        found = searched(Search(aim), lambda trial, seed=seed: tried(trial, seed))
        assert found.requests == requests
        assert found.limit is Limit.SERVER
        assert found.rate is not None and found.low is not None and found.high is not None
        held += found.low <= truth <= found.high
        errors.append(abs(found.rate / truth - 1))
        confidences.add(found.confidence)
    assert confidences == {1 - 2 / 2**6}
    assert held >= 54, f"{held} of 60"  # 58 expected; 53 or fewer have a probability of 0.25 %
    assert statistics.median(errors) < 0.05
    assert sorted(errors)[56] < 0.15


def test_long_loads_find_the_queue_s_known_capacity() -> None:
    found = searched(Search(Aim(attainment=SHARE, trial_s=400.0, precision=0.01)), lambda trial: tried(trial, 1))
    assert found.rate == pytest.approx(STEADY, rel=0.02)
    assert found.low is not None and found.high is not None and found.low <= STEADY <= found.high


@given(st.floats(0.01, 5000), st.floats(0.01, 0.2), st.floats(0.1, 100))
def test_a_server_with_one_edge_is_found_within_the_precision(edge: float, precision: float, first: float) -> None:
    aim = Aim(attainment=SHARE, first_rate=first, precision=precision, repeats=6)
    found = searched(Search(aim), lambda trial: made(trial, trial.rate <= edge))
    if found.limit is Limit.NEVER:
        assert edge < first / 500
        return
    assert found.low is not None and found.high is not None
    assert found.low <= edge <= found.high <= found.low * (1 + precision) ** 2
    assert found.trials < 120


def test_the_same_load_is_sent_at_every_rate_of_a_repeat() -> None:
    sizes: dict[int, set[int]] = {}

    def answer(trial: RunTrial) -> Try:
        sizes.setdefault(trial.repeat, set()).add(trial.requests)
        return made(trial, trial.rate <= 37)

    searched(Search(Aim(attainment=SHARE, trial_s=10.0)), answer)
    assert set(sizes) == set(range(7))
    assert all(len(each) == 1 for repeat, each in sizes.items() if repeat)
    assert min(sizes[0]) == 50 and max(sizes[0]) <= 3 * 64  # the pilot's trials last three seconds at least
    assert max(sizes[6]) == pytest.approx(370, rel=0.15)


def test_a_sender_that_stays_late_is_the_limit_and_no_goodput_is_told() -> None:
    def answer(trial: RunTrial) -> Try:
        return made(trial, holds=True, late="the sender is late" if trial.rate > 300 else "")

    found = searched(Search(Aim(attainment=SHARE)), answer)
    assert (found.limit, found.rate, found.low, found.high) == (Limit.SENDER, None, None, None)
    assert found.at_least is not None and 250 < found.at_least <= 300
    assert found.because == "the sender is late"
    assert found.late >= LATE_TRIES


def test_a_sender_that_is_late_from_the_start() -> None:
    found = searched(Search(Aim(attainment=SHARE)), lambda trial: made(trial, holds=False, late="late"))
    assert (found.limit, found.at_least, found.rate) == (Limit.SENDER, None, None)


def test_a_sender_that_was_late_once_is_asked_again() -> None:
    late: set[float] = set()

    def answer(trial: RunTrial) -> Try:
        if trial.rate > 20 and trial.rate not in late:
            late.add(trial.rate)
            return made(trial, holds=False, late="another program")
        return made(trial, trial.rate <= 40)

    found = searched(Search(Aim(attainment=SHARE)), answer)
    assert found.limit is Limit.SERVER
    assert found.rate == pytest.approx(40, rel=0.05)
    assert found.late == len(late)


def test_the_highest_rate_allowed_and_no_rate_at_all() -> None:
    found = searched(Search(Aim(attainment=SHARE, top_rate=10)), lambda trial: made(trial, holds=True))
    assert (found.limit, found.rate, found.at_least) == (Limit.TOP, None, 10)
    found = searched(Search(Aim(attainment=SHARE)), lambda trial: made(trial, holds=False))
    assert (found.limit, found.rate, found.at_least) == (Limit.NEVER, 0.0, None)


@pytest.mark.parametrize(("apart", "trials"), [(True, 2), (False, 11)])
def test_a_server_that_misses_with_one_request_at_a_time_is_not_asked_at_lower_rates(apart: bool, trials: int) -> None:
    """Down to the lowest rate of all a search would take hours, also of a server that refuses all connections."""
    found = searched(Search(Aim(attainment=SHARE)), lambda trial: replace(made(trial, False), misses_alone=apart))
    assert (found.limit, found.trials) == (Limit.NEVER, trials)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4), st.booleans()), max_size=20), st.sampled_from([0.3, 0.9])
)
def test_a_request_is_alone_if_no_other_overlaps_it(found: list[tuple[int, int, bool]], share: float) -> None:
    ended = [(float(sent), float(sent + lasts), missed) for sent, lasts, missed in found]
    lone = [
        one[2]
        for here, one in enumerate(ended)
        if not any(one[0] < other[1] and other[0] < one[1] for there, other in enumerate(ended) if there != here)
    ]
    enough = len(lone) >= ALONE_LEAST
    assert misses_alone(ended, share) == (enough and sum(lone) > len(lone) * max(0.5, 1 - share))


@pytest.mark.parametrize("ends_at", [1, 3])
def test_a_load_that_attains_at_no_rate_after_the_pilot_did_ends_the_search(ends_at: int) -> None:
    """For example, the server has died. Each halved rate would take twice as long, without end."""

    def answer(trial: RunTrial) -> Try:
        return made(trial, trial.repeat < ends_at and trial.rate <= 4)

    found = searched(Search(Aim(attainment=SHARE)), answer, trials_max=40)
    assert (found.limit, found.rate, found.low) == (Limit.LOST, None, None)
    assert len(found.loads) == ends_at - 1
    assert found.because.startswith(f"load {ends_at} attains at no rate, though the pilot did: is the server up?")


def test_a_sender_that_is_late_at_every_rate_after_the_pilot_ends_the_search() -> None:
    def answer(trial: RunTrial) -> Try:
        return made(trial, trial.rate <= 4, late="another program" if trial.repeat else "")

    aim = Aim(attainment=SHARE, first_rate=1e-6)
    found = searched(Search(aim), answer, trials_max=80)
    assert (found.limit, found.rate, found.because) == (Limit.SENDER, None, "another program")


def test_time_that_runs_out_leaves_what_is_known() -> None:
    search = Search(Aim(attainment=SHARE, seconds_max=30))
    search.start(5.0)
    assert search.next_wakeup() == 35.0
    assert search.handle(TrialTick(), 34.9) == ()
    (found,) = search.handle(TrialTick(), 35.0)
    assert isinstance(found, SearchFinished)
    assert (found.limit, found.rate, found.low, found.confidence) == (Limit.BUDGET, None, None, None)
    assert search.next_wakeup() is None
    assert search.handle(StopSearch(), 36.0) == ()

    search, now = Search(Aim(attainment=SHARE, seconds_max=60)), 0.0
    (effect,) = search.start(now)
    while isinstance(effect, RunTrial):
        now += 3.0
        (effect,) = search.handle(TrialDone(made(effect, effect.rate <= 64)), now)
    assert effect.limit is Limit.BUDGET
    assert 1 < len(effect.loads) < 6
    assert effect.rate == pytest.approx(64, rel=0.04)
    assert effect.low is None  # fewer than six loads


def test_a_search_that_is_stopped_says_so() -> None:
    search = Search(Aim(attainment=SHARE))
    search.start(0.0)
    (found,) = search.handle(StopSearch(), 1.0)
    assert isinstance(found, SearchFinished) and found.limit is Limit.STOPPED


@pytest.mark.parametrize(
    ("count", "at", "confidence"),
    [(5, None, None), (6, 0, 1 - 2 / 64), (8, 0, 1 - 2 / 256), (9, 1, 1 - 20 / 512), (12, 2, 1 - 2 * 79 / 4096)],
)
def test_the_interval_is_that_of_order_statistics(count: int, at: int | None, confidence: float | None) -> None:
    loads = tuple((float(each), each + 0.5) for each in range(count))
    low, high, told = interval(loads)
    if at is None:
        assert (low, high, told) == (None, None, None)
    else:
        assert (low, high) == (float(at), count - 1 - at + 0.5)
        assert told == pytest.approx(confidence)


def test_a_later_trial_is_believed_over_an_earlier_one() -> None:
    bisection = Bisection(10.0, 1.15, 0.04, math.inf)
    bisection.take(10.0, holds=True)
    bisection.take(12.0, holds=False)
    bisection.take(9.0, holds=False)
    assert (bisection.held, bisection.failed) == (0.0, 9.0)
    bisection.take(11.0, holds=True)
    assert (bisection.held, bisection.failed) == (11.0, math.inf)


def test_what_surely_holds_lies_below_everything_that_failed() -> None:
    def one(rate: float, holds: bool, late: str = "") -> Try:
        return Try(repeat=1, rate=rate, holds=holds, counted=1, attained=1, sender_late=late)

    assert held_at([]) is None
    assert held_at([one(5, True), one(9, True), one(7, False)]) == 5
    assert held_at([one(5, True), one(4, False, late="yes")]) == 5


@pytest.mark.parametrize(("top", "late_above"), [(100.0, math.inf), (math.inf, 100.0)])
def test_no_rate_is_told_that_only_a_pilot_has_shown(top: float, late_above: float) -> None:
    """A server that takes fifty requests at any rate, and attains at 60 a second in the long run."""

    def answer(trial: RunTrial) -> Try:
        if trial.rate > late_above:
            return made(trial, False, late="the sender")
        return made(trial, trial.rate <= (60.0 if trial.repeat else math.inf))

    found = searched(Search(Aim(attainment=SHARE, first_rate=5, top_rate=top)), answer)
    assert found.limit is Limit.SERVER
    assert found.rate == pytest.approx(60.0, rel=0.05)
    assert found.at_least is not None and found.at_least <= 60.0


def test_a_server_that_attains_at_the_highest_rate_is_told_by_a_whole_load() -> None:
    search = Search(Aim(attainment=SHARE, first_rate=5, top_rate=100))
    found = searched(search, lambda trial: made(trial, True))
    assert (found.limit, found.at_least) == (Limit.TOP, 100)
    assert search.tries[-1].repeat == 1 and found.requests == 3000
