"""Operators' commands to a controller, and what they read of its state and its log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from support.scaling import MODEL, InMemory, Scripted

from baton.cli import main
from baton.commands import scale
from baton.scaling import fleets_of, plan_of
from baton.scaling_admin import Wishes, admin_app
from cluster.instance import Role
from cluster.registry.memory import MemoryRegistry
from cluster.spec import parse
from engine.agent.http import listen
from goodput.actuate.journal import Journal
from goodput.actuate.lease import LeaderClaim
from goodput.actuate.scaler import ScaledFleet, Scaler
from goodput.decision import Observed, Pause, Resize
from goodput.observation import Observation


@dataclass
class Rig:
    url: str
    scaler: Scaler
    machine: Scripted
    wishes: Path
    log: Path


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    registry = MemoryRegistry(asyncio.get_running_loop().time)
    machine = Scripted(lambda _: {"prefill": 1, "decode": 2})
    pools = {"prefill": (Role.PREFILL, False), "decode": (Role.DECODE, False)}
    log = tmp_path / "default.jsonl"
    scaler = Scaler(
        registry,
        LeaderClaim(registry, "http://h:1"),
        InMemory(),
        (ScaledFleet(model="", pools=pools, machine=machine),),
        Journal(log, {"engine": "mock", "gpu": None}),
    )
    await scaler.lease.turn()
    await scaler.look()
    runner, url = await listen(admin_app(scaler, Wishes(tmp_path / "default.json", scaler)), "127.0.0.1", 0)
    yield Rig(url, scaler, machine, tmp_path / "default.json", log)
    await runner.cleanup()


async def run(*words: str) -> int:
    return await asyncio.to_thread(main, list(words))


async def test_scale_shows_what_the_controller_does(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("scale", "--url", rig.url) == 0
    told = capsys.readouterr().out
    assert told.startswith("acts\n")
    assert "up" in told
    assert "the script" in told


async def test_orders_reach_the_machine_and_outlive_the_controller(rig: Rig) -> None:
    assert await run("scale", "--url", rig.url, "decode=4", "--pause") == 0
    assert Resize(Role.DECODE, 4, rig.machine.events[-2].who) == rig.machine.events[-2]  # type: ignore[union-attr]
    assert isinstance(rig.machine.events[-1], Pause)
    assert rig.machine.events[-1].paused
    registry = MemoryRegistry(asyncio.get_running_loop().time)
    after = Scripted(lambda _: {})
    fleet = ScaledFleet(model="", pools=rig.scaler.fleets[0].pools, machine=after)
    next_one = Scaler(registry, LeaderClaim(registry, "http://h:1"), InMemory(), (fleet,))
    await Wishes(rig.wishes, next_one).take_up()
    assert next_one.paused
    assert next_one.sizes == {("", Role.DECODE): 4}
    assert await run("scale", "--url", rig.url, "decode=auto", "--resume") == 0
    assert json.loads(rig.wishes.read_text()) == {"paused": False, "sizes": []}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["both=2"], "must be one of decode, prefill"),
        (["decode=x"], "write ROLE=N or ROLE=auto"),
        (["decode"], "write ROLE=N or ROLE=auto"),
        (["decode=99999"], "a number from 0 to 1024"),
        (["decode=1", "--model", "m"], "must be one of ''"),
    ],
)
async def test_a_wrong_order_is_one_clear_line(
    rig: Rig, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert await run("scale", "--url", rig.url, *words) == 2
    assert told in capsys.readouterr().err
    assert rig.scaler.sizes == {}


async def test_a_page_of_another_site_orders_nothing(rig: Rig) -> None:
    async with aiohttp.ClientSession() as session:
        for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            async with session.post(f"{rig.url}/pause", headers=headers) as answer:
                assert answer.status == 403
    assert not rig.scaler.paused


async def test_metrics_are_prometheus_text(rig: Rig) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{rig.url}/metrics") as answer:
        text = await answer.text()
    assert "baton_controller_leads 1" in text
    assert 'baton_controller_decisions_total{what="up"} 1' in text


async def test_the_log_is_read_as_words_and_as_json(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("explain", "--scaling", str(rig.log)) == 0
    assert "up: start prefill-0, start decode-0, start decode-1" in capsys.readouterr().out
    assert await run("explain", "--scaling", str(rig.log), "--json", "--held") == 0
    (line,) = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    assert line["because"] == "the script"
    assert await run("explain", "--scaling", "nosuch") == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "nosuch" in told.err


def file_of(*sized: str, kept: int = 2) -> str:
    """A cluster file with these models on L4s, and one model whose sizes are unknown."""
    small = "pools: {both: {min: 1, max: 3, gpu: L4}}"
    models = [f"  - {{name: {MODEL}, served_name: {name}, {small}}}" for name in sized]
    models.append(f"  - {{name: of/unknown-size, served_name: kept, pools: {{both: {{min: {kept}, max: 4}}}}}}")
    return "\n".join(["models:", *models, "slo:", "  chat: {ttft_ms: 6000, tpot_ms: 150, attainment: 0.9}", ""])


def logged(text: str, folder: Path, *, resizes: bool = True) -> Path:
    """The log of a cluster file's controllers that observed the fleet twice, and saw no instance."""
    plan = plan_of(parse(text, "f").usable(), "mock", None, [], resizes=resizes)
    journal = Journal(folder / "log.jsonl", msgspec.to_builtins(plan.made))
    fleets = fleets_of(plan)
    for at in (10.0, 50.0):
        for fleet in fleets:
            event = Observed(Observation(at_s=at, routers=(), instances=(), leads=True))
            journal.add(fleet.model, at, event, fleet.machine.handle(event, at))
    return journal.path


