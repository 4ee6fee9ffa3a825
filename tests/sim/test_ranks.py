"""Data parallel ranks in simulated fleets: members of their own that die together."""

from __future__ import annotations

from support.simulated import every, one, simulate

from cluster.ids import InstanceId, ranks_of
from cluster.instance import Role
from costs.shape import Spans
from sim.faults import Fault


def test_a_rank_that_is_killed_takes_its_engine_with_it() -> None:
    names = [*ranks_of(InstanceId("d"), 2), *ranks_of(InstanceId("e"), 2)]
    fleet = [one("p", Role.PREFILL), *(one(name, Role.DECODE, shape=Spans(dp=2)) for name in names)]
    killed = Fault(at_s=1.0, kind="kill", instance=InstanceId("d@1"))
    world, result = simulate(fleet, every(0.02, 300), faults=[killed])
    assert (result.columns["outcome"] == 1).sum() >= 299, "as with two engines: one stream may break off beyond repair"
    assert {at.name: at.epoch for at in world.instances} == {"p": 1, "d@0": 2, "d@1": 2, "e@0": 1, "e@1": 1}
    assert world.counts["killed"] == 1
