"""A router without any settings: no policy, no costs, engines that cannot be told a first token.

It is compared with `least_load`, which needs no settings either: never worse, and far better where prompts share
prefixes.
"""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
from support.simulated import of_roles

import router.predict.prefix_uses
from cluster.instance import Role
from engine.mock.settings import SimpleCosts
from loadgen.arrival import Arrival
from router.fleet.view import FleetView
from router.scheduler.scoring.policies import POLICIES
from sim.faults import Fault, Faults
from sim.settings import SimSettings
from sim.world import World

P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH
BLOCK = 16
MS = 1_000_000


def chats(
    sessions: int, per_s: float, *, turns: int = 6, systems: int = 4, tokens: int = 1600, user: int = 96
) -> list[Arrival]:
    """Random sessions, each with one of the system prompts as its beginning; `systems` 0: with a text of its own."""
    rng, made, at_s, names = Random(1), list[Arrival](), 0.0, iter(range(10**9))
    shared = [[next(names) for _ in range(tokens // BLOCK)] for _ in range(systems)]
    for _ in range(sessions):
        at_s += rng.expovariate(per_s)
        chain = [*rng.choice(shared)] if systems else [next(names) for _ in range(tokens // BLOCK)]
        due_s = at_s
        for _ in range(turns):
            chain += [next(names) for _ in range(user // BLOCK)]
            made.append(
                Arrival(
                    at_s=round(due_s, 9),
                    input_tokens=len(chain) * BLOCK + 4,
                    output_tokens=24,
                    prefix=tuple(chain),
                    block_tokens=BLOCK,
                )
            )
            chain += [next(names), next(names)]
            due_s += 0.3 + rng.expovariate(2.0)
    return sorted(made, key=lambda each: each.at_s)


GPUS = SimpleCosts(step_ms=10.0, prefill_ms_per_1k=45.0)
"""A prompt of 2,000 tokens takes 100 ms."""
CPUS = SimpleCosts(step_ms=60.0, prefill_ms_per_1k=1500.0)
"""A prompt of 240 tokens takes 420 ms; the router assumes 11 ms (`router.predict.step_model.UNKNOWN`)."""


def run(
    arrivals: list[Arrival],
    *roles: Role,
    policy: str | None = None,
    faults: tuple[Fault, ...] = (),
    costs: SimpleCosts = GPUS,
) -> Any:
    """Simulate a run. Returns the result's columns. `policy`: replaces the default policy."""
    more = {} if policy is None else {"policy": POLICIES[policy]}
    world = World(of_roles(*roles, costs=costs), SimSettings(seeding=False), view=FleetView(lambda _: None), **more)
    Faults(world, faults, 0)
    return world.run(arrivals).columns


def ttft_ms(columns: Any) -> float:
    """The mean time to first token in ms, after a check that every request was served."""
    assert (columns["outcome"] == 1).all()
    return float(np.mean(columns["first_ns"] - columns["at_ns"]) / MS)


FOUR = (P, P, P, P, D, D, D, D)
LONG = pytest.mark.long
ALONE: dict[str, Any] = {"turns": 1, "systems": 0, "tokens": 1900}


def slow(name: str) -> Fault:
    return Fault(at_s=0.0, kind="slow", instance=name, factor=4, duration_s=1000.0)


def test_sessions_go_where_their_prefix_is() -> None:
    load = chats(12, 8.0, turns=4)
    assert ttft_ms(run(load, *FOUR)) < 0.6 * ttft_ms(run(load, *FOUR, policy="least_load"))


@pytest.mark.parametrize(
    ("load", "roles", "faults"),
    [
        pytest.param(chats(40, 16.0, **ALONE), FOUR, (), id="no shared prefix"),
        pytest.param(chats(100, 60.0, **ALONE), FOUR, (), id="more than they can do", marks=LONG),
        pytest.param(chats(200, 16.0, **ALONE), FOUR, (slow("decode-5"),), id="a slow D", marks=LONG),
        pytest.param(chats(200, 16.0, **ALONE), FOUR, (slow("prefill-1"),), id="a slow P", marks=LONG),
        pytest.param(chats(20, 4.0, **ALONE), (P, D), (), id="one of each"),
        pytest.param(chats(60, 10.0, **ALONE), (B, B, B, B), (), id="role both", marks=LONG),
        pytest.param(chats(10, 8.0), (P, P), (), id="prefill alone", marks=LONG),
        pytest.param(chats(10, 8.0), (P, B, B), (), id="mixed roles", marks=LONG),
        pytest.param(chats(100, 60.0, turns=1, systems=0, tokens=0, user=16), FOUR, (), id="tiny prompts", marks=LONG),
        pytest.param(chats(15, 2.0, turns=1, systems=0, tokens=25_000), FOUR, (), id="100 KB prompts", marks=LONG),
    ],
)
def test_the_default_is_no_worse_than_least_load(
    load: list[Arrival], roles: tuple[Role, ...], faults: tuple[Fault, ...]
) -> None:
    ours, plain = (run(load, *roles, policy=policy, faults=faults) for policy in (None, "least_load"))
    assert ttft_ms(ours) <= 1.02 * ttft_ms(plain)


@pytest.mark.parametrize(
    "load", [chats(40, 2.5, turns=1, systems=0, tokens=208, user=32), chats(12, 0.5, turns=4, tokens=304, user=48)]
)
def test_engines_as_slow_as_cpus_are_no_worse_either(load: list[Arrival]) -> None:
    """Prompts of one size on engines that are far slower than the router assumes."""
    roles = (P, P, D, D)
    ours, plain = (run(load, *roles, policy=policy, costs=CPUS) for policy in (None, "least_load"))
    assert ttft_ms(ours) <= 1.02 * ttft_ms(plain)


def test_chats_on_slow_engines_find_their_prefix_from_the_start() -> None:
    """By assumed costs alone, an instance without measurements would look far faster than one with measurements."""
    load, roles = chats(20, 1.5, turns=4, tokens=304, user=48), (P, P, D, D)
    assert ttft_ms(run(load, *roles, costs=CPUS)) < 0.9 * ttft_ms(run(load, *roles, policy="least_load", costs=CPUS))


def test_a_burst_of_equal_prompts_spreads_over_the_fleet() -> None:
    """The router has no measurements yet, and all requests share the first one's prefix."""
    columns = run(chats(40, 4000.0, turns=1, systems=1), *FOUR)
    placed = Counter(
        int(at if at >= 0 else other) for at, other in zip(columns["prefill"], columns["decode"], strict=True)
    )
    assert len(placed) >= 6 and max(placed.values()) <= 12
    unshared = run(chats(40, 4000.0, **ALONE), *FOUR)
    placed = Counter(
        int(at if at >= 0 else other) for at, other in zip(unshared["prefill"], unshared["decode"], strict=True)
    )
    assert len(placed) == 8 and max(placed.values()) <= 7


@pytest.mark.interpreted
def test_many_sessions_of_few_system_prompts_use_more_than_the_instances_that_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To compute a system prompt once more costs one request more than it waits, and all later ones less."""
    load, fleet = chats(160, 32.0), (*[P] * 16, *[D] * 16)
    copies = run(load, *fleet)
    monkeypatch.setattr(router.predict.prefix_uses, "USES_MIN", math.inf)
    none = run(load, *fleet)
    assert len(set(copies["decode"])) >= 2 * len(set(none["decode"]))
    assert ttft_ms(copies) < 0.95 * ttft_ms(none)
