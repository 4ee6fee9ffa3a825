"""Start-up times are learned from first starts only: not from restarts in place, nor from instances already running."""

from __future__ import annotations

import pytest
from support.pretend_fleet import pools

from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.registry.membership import Heartbeat, MemberState
from goodput.actuate.existing import Existing, ExistingFleet, InstanceLife
from goodput.actuate.seen import Readiness, seen_all
from goodput.startups import StartUps

NAME = InstanceId("decode-0")


class Watched:
    """One instance that was asked for at 0 s, and `looking` controllers that observe it."""

    def __init__(self, looking: int = 1) -> None:
        self.readiness = [Readiness() for _ in range(looking)]
        self.starts = [StartUps({"decode": pools(startup_s=90.0)[1]}) for _ in range(looking)]

    def look(self, now: float, state: MemberState | None, epoch: int = 1, only: int | None = None) -> None:
        """All controllers observe the instance; with `only`, the controller of this number does."""
        there = Existing(instance=NAME, pool="decode", life=InstanceLife.RUNNING, asked_s=0.0)
        beat = Heartbeat(id=NAME, agent="a", epoch=epoch, url="http://h:1", state=state) if state else None
        for number, (readiness, starts) in enumerate(zip(self.readiness, self.starts, strict=True)):
            if only is None or number == only:
                fleet = ExistingFleet(now_s=now, instances=(there,))
                heard = {} if beat is None else {str(NAME): beat}
                starts.saw(seen_all(fleet, heard, {"decode": (Role.DECODE, False)}, readiness, now))


def test_the_first_start_counts_once() -> None:
    at = Watched()
    at.look(3, None)
    at.look(30, MemberState.STARTING)
    at.look(50, MemberState.READY)
    at.look(80, MemberState.READY)
    assert at.starts[0].horizon_s("decode") == 50.0


def test_a_start_whose_first_try_fails_counts_from_the_first_try() -> None:
    at = Watched()
    at.look(3, MemberState.STARTING)
    at.look(30, MemberState.RESTARTING)
    at.look(40, MemberState.STARTING, epoch=2)
    at.look(70, MemberState.READY, epoch=2)
    assert at.starts[0].horizon_s("decode") == 70.0


@pytest.mark.parametrize("first", [MemberState.RESTARTING, MemberState.STARTING, None])
def test_a_restart_in_place_does_not_count_as_a_start_of_three_hours(first: MemberState | None) -> None:
    """This holds for a controller that saw the instance ready, and for a controller that begins while the instance
    restarts.
    """
    at = Watched(2)
    at.look(3, MemberState.STARTING, only=0)
    at.look(50, MemberState.READY, only=0)
    at.look(3 * 3600, first)
    at.look(3 * 3600 + 20, MemberState.STARTING, epoch=2)
    at.look(3 * 3600 + 60, MemberState.READY, epoch=2)
    assert [each.horizon_s("decode") for each in at.starts] == [50.0, 90.0]
