"""The simulation before an instance leaves: in its own process, within its time, while the controller goes on."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.scaling import FILE, MODEL, InMemory, Scripted

from baton.clusterfile import read
from baton.scaling import ScalingPlan, fleets_of, plan_of
from baton.scaling_check import CPU_S, Checker
from cluster.instance import Role
from cluster.registry.memory import MemoryRegistry
from goodput.actuate.lease import LeaderClaim
from goodput.actuate.scaler import ScaledFleet, Scaler
from goodput.decision import Check, Checked
from goodput.decision import Observed as Look
from goodput.sizing import RecentLengths
from goodput.sketch import sketch_of


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> ScalingPlan:
    path = tmp_path_factory.mktemp("check") / "baton.yaml"
    path.write_text(FILE)
    return plan_of(read(path).usable(), "mock", None, [])


def asked(prefills: int, decodes: int, rate: float = 2.0) -> Check:
    return Check(
        number=7,
        fleet={"prefill": {Role.PREFILL: prefills}, "decode": {Role.DECODE: decodes}},
        rate=rate,
        lengths={"chat": RecentLengths(prompts=sketch_of([4000]), answers=sketch_of([120]))},
        dispersion=1.0,
        because="a test",
    )


def test_controllers_of_a_cluster_file_ask_for_a_simulation(plan: ScalingPlan) -> None:
    (fleet,) = fleets_of(plan)
    assert plan.rules.checks
    assert fleet.check is not None


@pytest.mark.timed
async def test_the_process_tells_whether_a_fleet_suffices_within_its_cpu_time(plan: ScalingPlan) -> None:
    check = Checker(plan.members[MODEL], plan.promises)
    before = os.times()
    large, small = await check(asked(3, 3)), await check(asked(1, 3, rate=8.0))
    after = os.times()
    assert (large.holds, small.holds) == (True, False), (large, small)
    assert small.number == 7
    spent = after.children_user - before.children_user + after.children_system - before.children_system
    assert spent < 2 * (CPU_S + 2)


async def test_a_check_that_takes_too_long_is_ended_without_a_result(
    plan: ScalingPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Checker(plan.members[MODEL], plan.promises)
    monkeypatch.setattr("baton.scaling_check.WALL_S", 0.05)
    told = await check(asked(3, 3))
    assert told.holds is None
    assert "not done within" in told.because
    ended = Path("/proc") / "self" / "task" / str(os.getpid()) / "children"
    assert ended.read_text().split() == [], "the process has ended and was waited for"


async def test_a_check_that_fails_or_cannot_start_has_no_result(
    plan: ScalingPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = await Checker({}, plan.promises)(asked(3, 3))
    assert (told.holds, told.because) == (None, "a pool is not known to the simulation")
    assert (await Checker(plan.members[MODEL], {})(asked(3, 3))).holds is None
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    told = await Checker(plan.members[MODEL], plan.promises)(asked(3, 3))
    assert told.holds is None
    assert "no process" in told.because


@asynccontextmanager
async def running(scaler: Scaler) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(scaler.run())
        yield
        task.cancel()


async def test_the_controller_goes_on_while_a_check_runs() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow(effect: Check) -> Checked:
        begun.set()
        await may_end.wait()
        return Checked(effect.number, True, "the test")

    class Asks(Scripted):
        def handle(self, event: object, now: float) -> tuple[object, ...]:  # type: ignore[override]
            effects = super().handle(event, now)  # type: ignore[arg-type]
            return (*effects, asked(1, 1)) if isinstance(event, Look) and len(self.looks) == 1 else effects

    machine = Asks(lambda _: {}, every_s=0.01)
    registry = MemoryRegistry(asyncio.get_running_loop().time)
    fleet = ScaledFleet(model="", pools={"decode": (Role.DECODE, False)}, machine=machine, check=slow)
    async with asyncio.timeout(10):
        async with running(Scaler(registry, LeaderClaim(registry, "http://h:1"), InMemory(), (fleet,))):
            await begun.wait()
            looks = len(machine.looks)
            while len(machine.looks) < looks + 3:
                await asyncio.sleep(0)
            assert not any(isinstance(each, Checked) for each in machine.events)
            may_end.set()
            while not any(isinstance(each, Checked) for each in machine.events):
                await asyncio.sleep(0)
