"""What `baton controller` starts with --dry-run, --owns and --no-scale; which of these flags `baton up` hands on."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.scaling import FILE, MODEL, InMemory

from baton.changing import Changing
from baton.commands import controller, up
from baton.plan import templates
from baton.ray_fleet import launches
from baton.scaling import fleets_of, plan_of
from baton.signals import STOPPING
from cluster.errors import UsageError
from cluster.instance import Role
from cluster.registry.memory import MemoryRegistry
from cluster.registry.registry import Registry
from cluster.spec import Spec, parse
from engine.vllm.hardware import find_hardware
from engine.vllm.placement import CudaGpu
from goodput.actuate.existing import ExistingFleet
from goodput.actuate.ray_actor import Launch
from goodput.actuate.scaler import Scaler
from goodput.fixed import FixedPools

UNKNOWN = FILE.replace(MODEL, "of/nobody-knows-what-size")
"""Its pools cannot be sized, so a controller keeps them at the file's sizes."""


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Restores signal handlers: a controller that has ended ignores signals, because its process ends next."""
    former = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


class Looking(InMemory):
    """An actuator in memory that counts the controller's looks. The controller may start instances after each look."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.fails = False
        """Whether the next look raises."""

    async def observe(self) -> ExistingFleet:
        self.looks += 1
        if self.fails:
            self.fails = False
            raise RuntimeError("a look that fails")
        return await super().observe()


async def begun(
    monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, *words: str
) -> tuple[asyncio.Task[int], Looking]:
    """A running controller and its actuator."""
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
    plan = plan_of(spec, "mock", None, [], dry=args.dry_run, resizes=not args.no_scale)
    return asyncio.create_task(controller._run(args, spec, plan, Changing(str(file)))), actuator


async def started(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, *words: str) -> list[str]:
    """The pools of which a controller has started instances after five looks."""
    running, actuator = await begun(monkeypatch, folder, text, *words)
    async with asyncio.timeout(20):
        while actuator.looks < 5 and not running.done():
            await asyncio.sleep(0.02)
    assert not running.done(), running
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return sorted({str(name).split("-")[0] for name in actuator.started})


@pytest.mark.parametrize("text", [FILE, UNKNOWN], ids=["sized", "kept"])
async def test_a_dry_run_starts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    assert await started(monkeypatch, tmp_path, text, "--dry-run") == []


@pytest.mark.parametrize("words", [[], ["--dry-run", "--owns"], ["--no-scale"]], ids=" ".join)
async def test_a_controller_starts_its_fleet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]) -> None:
    assert await started(monkeypatch, tmp_path, FILE, *words) == ["decode", "prefill"]


def test_a_password_in_the_registrys_address_reaches_no_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On Ray each node's process list shows the words of its engines. They get the password in a file."""
    file = tmp_path / "baton.yaml"
    file.write_text(FILE + "\nregistry: {url: 'redis://user:hunter%402@there:1'}\n")
    parser = argparse.ArgumentParser()
    controller.add_arguments(parser)
    args = parser.parse_args([str(file), "--on", "ray", "--engine", "mock"])
    args.vllm_args = []
    made: list[Launch] = []

    async def begin(args: argparse.Namespace, spec: Spec, *_: object) -> int:
        words = ["--registry", args.registry]
        made.append(launches(templates(spec, [], "mock"), words, args.registry_password_file, None)("p-0", "prefill"))
        return 0

    monkeypatch.setattr(controller, "_run", begin)
    assert controller.run(args) == 0
    (launch,) = made
    assert "redis://user@there:1" in launch.words
    assert not [word for word in launch.words if "hunter" in word]
    assert launch.files == {"registry": "hunter@2"}
    assert not args.registry_password_file.exists(), "the file is gone with the controller"


