"""Splitwise's policy for a fleet: the instances' homes are their pools' roles, the capacity is the smallest cache's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.ids import InstanceId
from cluster.instance import Role
from sim.baselines.splitwise import ANSWER_TOKENS, Splitwise
from sim.experiments.systems import pool_of
from sim.fleet import SimulatedMember


def splitwise_of(
    homes: Sequence[Role],
    members: Sequence[SimulatedMember],
    *,
    answer_tokens: int = ANSWER_TOKENS,
    speeds: Mapping[InstanceId, float] | None = None,
    known: Sequence[int] = (),
) -> Splitwise:
    """The policy of these members, whose names contain their pool's index (`Shelf.members`).

    Args:
        homes: the role of each pool; instances of a pool of role both have no home. Empty: no instance has one.
        members: the fleet.
        answer_tokens: what is booked for an answer.
        speeds: of instances on unequal GPUs, by name.
        known: answers' lengths by request.
    """
    found = {role: [each.name for each in members if homes and homes[pool_of(each)] is role] for role in Role}
    return Splitwise(
        found[Role.PREFILL],
        found[Role.DECODE],
        capacity_tokens=min(each.config.num_blocks * each.config.block_size for each in members),
        answer_tokens=answer_tokens,
        known=known,
        speeds=speeds,
    )
