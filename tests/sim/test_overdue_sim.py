"""Requests that wait for memory, in a simulated fleet whose answers last for seconds."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from support.simulated import MODEL, members
from support.twin import Linear

from cluster.instance import Role
from costs.step import StepCost
from loadgen.arrival import Arrival
from router.core.values import Promise
from router.fleet.view import FleetView
from router.predict.step_model import Make
from router.scheduler.scoring.policies import POLICIES
from sim.result import Result
from sim.settings import SimSettings
from sim.world import World

B, P, D = Role.BOTH, Role.PREFILL, Role.DECODE
STEP_MS = 20
BLOCKS = 400
CAPACITY = BLOCKS * 16
STEPS = StepCost(
    floor_ms=STEP_MS,
    start_ms=STEP_MS,
    token_ms=0.01,
    area_ms=0.0,
    decode_ms=STEP_MS,
    context_ms=1e-4,
    request_ms=0.02,
)
MAKE = Make(prefill=STEPS, decode=STEPS, capacity_tokens=CAPACITY, budget_tokens=2048)
PROMISES = pytest.mark.parametrize("promise", [Promise(), Promise(ttft_ms=30_000.0, tpot_ms=100.0)])


def run(fleet: tuple[Role, ...], arrivals: list[Arrival], promise: Promise) -> Result:
    costs = Linear(step=STEP_MS * 1_000_000, token=10_000, request=20_000, context=100)
    config = {"num_blocks": BLOCKS, "max_model_len": CAPACITY - 100, "max_num_seqs": 64}
    instances = [replace(each, costs=costs) for each in members(*fleet, config=config)]
    world = World(
        instances,
        SimSettings(first_token_s=3000.0, stall_s=100.0),
        policy=POLICIES["workload"],
        model=MODEL,
        promises={"": promise},
        view=FleetView(lambda _: MAKE),
    )
    return world.run(arrivals)


def short(seed: int, rate: float, seconds: float) -> list[Arrival]:
    """Chats of 250 tokens and a 20th of an instance's memory in all, which last five seconds."""
    rng, at_s, found = Random(seed), 0.0, list[Arrival]()
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        found.append(Arrival(at_s=round(at_s, 9), input_tokens=rng.randrange(200, 300), output_tokens=250))
    return found


def with_one(arrivals: list[Arrival], tokens: int) -> list[Arrival]:
    return sorted([*arrivals, Arrival(at_s=20.0, input_tokens=tokens, output_tokens=50)], key=lambda each: each.at_s)


@PROMISES
def test_a_long_prompt_is_served_while_short_ones_keep_some_memory_in_use(promise: Promise) -> None:
    """Two instances at a third of their memory. It was served only after the last short request."""
    result = run((B, B), with_one(short(3, 1.7, 100.0), CAPACITY - 700), promise)
    assert (result.columns["outcome"] == 1).all()
    waited_s = result.latency_s("ttft")
    assert waited_s[result.columns["input_tokens"].argmax()] < 15.0
    assert np.sort(waited_s)[-2] < 12.0


@PROMISES
def test_a_prompt_that_is_too_long_is_refused_by_an_engine_at_once(promise: Promise) -> None:
    result = run((B, B), with_one(short(3, 1.7, 60.0), CAPACITY + 100), promise)
    too_long = result.columns["input_tokens"].argmax()
    assert result.columns["status"][too_long] == 400
    assert result.latency_s("e2e")[too_long] < 1.0


@PROMISES
@pytest.mark.parametrize("fleet", [(B, B), (P, D, D)])
def test_an_overload_that_fills_all_memory_does_not_flood_the_engines(
    fleet: tuple[Role, ...], promise: Promise
) -> None:
    """Requests wait for minutes. When all that had waited for ten seconds went to the engines, these stopped answers
    and computed them again: tokens of some took 3 to 20 times as long. When none went, all took a third longer (147 s).
    """
    rng = Random(1)
    arrivals = [
        Arrival(at_s=0.05 * number, input_tokens=rng.randrange(200, 700), output_tokens=rng.randrange(100, 600))
        for number in range(150)
    ]
    result = run(fleet, arrivals, promise)
    assert (result.columns["outcome"] == 1).all()
    assert np.nanquantile(result.latency_s("tpot"), 0.98) * 1000 < 1.2 * STEP_MS
    assert result.columns["end_ns"].max() / 1e9 < 125
