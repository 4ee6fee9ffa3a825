"""Simulated disturbances (`sim.roughness`): runs are repeatable, break no law, and have only the configured ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.simulated import every, members

from cluster.ids import InstanceId
from cluster.instance import Role
from loadgen.arrival import Arrival
from router.core.values import Promise
from router.scheduler.scoring.policies import POLICIES
from sim.faults import Fault, Faults
from sim.result import Result
from sim.roughness import ROUGH, SMOOTH, Roughness
from sim.settings import SimSettings
from sim.world import World

P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH


def run(rough: Roughness, *roles: Role, seed: int = 0, **more: Any) -> tuple[World, Result]:
    """A run with every check of the simulator on."""
    promise = {"": Promise(ttft_ms=500.0, tpot_ms=20.0)}
    settings = SimSettings(seed=seed, rough=rough)
    world = World(members(*roles), settings, policy=POLICIES["workload"], promises=promise)
    Faults(world, more.get("faults", ()), seed)
    return world, world.run(every(more.get("gap_s", 0.02), more.get("count", 400), tokens=100, answer=20))


def test_a_rough_world_keeps_every_law_and_serves_all() -> None:
    slow = Fault(at_s=2.0, kind="slow", instance=InstanceId("decode-1"), duration_s=1.0)
    world, result = run(replace(ROUGH, stall_every_s=1.0), P, D, B, faults=[slow])
    assert (result.columns["outcome"] == 1).all()
    assert world.counts["stalls"] >= 3


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    first, again, other = (run(ROUGH, P, D, seed=seed)[1].columns for seed in (1, 1, 2))
    assert (first["end_ns"] == again["end_ns"]).all()
    assert (first["end_ns"] != other["end_ns"]).any()


def test_nothing_is_rough_unless_asked_for() -> None:
    assert SimSettings().rough == SMOOTH == Roughness()
    world, _ = run(SMOOTH, P, D)
    assert not world.counts["stalls"] and all(each.clock is None for each in world.instances)


@pytest.mark.parametrize(
    ("rough", "roles"),
    [
        (Roughness(stall_every_s=0.3), (B,)),
        (Roughness(front_cores=1), (B,)),
        (Roughness(pull_wait_ms=20.0), (P, D)),
    ],
)
def test_each_part_alone_makes_requests_wait(rough: Roughness, roles: tuple[Role, ...]) -> None:
    """Requests arrive every 4 ms. An API server that needs 5 ms for each cannot keep up with one core."""
    (_, smooth), (_, found) = (run(each, *roles, gap_s=0.004, count=300) for each in (SMOOTH, rough))
    assert np.mean(found.columns["end_ns"] - found.columns["at_ns"]) > np.mean(
        smooth.columns["end_ns"] - smooth.columns["at_ns"]
    )


def test_speeds_vary_around_their_mean() -> None:
    """Some requests are faster and some slower; on average they take the same time."""
    (_, smooth), (_, found) = (run(each, B, gap_s=0.5, count=200) for each in (SMOOTH, Roughness(speed_cv=0.2)))
    times = [each.columns["end_ns"] - each.columns["at_ns"] for each in (smooth, found)]
    assert np.std(times[1] / times[0]) > 0.05
    assert np.mean(times[1] / times[0]) == pytest.approx(1.0, abs=0.1)


def test_prompt_tokens_are_estimated_with_an_error() -> None:
    seen: list[int] = []
    world = World(members(B), SimSettings(rough=Roughness(ratio_cv=0.15)), policy=POLICIES["workload"])
    world.front.on_choice = lambda passage, _: seen.append(passage.wanted.prompt_tokens)
    world.run(every(0.05, 200, tokens=1000 // 10, answer=4))
    assert len(set(seen)) > 20
    assert np.mean(seen) == pytest.approx(100, rel=0.05) and 0.08 < np.std(seen) / 100 < 0.25


def test_a_row_without_prompt_tokens_is_served_like_any_other() -> None:
    world = World(members(B), SimSettings(rough=ROUGH), policy=POLICIES["workload"])
    result = world.run([*every(0.05, 5), Arrival(at_s=0.3, input_tokens=0, output_tokens=4)])
    assert (result.columns["outcome"] == 1).all()


def test_rates_of_a_fault_and_of_a_varying_speed_multiply() -> None:
    world = World(members(B), SimSettings())
    at = world.instances[0]
    world.lives.slow(at, (1, 4))
    world.lives.slow(at, (1, 2), "speed")
    assert at.clock is not None and at.clock.rate == (1, 8)
    world.lives.slow(at, (1, 1))
    assert at.clock.rate == (1, 2)


@pytest.mark.parametrize(("name", "value"), [("speed_cv", -0.1), ("stall_s", 0.0), ("front_cores", -1)])
def test_values_out_of_bounds_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        Roughness(**{name: value})


def test_three_routers_share_the_fleet_and_each_knows_its_own_requests() -> None:
    promise, policy = {"": Promise(ttft_ms=500.0, tpot_ms=20.0)}, POLICIES["workload"]
    world = World(members(P, D, B), SimSettings(), policy=policy, promises=promise, others=(policy, policy))
    Faults(world, [Fault(at_s=1.0, kind="kill", instance=InstanceId("both-2"))], 0)
    chose: dict[int, set[int]] = {}
    for number, front in enumerate(world.fronts):
        front.on_choice = lambda passage, _, of=number: chose.setdefault(of, set()).add(passage.number % 3)
    result = world.run(every(0.01, 300, tokens=100, answer=20))
    assert chose == {0: {0}, 1: {1}, 2: {2}}
    assert (result.columns["outcome"] == 1).mean() > 0.95
    assert len({id(each.scheduler.view) for each in world.fronts}) == 3
