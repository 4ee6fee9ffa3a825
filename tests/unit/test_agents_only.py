"""A controller that speaks to agents alone takes no capacity away that it cannot give back."""

from __future__ import annotations

from typing import Any, cast

from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.registry.membership import Heartbeat, MemberState
from goodput.actions import Drain, Flip, Start, Stop
from goodput.actuate.agents_only import AgentsOnly
from goodput.actuate.existing import InstanceLife
from goodput.actuate.seen import Readiness, seen_all
from goodput.observation import Phase

NAME = InstanceId("decode-0")


class Told:
    """Takes what agents are told."""

    def __init__(self) -> None:
        self.flips: list[Role] = []

    async def flip(self, _beat: Heartbeat, role: Role) -> str:
        self.flips.append(role)
        return ""


def beat(state: MemberState) -> Heartbeat:
    return Heartbeat(id=NAME, agent="a", epoch=1, url="http://h:1", state=state, role=Role.DECODE)


async def test_only_flips_are_carried_out() -> None:
    """Before, a drain was carried out: the instance stayed without work, and no start could replace it."""
    told = Told()
    actuator = AgentsOnly(["decode"], lambda: {NAME: beat(MemberState.READY)}, cast("Any", told))
    for refusal in (
        await actuator.drain(Drain(instance=NAME)),
        await actuator.stop(Stop(instance=NAME)),
    ):
        assert refusal.startswith("nothing here can end instances")
    assert (await actuator.start(Start(instance=NAME, pool="decode"))).startswith("nothing here can start instances")
    assert await actuator.flip(Flip(instance=NAME, role=Role.PREFILL)) == ""
    assert told.flips == [Role.PREFILL]
    assert [each.life for each in (await actuator.observe()).instances] == [InstanceLife.RUNNING]


async def test_an_instance_that_is_ready_again_after_a_drain_serves() -> None:
    beats = {str(NAME): beat(MemberState.READY)}
    actuator = AgentsOnly(["decode"], lambda: beats, cast("Any", Told()))
    await actuator.drain(Drain(instance=NAME))
    phases = []
    for state in (MemberState.DRAINING, MemberState.READY):
        beats[NAME] = beat(state)
        (seen,) = seen_all(await actuator.observe(), beats, {"decode": (Role.DECODE, True)}, Readiness(), 0.0)
        phases.append((seen.phase, seen.leaving))
    assert phases == [(Phase.DRAINING, True), (Phase.READY, False)]
