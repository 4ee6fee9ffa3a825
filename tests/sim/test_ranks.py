"""Data parallel ranks in simulated fleets: each rank is a member, and the ranks of one engine die together."""

from __future__ import annotations

from support.simulated import every, one, simulate

from cluster.ids import InstanceId, ranks_of
from cluster.instance import Role
from costs.shape import Spans
from loadgen.arrival import Arrival
from router.scheduler.scoring.policies import POLICIES
from sim.faults import Fault


def test_a_rank_that_is_killed_takes_its_engine_with_it() -> None:
    names = [*ranks_of(InstanceId("d"), 2), *ranks_of(InstanceId("e"), 2)]
    fleet = [one("p", Role.PREFILL), *(one(name, Role.DECODE, shape=Spans(dp=2)) for name in names)]
    killed = Fault(at_s=1.0, kind="kill", instance=InstanceId("d@1"))
    world, result = simulate(fleet, every(0.02, 300), faults=[killed])
    assert (result.columns["outcome"] == 1).sum() >= 299, "as with two engines, one stream may break off"
    assert {at.name: at.epoch for at in world.instances} == {"p": 1, "d@0": 2, "d@1": 2, "e@0": 1, "e@1": 1}
    assert world.counts["killed"] == 1


def test_prefixes_are_found_as_on_two_instances() -> None:
    """Conversations of six turns, each one chunk longer than before. The default policy sends a turn to its prefix."""
    talks = [
        Arrival(at_s=0.4 * turn + 0.03 * talk, input_tokens=128 * (turn + 2), output_tokens=10, block_tokens=128,
                prefix=tuple(range(1000 * talk, 1000 * talk + turn + 2)))
        for turn in range(6) for talk in range(10)
    ]  # fmt: skip
    sizes = {"prefix_caching": True, "num_blocks": 500, "max_model_len": 2000}
    cached = []
    for names, dp in ((ranks_of(InstanceId("b"), 2), 2), ((InstanceId("b-0"), InstanceId("b-1")), 1)):
        fleet = [one(name, Role.BOTH, config=sizes, shape=Spans(dp=dp)) for name in names]
        _, result = simulate(fleet, talks, policy=POLICIES["workload"])
        assert (result.columns["outcome"] == 1).all()
        cached.append(int(result.columns["cached_tokens"].clip(0).sum()) / int(result.columns["input_tokens"].sum()))
    assert cached[0] == cached[1] > 0.5, cached
