"""Targets of an edited cluster file hold in a controller that runs; a bad file leaves the old ones, and it says why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support.scaling import FILE, InMemory

from baton.changing import Changing
from baton.clusterfile import read
from baton.scaling import ScalingShell, plan_of
from cluster.registry.memory import MemoryRegistry


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_targets_change_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        path.write_text(FILE.replace("ttft_ms", "ttft_mss"))
        await until(lambda: any("ttft_mss" in each for each in said))
        assert plan.promises["chat"].ttft_ms == 2500
        assert shell.scaler is before, "no restart"
        running.cancel()
