"""`baton up` is told to stop, or one of its engines is told to leave, before the whole fleet is up."""

from __future__ import annotations

import argparse
import asyncio
import errno
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from support.cluster import within

from baton import fleet as fleet_module
from baton import router_child
from baton.commands import down
from baton.commands import up as up_command
from baton.fleet import Elsewhere, LocalFleet, all_up
from baton.local import Program
from baton.plan import from_counts, with_ports
from baton.ports import HeldPorts
from baton.registry_child import RegistryElsewhere
from baton.router_child import LocalRouter
from baton.state import Running, load
from cluster.errors import BatonError
from cluster.instance import Role
from cluster.spec import parse
from engine.agent.http import listen
from engine.vllm.placement import MachineShare


class Registry:
    """A registry elsewhere. `meanwhile` is called while `baton up` waits for the registry."""

    argv = None
    say = "redis://elsewhere"

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] = lambda: None

        self.answers = True

    def words(self) -> list[str]:
        return []

    async def wait_ready(self) -> None:
        self.meanwhile()
        if not self.answers:
            await asyncio.Event().wait()


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalFleet]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = _fleet()
    _writes(made.router.program, tmp_path / "begun")
    with made.members.ports:
        yield made


def _fleet(elsewhere: Elsewhere | None = None, **limits: float) -> LocalFleet:
    front = LocalRouter(title="chat", host="127.0.0.1", port=0, admin_host="127.0.0.1", admin_port=0, limits=limits)
    running = Running(cluster="chat", pid=1, born="0")
    return LocalFleet(front, [], running, cast("RegistryElsewhere", Registry()), HeldPorts(), elsewhere)


def _says(program: Program, event: dict[str, str] | None, *, then: str = "sys.stdin.read()") -> None:
    """Replace the program: it prints this event, then runs `then`. By default it waits until its input is closed."""
    said = "" if event is None else f"print({json.dumps(event)!r}, flush=True); "
    program.argv = [sys.executable, "-c", f"import sys; {said}{then}"]


def _adds_two_engines(fleet: LocalFleet) -> None:
    wanted = from_counts({Role.PREFILL: 1, Role.DECODE: 1}, "m", None, [])
    for each in wanted:
        fleet.members.add(with_ports(each, MachineShare(), fleet.members.ports))


@pytest.mark.parametrize("ready", [False, True], ids=["not ready", "ready"])
async def test_an_engine_that_was_told_to_leave_is_not_waited_for(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ready: bool
) -> None:
    _adds_two_engines(fleet)
    leaving, staying = fleet.members
    _says(leaving.program, {"event": "ready", "model": "m"} if ready else None, then="sys.exit(0)")
    _says(staying.program, {"event": "ready", "model": "m"})
    _says(fleet.router.program, {"event": "ready", "endpoint": "http://h:1", "admin": "http://h:2"})

    async def routable(enough: Callable[[list[dict[str, Any]]], bool]) -> None:
        while not enough([{"id": staying.name, "state": "up"}]):
            await asyncio.sleep(0.01)
        fleet._interrupted()

    monkeypatch.setattr(fleet.router, "routable", routable)
    assert await asyncio.wait_for(fleet.run(), 20) == 0
    assert "ready baton http://h:1" in capsys.readouterr().out


def _writes(program: Program, path: Path) -> None:
    """Replace the program: it writes a file, then waits until its input is closed."""
    words = f"import sys; open({str(path)!r}, 'a').write('begun '); sys.stdin.read()"
    program.argv = [sys.executable, "-c", words]


async def test_a_stop_while_the_registry_comes_up_starts_no_program(fleet: LocalFleet, tmp_path: Path) -> None:
    cast("Any", fleet.registry).meanwhile = fleet._interrupted
    assert await asyncio.wait_for(fleet.run(), 20) == 0
    assert not (tmp_path / "begun").exists()


async def test_a_stop_while_the_registry_does_not_answer_ends_the_wait(fleet: LocalFleet, tmp_path: Path) -> None:
    registry = cast("Any", fleet.registry)
    registry.meanwhile, registry.answers = fleet._interrupted, False
    assert await asyncio.wait_for(fleet.run(), 20) == 0
    assert not (tmp_path / "begun").exists()


