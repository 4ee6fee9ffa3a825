"""An agent's life as scripts: events, and the effects that they must cause."""

import pytest

from cluster.instance import Load, Role
from decode.rules import DecodeRules
from engine.agent.machine import (
    QUIET_S,
    AgentMachine,
    AgentState,
    DrainAsked,
    EngineIs,
    Leave,
    LoadRead,
    Publish,
    ResumeAsked,
    RoleAsked,
    Say,
    StopAsked,
    StopEngine,
    Tick,
)
from prefill.rules import HOLDS_HIGH, PrefillRules

IDLE = Load()
HOLDS = Load(kv_usage=0.25)
BUSY = Load(running=2, waiting=1, kv_usage=0.5)


def ready(rules: object = None) -> AgentMachine:
    machine = AgentMachine(name="p", rules=rules or PrefillRules())  # type: ignore[arg-type]
    assert machine.handle(EngineIs("starting", "importing", 1), 0.0) == ()
    assert machine.handle(EngineIs("ready", "", 1), 1.0) == (Publish(),)
    return machine


def kinds(effects: tuple[object, ...]) -> list[type]:
    return [type(effect) for effect in effects]


def said(effects: tuple[object, ...]) -> str:
    return " | ".join(effect.line for effect in effects if isinstance(effect, Say))


def test_credits_are_for_ready_instances_only() -> None:
    machine = AgentMachine(name="p", rules=PrefillRules(legs_max=10))
    assert machine.credits == 0
    machine.handle(EngineIs("ready", "", 1), 0.0)
    assert machine.credits == 10
    machine.handle(DrainAsked(30, leave=False), 0.0)
    assert machine.credits == 0


@pytest.mark.parametrize("died", [("restarting", "starting"), ("restarting",), ()])
def test_a_drain_that_is_taken_back_before_the_engine_is_ready_gives_no_work(died: tuple[str, ...]) -> None:
    machine = ready() if died else AgentMachine(name="p", rules=PrefillRules())
    machine.handle(DrainAsked(30, leave=False), 2.0)
    for at, state in enumerate(died):
        machine.handle(EngineIs(state, "its engine died", 2), 3.0 + at)
    assert said(machine.handle(ResumeAsked(), 6.0)) == "p takes work again once its engine is ready"
    assert machine.state is AgentState(died[-1] if died else "starting") and machine.credits == 0
    machine.handle(EngineIs("ready", "", 2), 7.0)
    assert machine.state is AgentState.READY and machine.credits > 0


def test_a_drain_that_is_taken_back_after_the_engine_came_up_gives_work_at_once() -> None:
    machine = AgentMachine(name="p", rules=PrefillRules())
    machine.handle(DrainAsked(30, leave=False), 2.0)
    machine.handle(EngineIs("ready", "", 1), 3.0)
    assert machine.state is AgentState.DRAINING
    machine.handle(ResumeAsked(), 4.0)
    assert machine.state is AgentState.READY and machine.credits > 0


def test_an_agent_that_lingers_takes_work_until_it_drains() -> None:
    machine = ready()
    effects = machine.handle(DrainAsked(30, leave=True, linger_s=5), 10.0)
    assert said(effects) == "p drains in 5 s, and takes work until then"
    assert (machine.state, machine.next_wakeup()) == (AgentState.READY, 15.0)
    assert machine.credits > 0
    machine.handle(LoadRead(HOLDS), 12.0)
    assert machine.handle(Tick(), 14.9) == ()
    assert kinds(machine.handle(Tick(), 15.0)) == [Publish, Say]
    assert (machine.state, machine.next_wakeup()) == (AgentState.DRAINING, 45.0)
    machine.handle(LoadRead(IDLE), 20.0)
    machine.handle(LoadRead(IDLE), 21.5)
    assert StopEngine() in machine.handle(Tick(), 20.0 + QUIET_S)


