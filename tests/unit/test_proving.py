"""What a reader believes of heartbeats while clocks are set anew."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cluster.ids import InstanceId
from cluster.registry.membership import Heartbeat, MemberState, encode
from kvtransfer.keys import InstanceKeys, instance_key
from kvtransfer.proving import AGE_S, FleetProofs, InstanceProofs
from kvtransfer.ticket import SigningKey

KEY = SigningKey("k", b"k" * 32)
P = InstanceId("p")


@dataclass
class Reader:
    """A router's reader and an agent, each with a wall clock; `steady` is the router's clock that is never set."""

    wall: float = 1e9
    theirs: float = 1e9
    steady: float = 50.0

    def __post_init__(self) -> None:
        self._proofs = FleetProofs(lambda: (KEY,), lambda: self.wall, steady=lambda: self.steady)
        self._agent = InstanceProofs(lambda: InstanceKeys(P, (instance_key(KEY, P),)), lambda: self.theirs)
        self._seq = 0

    def pass_s(self, seconds: float) -> None:
        self.wall, self.theirs, self.steady = self.wall + seconds, self.theirs + seconds, self.steady + seconds

    def says(self, agent: str = "a", sent_at: float | None = None) -> str:
        """What is wrong with the agent's next heartbeat; empty: nothing."""
        self._seq += 1
        at = self.theirs if sent_at is None else sent_at
        beat = Heartbeat(id=P, agent=agent, url="http://h:1", sent_at=at, state=MemberState.READY, seq=self._seq)
        body = encode(beat)
        return self._proofs.fault("c", beat, body, self._agent.prove("c", beat, body))


@pytest.mark.parametrize("step_s", [40.0, -40.0, 3600.0])
def test_a_reader_whose_clock_is_set_anew_keeps_its_fleet(step_s: float) -> None:
    here = Reader()
    assert here.says() == ""
    here.wall += step_s
    for _ in range(600):
        here.pass_s(1)
        assert here.says() == ""
    assert "clocks differ" in here.says("another"), "one that was never believed has to be of now"


def test_a_sender_that_goes_on_at_another_pace_is_not_believed() -> None:
    """Copies of true heartbeats that were kept back can be given out one by one: they fall behind."""
    here = Reader()
    assert here.says() == ""
    kept = [here.theirs + second for second in range(1, 200)]
    believed = 0
    for at in kept:
        here.pass_s(6)
        believed += here.says(sent_at=at) == ""
    assert believed * 6 <= 2 * AGE_S + 12


def test_a_sender_whose_own_clock_jumps_has_to_be_right_again() -> None:
    here = Reader()
    assert here.says() == ""
    here.theirs += 40
    here.pass_s(1)
    assert "from the future" in here.says().replace("from 40 s in the future", "from the future")
    here.theirs -= 40
    assert here.says() == ""
