"""The search of `baton plan` in made-up spaces, for which a test decides which fleets hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from goodput.search import Counts, SearchState, Space, Trial, TrialVerdict, neighbours, search

Holds = Callable[[Trial], TrialVerdict]


def run(spaces: list[Space], holds: Holds, **more: object) -> SearchState:
    found = SearchState()
    going = search([each for each in spaces if not each.empty], found, **more)  # type: ignore[arg-type]
    try:
        todo = next(going)
        while True:
            todo = going.send(holds(todo[0]))
    except StopIteration:
        return found


def drawn(prices: tuple[float, ...], need: float, most: int, name: str, **more: object) -> Space:
    kinds = len(prices)
    return Space(
        name=name,
        prices=prices,
        least=(1,) * kinds,
        most=(most,) * kinds,
        floors=(((1.0,) * kinds, need),),
        **more,  # type: ignore[arg-type]
    )


def test_a_measured_objective_is_minimised() -> None:
    """The space that is cheapest by its bound costs more than the other when measured."""
    first, second = (drawn((1.0,), 1.0, 5, "first"), drawn((1.5,), 1.0, 5, "second"))

    def holds(trial: Trial) -> TrialVerdict:
        cost = trial.price + (3.0 if trial.space is first else 0.5)
        return TrialVerdict(holds=trial.counts[0] >= 2, cost=cost)

    found = run([first, second], holds)
    assert found.best is not None
    assert (found.best.space.name, found.best.counts, found.cost) == ("second", (2,), 3.5)
    assert found.proven


def test_a_cheaper_neighbour_that_holds_against_what_was_presumed_is_taken_and_told() -> None:
    """(3, 1) fails, so (2, 1) is presumed to fail, but it holds."""
    space = drawn((1.0, 5.0), 1.0, 4, "odd")
    odd = {(2, 1): True, (3, 1): False, (4, 1): True}
    found = run([space], lambda trial: TrialVerdict(holds=odd.get(trial.counts, trial.counts[0] >= 4)))
    assert found.best is not None
    assert found.best.counts in {(2, 1), (4, 1)}
    if found.best.counts == (2, 1):
        assert any("presumed to" in told for told in found.contradicted)
    else:
        assert (3, 1) in [trial.counts for trial in found.failed]


def test_the_effort_ends_it_with_the_best_so_far_and_says_what_is_left() -> None:
    spaces = [drawn((1.0 + 0.001 * number, 1.0), 4.0, 20, str(number)) for number in range(30)]
    found = run(spaces, lambda trial: TrialVerdict(holds=sum(trial.counts) >= 9, spent=10), effort=30)
    assert found.best is not None
    assert not found.proven
    assert found.open_spaces > 0
    assert found.open_scale >= 1


def test_weaker_kinds_are_ruled_out_with_stronger_ones() -> None:
    strong = drawn((2.0,), 1.0, 5, "strong", kinds=("strong",))
    weak = drawn((1.9,), 1.0, 5, "weak", kinds=("weak",))
    tried: list[tuple[str, Counts]] = []

    def holds(trial: Trial) -> TrialVerdict:
        tried.append((trial.space.name, trial.counts))
        return TrialVerdict(holds=trial.space is strong and trial.counts[0] >= 4)

    failed = [Trial(strong, (3,))]
    run([strong, weak], holds, weaker={"strong": frozenset({"weak"})}, failed=failed)
    assert all(counts[0] > 3 for name, counts in tried if name == "weak")


def test_no_fleet_beyond_the_limits_or_below_the_floors_is_tried() -> None:
    space = Space(
        name="shared",
        prices=(1.0, 1.0),
        least=(1, 1),
        most=(8, 8),
        limits=(((1.0, 2.0), 9.0),),
        floors=(((1.0, 1.0), 3.0),),
    )
    tried: list[Counts] = []

    def holds(trial: Trial) -> TrialVerdict:
        tried.append(trial.counts)
        return TrialVerdict(holds=False)

    found = run([space], holds)
    assert found.best is None
    assert found.proven
    assert tried
    assert all(few + 2 * many <= 9 and few + many >= 3 for few, many in tried)


@pytest.mark.parametrize("kinds", [3, 4])
def test_a_space_of_more_fleets_than_a_grid_has_ends_the_search(kinds: int) -> None:
    """Only large fleets may hold. What a grid cannot reach stays open, and the search says so."""
    space = drawn((1.0,) * kinds, 160.0, 64, "many")
    found = run([space], lambda trial: TrialVerdict(holds=sum(trial.counts) >= 170, spent=1), effort=200)
    assert (found.best is not None) == (kinds == 3)
    assert not found.proven


def test_neighbours_are_cheaper_ones_first_then_one_more() -> None:
    space = Space(name="x", prices=(1.0, 3.0), least=(1, 1), most=(5, 5))
    near = [each.counts for each in neighbours(Trial(space, (2, 2)))]
    assert set(near[:3]) == {(1, 2), (2, 1), (3, 1)}, "cheaper than 2 + 2"
    assert set(near[3:]) == {(3, 2), (2, 3)}, "one more"
    assert near.index((1, 2)) < near.index((2, 1))


def test_two_equal_searches_try_the_same_fleets_in_the_same_order() -> None:
    """Of the trials that the search yields at once, only the first gets a verdict."""
    spaces = [drawn((1.0 + number / 7, 2.0), 2.0, 6, str(number)) for number in range(5)]
    seen: list[list[tuple[str, Counts]]] = [[], []]
    for row in seen:

        def holds(trial: Trial, row: list[tuple[str, Counts]] = row) -> TrialVerdict:
            row.append((trial.space.name, trial.counts))
            return TrialVerdict(holds=sum(trial.counts) >= 5, spent=1)

        run(spaces, holds)
    assert seen[0] == seen[1]


def test_of_fleets_of_one_price_the_one_that_attains_more_is_taken() -> None:
    attained = {"small": 0.91, "large": 0.97, "other": 0.93}
    settings = [
        drawn((1.0,), 1.0, 5, name, make=make) for name, make in (("small", "a"), ("large", "a"), ("other", "b"))
    ]
    found = run(
        settings, lambda trial: TrialVerdict(holds=trial.counts[0] >= 2, attained=attained[trial.space.name], spent=1)
    )
    assert found.best is not None
    assert (found.best.space.name, found.best.counts, found.attained) == ("large", (2,), 0.97)


def test_splits_of_one_price_are_told_apart_by_what_they_attain() -> None:
    space = drawn((1.0, 1.0), 4.0, 8, "split")
    attained = {(1, 3): 0.9, (2, 2): 0.96, (3, 1): 0.92}

    def holds(trial: Trial) -> TrialVerdict:
        return TrialVerdict(
            holds=trial.counts in attained or sum(trial.counts) > 4, attained=attained.get(trial.counts, 1.0)
        )

    found = run([space], holds)
    assert found.best is not None
    assert found.best.counts == (2, 2)


def test_of_equal_price_and_attainment_fewer_gpus_win() -> None:
    spaces = [drawn((2.0,), 1.0, 3, "wide", gpus=(4,)), drawn((2.0,), 1.0, 3, "narrow", gpus=(2,))]
    found = run(spaces, lambda _: TrialVerdict(holds=True, attained=1.0))
    assert found.best is not None
    assert found.best.space.name == "narrow"


def test_fleets_of_one_price_cost_no_more_than_a_few_trials() -> None:
    spaces = [drawn((1.0,), 1.0, 2, str(number)) for number in range(30)]
    assert run(spaces, lambda _: TrialVerdict(holds=True, attained=0.9), equals=4).trials <= 2 + 4
    assert run(spaces, lambda _: TrialVerdict(holds=True, attained=0.9), equals=0).trials <= 2


def test_where_the_objective_is_measured_the_same_machines_are_tried_with_other_settings() -> None:
    """The bound overstates the cost of the capped machines, so the search would not try them for their price."""
    plain, capped = (
        drawn((1.0,), 1.0, 3, "plain", make="a", family="x"),
        drawn((1.1,), 1.0, 3, "capped", make="a", family="y"),
    )
    measured = {"plain": 2.0, "capped": 1.5}
    found = run(
        [plain, capped], lambda trial: TrialVerdict(holds=True, cost=measured[trial.space.name], spent=1), effort=1
    )
    assert found.best is not None
    assert found.best.space.name == "capped"


@pytest.mark.parametrize("survive", [0, 1])
def test_a_fleets_scale_is_that_of_what_is_left_after_the_worst_loss(survive: int) -> None:
    space = Space(name="x", prices=(1.0, 1.0), least=(1, 1), most=(9, 9), floors=(((1.0, 2.0), 4.0),), survive=survive)
    assert space.scale((2, 3)) == pytest.approx((8 - 2 * survive) / 4)


def test_where_bounds_say_nothing_the_search_leaps_over_many_cheap_failures() -> None:
    """Sixty arrangements of slow machines never hold, in any number; a dear one does. The effort is for 30 trials."""
    slow = [replace(drawn((1.0 + at / 100,), 1.0, 4, f"slow {at}"), floors=()) for at in range(60)]
    fast = replace(drawn((6.0,), 1.0, 4, "fast"), floors=())
    found = run([*slow, fast], lambda trial: TrialVerdict(holds=trial.space is fast, spent=1), effort=30)
    assert found.best is not None
    assert (found.best.space.name, found.best.counts) == ("fast", (1,))


def test_a_leap_that_finds_nothing_dearer_tries_the_largest_instances() -> None:
    """With twelve GPUs only the largest instance with one of five settings is fast enough; all other fleets fail."""
    sizes = [
        replace(drawn((float(gpus),), 1.0, 12 // gpus, f"{gpus} {budget}"), floors=(), gpus=(gpus,))
        for budget in range(5)
        for gpus in (1, 2, 4, 8)
    ]
    found = run(sizes, lambda trial: TrialVerdict(holds=trial.space.name == "8 4", spent=1), effort=40)
    assert found.best is not None


def test_after_a_leap_single_instances_that_cost_less_are_tried_among_the_cheapest() -> None:
    slow = [replace(drawn((1.0 + at / 100,), 1.0, 4, f"slow {at}"), floors=()) for at in range(60)]
    fast, dear = (replace(drawn((price,), 1.0, 4, f"{price}"), floors=()) for price in (1.9, 6.0))
    found = run([*slow, fast, dear], lambda trial: TrialVerdict(holds=trial.space in {fast, dear}, spent=1), effort=30)
    assert found.best is not None
    assert (found.best.space.name, found.best.counts) == ("1.9", (1,))
