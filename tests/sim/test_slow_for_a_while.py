"""Engines that are slow for a while, and targets that no engine can keep.

What the router learned in that time must not keep requests waiting afterwards. Unless a test gives costs, the router
knows none and learns them.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from support.simulated import of_roles

from cluster.instance import Role
from costs.step import StepCost
from engine.mock.settings import SimpleCosts
from loadgen.arrival import Arrival
from router.core.events import Chosen
from router.core.values import Promise
from router.fleet.view import FleetView
from router.predict.step_model import Make
from sim.faults import Fault, Faults
from sim.settings import SimSettings
from sim.world import World

SLOW_FROM_S, SLOW_S, SETTLES_S, END_S = 20.0, 25.0, 12.0, 75.0
STEP_MS = 30.0
STEP = StepCost(
    floor_ms=0.0, start_ms=STEP_MS, token_ms=0.15, area_ms=0.0, decode_ms=STEP_MS, context_ms=0.0, request_ms=0.0
)
MAKE = Make(prefill=STEP, decode=STEP)


@dataclass(frozen=True)
class Run:
    """The arrival, the latencies and the outcome of each request."""

    at_s: Any
    ttft_ms: Any
    tpot_ms: Any
    served: Any

    def attained(self, promise: Promise, from_s: float) -> float:
        kept = (self.ttft_ms <= promise.ttft_ms) & (self.tpot_ms <= promise.tpot_ms)
        return float((kept & self.served)[self.at_s >= from_s].mean())


def chats() -> list[Arrival]:
    rng, made, at_s = Random(3), list[Arrival](), 0.0
    while (at_s := at_s + rng.expovariate(4.5)) < END_S:
        made.append(
            Arrival(
                at_s=round(at_s, 9),
                input_tokens=min(1500, int(rng.lognormvariate(5.9, 0.6))),
                output_tokens=min(400, max(4, int(rng.lognormvariate(4.4, 0.7)))),
                slo_class="chat",
            )
        )
    return made


def alike() -> list[Arrival]:
    """Prompts of one length, two a second, until long after the engines have recovered."""
    return [
        Arrival(at_s=0.5 * number, input_tokens=400, output_tokens=40, slo_class="chat")
        for number in range(1, round(4 * END_S))
    ]


def run(promise: Promise, *, times: int = 1, arrivals: list[Arrival] | None = None, costs: Make | None = None) -> Run:
    """Run two engines of role `both`, which are `times` slower for `SLOW_S` seconds."""
    engines = SimpleCosts(step_ms=STEP_MS, prefill_ms_per_1k=150.0)
    settings = SimSettings(seeding=False, checks=False)
    world = World(
        of_roles(Role.BOTH, Role.BOTH, costs=engines),
        settings,
        view=FleetView(lambda _: costs),
        promises={"chat": promise},
    )
    if times > 1:
        names = [each.name for each in world.instances]
        slow = [Fault(at_s=SLOW_FROM_S, kind="slow", instance=n, factor=times, duration_s=SLOW_S) for n in names]
        Faults(world, slow, 0)
    columns = world.run(arrivals or chats()).columns
    assert promise.sheds or (columns["outcome"] == 1).all()
    tokens = np.maximum(columns["output_tokens"] - 1, 1)
    return Run(
        at_s=columns["at_ns"] / 1e9,
        ttft_ms=(columns["first_ns"] - columns["at_ns"]) / 1e6,
        tpot_ms=(columns["end_ns"] - columns["first_ns"]) / 1e6 / tokens,
        served=columns["outcome"] == 1,
    )


@pytest.mark.parametrize("times", [4, 10])
def test_what_was_learned_of_slow_engines_is_forgotten_when_they_recover(times: int) -> None:
    """Guards against a router that takes them for slow for another forty seconds, and admits one answer at a time.
    Engines that are fuller while they are slow look as if each answer made them slow: that takes answers to unlearn.
    """
    promise = Promise(ttft_ms=1500.0, tpot_ms=60.0)
    found = run(promise, times=times)
    assert found.attained(promise, SLOW_FROM_S + SLOW_S + SETTLES_S) >= 0.85
    assert found.attained(promise, SLOW_FROM_S + SLOW_S + 2 * SETTLES_S) >= 0.95


@pytest.mark.parametrize("costs", [MAKE, None], ids=["told", "unknown"])
@pytest.mark.parametrize("times", [2, 4, 10])
def test_a_class_that_refuses_is_not_refused_for_ever_after_engines_were_slow(times: int, costs: Make | None) -> None:
    """Refused requests give no new measurements. The router must still not refuse every request from then on."""
    promise = Promise(ttft_ms=130.0, tpot_ms=200.0, sheds=True)
    found = run(promise, times=times, arrivals=alike(), costs=costs)
    slow = (found.at_s > SLOW_FROM_S) & (found.at_s < SLOW_FROM_S + SLOW_S)
    assert found.served[found.at_s < SLOW_FROM_S].all()
    assert found.served[slow].mean() < 0.5, "most requests of that time are refused"
    assert found.attained(promise, SLOW_FROM_S + SLOW_S + 2.5 * SETTLES_S) >= 0.99


def test_a_target_that_no_engine_keeps_keeps_no_request_waiting() -> None:
    """The TPOT target is half of a step's time. Engines must not decode one answer at a time for a promise that is lost
    anyway.
    """
    promise = Promise(ttft_ms=1500.0, tpot_ms=STEP_MS / 2)
    found = run(promise)
    assert np.mean(found.ttft_ms <= promise.ttft_ms) >= 0.99


@pytest.mark.parametrize("costs", [MAKE, None], ids=["told", "unknown"])
def test_an_instance_that_recovers_in_an_overload_gets_prompts_again(costs: Make | None) -> None:
    """While requests wait in the router, prompts stay away from slow instances, and only prompts teach their times."""
    rng, made, at_s = Random(3), list[Arrival](), 0.0
    while (at_s := at_s + rng.expovariate(23.0)) < END_S:
        prompt, answer = (
            min(3000, int(rng.lognormvariate(6.6, 0.6))),
            min(400, max(4, int(rng.lognormvariate(4.0, 0.7)))),
        )
        made.append(Arrival(at_s=round(at_s, 9), input_tokens=prompt, output_tokens=answer, slo_class="chat"))
    engines = SimpleCosts(step_ms=STEP_MS, prefill_ms_per_1k=150.0)
    world = World(
        of_roles(*[Role.BOTH] * 4, costs=engines),
        SimSettings(seeding=False, checks=False),
        view=FleetView(lambda _: costs),
        promises={"chat": Promise(ttft_ms=1500.0, tpot_ms=120.0)},
    )
    slow = world.instances[0].name
    Faults(world, [Fault(at_s=SLOW_FROM_S, kind="slow", instance=slow, factor=6, duration_s=SLOW_S)], 0)
    placed: list[tuple[float, bool]] = []

    def note(_passage: Any, chosen: Chosen) -> None:
        if chosen.decode is not None:
            placed.append((world.kernel.now_ns / 1e9, (chosen.prefill or chosen.decode) == slow))

    for front in world.fronts:
        front.on_choice = note
    world.run(made)

    def share(from_s: float, until_s: float) -> float:
        found = [here for now_s, here in placed if from_s <= now_s < until_s]
        return sum(found) / len(found)

    recovered_s = SLOW_FROM_S + SLOW_S
    assert share(recovered_s - 10.0, recovered_s) < 0.1
    assert share(recovered_s + SETTLES_S, END_S) > 0.15, "a quarter would be its part"