@pytest.mark.parametrize("resizes", [True, False], ids=["", "--no-scale"])
@pytest.mark.parametrize("sized", [(), ("a",), ("a", "b")], ids=len)
def test_decisions_about_kept_pools_are_made_again_too(
    sized: tuple[str, ...], resizes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(file_of(*sized))
    log = logged(file.read_text(), tmp_path, resizes=resizes)
    assert main(["plan", str(file), "--replay-decisions", str(log)]) == 0
    events, controllers = 2 * (len(sized) + 1), len(sized) + 1
    assert f"{events} events of {controllers} controllers decided again: all as" in capsys.readouterr().out
    file.write_text(file_of(*sized, kept=3))
    assert main(["plan", str(file), "--replay-decisions", str(log)]) == 1
    assert capsys.readouterr().out.count(": was [") == 2


def test_a_log_of_a_model_that_the_file_does_not_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(file_of("a", "b"))
    log = logged(file_of("a", "gone"), tmp_path)
    assert main(["plan", str(file), "--replay-decisions", str(log)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{log}: is of the model 'gone', and {file} has kept, a, b: give the file" in line


@pytest.mark.parametrize("words", [("explain", "--scaling"), ("plan", "baton.yaml", "--replay-decisions")])
def test_another_file_is_no_log_of_decisions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "baton.yaml").write_text(file_of("a"))
    (tmp_path / "trace.csv").write_text("arrived_s,prompt_tokens\n0,10\n")
    assert main([*words, "trace.csv"]) == 2
    assert "trace.csv: no line of it is of a controller's log" in capsys.readouterr().err


def test_scale_without_a_cluster_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["scale"]) == 2
    assert "no cluster named `default`" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["localhost", "localhost:8000", "", "ftp://h", "http://", "http://[", "http://h:port"])
def test_a_wrong_url_is_one_line(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert main(["scale", "--url", url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert url in line
    assert "write http://HOST:PORT" in line or "does not answer" in line


def test_ray_needs_a_file_and_ray(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else True)
    assert main(["up", "--on", "ray", "--engine", "mock"]) == 2
    assert "name a cluster file" in capsys.readouterr().err
    assert main(["controller", "nosuch.yaml", "--on", "slurm"]) == 2
    assert "--on slurm" in capsys.readouterr().err


def lines_of(told: dict[str, Any]) -> str:
    return "\n".join(scale.lines(told))


def test_a_controller_that_does_not_lead_tells_which_one_leads() -> None:
    told = {"leads": False, "leader": "agent 3f", "paused": False, "sizes": [], "now": {}, "decisions": []}
    assert lines_of(told).startswith("looks on: agent 3f")
