"""The search against trying everything: never a dearer answer, and far fewer trials."""

from __future__ import annotations

import math
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from goodput.search import TOLERANCE, Counts, Found, Space, Trial, search

GPU_PRICES = [0.44, 1.2, 1.5, 2.95, 3.8, 5.98]


@st.composite
def problems(draw: st.DrawFn) -> list[tuple[Space, list[Counts]]]:
    """Spaces, each with the least fleets that hold: everything that contains one of these holds."""
    found = []
    for number in range(draw(st.integers(1, 5))):
        kinds = draw(st.integers(1, 3))
        many = {"min_size": kinds, "max_size": kinds}
        least = tuple(draw(st.lists(st.integers(1, 3), **many)))
        most = tuple(draw(st.lists(st.integers(2, 12), **many)))
        prices = tuple(
            price * tp
            for price, tp in draw(st.lists(st.tuples(st.sampled_from(GPU_PRICES), st.sampled_from([1, 2, 4])), **many))
        )
        edges = draw(st.lists(st.lists(st.integers(1, 14), **many), max_size=4))
        holds = [tuple(max(pair) for pair in zip(edge, least, strict=True)) for edge in edges]
        weights = tuple(draw(st.lists(st.integers(0, 4), **many)))
        limits = ((weights, float(draw(st.integers(0, 40)))),) if draw(st.booleans()) else ()
        floor = draw(st.integers(0, 12))
        floors = ((tuple(float(each) for each in draw(st.lists(st.integers(0, 2), **many))), float(floor)),)
        space = Space(name=str(number), prices=prices, least=least, most=most, limits=limits, floors=floors)
        found.append((space, [edge for edge in holds if space.suffices(edge)]))
    return found


def holds(problem: list[tuple[Space, list[Counts]]], trial: Trial) -> bool:
    edges = next(edges for space, edges in problem if space is trial.space)
    return any(all(few <= many for few, many in zip(edge, trial.counts, strict=True)) for edge in edges)


def cheapest(problem: list[tuple[Space, list[Counts]]]) -> float:
    """By trying every fleet there is."""
    best = math.inf
    for space, _ in problem:
        ranges = [range(few, many + 1) for few, many in zip(space.least, space.most, strict=True)]
        for counts in product(*ranges):
            if space.allows(counts) and holds(problem, Trial(space, counts)):
                best = min(best, space.price(counts))
    return best


def run(problem: list[tuple[Space, list[Counts]]], width: int = 1) -> Found:
    found = Found()
    going = search([space for space, _ in problem], found, width=width)
    try:
        batch = next(going)
        while True:
            assert 1 <= len(batch) <= width
            assert all(trial.space.allows(trial.counts) for trial in batch)
            batch = going.send([holds(problem, trial) for trial in batch])
    except StopIteration:
        return found


@given(problems(), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_it_finds_the_cheapest_fleet(problem: list[tuple[Space, list[Counts]]], width: int) -> None:
    found, best = run(problem, width), cheapest(problem)
    assert found.proven
    assert found.open_spaces == 0
    assert found.trials == len(found.held) + len(found.failed)
    if math.isinf(best):
        assert found.best is None
        return
    assert found.best is not None
    assert holds(problem, found.best)
    assert best <= found.best.price * (1 + 1e-9)
    assert found.best.price * (1 - TOLERANCE) <= best * (1 + 1e-9)


@given(problems())
@settings(max_examples=100, deadline=None)
def test_no_fleet_is_tried_twice_nor_where_it_is_known(problem: list[tuple[Space, list[Counts]]]) -> None:
    found = run(problem)
    tried = [(id(trial.space), trial.counts) for trial in (*found.held, *found.failed)]
    assert len(set(tried)) == len(tried)


def test_large_spaces_take_few_trials() -> None:
    """60 arrangements of up to 64 instances of two kinds: 250,000 fleets."""
    problem = [
        (
            Space(name=str(number), prices=(1 + number % 7, 2 + number % 5), least=(2, 2), most=(64, 64)),
            [(5 + number % 9, 20 + number % 11)],
        )
        for number in range(60)
    ]
    found = run(problem)
    assert found.best is not None
    best = min(space.price(edges[0]) for space, edges in problem)
    assert found.best.price == best
    assert found.trials < 600


def test_a_ceiling_is_a_budget() -> None:
    space = Space(name="", prices=(2.0,), least=(1,), most=(10,))
    found = Found()
    going = search([space], found, ceiling=8.0)
    batch, tried = next(going), list[float]()
    try:
        while True:
            tried += [trial.price for trial in batch]
            batch = going.send([trial.counts[0] >= 5 for trial in batch])
    except StopIteration:
        pass
    assert found.best is None
    assert found.proven
    assert max(tried) <= 8.0
