"""Every rival's routing policy on the same load and GPUs: separate pools at its own best split, and aggregated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from cluster.instance import Role
from sim.baselines import BASELINES
from sim.experiments.homes import splitwise_of
from sim.experiments.scenarios import Compared, pair
from sim.experiments.systems import EqualInstances, Shelf, System
from sim.experiments.tuning import Best, best_of, best_split

POLICIES: Final = tuple(BASELINES)


@dataclass(frozen=True, slots=True)
class RivalRow:
    """One policy on one load."""

    policy: str
    apart: Best
    whole: Best


def compare(compared: Compared, shelf: Shelf, policies: Sequence[str] = POLICIES) -> list[RivalRow]:
    """All policies; aggregated fleets have the shape and token budget that were best for the load."""
    scenario, case = compared.scenario, compared.case
    assert compared.whole.system is not None and compared.apart.system is not None
    pools = compared.whole.system.pools
    start = compared.apart.system.pools[1].count
    rows = []
    for policy in policies:
        adapt = mixing if policy == "splitwise" else as_it_is
        apart = best_split(case, shelf, pair(scenario), scenario.gpus, policy, start=start, adapt=adapt)
        whole = best_of(case, shelf, [System(name="aggregated", pools=pools, policy=policy)])
        rows.append(RivalRow(policy, apart, whole))
    return rows


def as_it_is(system: System) -> System:
    """Two pools of fixed roles."""
    return system


def mixing(system: System) -> System:
    """Splitwise's arrangement: all instances can do both, and have their homes in one of two pools."""
    prompts, tokens = system.pools
    homes = (Role.PREFILL, Role.DECODE)
    return replace(system, pools=(_able(prompts), _able(tokens)), make_policy=partial(splitwise_of, homes))


def _able(pool: EqualInstances) -> EqualInstances:
    return replace(pool, role=Role.BOTH)
