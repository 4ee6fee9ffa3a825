"""Rivals' policies are told of a request's events when they happen, and not earlier."""

from __future__ import annotations

import numpy as np
import pytest
from support.simulated import MODEL, every, members

from cluster.instance import Role
from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.scheduler.scoring.policies import POLICIES
from sim.baselines import follow
from sim.settings import SimSettings
from sim.world import World

P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH
HOP_NS = round(SimSettings().hop_us * 1000)


class Listening:
    """Routes as `least_load` does, and records when it is told of each event."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.prompt_ns: dict[int, int] = {}
        self.end_ns: dict[int, int] = {}

    def __call__(self, fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
        return POLICIES["least_load"](fleet, wanted)

    def placed(self, request: int, wanted: Wanted, chosen: Chosen) -> None:
        pass

    def prefilled(self, request: int) -> None:
        assert self.world is not None
        self.prompt_ns.setdefault(request, self.world.kernel.now_ns)

    def ended(self, request: int) -> None:
        assert self.world is not None
        self.end_ns[request] = self.world.kernel.now_ns


@pytest.mark.parametrize("roles", [(B,), (P, D)], ids=["whole", "handed over"])
def test_a_prompt_is_computed_when_its_step_has_ended(roles: tuple[Role, ...]) -> None:
    policy = Listening()
    policy.world = world = World(members(*roles), SimSettings(), policy=policy, model=MODEL)
    follow(world, policy)
    rows = world.run(every(0.004, 20, tokens=300)).columns  # a prompt takes 4 ms: queues form
    heard = np.array([policy.prompt_ns[number] for number in range(len(rows))])
    assert (heard + HOP_NS == rows["first_ns"]).all(), "the first token is at the router one hop later"
    assert set(policy.end_ns) == set(range(len(rows)))
    assert all(policy.end_ns[number] > policy.prompt_ns[number] for number in policy.end_ns)
