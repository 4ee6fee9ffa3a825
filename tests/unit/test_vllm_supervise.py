"""The supervisor of one engine, as playbooks: events with their times, and the expected effects of each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.vllm.supervise import (
    Announce,
    Begin,
    ChildExited,
    Effect,
    EngineProbeFailed,
    EngineState,
    Event,
    GiveUpEngine,
    Healthy,
    KillChild,
    Reached,
    StartChild,
    StartHangs,
    StartRefused,
    StopChild,
    StopSupervised,
    SuperviseLimits,
    Supervisor,
    Tick,
    WaitsForTurn,
)

RULES = SuperviseLimits(
    start_max_s=100,
    restarts_max=3,
    window_s=1000,
    pause_first_s=1,
    pause_max_s=4,
    stable_s=60,
    silent_max_s=30,
    dead_max_s=1,
    stop_s=40,
    stop_starting_s=5,
)

STARTING, READY, STOPPING, STOPPED = (
    Announce(state) for state in (EngineState.STARTING, EngineState.READY, EngineState.STOPPING, EngineState.STOPPED)
)


def died(code: int, pause_s: float) -> Announce:
    return Announce(EngineState.RESTARTING, f"the process ended with exit code {code}", pause_s)


def silent(epoch: int = 1) -> EngineProbeFailed:
    return EngineProbeFailed(epoch, "no answer")


def dead(epoch: int = 1) -> EngineProbeFailed:
    return EngineProbeFailed(epoch, "HTTP 503", dead=True)


Playbook = list[tuple[float, Event, tuple[Effect, ...]]]

COMES_UP: Playbook = [
    (0, Begin(), (STARTING, StartChild(1))),
    (20, Healthy(1), (READY,)),
]


def killed(because: str) -> tuple[Effect, ...]:
    """The effects at the end of an engine that served: it is told at once, as its end may take long."""
    return Announce(EngineState.RESTARTING, because), KillChild(because)


SILENT = "no healthy answer for 30 s (no answer)"
KILLED_SILENT = killed(SILENT)
NOW = KillChild("asked to stop at once")

PLAYBOOKS: dict[str, Playbook] = {
    "comes up and is stopped": [
        *COMES_UP,
        (30, StopSupervised(), (STOPPING, StopChild())),
        (33, ChildExited(1, 0), (STOPPED,)),
    ],
    "does not stop in time": [
        *COMES_UP,
        (30, StopSupervised(), (STOPPING, StopChild())),
        (69, Tick(), ()),
        (70, Tick(), (KillChild("it did not stop in time"),)),
        (71, ChildExited(1, 137), (STOPPED,)),
    ],
    "a second request to stop kills, a third changes nothing": [
        *COMES_UP,
        (30, StopSupervised(), (STOPPING, StopChild())),
        (31, StopSupervised(), (NOW,)),
        (32, StopSupervised(), ()),
        (33, ChildExited(1, 137), (STOPPED,)),
    ],
    "stopped at once": [
        *COMES_UP,
        (30, StopSupervised(at_once=True), (STOPPING, NOW)),
        (31, ChildExited(1, 137), (STOPPED,)),
    ],
    "stopped while it starts: little patience": [
        (0, Begin(), (STARTING, StartChild(1))),
        (1, StopSupervised(), (STOPPING, StopChild())),
        (2, Healthy(1), ()),
        (6, Tick(), (KillChild("it did not stop in time"),)),
        (7, ChildExited(1, 137), (STOPPED,)),
    ],
    "stopped before it began": [(0, StopSupervised(), (STOPPED,)), (1, Begin(), ())],
    "a start that fails is not tried again": [
        (0, Begin(), (STARTING, StartChild(1))),
        (
            9,
            ChildExited(1, 2),
            (
                Announce(EngineState.FAILED, "the process ended with exit code 2"),
                GiveUpEngine("the process ended with exit code 2"),
            ),
        ),
        (10, StopSupervised(), ()),
    ],
    "a start that takes too long is killed and given up": [
        (0, Begin(), (STARTING, StartChild(1))),
        (100, Tick(), (KillChild("no first token after 100 s"),)),
        (101, Healthy(1), ()),
        (
            102,
            ChildExited(1, 137),
            (Announce(EngineState.FAILED, "no first token after 100 s"), GiveUpEngine("no first token after 100 s")),
        ),
    ],
    "a start that will never end is killed at once and given up": [
        (0, Begin(), (STARTING, StartChild(1))),
        (1, StartHangs(2, "of another start"), ()),
        (2, StartHangs(1, "a thread died"), (KillChild("a thread died"),)),
        (3, StartHangs(1, "a thread died"), ()),
        (4, ChildExited(1, 137), (Announce(EngineState.FAILED, "a thread died"), GiveUpEngine("a thread died"))),
    ],
    "an engine that is ready does not hang": [*COMES_UP, (21, StartHangs(1, "a thread died"), ())],
    "a start that takes too long says how far it came": [
        (0, Begin(), (STARTING, StartChild(1))),
        (5, Reached(1, "loading weights"), (Announce(EngineState.STARTING, "loading weights"),)),
        (6, Reached(1, "loading weights"), ()),
        (7, Reached(2, "first token"), ()),
        (100, Tick(), (KillChild("no first token after 100 s; the start came as far as: loading weights"),)),
    ],
    "a start that takes too long says what the engine answered last": [
        (0, Begin(), (STARTING, StartChild(1))),
        (5, StartRefused(1, "HTTP 404"), ()),
        (6, StartRefused(1, "HTTP 400"), ()),
        (7, StartRefused(2, "of another start"), ()),
        (100, Tick(), (KillChild("no first token after 100 s; its last answer: HTTP 400"),)),
    ],
    "an engine that was ready is started again, with growing pauses, three times": [
        *COMES_UP,
        (30, ChildExited(1, 139), (died(139, 1),)),
        (30.5, Tick(), ()),
        (31, Tick(), (STARTING, StartChild(2))),
        (40, ChildExited(2, 1), (died(1, 2),)),
        (42, Tick(), (STARTING, StartChild(3))),
        (60, Healthy(3), (READY,)),
        (70, ChildExited(3, 1), (died(1, 4),)),
        (74, Tick(), (STARTING, StartChild(4))),
        (
            80,
            ChildExited(4, 1),
            (
                Announce(EngineState.FAILED, "the process ended with exit code 1; 3 restarts in 1000 s did not help"),
                GiveUpEngine("the process ended with exit code 1; 3 restarts in 1000 s did not help"),
            ),
        ),
    ],
    "a stable time makes the next pause short again": [
        *COMES_UP,
        (30, ChildExited(1, 1), (died(1, 1),)),
        (31, Tick(), (STARTING, StartChild(2))),
        (50, Healthy(2), (READY,)),
        (110, ChildExited(2, 1), (died(1, 1),)),
    ],
    "old restarts are forgotten": [
        *COMES_UP,
        *[
            step
            for epoch in range(1, 9)
            for step in (
                (epoch * 500.0, ChildExited(epoch, 1), (died(1, 1),)),
                (epoch * 500.0 + 1, Tick(), (STARTING, StartChild(epoch + 1))),
                (epoch * 500.0 + 20, Healthy(epoch + 1), (READY,)),
            )
        ],
    ],
    "stopped in the pause before a restart": [
        *COMES_UP,
        (30, ChildExited(1, 1), (died(1, 1),)),
        (30.5, StopSupervised(), (STOPPED,)),
        (31, Tick(), ()),
    ],
    "an engine that hangs is killed and started again": [
        *COMES_UP,
        (30, silent(), ()),
        (59, silent(), ()),
        (60, silent(), KILLED_SILENT),
        (61, silent(), ()),
        (61, Healthy(1), ()),
        (62, ChildExited(1, 137), (Announce(EngineState.RESTARTING, SILENT, 1),)),
        (63, Tick(), (STARTING, StartChild(2))),
    ],
    "one answer in between is enough": [
        *COMES_UP,
        (30, silent(), ()),
        (59, Healthy(1), ()),
        (60, silent(), ()),
        (89, silent(), ()),
    ],
    "an engine that says it is dead is not given 30 s": [
        *COMES_UP,
        (30, dead(), ()),
        (31, dead(), killed("no healthy answer for 1 s (HTTP 503)")),
    ],
    "one answer that says so after a slow one is not enough": [
        *COMES_UP,
        (30, silent(), ()),
        (35, dead(), ()),
        (36, silent(), ()),
        (40, dead(), ()),
        (41, dead(), killed("no healthy answer for 11 s (HTTP 503)")),
    ],
    "failing probes during a start are normal": [
        (0, Begin(), (STARTING, StartChild(1))),
        (50, dead(), ()),
        (90, dead(), ()),
        (99, Healthy(1), (READY,)),
    ],
    "asked to stop while its end is on the way: no restart": [
        *COMES_UP,
        (30, silent(), ()),
        (60, silent(), KILLED_SILENT),
        (61, StopSupervised(), (STOPPING,)),
        (62, ChildExited(1, 137), (STOPPED,)),
    ],
    "news of an older start change nothing": [
        *COMES_UP,
        (30, ChildExited(1, 1), (died(1, 1),)),
        (31, Tick(), (STARTING, StartChild(2))),
        (32, Healthy(1), ()),
        (32, ChildExited(1, 1), ()),
        (32, dead(1), ()),
        (33, Healthy(2), (READY,)),
    ],
    "it begins once": [*COMES_UP, (30, Begin(), ())],
}


@pytest.mark.parametrize("name", PLAYBOOKS)
def test_playbook(name: str) -> None:
    supervisor = Supervisor(RULES)
    for now, event, expected in PLAYBOOKS[name]:
        assert supervisor.handle(event, now) == expected, f"at {now} s, {event}"


@pytest.mark.parametrize(
    ("events", "wakeup"),
    [
        ([], None),
        ([(0, Begin())], 100),
        ([(0, Begin()), (90, WaitsForTurn(1))], 190),
        ([(0, Begin()), (90, WaitsForTurn(2))], 100),
        ([(0, Begin()), (20, StopSupervised()), (21, WaitsForTurn(1))], 25),
        ([(0, Begin()), (20, Healthy(1)), (30, WaitsForTurn(1))], None),
        ([(0, Begin()), (20, Healthy(1))], None),
        ([(0, Begin()), (20, Healthy(1)), (30, ChildExited(1, 1))], 31),
        ([(0, Begin()), (20, Healthy(1)), (30, StopSupervised())], 70),
        ([(0, Begin()), (20, Healthy(1)), (30, StopSupervised()), (31, ChildExited(1, 0))], None),
    ],
)
def test_the_supervisor_wakes_at_its_next_deadline(events: list[tuple[float, Event]], wakeup: float | None) -> None:
    supervisor = Supervisor(RULES)
    for now, event in events:
        supervisor.handle(event, now)
    assert supervisor.next_wakeup() == wakeup


_EPOCHS = st.integers(0, 6)
_EVENTS = st.one_of(
    st.just(Begin()),
    st.just(Tick()),
    st.builds(Healthy, _EPOCHS),
    st.builds(WaitsForTurn, _EPOCHS),
    st.builds(StartHangs, _EPOCHS, st.just("x")),
    st.builds(EngineProbeFailed, _EPOCHS, st.just("x"), st.booleans()),
    st.builds(ChildExited, _EPOCHS, st.integers(0, 255)),
    st.builds(StopSupervised, st.booleans()),
)


@given(st.lists(st.tuples(st.floats(0, 200), _EVENTS), max_size=60))
def test_never_two_processes_and_nothing_after_the_end(steps: list[tuple[float, Event]]) -> None:
    supervisor = Supervisor(RULES)
    now = 0.0
    running = ended = False
    for wait, event in steps:
        now += wait
        if isinstance(event, ChildExited):
            if event.epoch == supervisor.epoch and not running:
                continue  # a process exits only once
            running = running and event.epoch != supervisor.epoch
        effects = supervisor.handle(event, now)
        assert not (ended and effects)
        for effect in effects:
            if isinstance(effect, StartChild):
                assert not running
                running = True
            elif isinstance(effect, StopChild | KillChild):
                assert running
            elif isinstance(effect, GiveUpEngine) or effect == STOPPED:
                assert not running
                ended = True
        waking = supervisor.next_wakeup()
        assert waking is None or not ended
