"""Early decode legs in the simulator: the second token comes sooner, and no request is lost when an instance dies."""

from __future__ import annotations

import numpy as np
import pytest
from support.simulated import every, members, simulate

from cluster.instance import Role
from sim.faults import Fault

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
