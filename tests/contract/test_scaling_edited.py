"""A running controller takes the targets of an edited cluster file; a bad file leaves the old ones, with a message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from support.pretend_fleet import Drive, PretendFleet
from support.scaling import FILE, MODEL, InMemory

from baton.changing import Changing
from baton.clusterfile import read
from baton.scaling import ScalingShell, machine_of, plan_of
from baton.scaling_log import decide_again
from cluster.instance import Role
from cluster.registry.memory import MemoryRegistry
from cluster.spec import parse
from engine.agent.http import listen
from goodput.actuate.journal import Journal, lines
from goodput.controller import Controller
from goodput.decision import Checked, Effect, Event, Renewed
from goodput.demand import ClassPromise
from goodput.observation import RouterCounts


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_targets_change_while_the_controller_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("baton.scaling.RENEW_EVERY_S", 0.01)
    path, said = tmp_path / "baton.yaml", list[str]()
    path.write_text(FILE)
    plan = plan_of(read(path).usable(), "mock", None, [])
    shell = ScalingShell(
        "edited",
        plan,
        lambda: MemoryRegistry(asyncio.get_running_loop().time),
        say=said.append,
        changing=Changing(str(path)),
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(shell.run(InMemory()))
        await until(lambda: shell.scaler is not None)
        before = shell.scaler
        path.write_text(FILE.replace("6000", "2500"))
        await until(lambda: plan.promises["chat"].ttft_ms == 2500)
        assert before is not None
        await before.look()
        path.write_text(FILE.replace("ttft_ms", "ttft_mss"))
        await until(lambda: any("ttft_mss" in each for each in said))
        assert plan.promises["chat"].ttft_ms == 2500
        assert shell.scaler is before, "no restart"
        running.cancel()
    log = tmp_path / "state" / "baton" / "scaling" / "edited.jsonl"
    path.write_text(FILE.replace("6000", "2500"))
    found = decide_again(str(path), log)
    assert (found.controllers, found.different) == (1, ()), "one controller, which goes on with other targets"
    assert [each.event for each in lines(log)].count("Renewed") == 1


async def test_targets_that_change_while_a_controller_starts_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller also forgets a class that is gone. The same targets once more are no event."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    plan = plan_of(parse(FILE.replace("slo:", "slo:\n  gone: {ttft_ms: 9}"), "f").usable(), "mock", None, [])
    shell = ScalingShell("early", plan, lambda: MemoryRegistry(asyncio.get_running_loop().time), say=lambda _: None)
    after = {"chat": ClassPromise(ttft_ms=2500.0)}

    async def slowly(*given: Any) -> Any:
        await shell.renew(after)
        return await listen(*given)

    monkeypatch.setattr("baton.scaling.listen", slowly)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(shell.run(InMemory()))
        await until(lambda: shell.scaler is not None and bool(shell.scaler.last))
        await shell.renew(dict(after))
        assert shell.scaler is not None
        (machine,) = (each.machine for each in shell.scaler.fleets)
        assert isinstance(machine, Controller)
        assert machine.needs.promises == after == plan.promises
        running.cancel()
    log = tmp_path / "state" / "baton" / "scaling" / "early.jsonl"
    assert [each.event for each in lines(log)].count("Renewed") == 1


class Chats(PretendFleet):
    """A pretended fleet whose requests are of the file's class."""

    def counts(self, now: float) -> RouterCounts:
        found = super().counts(now)
        return replace(found, classes={"chat": found.classes[""]})


class Logged:
    """A controller whose events are kept in a log."""

    def __init__(self, machine: Controller, journal: Journal) -> None:
        self.machine, self.journal = machine, journal

    def handle(self, event: Event, now: float) -> tuple[Effect, ...]:
        effects = self.machine.handle(event, now)
        self.journal.add("", now, event, effects)
        return effects


@pytest.mark.parametrize("edit", ["renewed", "none"])
def test_the_log_of_a_life_with_edited_targets_is_decided_again_as_it_was(tmp_path: Path, edit: str) -> None:
    """The file of after the edit is given. Decisions of before came from other targets, which the log has."""
    path, log = tmp_path / "baton.yaml", tmp_path / "log.jsonl"
    path.write_text(FILE)
    plan = plan_of(read(str(path)).usable(), "mock", None, [])
    machine = machine_of(plan, MODEL)
    assert isinstance(machine, Controller)
    journal = Journal(log, msgspec.to_builtins(plan.as_made))
    fleet = Chats(instances=PretendFleet.of(1, 1).instances, prompt=4000, answer=20)
    logged = cast("Controller", Logged(machine, journal))
    at = Drive(logged, fleet, check=lambda asked: Checked(asked.number, holds=True))
    chance = np.random.default_rng(1)
    at.run(lambda _: 0.6, 300, chance)
    few = fleet.of_role(Role.PREFILL)
    path.write_text(FILE.replace("6000", "1200"))
    tight = plan_of(read(str(path)).usable(), "mock", None, [])
    if edit == "renewed":
        at.feed(Renewed(tight.promises))
    at.run(lambda _: 0.6, 300, chance)
    found = decide_again(str(path), log)
    assert found.controllers == 1
    if edit == "renewed":
        assert fleet.of_role(Role.PREFILL) > few, "the edit changes decisions"
        assert found.different == ()
    else:
        assert found.different, "without an edit in the log the file decides"
