"""Classes that refuse, in an overload: what is let in is kept, and no fewer of all that came are served in time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costs import shipped
from loadgen.report import Targets
from sim.experiments.overload import SCENARIOS, URGENT, Kept, around, by_decile, kept, of_class, run, targets
from sim.experiments.systems import Shelf

TWO_CLASSES = replace(SCENARIOS[0], seconds=20.0)


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    return Shelf(shipped.models(), shipped.profiles())


def test_what_is_let_in_is_kept_and_nobody_pays_for_it(shelf: Shelf) -> None:
    """By prices alone, one in twenty that were let in missed their time per token."""
    kept_of = {True: Kept(0, 0, 0), False: Kept(0, 0, 0)}
    attained = {True: 0.0, False: 0.0}
    for seed in (4, 5):  # of one alone, chance decides: 20 s are a thousand requests
        for learns, before in kept_of.items():
            result = run(TWO_CLASSES, shelf, seed, learns=learns)
            mine = kept(result, of_class(result, URGENT))
            kept_of[learns] = Kept(
                before.arrived + mine.arrived, before.admitted + mine.admitted, before.met + mine.met
            )
            attained[learns] += kept(result).attained
    assert kept_of[False].kept < 0.96
    assert kept_of[True].kept > 0.965
    assert attained[True] >= attained[False]


def test_after_an_instance_has_slowed_down_what_is_let_in_is_kept_again(shelf: Shelf) -> None:
    scenario = next(each for each in SCENARIOS if each.slow)
    result = run(scenario, shelf, 4)
    parts = {name: kept(result, of_class(result, URGENT) & among) for name, among in around(scenario, result).items()}
    assert sum(each.arrived for each in parts.values()) == kept(result, of_class(result, URGENT)).arrived
    assert parts["later"].kept > parts["in flight, and 5 s after"].kept
    assert parts["later"].kept >= 0.95


def test_deciles_are_of_all_requests(shelf: Shelf) -> None:
    scenario = replace(next(each for each in SCENARIOS if each.prompts[0] != each.prompts[1]), seconds=6.0)
    result = run(scenario, shelf, 1)
    found = by_decile(result.columns["input_tokens"], result.met(Targets(), targets()))
    assert len(found) == 10 and sum(found) / 10 == pytest.approx(kept(result).attained, abs=0.02)