def test_a_second_request_to_leave_ends_the_lingering_and_a_draining_agent_does_not_linger() -> None:
    machine = ready()
    machine.handle(DrainAsked(30, leave=True, linger_s=5), 10.0)
    assert StopEngine() in machine.handle(DrainAsked(30, leave=True, linger_s=5), 11.0)
    machine = ready()
    machine.handle(DrainAsked(30, leave=False), 10.0)
    machine.handle(DrainAsked(30, leave=True, linger_s=5), 11.0)
    machine.handle(LoadRead(IDLE), 11.5)
    assert (machine.state, machine.next_wakeup()) == (AgentState.DRAINING, 10.0 + QUIET_S)


def test_a_drain_or_a_lost_engine_ends_the_lingering() -> None:
    machine = ready()
    machine.handle(DrainAsked(30, leave=True, linger_s=5), 10.0)
    machine.handle(DrainAsked(60, leave=False), 11.0)
    assert machine.state is AgentState.DRAINING
    machine.handle(LoadRead(IDLE), 11.0 + QUIET_S / 2)
    assert StopEngine() in machine.handle(Tick(), 11.0 + QUIET_S)
    machine = ready()
    machine.handle(DrainAsked(30, leave=True, linger_s=5), 10.0)
    machine.handle(EngineIs("restarting", "exit code 1", 1), 12.0)
    assert machine.next_wakeup() == 15.0
    assert "stopped before it was ready" in said(machine.handle(Tick(), 15.0))


@pytest.mark.parametrize("linger_s", [0.0, 5.0])
def test_a_drain_by_another_program_does_not_put_off_the_end(linger_s: float) -> None:
    """An instance that was told to leave is killed at its deadline, whatever deadline another program gives."""
    machine = ready()
    machine.handle(LoadRead(BUSY), 9.0)
    machine.handle(DrainAsked(30, leave=True, linger_s=linger_s), 10.0)
    for at in (11.0, 20.0, 30.0):
        machine.handle(LoadRead(BUSY), at)
        machine.handle(DrainAsked(3600, leave=False), at)
    assert machine.deadline == (41.0 if linger_s else 40.0)
    assert StopEngine() in machine.handle(Tick(), machine.deadline)


def test_idle_drain_leaves_after_the_quiet_time_and_the_registry_last() -> None:
    machine = ready()
    assert kinds(machine.handle(DrainAsked(30, leave=True), 10.0)) == [Publish, Say]
    assert machine.handle(LoadRead(IDLE), 10.0 + QUIET_S / 2) == ()
    assert machine.next_wakeup() == 10.0 + QUIET_S
    assert machine.handle(Tick(), 10.0 + QUIET_S / 2) == ()
    assert kinds(machine.handle(Tick(), 10.0 + QUIET_S)) == [Publish, Say, StopEngine]
    assert machine.state is AgentState.STOPPING
    assert machine.handle(EngineIs("stopped", "", 1), 13.0) == (Publish(), Leave(0))


def test_prefill_waits_until_its_holds_are_pulled() -> None:
    """llm-d's operations page says that llm-d has "no way to delay shutdown until blocks are retrieved"."""
    machine = ready()
    machine.handle(LoadRead(HOLDS), 9.0)
    assert "holds of 25.0%" in said(machine.handle(DrainAsked(30, leave=True), 10.0))
    assert machine.handle(LoadRead(HOLDS), 12.0) == ()
    assert machine.handle(LoadRead(IDLE), 20.0) == ()
    assert machine.handle(LoadRead(BUSY), 21.0) == (), "a leg sent by a router that did not know of the drain yet"
    assert machine.handle(LoadRead(IDLE), 22.0) == ()
    assert machine.handle(LoadRead(IDLE), 23.0) == ()
    assert kinds(machine.handle(LoadRead(IDLE), 24.0)) == [Publish, Say, StopEngine]


def test_decode_waits_for_its_streams() -> None:
    machine = ready(DecodeRules())
    machine.handle(LoadRead(BUSY), 9.0)
    assert "3 streams" in said(machine.handle(DrainAsked(30, leave=True), 10.0))
    assert machine.next_wakeup() == 40.0