async def test_a_controller_whose_port_is_taken_ends_and_names_the_flag(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        running, actuator = await begun(monkeypatch, tmp_path, FILE, "--port", f"{port}")
        async with asyncio.timeout(20):
            with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port} .*: choose another --port"):
                await running
    assert actuator.looks == 0


async def test_a_controller_that_cannot_open_its_registry_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreadable(*_: object) -> Registry:
        raise UsageError("--registry-password-file secret: no such file")

    running, _ = await begun(monkeypatch, tmp_path, FILE)
    monkeypatch.setattr(controller, "open_registry", unreadable)
    async with asyncio.timeout(20):
        with pytest.raises(UsageError, match="secret: no such file"):
            await running


async def test_a_controller_that_once_ran_begins_anew_whatever_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its fleet goes on serving, and an operator may mend the fault."""
    opened: list[Registry] = []
    clock = asyncio.get_running_loop().time

    def registry(*_: object) -> Registry:
        opened.append(MemoryRegistry(clock))
        if len(opened) == 2:
            raise UsageError("the password file is being replaced")
        return opened[-1]

    monkeypatch.setattr("baton.scaling.AGAIN_S", 0.01)
    running, actuator = await begun(monkeypatch, tmp_path, FILE)
    monkeypatch.setattr(controller, "open_registry", registry)
    actuator.fails = True
    async with asyncio.timeout(20):
        while len(opened) < 3 or actuator.looks < 2:
            await asyncio.sleep(0.01)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("text", [FILE, UNKNOWN], ids=["sized", "kept"])
def test_pools_that_are_kept_have_no_controller_of_their_own(text: str) -> None:
    plan = plan_of(parse(text, "f").usable(), "mock", None, [], resizes=False)
    (fleet,) = fleets_of(plan)
    assert isinstance(fleet.machine, FixedPools)
    assert list(plan.kept.values()) == [{"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}]


def up_args(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    args = parser.parse_args(words)
    args.vllm_args = []
    return args


def test_a_gpu_without_a_name_is_no_type(capsys: pytest.CaptureFixture[str]) -> None:
    """Without nvidia-smi only CUDA_VISIBLE_DEVICES names GPUs, by number."""
    unnamed = replace(find_hardware(), gpus=(CudaGpu(id="0"),))
    text = "models: [{name: m, pools: {prefill: {min: 1, max: 2}, decode: {min: 1}}}]"
    assert up._scaling_plan(up_args("f.yaml"), parse(text, "f.yaml").usable(), unnamed) is None
    assert "no type of GPU is named (`gpu:` of the pool)" in capsys.readouterr().err


def test_up_hands_on_what_it_was_told_of_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    args = up_args("f.yaml", "--on", "ray", "--no-scale", "--scale-dry-run")
    spec = parse(FILE, "f.yaml").usable()
    elsewhere = up._elsewhere(args, spec, up._front(args, spec))
    assert elsewhere is not None
    assert {"--no-scale", "--dry-run", "--owns"} <= set(elsewhere.words)
    parser = argparse.ArgumentParser()
    controller.add_arguments(parser)
    parser.parse_args(elsewhere.words[1:])


FIXED = "models: [{name: m}]"


@pytest.mark.parametrize(
    ("text", "words", "because"),
    [
        (None, [], "without a cluster file"),
        (FIXED, ["f.yaml"], "no pool of f.yaml may change"),
        (FILE, ["f.yaml", "--no-scale"], "beside --no-scale"),
    ],
)
def test_a_dry_run_that_has_nothing_to_say_says_so(
    capsys: pytest.CaptureFixture[str], text: str | None, words: list[str], because: str
) -> None:
    spec = None if text is None else parse(text, "f.yaml").usable()
    assert up._scaling_plan(up_args(*words, "--scale-dry-run"), spec, find_hardware()) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "--scale-dry-run" in line
    assert because in line
    up._scaling_plan(up_args(*words), spec, find_hardware())
    assert "dry-run" not in capsys.readouterr().err
