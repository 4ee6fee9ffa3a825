"""Pools of a fixed size: missing instances are started, failed ones are stopped, and nothing else happens."""

from __future__ import annotations

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput.actions import Action, Start, Stop
from goodput.decision import Act, Observed, Pause
from goodput.fixed import AGAIN_S, FixedPools
from goodput.observation import InstanceSeen, Observation, Phase


def seen(*phases: Phase, leads: bool = True, known: bool = True) -> Observed:
    instances = tuple(
        InstanceSeen(id=InstanceId(f"decode-{number}"), pool="decode", role=Role.DECODE, phase=phase)
        for number, phase in enumerate(phases)
    )
    return Observed(Observation(at_s=0.0, routers=(), instances=instances if known else None, leads=leads))


def acts(machine: FixedPools, event: Observed | Pause, now: float) -> list[Action]:
    return [effect.action for effect in machine.handle(event, now) if isinstance(effect, Act)]


def test_missing_instances_are_started_once() -> None:
    machine = FixedPools({"decode": 3})
    found = acts(machine, seen(Phase.READY), 100.0)
    assert len(found) == 2
    assert all(isinstance(each, Start) for each in found)
    assert len({each.instance for each in found}) == 2
    assert acts(machine, seen(Phase.READY), 101.0) == [], "asked for, and not seen yet"
    assert len(acts(machine, seen(Phase.READY), 100.0 + AGAIN_S)) == 2


def test_a_failed_instance_is_stopped_and_replaced() -> None:
    machine = FixedPools({"decode": 2})
    first, second = acts(machine, seen(Phase.READY, Phase.FAILED), 100.0)
    assert isinstance(first, Stop)
    assert first.instance == "decode-1"
    assert isinstance(second, Start)


def test_instances_beyond_the_file_are_left_alone() -> None:
    assert acts(FixedPools({"decode": 1}), seen(Phase.READY, Phase.READY), 100.0) == []


def test_nothing_happens_while_instances_are_unknown_or_it_does_not_lead_or_is_paused() -> None:
    machine = FixedPools({"decode": 3})
    assert acts(machine, seen(known=False), 100.0) == []
    assert acts(machine, seen(leads=False), 100.0) == []
    acts(machine, Pause(paused=True), 100.0)
    assert acts(machine, seen(), 100.0) == []
    acts(machine, Pause(paused=False), 100.0)
    assert len(acts(machine, seen(), 100.0)) == 3
