"""The search of `baton plan` finds the cheapest fleet that holds."""

from __future__ import annotations

import math
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from goodput.search import TOLERANCE, Counts, SearchState, Space, Trial, TrialVerdict, search


def fleets(space: Space) -> list[Counts]:
    ranges = [range(low, high + 1) for low, high in zip(space.least, space.most, strict=True)]
    return [counts for counts in product(*ranges) if space.allows(counts)]


TASKS = st.lists(
    st.tuples(
        st.lists(st.floats(0.5, 5.0), min_size=1, max_size=3),
        st.floats(0.5, 6.0),
        st.floats(1.0, 2.5),
        st.integers(1, 6),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40)
@given(TASKS, st.integers(0, 1))
def test_the_search_finds_the_cheapest_fleet_if_larger_fleets_hold_more(tasks: list[tuple], survive: int) -> None:
    spaces = [
        Space(
            name=str(number),
            prices=tuple(prices),
            least=(1,) * len(prices),
            most=(most,) * len(prices),
            floors=(((1.0,) * len(prices), need),),
            survive=survive,
        )
        for number, (prices, need, _, most) in enumerate(tasks)
    ]
    scales = {str(number): scale for number, (_, _, scale, _) in enumerate(tasks)}

    def holds(trial: Trial) -> TrialVerdict:
        return TrialVerdict(holds=trial.space.scale(trial.counts) >= scales[trial.space.name], spent=1)

    found = SearchState()
    going = search([each for each in spaces if not each.empty], found)
    try:
        todo = next(going)
        while True:
            todo = going.send(holds(todo[0]))
    except StopIteration:
        pass
    prices = [
        space.price(counts)
        for space in spaces
        for counts in fleets(space)
        if sum(counts) > survive and holds(Trial(space, counts)).holds
    ]
    assert found.proven
    assert math.isinf(found.cost) == (not prices)
    if prices:
        assert min(prices) - 1e-6 <= found.cost <= min(prices) / (1 - TOLERANCE) + 1e-6
