"""Every rival's routing policy on the same load and GPUs: separate pools at its own best split, and aggregated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from cluster.instance import Role
from router.scheduler.scoring.policies import Policy
from sim.baselines import BASELINES
from sim.baselines.splitwise import Splitwise
from sim.experiments.scenarios import Compared, pair
from sim.experiments.systems import EqualInstances, Shelf, System
from sim.experiments.tuning import Best, best_of, best_split
from sim.fleet import SimulatedMember

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
    return replace(system, pools=(_able(prompts), _able(tokens)), make_policy=_splitwise)


def _able(pool: EqualInstances) -> EqualInstances:
    return replace(pool, role=Role.BOTH)


def _splitwise(members: Sequence[SimulatedMember]) -> Policy:
    """Members are named by role, pool and number (`Shelf.members`)."""
    prompts, tokens = ([each.name for each in members if each.name.split("-")[1] == pool] for pool in ("0", "1"))
    capacity = min(each.config.num_blocks * each.config.block_size for each in members)
    return Splitwise(prompts, tokens, capacity_tokens=capacity)
