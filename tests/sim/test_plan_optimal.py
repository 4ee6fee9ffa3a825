"""`baton plan` compared with a search over every fleet: within 2 % of the optimum in 95 % of random cases.

Each case has a drawn model, GPU types with counts, prices and speeds, load, promises and objective, and may have to
survive the loss of an instance. The optimum is found by trying every fleet, cheapest first, until one holds. Fleets
that bounds rule out are tried, too. The seeds were drawn once, before the first run; the generator was developed with
other seeds (below 100).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from support.plan_cases import optimum, price_of, random_task

from baton.planning import plan

WITHIN = 1.02
SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Case:
    """The result of one task."""

    seed: int
    best: float
    """The lowest price by trying every fleet; infinite: no fleet holds."""
    chosen: float
    """The price of the planner's choice; infinite: it has none."""
    instances: int
    holds: bool

    @property
    def good(self) -> bool:
        """Whether the choice keeps the promises and costs at most `WITHIN` times the optimum."""
        if math.isinf(self.best):
            return math.isinf(self.chosen)
        return self.holds and self.chosen <= self.best * WITHIN


def case(seed: int, *, small: bool) -> Case:
    task = random_task(seed, small=small)
    found = plan(task, lambda *_: None, processes=1).best
    best = optimum(task).price
    if found is None:
        return Case(seed, best, math.inf, 0, holds=False)
    chosen = price_of(task, found.arrangement, found.counts)
    return Case(seed, best, chosen, sum(found.counts), found.seen.holds)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(7000, 7005), id="5"),
        pytest.param(range(8000, 8200), id="200", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
def test_choices_are_within_two_per_cent_of_the_optimum(seeds: range) -> None:
    cases = [case(seed, small=len(seeds) < 100) for seed in seeds]
    bad = [each for each in cases if not each.good]
    assert len(bad) <= (1 - SHARE) * len(cases) + 1e-9, bad
    answered = [each for each in cases if not math.isinf(each.best)]
    assert len(answered) >= 0.6 * len(cases), "most cases have to have an answer, or nothing is compared"
    assert sum(each.instances > 1 for each in answered) >= 0.5 * len(cases), "half of them need several instances"


def test_a_choice_that_is_dearer_or_breaks_its_promise_is_not_good() -> None:
    assert Case(1, 100.0, 101.9, 2, holds=True).good
    assert Case(1, math.inf, math.inf, 0, holds=False).good
    for wrong in (
        Case(1, 100.0, 102.1, 2, holds=True),
        Case(1, 100.0, 100.0, 2, holds=False),
        Case(1, 100.0, math.inf, 0, holds=False),
        Case(1, math.inf, 100.0, 2, holds=True),
    ):
        assert not wrong.good, wrong