def test_past_the_deadline_the_agent_names_what_it_cuts_off() -> None:
    machine = ready(DecodeRules())
    machine.handle(LoadRead(BUSY), 9.0)
    machine.handle(DrainAsked(30, leave=True), 10.0)
    effects = machine.handle(Tick(), 40.0)
    assert kinds(effects) == [Publish, Say, StopEngine]
    assert "not drained within 30 s; cut off: 3 streams" in said(effects)


def test_drain_without_leaving_can_be_taken_back() -> None:
    machine = ready()
    machine.handle(DrainAsked(30, leave=False), 10.0)
    machine.handle(LoadRead(IDLE), 11.5)
    assert "is drained" in said(machine.handle(Tick(), 12.0))
    assert machine.drained
    assert machine.next_wakeup() is None, "the drain ended in time"
    assert machine.handle(Tick(), 40.0) == ()
    assert kinds(machine.handle(ResumeAsked(), 50.0)) == [Publish, Say]
    assert machine.credits > 0
    assert machine.next_wakeup() is None


def test_drain_without_leaving_says_when_it_takes_too_long_and_goes_on() -> None:
    machine = ready(DecodeRules())
    machine.handle(LoadRead(BUSY), 9.0)
    machine.handle(DrainAsked(30, leave=False), 10.0)
    assert "goes on draining" in said(machine.handle(Tick(), 40.0))
    assert machine.state is AgentState.DRAINING
    machine.handle(LoadRead(IDLE), 50.0)
    assert "is drained" in said(machine.handle(LoadRead(IDLE), 52.0))


def test_an_engine_that_dies_in_a_drain_has_no_work_any_more() -> None:
    """Before, its last load stayed: for minutes heartbeats reported streams of a dead process, and it never drained."""
    machine = ready(DecodeRules())
    machine.handle(LoadRead(BUSY), 9.0)
    machine.handle(DrainAsked(30, leave=False), 10.0)
    machine.handle(EngineIs("restarting", "its engine died", 2), 11.0)
    assert machine.load == IDLE
    wakeup = machine.next_wakeup()
    assert wakeup is not None
    assert "is drained" in said(machine.handle(Tick(), wakeup))
    assert kinds(machine.handle(DrainAsked(30, leave=True), 20.0)) == [Publish, Say, StopEngine]


def test_drained_instance_told_to_leave_goes_at_once() -> None:
    machine = ready()
    machine.handle(DrainAsked(30, leave=False), 10.0)
    machine.handle(LoadRead(IDLE), 12.0)
    assert kinds(machine.handle(DrainAsked(30, leave=True), 20.0)) == [Publish, Say, StopEngine]


@pytest.mark.parametrize("reads", [(), (104.4,)])
def test_an_engine_that_does_not_answer_is_not_taken_for_a_drained_one(reads: tuple[float, ...]) -> None:
    machine = ready(DecodeRules())
    machine.handle(LoadRead(IDLE), 99.9)
    machine.handle(DrainAsked(30, leave=True), 104.0)
    for at in reads:
        machine.handle(LoadRead(IDLE), at)
    assert machine.handle(Tick(), 106.0) == (), "streams may have come since"
    assert machine.next_wakeup() == 134.0
    assert machine.handle(LoadRead(BUSY), 107.0) == ()
    assert machine.handle(LoadRead(IDLE), 110.0) == ()
    assert kinds(machine.handle(LoadRead(IDLE), 112.0)) == [Publish, Say, StopEngine]


def test_an_engine_that_never_answers_again_is_stopped_at_the_deadline() -> None:
    machine = ready(DecodeRules())
    machine.handle(LoadRead(IDLE), 99.9)
    machine.handle(DrainAsked(30, leave=True), 104.0)
    effects = machine.handle(Tick(), 134.0)
    assert said(effects) == "p stops: p was not drained within 30 s; cut off: what it has had since it last answered"
    assert StopEngine() in effects


