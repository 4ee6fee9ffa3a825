"""Small simulated fleets whose times can be calculated by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.twin import Linear

from cluster.ids import InstanceId
from cluster.instance import Role
from engine.mock.settings import SimpleCosts
from engine.twin.config import TwinConfig
from loadgen.arrival import Arrival
from router.scheduler.scoring.policies import POLICIES, Policy
from sim.faults import Fault, Faults
from sim.fleet import SimulatedMember
from sim.result import Result
from sim.settings import SimSettings
from sim.world import World

COSTS = Linear(step=1_000_000, token=10_000, request=20_000, context=100)
"""In ns: a step takes 1 ms, and 10 us for each prompt token, 20 us for each request, 0.1 us for each context token."""

MODEL = "m"

HANDS_OVER: Policy = POLICIES["least_load"]
"""Hands over whenever it can, for tests of hand-overs themselves."""


def members(*roles: Role, **rest: Any) -> list[SimulatedMember]:
    """One instance for each role; its name is the role and a number."""
    return [one(f"{role.value}-{number}", role, **rest) for number, role in enumerate(roles)]


def one(name: str, role: Role, *, config: dict[str, Any] | None = None, **rest: Any) -> SimulatedMember:
    settings: dict[str, Any] = {"num_blocks": 200, "max_model_len": 1000, "max_num_seqs": 16, **(config or {})}
    fields: dict[str, Any] = {
        "prompt_front_ns": 5_000_000,
        "block_bytes": 1_000_000,
        "nic_gb_s": 10.0,
        "latency_ns": 20_000,
        "start_up_ns": 2_000_000_000,
        **rest,
    }
    return SimulatedMember(
        name=InstanceId(name), role=role, model=MODEL, config=TwinConfig(role=role, **settings), costs=COSTS, **fields
    )


def of_roles(*roles: Role, costs: SimpleCosts) -> list[SimulatedMember]:
    """One instance for each role, with a GPU's memory and network."""
    return [
        SimulatedMember(
            name=InstanceId(f"{role.value}-{number}"),
            role=role,
            model=MODEL,
            config=TwinConfig(
                role=role, num_blocks=25_000, max_model_len=32_768, max_num_seqs=256, prefix_caching=True
            ),
            costs=costs,
            prompt_front_ns=1_000_000,
            block_bytes=2_000_000,
            nic_gb_s=50.0,
            latency_ns=20_000,
            start_up_ns=2_000_000_000,
        )
        for number, role in enumerate(roles)
    ]


def every(gap_s: float, count: int, tokens: int = 100, answer: int = 20, **rest: Any) -> list[Arrival]:
    """`count` equal requests that arrive at equal gaps."""
    return [
        Arrival(at_s=round(number * gap_s, 9), input_tokens=tokens, output_tokens=answer, **rest)
        for number in range(count)
    ]


def simulate(
    fleet: Sequence[SimulatedMember],
    arrivals: Sequence[Arrival],
    *,
    faults: Sequence[Fault] = (),
    seed: int = 0,
    policy: Policy = HANDS_OVER,
    **settings: Any,
) -> tuple[World, Result]:
    """Simulate a run with every check on. Returns the world and the result."""
    world = World(fleet, SimSettings(seed=seed, **settings), policy=policy)
    Faults(world, faults, seed)
    return world, world.run(arrivals)
