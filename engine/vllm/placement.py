"""Divides cores, GPUs and GPU memory among several engines on one machine. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from engine.vllm.spec import given

GPU_MEMORY_USED = 0.9
"""Part of a GPU's memory that engines which share it use together; the rest is for CUDA contexts and fragmentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGpu:
    """One GPU as CUDA names it."""

    id: str
    """What `CUDA_VISIBLE_DEVICES` takes: an index or a UUID."""
    name: str = ""
    memory_mib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineShare:
    """One engine's part of the machine."""

    cores: tuple[int, ...] = ()
    """CPU ids to bind to; empty if the engine runs on a GPU (vLLM and the kernel place those threads well)."""
    threads: int = 0
    """Threads that are bound to no core, in place of `cores`: for machines with fewer cores than engines."""
    gpus: tuple[str, ...] = ()
    gpu_memory_share: float | None = None
    """Part of each GPU's memory, 0 to 1; None = vLLM's own default, for an engine that has the GPU for itself."""

    def flags(self) -> list[str]:
        """The share as flags of `baton engine`."""
        flags = []
        if self.cores:
            flags += ["--cores", ",".join(map(str, self.cores))]
        if self.threads:
            flags += ["--threads", str(self.threads)]
        if self.gpus:
            flags += ["--gpu", ",".join(self.gpus)]
        if self.gpu_memory_share is not None:
            flags += ["--gpu-memory-share", f"{self.gpu_memory_share:g}"]
        return flags

    def __str__(self) -> str:
        if self.gpus:
            whose = "its" if len(self.gpus) == 1 else "their"
            part = "" if self.gpu_memory_share is None else f" ({self.gpu_memory_share:.0%} of {whose} memory)"
            return _named("GPU", self.gpus) + part
        if self.threads:
            return "shared cores"
        return _named("core", tuple(map(str, self.cores))) if self.cores else "any core"


def share(
    engines: int, gpus: Sequence[CudaGpu], cores: Sequence[int], *, gpus_each: int = 1
) -> tuple[MachineShare, ...]:
    """Split a machine between `engines` engines of `gpus_each` GPUs each; without a GPU, split the cores.

    GPUs are given out in turn: if there are too few, engines share them and their memory. Cores are split into
    contiguous parts whose sizes differ by one at most. If there are more engines than cores, no engine is bound to a
    core, and each has one thread.
    """
    if gpus:
        return _share_gpus(engines, [gpu.id for gpu in gpus], gpus_each)
    return _share_cores(engines, cores)


def measures_memory(vllm_args: tuple[str, ...]) -> bool:
    """Whether vLLM measures the GPU's memory while it starts: not if its KV cache has a given size."""
    return not given(vllm_args, "--kv-cache-memory-bytes")


def _share_gpus(engines: int, ids: list[str], gpus_each: int) -> tuple[MachineShare, ...]:
    on_each = -(-engines * gpus_each // len(ids))  # engines on the fullest GPU
    memory = None if on_each <= 1 else int(100 * GPU_MEMORY_USED / on_each) / 100
    return tuple(
        MachineShare(
            gpus=tuple(ids[(engine * gpus_each + rank) % len(ids)] for rank in range(gpus_each)),
            gpu_memory_share=memory,
        )
        for engine in range(engines)
    )


def _share_cores(engines: int, cores: Sequence[int]) -> tuple[MachineShare, ...]:
    if not cores:
        return (MachineShare(),) * engines
    if engines > len(cores):
        # When bound, vLLM pins *all* threads of a worker, and NIXL's progress thread spins while a peer's connection is
        # being set up. So two engines pinned to one core starve each other. In 6 of 8 cold starts of three engines on
        # two cores the first hand-overs took 5 to 24 s: every other thread of that core, the kernel's own network
        # thread included, waited for seconds at a time. Unbound they took 0.1 to 0.6 s.
        return (MachineShare(threads=1),) * engines
    return tuple(MachineShare(cores=part) for part in split(cores, engines))


def split(cores: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """`cores` in contiguous parts whose sizes differ by one at most; if there are too few, one core each in turn."""
    if parts >= len(cores):
        return tuple((cores[part % len(cores)],) for part in range(parts))
    edges = [len(cores) * part // parts for part in range(parts + 1)]
    return tuple(tuple(cores[start:end]) for start, end in itertools.pairwise(edges))


def _named(noun: str, ids: tuple[str, ...]) -> str:
    return f"{noun}{'s' if len(ids) > 1 else ''} {', '.join(ids)}"


def visible_gpus(listed: str | None, visible: str | None) -> tuple[CudaGpu, ...]:
    """The GPUs CUDA will see: nvidia-smi's lines `index, uuid, MiB, name` under CUDA_VISIBLE_DEVICES' rules.

    `visible` holds indices, UUIDs or beginnings of UUIDs; the first one that names no GPU ends the list, as in CUDA.
    Parts of a GPU (``MIG-...``) are not in nvidia-smi's list and are accepted unchecked; so are all others if
    nvidia-smi is missing or fails (`listed` is None), as in images that have the driver's libraries only.
    """
    found = {}
    unlisted = ("MIG-",) if listed is not None else ("MIG-", "GPU-", *"0123456789")
    for line in (listed or "").splitlines():
        fields = [field.strip() for field in line.split(",", 3)]
        if len(fields) == 4 and fields[0].isdecimal():
            index, uuid, memory, name = fields
            found[index] = (uuid, CudaGpu(id=index, name=name, memory_mib=int(memory) if memory.isdecimal() else 0))
    if visible is None:
        return tuple(gpu for _, gpu in found.values())
    chosen: list[CudaGpu] = []
    for word in (each.strip() for each in visible.split(",")):
        by_uuid = [gpu for uuid, gpu in found.values() if word.startswith("GPU-") and uuid.startswith(word)]
        if word in found:
            chosen.append(found[word][1])
        elif len(by_uuid) == 1:
            chosen.append(by_uuid[0])
        elif word.startswith(unlisted):
            chosen.append(CudaGpu(id=word))
        else:
            break
    return tuple(chosen)