def test_an_engine_that_is_not_ready_has_nothing_to_show() -> None:
    machine = AgentMachine(name="p", rules=PrefillRules())
    machine.handle(DrainAsked(30, leave=False), 10.0)
    assert "is drained" in said(machine.handle(Tick(), 12.0))


def test_a_drained_instance_that_is_told_again_to_drain_stays_drained() -> None:
    machine = ready(DecodeRules())
    machine.handle(DrainAsked(60, leave=False), 10.0)
    machine.handle(LoadRead(IDLE), 12.0)
    machine.handle(DrainAsked(60, leave=False), 20.0)
    assert machine.drained and machine.next_wakeup() is None
    assert machine.handle(Tick(), 80.0) == (), "it was drained in time"
    machine.handle(LoadRead(BUSY), 89.5)
    machine.handle(LoadRead(BUSY), 90.0)
    assert (machine.drained, machine.next_wakeup()) == (False, 150.0), "a drain that begins anew has all its time"
    assert "was not drained within 60 s: 3 streams" in said(machine.handle(Tick(), 150.0))


def test_the_agents_own_question_for_a_token_leaves_an_instance_drained() -> None:
    """An idle engine is asked for one twice a minute: before, the instance was said to be drained anew each time."""
    machine = ready(DecodeRules())
    machine.handle(DrainAsked(60, leave=False), 10.0)
    machine.handle(LoadRead(IDLE), 12.0)
    machine.handle(Tick(), 15.0)
    for at in (30.0, 60.0):
        assert machine.handle(LoadRead(BUSY), at) == () and machine.drained
        assert machine.handle(LoadRead(IDLE), at + 0.5) == () and machine.drained


def test_an_agent_told_twice_to_leave_stops_at_once() -> None:
    machine = ready(DecodeRules())
    machine.handle(LoadRead(BUSY), 9.0)
    machine.handle(DrainAsked(30, leave=True), 10.0)
    assert StopEngine() in machine.handle(DrainAsked(30, leave=True), 10.5)


def test_an_agent_that_has_lost_its_name_is_still_told_a_first_time() -> None:
    """Its streams go on until the deadline, whichever came first."""
    machine = ready(DecodeRules())
    machine.handle(LoadRead(BUSY), 9.0)
    assert kinds(machine.handle(DrainAsked(30, leave=True, own=True), 10.0)) == [Publish, Say]
    assert machine.handle(DrainAsked(30, leave=True), 11.0) == ()
    assert machine.handle(DrainAsked(30, leave=True, own=True), 12.0) == ()
    assert StopEngine() in machine.handle(DrainAsked(30, leave=True), 13.0), "told a second time"
    machine = ready(DecodeRules())
    machine.handle(LoadRead(BUSY), 9.0)
    machine.handle(DrainAsked(30, leave=True), 10.0)
    assert machine.handle(DrainAsked(30, leave=True, own=True), 11.0) == ()
    assert machine.next_wakeup() == 40.0


def test_stop_before_ready_is_at_once() -> None:
    machine = AgentMachine(name="p", rules=PrefillRules())
    assert StopEngine() in machine.handle(DrainAsked(30, leave=True), 1.0)


def test_stop_at_once() -> None:
    machine = ready()
    machine.handle(LoadRead(BUSY), 2.0)
    assert StopEngine() in machine.handle(StopAsked(), 3.0)
    assert machine.handle(StopAsked(), 3.1) == ()
    assert machine.handle(DrainAsked(1, leave=True), 3.1) == ()


def test_dead_engine_comes_back_under_a_new_epoch() -> None:
    machine = ready()
    machine.handle(LoadRead(BUSY), 2.0)
    assert machine.handle(EngineIs("restarting", "exit code 137", 1), 3.0) == (Publish(),)
    assert machine.state is AgentState.RESTARTING
    assert machine.load == Load()
    assert machine.credits == 0
    machine.handle(EngineIs("starting", "", 2), 4.0)
    assert machine.handle(EngineIs("ready", "", 2), 9.0) == (Publish(),)
    assert (machine.epoch, machine.credits > 0) == (2, True)


