"""Bounds of whole fleets: fleets that a bound rules out fail when they are simulated. The reverse is not promised."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.plan_cases import fleets, random_task

from baton.planning import Planner
from goodput.candidates import POWER_CAPS, Arrangement, arrangements
from goodput.floors import Floors
from goodput.search import Counts, Space

PER_CASE = 6


def ruled_out(seed: int) -> tuple[Planner, list[tuple[float, Arrangement, Counts]]]:
    """The planner and the fleets of a random task that bounds rule out, those nearest to passing first."""
    planner = Planner(random_task(seed, small=True))
    floors = Floors(planner.task.demand())
    found = []
    for _, arrangement, counts in fleets(planner.task, planner):
        roles, engines = [kind.role for kind in arrangement], [planner._engine(kind) for kind in arrangement]
        if planner._floors.impossible(roles, engines) is not None:
            found.append((0.0, arrangement, counts))
            continue
        space = Space(
            name="",
            prices=(1.0,) * len(counts),
            least=(1,) * len(counts),
            most=counts,
            floors=tuple((each.weights, each.least) for each in floors.of(roles, engines)),
            survive=planner.task.survive,
        )
        if space.scale(counts) < 1:
            found.append((space.scale(counts), arrangement, counts))
    return planner, sorted(found, key=lambda each: -each[0])


LONG = [pytest.param(seed, marks=pytest.mark.long) for seed in range(320, 360)]


@pytest.mark.parametrize("seed", [301, 302, 303, 304, 305, 306, *LONG])
def test_fleets_that_bounds_rule_out_fail(seed: int) -> None:
    planner, found = ruled_out(seed)
    for scale, arrangement, counts in found[:PER_CASE]:
        assert not planner.holds(arrangement, counts), (scale, [str(kind) for kind in arrangement], counts)


def test_the_cases_above_rule_something_out() -> None:
    assert sum(len(ruled_out(seed)[1]) for seed in (301, 302, 303)) >= 10


@pytest.mark.parametrize("seed", [301, 304, *LONG])
def test_no_fleet_draws_less_than_its_bound(seed: int) -> None:
    """Compares simulated joules per output token with the bound, for some arrangements with power caps. Each has up to
    two instances of a kind.
    """
    planner = Planner(replace(random_task(seed, small=True), objective="energy", survive=0))
    ratios = []
    for space in planner.spaces[::7][:12]:
        counts = tuple(min(2, most) for most in space.most)
        seen = planner.answer(planner.arrangements[space.name], counts).seen
        if space.allows(counts) and min(each.missed["served"] for each in seen.classes.values()) == 0:
            drawn = seen.energy_j / seen.output_tokens
            assert drawn >= space.price(counts) * (1 - 1e-6), (space.kinds, counts, drawn, space.price(counts))
            ratios.append(drawn / space.price(counts))
    assert ratios
    bases = {space.kinds: space.base for space in planner.spaces if len(space.kinds) == 1}
    capped = {kinds[0].partition(" capped")[0] for kinds in bases if " capped" in kinds[0]}
    assert capped
    for name in capped:
        assert bases[next(kinds for kinds in bases if kinds[0].startswith(f"{name} capped"))] < bases[name,]


def test_kinds_of_several_types_and_caps_are_candidates_and_refused_pairs_are_not() -> None:
    task = random_task(302, small=True)
    listed = list(arrangements(task.shape, task.gpus, POWER_CAPS))
    assert any(kind.power_cap < 1 for each in listed for kind in each)
    assert len({tuple(map(str, each)) for each in listed}) == len(listed)
    for each in listed:
        for role in {kind.role for kind in each}:
            types = [kind.gpu.name for kind in each if kind.role is role]
            assert len(set(types)) == len(types), "several kinds of one role differ in their GPU type"
