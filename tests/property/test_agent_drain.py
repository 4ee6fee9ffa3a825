"""An agent that asks to be woken at a certain time makes progress at that time, at any reading of the clock."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from cluster.ids import InstanceId
from cluster.instance import Load, Role
from decode.rules import DecodeRules
from engine.agent.machine import AgentMachine, DrainAsked, EngineIs, LoadRead, Tick


@given(st.floats(0.0, 1e6))
@example(6.3371)  # 6.3371 + 2.0 - 6.3371 < 2.0: before, an agent asked for the same time without end
def test_a_drain_of_an_idle_engine_ends_at_the_requested_wakeup(began: float) -> None:
    machine = AgentMachine(name=InstanceId("d"), rules=DecodeRules(), role=Role.DECODE)
    machine.handle(EngineIs("ready", "", 1), began)
    machine.handle(LoadRead(Load()), began)
    machine.handle(DrainAsked(30.0, leave=False), began)
    machine.handle(LoadRead(Load()), began + 1.5)
    for _ in range(3):
        due = machine.next_wakeup()
        if due is None:
            break
        machine.handle(Tick(), due)
    assert machine.drained