def test_engine_that_dies_while_leaving_is_not_brought_back() -> None:
    machine = ready()
    machine.handle(LoadRead(BUSY), 2.0)
    machine.handle(DrainAsked(30, leave=True), 3.0)
    assert StopEngine() in machine.handle(EngineIs("restarting", "exit code 137", 1), 4.0)


def test_engine_that_fails_for_good_ends_the_agent_with_1() -> None:
    machine = ready()
    assert machine.handle(EngineIs("failed", "died 5 times", 6), 9.0) == (Publish(), Leave(1))
    assert machine.handle(Tick(), 10.0) == ()


@pytest.mark.parametrize(("usage", "expected"), [(0.0, 64), (HOLDS_HIGH, 64), (0.9, 32), (1.0, 1)])
def test_prefill_credits_shrink_with_holds(usage: float, expected: int) -> None:
    assert abs(PrefillRules().credits(Load(kv_usage=usage)) - expected) <= 1


def test_decode_credits_end_with_the_cache() -> None:
    rules = DecodeRules(streams_max=100)
    assert rules.credits(Load(kv_usage=0.89, running=50)) == 100
    assert rules.credits(Load(kv_usage=0.95, running=50, waiting=2)) == 52
    assert rules.credits(Load(kv_usage=0.95)) == 1


def flippable() -> AgentMachine:
    machine = AgentMachine(
        name="p",
        rules=PrefillRules(legs_max=10),
        role=Role.PREFILL,
        flips={Role.PREFILL: PrefillRules(legs_max=10), Role.DECODE: DecodeRules(streams_max=20)},
    )
    machine.handle(EngineIs("ready", "", 1), 0.0)
    return machine


def test_a_role_is_taken_at_once_and_running_work_goes_on() -> None:
    machine = flippable()
    machine.handle(LoadRead(BUSY), 1.0)
    effects = machine.handle(RoleAsked(Role.DECODE), 2.0)
    assert kinds(effects) == [Publish, Say], "no drain, no stop"
    assert said(effects) == "p was prefill and is decode now"
    assert (machine.state, machine.role, machine.credits) == (AgentState.READY, Role.DECODE, 20)
    machine.handle(DrainAsked(30, leave=False), 3.0)
    assert machine.detail == "3 streams", "the rules of the new role apply"


def test_a_role_that_the_agent_has_changes_nothing() -> None:
    assert flippable().handle(RoleAsked(Role.PREFILL), 1.0) == ()


@pytest.mark.parametrize("before", [[], [EngineIs("restarting", "died", 2)]])
def test_a_role_may_be_taken_before_the_engine_is_ready(before: list[EngineIs]) -> None:
    machine = flippable()
    for event in before:
        machine.handle(event, 1.0)
    machine.handle(RoleAsked(Role.DECODE), 2.0)
    machine.handle(EngineIs("ready", "", 2), 3.0)
    assert (machine.role, machine.credits) == (Role.DECODE, 20)


def test_a_role_is_refused_with_the_reason() -> None:
    fixed = ready()
    assert "--flips" in (fixed.refuses(Role.DECODE) or "")
    assert fixed.handle(RoleAsked(Role.DECODE), 1.0) == ()
    draining = flippable()
    draining.handle(DrainAsked(30, leave=False), 1.0)
    assert "draining" in (draining.refuses(Role.DECODE) or "")
    assert draining.handle(RoleAsked(Role.DECODE), 2.0) == ()
    assert draining.role is Role.PREFILL
    draining.handle(ResumeAsked(), 3.0)
    assert draining.refuses(Role.DECODE) is None
    assert "fixed" in (flippable().refuses(Role.BOTH) or ""), "only the roles that it was started for"
