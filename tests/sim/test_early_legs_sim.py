"""Early decode legs in the simulator: the second token comes sooner, no request is lost when an instance dies, and the
router pulls where early legs cost more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.simulated import HANDS_OVER, every, members, simulate

from cluster.instance import Role
from router.core.events import Chosen
from sim.faults import Fault
from sim.passage import Passage
from sim.settings import SimSettings
from sim.world import World

P, D = Role.PREFILL, Role.DECODE


def test_the_second_token_comes_sooner_by_ds_server_and_a_hop() -> None:
    """A network hop takes 100 µs, D's API server 2 ms. The first token is P's, and comes at the same time."""
    runs = {early: simulate(members(P, D), every(0.5, 20), early=early)[1].columns for early in (False, True)}
    assert all((rows["outcome"] == 1).all() for rows in runs.values())
    assert (runs[True]["first_ns"] == runs[False]["first_ns"]).all()
    gained_ms = (runs[False]["second_ns"] - runs[True]["second_ns"]) / 1e6
    assert np.median(gained_ms) == pytest.approx(2.1, abs=0.05) and gained_ms.min() >= 0


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_an_instance_that_dies_costs_no_request(victim: str) -> None:
    died = [Fault(at_s=1.01, kind="kill", instance=victim)]
    world, result = simulate(members(P, P, D, D), every(0.02, 150), faults=died, early=True, greedy=True)
    assert (result.columns["outcome"] == 1).all(), result.details
    assert all(view.inflight == 0 for view in world.view.all()), "places are given back"


def times_of(gap_s: float, **settings: Any) -> tuple[World, list[Chosen], Any]:
    """A run of 400 requests. Returns its world, its choices, and the times to the second tokens in ms."""
    told: list[Chosen] = []

    def note(_: Passage, chosen: Chosen) -> None:
        told.append(chosen)

    world = World(members(P, D), SimSettings(**settings), policy=HANDS_OVER)
    world.fronts[0].on_choice = note
    rows = world.run(every(gap_s, 400, answer=3)).columns
    assert (rows["outcome"] == 1).all()
    return world, told, (rows["second_ns"] - rows["at_ns"]) / 1e6


@pytest.mark.parametrize("gap_s", [0.5, 0.015])
def test_where_waiting_legs_slow_p_the_router_pulls(gap_s: float) -> None:
    """An early leg gains 2.1 ms and loses 5, alone and where two requests are under way."""
    world, told, second_ms = times_of(gap_s, early=True, early_slows_ms=5.0)
    *_, pulled_ms = times_of(gap_s, early=False)
    early = np.array([each.early_s is not None for each in told])
    assert early[:24].all(), "nothing is known"
    assert early[-180:].mean() < 0.1
    assert np.median(second_ms[-180:]) == pytest.approx(np.median(pulled_ms[-180:]), abs=0.1)
    assert any("; pulls: early legs took 3 ms longer here" in each.because for each in told)
    assert [round(each[-1]) for each in world.fronts[0].scheduler.legs.early.found()] == [3]


@pytest.mark.parametrize("gap_s", [0.5, 0.015])
def test_where_they_slow_p_by_less_than_they_gain_legs_stay_early(gap_s: float) -> None:
    world, told, _ = times_of(gap_s, early=True, early_slows_ms=1.0)
    early = np.array([each.early_s is not None for each in told])
    assert early.mean() > 0.85 and early[-180:].mean() > 0.9, "the others are compared"
    assert world.fronts[0].scheduler.legs.early.pulled["dearer"] == 0
