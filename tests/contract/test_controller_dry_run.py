"""`baton controller --on ray --dry-run` starts nothing; with --owns, the fleet of its own that it then leaves alone."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest
from support.scaling import FILE, MODEL, InMemory

from baton.commands import controller
from baton.scaling import plan_of
from cluster.registry.memory import MemoryRegistry
from cluster.spec import parse
from goodput.actuate.existing import ExistingFleet
from goodput.actuate.scaler import Scaler

UNKNOWN = FILE.replace(MODEL, "of/nobody-knows-what-size")
"""Its pools cannot be sized, so a controller keeps them at the file's sizes."""


class Looking(InMemory):
    """Counts the looks after which something would have been started."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    async def observe(self) -> ExistingFleet:
        self.looks += 1
        return await super().observe()


async def started(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, *words: str) -> list[str]:
    """What a controller has started after it led for a few looks."""
    file = folder / "baton.yaml"
    file.write_text(text)
    parser = argparse.ArgumentParser()
    controller.add_arguments(parser)
    args = parser.parse_args([str(file), "--on", "ray", "--engine", "mock", "--registry", "redis://there:1", *words])
    args.vllm_args = []
    actuator = Looking()

    async def made(_: object) -> Looking:
        return actuator

    loop = asyncio.get_running_loop()
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    monkeypatch.setattr(Scaler, "_until_next", lambda _: 0.05)
    monkeypatch.setattr(controller, "_actuator", made)
    monkeypatch.setattr(controller, "open_registry", lambda *_: MemoryRegistry(loop.time))
    spec = parse(text, "baton.yaml").usable()
    running = asyncio.create_task(controller._run(args, spec, plan_of(spec, "mock", None, [], dry=args.dry_run)))
    async with asyncio.timeout(20):
        while actuator.looks < 5 and not running.done():
            await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return sorted({str(name).split("-")[0] for name in actuator.started})


@pytest.mark.parametrize("text", [FILE, UNKNOWN], ids=["sized", "kept"])
async def test_a_dry_run_starts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    assert await started(monkeypatch, tmp_path, text, "--dry-run") == []


@pytest.mark.parametrize("words", [[], ["--dry-run", "--owns"]], ids=["no dry run", "a fleet of its own"])
async def test_a_fleet_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]) -> None:
    assert await started(monkeypatch, tmp_path, FILE, *words) == ["decode", "prefill"]
