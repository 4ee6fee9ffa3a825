"""`baton doctor` on machines that lack something: a finding with its fix, never a traceback."""

from __future__ import annotations

import dataclasses

import pytest

from baton import checks
from baton.checks import CHECKS, CheckVerdict, run_checks
from engine.vllm.hardware import find_hardware
from engine.vllm.placement import CudaGpu


def test_every_check_answers_on_this_machine() -> None:
    findings = run_checks()
    assert len(findings) == len(CHECKS)
    assert all(finding.what and finding.found for finding in findings)
    assert all(finding.fix for finding in findings if finding.verdict is CheckVerdict.MISSING)


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_nothing(_: object) -> checks.DoctorFinding:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(checks, "CHECKS", (check_nothing,))
    (finding,) = run_checks()
    assert finding.verdict is CheckVerdict.NOTE
    assert "ZeroDivisionError: by zero" in finding.found


@pytest.mark.parametrize(
    ("built", "verdict"),
    [
        ("'--enable-shared' '--prefix=/opt'", CheckVerdict.NOTE),
        ("'--enable-optimizations' '--with-lto'", CheckVerdict.OK),
        (None, CheckVerdict.OK),
    ],
    ids=["plain", "optimized", "not told"],
)
def test_a_python_without_optimizations_is_noted(
    monkeypatch: pytest.MonkeyPatch, built: str | None, verdict: CheckVerdict
) -> None:
    monkeypatch.setattr("sysconfig.get_config_var", lambda _: built)
    finding = checks.check_python(find_hardware())
    assert finding.verdict is verdict
    assert ("--enable-optimizations" in finding.found) == (verdict is CheckVerdict.NOTE)


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_gpu_memory_that_no_other_process_can_open_is_noted(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """Field report: hand-overs go over TCP, silently (NIXL's issue 1754)."""
    cores = dataclasses.replace(find_hardware(), gpus=())
    with_gpu = dataclasses.replace(cores, gpus=(CudaGpu(id="0"),))
    monkeypatch.setenv("UCX_TLS", "cuda_ipc,tcp")
    monkeypatch.setenv(variable, "max_split_size_mb:64, expandable_segments: True")
    finding = checks.check_ucx(with_gpu)
    assert (finding.verdict, finding.fix) == (CheckVerdict.NOTE, f"unset {variable}")
    assert "UCX_TLS=cuda_ipc,tcp" in finding.found
    assert checks.check_ucx(cores).verdict is CheckVerdict.OK
    monkeypatch.setenv(variable, "expandable_segments:False")
    assert checks.check_ucx(with_gpu).verdict is CheckVerdict.OK


def test_missing_lscpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on a real machine: without lscpu, vLLM's CPU worker dies 30 s after its start."""
    monkeypatch.setattr(checks.shutil, "which", lambda _: None)
    finding = checks.check_cpu(dataclasses.replace(find_hardware(), gpus=()))
    assert finding.verdict is CheckVerdict.MISSING
    assert "util-linux" in finding.fix


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_version", lambda _: None)
    hardware = find_hardware()
    for check in (checks.check_torch, checks.check_vllm, checks.check_nixl):
        assert check(hardware).verdict is CheckVerdict.MISSING


def test_gpus_that_only_the_user_names_have_no_size() -> None:
    gpus = (CudaGpu(id="0"), CudaGpu(id="1", name="NVIDIA H100", memory_mib=81920))
    found = checks.check_gpu(dataclasses.replace(find_hardware(), gpus=gpus)).found
    assert found == "GPU 0 (size unknown); NVIDIA H100 (80 GiB)"


def test_gpus_that_vllms_build_for_cpus_cannot_use_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice was to make `nvidia-smi` work, which did."""
    monkeypatch.setattr(checks, "find_gpus", lambda _: (CudaGpu(id="0", name="NVIDIA H100", memory_mib=81920),))
    finding = checks.check_gpu(dataclasses.replace(find_hardware(), gpus=(), cpu_build=True))
    assert finding.found == "NVIDIA H100 (80 GiB): not used, as vLLM is the build for CPUs"
    assert "DEVICE=gpu" in finding.fix


def test_vllms_build_for_gpus_misses_a_gpu() -> None:
    without = dataclasses.replace(find_hardware(), gpus=(), lacks_gpu=True)
    assert checks.check_gpu(without).verdict is CheckVerdict.MISSING
    with_cpus = dataclasses.replace(without, lacks_gpu=False, cpu_build=False)
    assert "engines run on the CPU" in checks.check_gpu(with_cpus).found
