"""Several routers of one fleet tell each other their in-flight load, and together serve about as well as one."""

from __future__ import annotations

from random import Random

import pytest
from support.simulated import of_roles

from cluster.instance import Role
from engine.mock.settings import SimpleCosts
from loadgen.arrival import Arrival
from router.core.values import Promise
from router.scheduler.scoring.policies import POLICIES
from sim.result import Result
from sim.settings import SimSettings
from sim.world import World

P, D = Role.PREFILL, Role.DECODE
PROMISE = Promise(ttft_ms=400.0, tpot_ms=30.0)


def chats(rate: float, seed: int = 1, count: int = 1000) -> list[Arrival]:
    rng, made, at_s = Random(seed), list[Arrival](), 0.0
    for _ in range(count):
        at_s += rng.expovariate(rate)
        prompt, answer = int(rng.lognormvariate(6.8, 0.9)), int(rng.lognormvariate(4.6, 0.6))
        made.append(
            Arrival(
                at_s=round(at_s, 9), input_tokens=min(8000, max(16, prompt)), output_tokens=min(600, max(4, answer))
            )
        )
    return made


def run(routers: int, *, notes_ms: float = SimSettings().notes_ms, rate: float = 17.0, admits: bool = True) -> Result:
    policy = POLICIES["workload"]
    world = World(
        of_roles(P, P, D, D, costs=SimpleCosts(step_ms=12.0, prefill_ms_per_1k=60.0)),
        SimSettings(notes_ms=notes_ms, checks=False),
        policy=policy,
        promises={"": PROMISE} if admits else None,
        others=[policy] * (routers - 1),
    )
    result = world.run(chats(rate))
    for front in world.fronts:
        assert front.scheduler.view.peer_load.bookings == 0
        assert all(at.prompts == at.decoding == 0 for at in front.scheduler.view.all().inflight.rows)
    return result


def talks(count: int = 120, turns: int = 5) -> list[Arrival]:
    """Conversations whose turns begin with all earlier turns. Requests go to the routers in turn, so that the turns of
    one conversation reach different routers.
    """
    rng, made = Random(2), list[Arrival]()
    for talk in range(count):
        at_s = rng.uniform(0.0, 40.0)
        for turn in range(turns):
            blocks = 16 * (turn + 1)
            made.append(
                Arrival(
                    at_s=round(at_s, 6),
                    input_tokens=16 * blocks,
                    output_tokens=40,
                    prefix=tuple(1000 * talk + number for number in range(blocks)),
                    block_tokens=16,
                )
            )
            at_s += rng.uniform(3.0, 6.0)
    return sorted(made, key=lambda each: each.at_s)


def cached(routers: int, notes_ms: float) -> float:
    """The share of prompt tokens that instances had in their prefix caches."""
    policy, both = POLICIES["workload"], [Role.BOTH] * 6
    world = World(
        of_roles(*both, costs=SimpleCosts(step_ms=12.0, prefill_ms_per_1k=60.0)),
        SimSettings(notes_ms=notes_ms, checks=False),
        policy=policy,
        others=[policy] * (routers - 1),
    )
    rows = world.run(talks()).columns
    return float(rows["cached_tokens"].sum() / rows["input_tokens"].sum())


def attained(result: Result) -> float:
    kept = result.latency_s("ttft") * 1000.0 <= PROMISE.ttft_ms
    return float((kept & (result.latency_s("tpot") * 1000.0 <= PROMISE.tpot_ms) & result.good()).mean())


@pytest.mark.parametrize("rate", [20.0])
def test_three_routers_attain_about_what_one_does(rate: float) -> None:
    one, three, silent = (attained(run(n, rate=rate, notes_ms=ms)) for n, ms in ((1, 10.0), (3, 10.0), (3, 0.0)))
    assert three > one - 0.02
    assert three > silent + 0.01


def test_without_targets_three_routers_are_about_as_fast_as_one() -> None:
    one, three, silent = (run(n, notes_ms=ms, admits=False) for n, ms in ((1, 10.0), (3, 10.0), (3, 0.0)))
    means = [float(each.latency_s("ttft").mean()) for each in (one, three, silent)]
    assert means[1] < 1.12 * means[0]
    assert means[1] < 0.95 * means[2]


def test_a_conversation_finds_its_cache_at_any_router() -> None:
    one, three, silent = cached(1, 10.0), cached(3, 10.0), cached(3, 0.0)
    print(one, three, silent)
    assert three > one - 0.02
    assert three > silent + 0.1