def test_a_signal_before_the_fleet_runs_leaves_no_password(tmp_path: Path) -> None:
    """`baton up` looks for GPUs after it has made its registry's password, and a driver may be slow to answer."""
    looked, folders = tmp_path / "looked", {name: str(tmp_path / name) for name in ("TMPDIR", "XDG_STATE_HOME")}
    for each in folders.values():
        Path(each).mkdir()
    slow = f"""
import pathlib, sys, time
from baton.cli import main
from baton.commands import up
def find_hardware():
    pathlib.Path({str(looked)!r}).touch()
    time.sleep(60)
up.find_hardware = find_hardware
sys.exit(main(["up", "--port", "0", "--admin-port", "0"]))
"""
    with subprocess.Popen([sys.executable, "-c", slow], env={**os.environ, **folders}) as process:
        try:
            within(60, looked.exists)
            assert list(Path(folders["TMPDIR"]).glob("baton-registry-*")), "the password is there"
            process.terminate()
            assert process.wait(30) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert not list(Path(folders["TMPDIR"]).glob("baton-*"))


async def test_without_a_registry_no_program_is_started(
    fleet: LocalFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise BatonError("the registry does not answer")

    cast("Any", fleet.registry).meanwhile = fails
    assert await asyncio.wait_for(fleet.run(), 20) == 1
    assert not (tmp_path / "begun").exists()
    assert "the registry does not answer" in capsys.readouterr().err


class Unread(io.StringIO):
    """A stream that nothing reads any more: a pipe without a reader, or a terminal that hung up."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        code = errno.EIO if self._terminal else errno.EPIPE
        raise OSError(code, os.strerror(code))


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
async def test_a_cluster_stops_in_order_although_nothing_reads_its_board(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    fleet.board.console.file = Unread(terminal=terminal)
    monkeypatch.setattr(sys, "stdout", Unread(terminal=terminal))
    _says(fleet.router.program, {"event": "ready", "endpoint": "http://h:1", "admin": "http://h:2"})

    async def routable(_: Callable[[list[dict[str, Any]]], bool]) -> None:
        asyncio.get_running_loop().call_later(0.05, fleet._interrupted)

    monkeypatch.setattr(fleet.router, "routable", routable)
    assert await asyncio.wait_for(fleet.run(), 20) == 0
    assert fleet.stopping.is_set()


def _up(**states: str) -> list[dict[str, str]]:
    return [
        {"id": name.replace("_", "-"), "state": state, "role": name.partition("_")[0]} for name, state in states.items()
    ]


ELSEWHERE = {"prefill_7": "lost", "decode_9": "up"}


@pytest.mark.parametrize(
    ("early", "enough"),
    [
        ({"ready": False, "instances": []}, {"ready": True, "instances": []}),
        (
            {"ready": True, "instances": _up(**ELSEWHERE, prefill_0="up", decode_0="new")},
            {"ready": True, "instances": _up(**ELSEWHERE, prefill_0="up", decode_0="up")},
        ),
        (
            {"ready": False, "instances": _up(prefill_0="up", decode_0="up")},
            {"ready": True, "instances": _up(prefill_0="up", decode_0="up")},
        ),
    ],
    ids=["it names no instance", "others are in the registry", "no pair is proven yet"],
)
async def test_up_waits_for_its_own_engines(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch, early: dict[str, Any], enough: dict[str, Any]
) -> None:
    """Answers that are slow, or no JSON, are asked for again."""
    monkeypatch.setattr(router_child, "ANSWER_S", 0.2)
    _adds_two_engines(fleet)
    asked = 0

    async def ready(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked == 1:
            await asyncio.sleep(0.5)
        if asked == 2:
            return web.Response(text="{", content_type="application/json")
        return web.json_response(early if asked == 3 else enough)

    app = web.Application()
    app.router.add_get("/ready", ready)
    runner, fleet.router.admin = await listen(app, "127.0.0.1", 0)
    try:
        await asyncio.wait_for(fleet.router.routable(partial(all_up, fleet)), 20)
    finally:
        await runner.cleanup()
    assert asked >= 4


async def test_a_full_disk_of_the_record_ends_nothing(fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is written once there is space again."""
    monkeypatch.setattr(fleet_module, "RECORD_AGAIN_S", 0.05)
    fleet.board.console.file = said = io.StringIO()
    full = True
    replace = Path.replace

    def replaces(path: Path, target: Path) -> Path:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replaces)
    _says(fleet.router.program, {"event": "ready", "endpoint": "http://h:1", "admin": "http://h:2"})

    async def routable(_: Callable[[list[dict[str, Any]]], bool]) -> None:
        nonlocal full
        fleet.scaled_at("http://h:3")
        full = False
        async with asyncio.timeout(10):
            while load("chat") is None:
                await asyncio.sleep(0.01)
        fleet._interrupted()

    monkeypatch.setattr(fleet.router, "routable", routable)
    assert await asyncio.wait_for(fleet.run(), 20) == 0
    record = load("chat")
    assert record is not None
    assert (record.endpoint, record.scaling) == ("http://h:1", "http://h:3")
    assert said.getvalue().count("No space left on device") == 1


