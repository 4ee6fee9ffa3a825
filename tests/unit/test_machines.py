"""Law 2: every machine has the one shape of `cluster.machine.Machine`, and what has the shape is a machine."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.machine import Machine
from engine.agent.machine import AgentMachine
from router.core.journey import Journey
from router.fleet import events as d
from router.fleet.view import FleetView
from router.scheduler.decision_log import DecisionLog, fleet_of, scheduler_of
from router.scheduler.scheduler import Scheduler
from router.scheduler.scoring.policies import POLICIES

ROOT = Path(__file__).resolve().parents[2]


def scheduler() -> Scheduler:
    return Scheduler(FleetView(), POLICIES["least_load"])


def journey() -> Journey:
    return Journey(hand_over=True, stream=True, deadline=1.0, deadline_s=1.0)


def logged() -> DecisionLog:
    return DecisionLog(lambda _: None, "least_load")


def logged_scheduler() -> Any:
    return scheduler_of(logged(), FleetView(), POLICIES["least_load"], admission=False, foresees=False)[1]


MADE: dict[str, Callable[[], Machine[Any, Any]]] = {
    "Journey": journey,
    "FleetView": FleetView,
    "Scheduler": scheduler,
    "LoggedFleet": lambda: fleet_of(logged(), FleetView()),
    "LoggedScheduler": logged_scheduler,
}
"""The router's machines. (mypy sees that each is one.)"""

ELSEWHERE = {"AgentMachine": AgentMachine}


@pytest.mark.parametrize("name", MADE)
def test_a_machine_says_when_it_wants_to_be_woken_and_takes_event_and_time(name: str) -> None:
    machine = MADE[name]()
    assert machine.next_wakeup() is None or isinstance(machine.next_wakeup(), float)
    assert list(inspect.signature(type(machine).handle).parameters) == ["self", "event", "now"]


def test_the_fleet_and_the_scheduler_have_an_answer_to_each_of_their_events() -> None:
    """The lists of events are complete: an event without an answer is a `KeyError`. Each event is of one machine."""
    from router.fleet import view
    from router.scheduler import scheduler as scheduling

    assert set(view._FOLD) == set(d.FleetEvent.__args__)
    assert set(scheduling._FOLD) == set(d.SchedulerEvent.__args__)
    assert not set(view._FOLD) & set(scheduling._FOLD)


def shaped(tree: ast.Module) -> list[str]:
    """Classes with a `handle` that takes an event and a time."""
    return [
        each.name
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef)
        for method in each.body
        if isinstance(method, ast.FunctionDef) and method.name == "handle"
        if [argument.arg for argument in method.args.args] == ["self", "event", "now"]
    ]


def test_what_has_the_shape_is_a_machine() -> None:
    """Every class of the router with a machine's `handle` is in this file's list."""
    paths = (ROOT / "router").rglob("*.py")
    assert {name for path in paths for name in shaped(ast.parse(path.read_text()))} == set(MADE)


@pytest.mark.parametrize("machine", ELSEWHERE.values(), ids=ELSEWHERE)
def test_machines_elsewhere_have_the_shape(machine: type) -> None:
    assert list(inspect.signature(machine.handle).parameters) == ["self", "event", "now"]
    assert callable(machine.next_wakeup)
