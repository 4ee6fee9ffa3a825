"""Classes that shed load, in an overload: promises to admitted requests are kept, and attainment does not fall."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costs import shipped
from loadgen.report import Targets
from sim.experiments.overload import (
    PROMISES,
    SCENARIOS,
    URGENT,
    Kept,
    around,
    by_decile,
    kept,
    of_class,
    run,
    targets,
)
from sim.experiments.systems import Shelf

TWO_CLASSES = replace(SCENARIOS[0], seconds=20.0)


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    return Shelf(shipped.models(), shipped.profiles())


def test_learned_margins_keep_promises_to_admitted_requests_at_no_loss(shelf: Shelf) -> None:
    """Without learned margins, one in sixteen admitted requests misses its TPOT target with seed 10; with seed 5,
    hardly any does, with or without.
    """
    kept_of = {True: Kept(0, 0, 0), False: Kept(0, 0, 0)}
    attained = {True: 0.0, False: 0.0}
    for seed in (10, 5):  # two seeds, as the attainment of one (20 s, a thousand requests) is too random
        found = {learns: run(TWO_CLASSES, shelf, seed, learns=learns) for learns in attained}
        mine, theirs = (kept(found[learns], of_class(found[learns], URGENT)) for learns in (True, False))
        assert theirs.kept < 0.95 if seed == 10 else theirs.kept <= mine.kept
        assert mine.kept > 0.95
        for learns, urgent in ((True, mine), (False, theirs)):
            kept_of[learns] += urgent
            attained[learns] += kept(found[learns]).attained
    assert kept_of[False].kept < 0.97
    assert kept_of[True].kept >= 0.97, kept_of
    assert attained[True] >= attained[False]


def test_prompts_leave_promised_answers_their_time(shelf: Shelf) -> None:
    """When a prompt was charged a single miss for an answer that it makes late, 0.959 of these answers were kept: on an
    instance of role both, dozens missed one after the other.
    """
    scenario = next(each for each in SCENARIOS if each.name == "prompts of all lengths")
    results = [run(scenario, shelf, seed) for seed in (15, 16)]  # attainment of one seed is 0.90 to 0.95
    assert all(kept(each, of_class(each, URGENT)).kept >= 0.98 for each in results)
    assert sum(kept(each).attained for each in results) / 2 > 0.91


@pytest.mark.parametrize(("told", "seconds"), [(True, 30.0), (False, 20.0)])
def test_first_tokens_that_come_after_a_hand_over_are_in_time(shelf: Shelf, told: bool, seconds: float) -> None:
    """A hand-over's pause counts in the deadline. If it did not, requests that had waited almost until their target
    would be admitted, and get their first token too late: 18 and 14 in these two loads, which would keep 0.961 and
    0.916.
    """
    result = run(replace(SCENARIOS[0], told=told, seeded=False, seconds=seconds), shelf, 6)
    rows, mine = result.columns, of_class(result, URGENT)
    first_ms = (rows["first_ns"] - rows["at_ns"]) / 1e6
    late = mine & (rows["status"] != 429) & (first_ms > PROMISES[URGENT].ttft_ms)
    assert late.sum() <= 2
    assert kept(result, mine).kept >= 0.97


def test_some_seconds_after_an_instance_has_slowed_down_promises_are_kept_again(shelf: Shelf) -> None:
    scenario = next(each for each in SCENARIOS if each.slow)
    result = run(scenario, shelf, 4)
    parts = {name: kept(result, of_class(result, URGENT) & among) for name, among in around(scenario, result).items()}
    assert sum(each.arrived for each in parts.values()) == kept(result, of_class(result, URGENT)).arrived
    assert parts["later"].kept > parts["in flight, and 5 s after"].kept
    assert parts["later"].kept >= 0.97, parts


def test_deciles_are_of_all_requests(shelf: Shelf) -> None:
    scenario = replace(next(each for each in SCENARIOS if each.prompts[0] != each.prompts[1]), seconds=6.0)
    result = run(scenario, shelf, 1)
    found = by_decile(result.columns["input_tokens"], result.met(Targets(), targets()))
    assert len(found) == 10 and sum(found) / 10 == pytest.approx(kept(result).attained, abs=0.02)
