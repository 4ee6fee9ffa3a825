"""Pauses of an engine core without work, with a fake core in place of vLLM's."""

from __future__ import annotations

import queue
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import pytest


class Condition:
    """A condition on which nobody else waits: keeps how long it was waited for."""

    def __init__(self) -> None:
        self.waits: list[float | None] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        self.meanwhile()
        return False

    def notify(self) -> None:
        pass

    def meanwhile(self) -> None:
        """What happens during the next wait."""


class Core:
    """An engine core. The one that makes the connector is `self` of a caller, as in vLLM."""

    def __init__(self, unfinished: int = 0, **more: object) -> None:
        self.input_queue: Any = queue.Queue()
        self.input_queue.not_empty = Condition()
        self.scheduler = SimpleNamespace(get_num_unfinished_requests=lambda: unfinished)
        vars(self).update(more)

    def is_running(self) -> bool:
        return True

    def idling(self, module: ModuleType) -> Any:
        return module.Idling("engine")

    @property
    def waits(self) -> list[float | None]:
        """Its pauses."""
        waits: list[float | None] = self.input_queue.not_empty.waits
        return waits


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The connector's module, on a stand-in for vLLM."""
    for name in ("vllm", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    engine = ModuleType("vllm.v1.engine")
    engine.EngineCoreRequestType = SimpleNamespace(WAKEUP="wakeup")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", engine)
    monkeypatch.delitem(sys.modules, "engine.vllm.connector.idling", raising=False)
    found = import_module("engine.vllm.connector.idling")
    monkeypatch.setitem(sys.modules, "engine.vllm.connector.idling", found)
    return found


def rest(core: Core, module: ModuleType, waiting: int = 0) -> list[float | None]:
    core.idling(module).rest(waiting, lambda: False, lambda: False)
    return core.waits


@pytest.mark.parametrize(
    ("core", "waiting"),
    [
        (Core(), 0),
        (Core(engines_running=False), 0),
        (Core(1, engines_running=False), 1),
        (Core(engines_running=False, dp_group="ranks"), 0),
    ],
)
def test_an_engine_that_only_holds_blocks_rests(module: ModuleType, core: Core, waiting: int) -> None:
    waits = rest(core, module, waiting)
    assert len(waits) == 1 and (waits[0] or 0.0) > 0.0


def test_an_engine_with_a_leg_that_waits_for_a_notice_rests_no_longer_than_until_it_asks_again(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.Rest, "pause_s", lambda *_: 5.0)
    assert rest(Core(1, engines_running=False), module, waiting=1)[0] == pytest.approx(module.ASK_AGAIN_S, abs=0.1)
    assert rest(Core(), module)[0] == pytest.approx(5.0, abs=0.1)


@pytest.mark.parametrize(
    ("core", "waiting"),
    [
        (Core(1), 0),
        (Core(engines_running=True, dp_group="ranks"), 0),
        (Core(1, engines_running=True, dp_group="ranks"), 1),
        (Core(1, engines_running=False, dp_group="ranks"), 1),
    ],
)
def test_a_rank_does_not_rest_while_ranks_step_together(module: ModuleType, core: Core, waiting: int) -> None:
    """With a mixture of experts vLLM's ranks make each step together: a rank that rests stops them all."""
    assert rest(core, module, waiting) == []


def pulling(
    one: Any, *, busy: bool = False, begins: bool = False, early: int = 0, pulls: int = 1, awaited: int = 1
) -> bool:
    """A step of an engine with one pull."""
    patient: bool = one.pause(
        busy=busy,
        pulls=pulls,
        awaited=awaited,
        begins=begins,
        early=early,
        listens=lambda: False,
        hear=lambda: False,
    )
    return patient


def test_an_engine_that_only_pulls_waits_for_the_end_of_a_pull(module: ModuleType) -> None:
    core = Core(1)
    one = core.idling(module)
    module.worker_here("engine")
    assert pulling(one) and core.waits == [module.PULLING_S]


def test_the_end_of_a_pull_is_reported_before_the_next_pause(module: ModuleType) -> None:
    """With asynchronous scheduling the step that takes a pull's end reports it one step later: a pause in between would
    delay the report, and no other end may come that would end the pause.
    """
    core = Core(2)
    one = core.idling(module)
    module.worker_here("engine")
    module.pulled("engine", 1)
    module.pulled("another engine", 1)
    for _ in range(2):
        assert not pulling(one, pulls=2, awaited=2) and core.waits == []
    one.reported(1)
    assert pulling(one, pulls=2, awaited=2) and core.waits == [module.PULLING_S]


def test_a_report_may_come_before_the_end_was_told(module: ModuleType) -> None:
    """The following thread tells the core after the worker can take the outcome."""
    core = Core(1)
    one = core.idling(module)
    module.worker_here("engine")
    one.reported(1)
    module.pulled("engine", 1)
    assert pulling(one) and core.waits == [module.PULLING_S]


def test_a_request_that_comes_meanwhile_is_not_kept_waiting_by_the_worker(module: ModuleType) -> None:
    core = Core(1)
    one = core.idling(module)
    module.worker_here("engine")
    core.input_queue.not_empty.meanwhile = lambda: core.input_queue.queue.append("request")
    assert not pulling(one)


def test_where_the_worker_is_another_process_only_the_worker_waits(module: ModuleType) -> None:
    """The end of a pull could not end the core's pause, and its report is not counted."""
    core = Core(1)
    one = core.idling(module)
    one.reported(1)
    assert pulling(one) and core.waits == []
    module.worker_here("engine")
    assert pulling(one) and core.waits == [module.PULLING_S]


@pytest.mark.parametrize("queued", [None, (), ("output",)])
def test_a_step_behind_another_ones_output_does_not_wait(module: ModuleType, queued: object) -> None:
    one = Core(1, batch_queue=queued).idling(module)
    assert pulling(one) is not bool(queued) and pulling(one, begins=True) is not bool(queued)


def test_the_step_that_begins_a_pull_is_made_at_once(module: ModuleType) -> None:
    core = Core(1)
    one = core.idling(module)
    module.worker_here("engine")
    assert pulling(one, begins=True) and core.waits == []


@pytest.mark.parametrize(
    ("core", "more"),
    [
        (Core(1), {"busy": True}),
        (Core(1), {"early": 1}),
        (Core(2), {}),
        (Core(1), {"awaited": 0}),
        (Core(1, engines_running=True, dp_group="ranks"), {}),
    ],
    ids=["a step with tokens", "an early leg", "another request", "another request, an aborted pull", "ranks"],
)
def test_an_engine_with_other_work_does_not_wait_for_pulls(module: ModuleType, core: Core, more: Any) -> None:
    one = core.idling(module)
    module.worker_here("engine")
    assert not pulling(one, **more) and core.waits == []