async def test_a_drain_is_not_cut_before_its_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    fleet = _fleet(drain_s=300.0)
    later: list[float] = []
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda delay_s, _: later.append(delay_s))
    fleet._stop()
    assert later == [315.0]


def test_down_waits_for_the_drain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    running = _fleet(drain_s=300.0).running
    now = 0.0

    def sleep(_: float) -> None:
        nonlocal now
        now += 10.0

    monkeypatch.setattr(down, "must_load", lambda _: running)
    monkeypatch.setattr(Running, "alive", property(lambda _: True))
    monkeypatch.setattr(down, "os", SimpleNamespace(kill=lambda *_: None))
    monkeypatch.setattr(down, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert down.run(argparse.Namespace(cluster="chat", now=False, json=False)) == 1
    assert now > 315.0


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_second_ctrl_c_lets_the_controller_end_its_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """A controller that does not end is killed later."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(fleet_module, "CONTROLLER_S", 0.3 if hangs else 15.0)
    fleet = _fleet(Elsewhere(words=("controller",), vllm_args=(), count=1, model="m"))
    assert fleet.controller is not None
    _says(fleet.router.program, None)
    ready = json.dumps({"event": "ready", "endpoint": "http://h:3"})
    ends = "time.sleep(60)" if hangs else "(time.sleep(0.2), sys.exit(0))"
    words = f"import signal, time; signal.signal(15, lambda *_: {ends}); print({ready!r}, flush=True); time.sleep(60)"
    _says(fleet.controller, None, then=words)
    scaled_at = fleet.scaled_at

    def scaled(url: str) -> None:
        scaled_at(url)
        fleet._interrupted()
        fleet._interrupted()

    monkeypatch.setattr(fleet, "scaled_at", scaled)
    assert await asyncio.wait_for(fleet.run(), 20) == 0
    assert fleet.codes["controller"] == (-9 if hangs else 0)


STARTS_FOUR = """
models:
  - name: m
    pools: {prefill: {min: 1, max: 2}, decode: {min: 1, max: 4, start: 4}}
registry: {url: "redis://127.0.0.1:6379"}
"""


@pytest.mark.parametrize(
    ("up", "enough"),
    [
        ("prefill-0 decode-2", True),  # scaled down by an earlier run
        ("prefill-0 decode-19a1b2c3d4e-1", True),
        ("decode-0 decode-1 decode-2", False),
        ("prefill-0", False),
        ("", False),
    ],
)
def test_a_fleet_on_ray_serves_at_the_sizes_that_an_earlier_run_left(
    monkeypatch: pytest.MonkeyPatch, up: str, enough: bool
) -> None:
    """Its controller brings no pool back to `start` that has instances, so `baton up` does not wait for that size."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    parser = argparse.ArgumentParser()
    up_command.add_arguments(parser)
    spec, args = parse(STARTS_FOUR, "f").usable(), parser.parse_args(["f", "--on", "ray"])
    args.vllm_args = []
    fleet = _fleet(up_command._elsewhere(args, spec, up_command._front(args, spec)))
    seen = [{"id": name, "role": name.partition("-")[0], "state": "up"} for name in up.split()]
    assert all_up(fleet, seen) is enough


async def _kept(fleet: LocalFleet, runs: list[int | OSError], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Keep the router, whose runs end so; the last one stops the cluster. Returns the pauses."""
    pauses: list[float] = []

    async def run() -> int:
        ends = runs.pop(0)
        if not runs:
            fleet.stopping.set()
        if isinstance(ends, OSError):
            raise ends
        return ends

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    fleet.board.add("router", "here")
    monkeypatch.setattr(fleet.router.program, "run", run)
    monkeypatch.setattr(fleet, "_pause", pause)
    await asyncio.wait_for(fleet._keep(fleet.router.program), 20)
    return pauses


async def test_a_router_that_refuses_an_edited_file_after_a_crash_ends_no_engines(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it ran, it ignored the mistake in the file; killed, it reads the file as at a first start."""
    assert await _kept(fleet, [-9, 2, 2, 2, 0], monkeypatch) == [fleet_module.REFUSED_S] * 3
    assert fleet.failure is None


async def test_a_router_that_refuses_its_first_start_ends_the_cluster(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await _kept(fleet, [2, 0], monkeypatch) == []
    assert fleet.failure is not None and fleet.stopping.is_set()


async def test_a_program_that_cannot_be_forked_for_a_moment_ends_no_cluster(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    assert await _kept(fleet, [-9, busy, busy, 0], monkeypatch) == [fleet_module.UNBORN_S] * 2
    assert fleet.failure is None
