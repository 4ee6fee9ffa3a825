"""Divides cores, GPUs and GPU memory among several engines on one machine. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from costs.hardware import find_gpu
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
    engines: int,
    gpus: Sequence[CudaGpu],
    cores: Sequence[int],
    *,
    gpus_each: Sequence[int] = (),
    types: Sequence[str | None] = (),
) -> tuple[MachineShare, ...]:
    """Split a machine between `engines` engines; without a GPU, split the cores.

    GPUs are given out in turn: if there are too few, engines share them and their memory. The GPUs of one engine are of
    one type as far as this makes none fuller. Cores are split into contiguous parts, some one core larger.
    If there are more engines than cores, no engine is bound to a core, and each has one thread.

    Args:
        engines: how many.
        gpus: the machine's.
        cores: the machine's CPU ids.
        gpus_each: GPUs of each engine, at most as many as `of_type` finds for it; left out: one each.
        types: the type of each engine's GPUs (`of_type`); left out: any.
    """
    if gpus:
        return _share_gpus(gpus, gpus_each or [1] * engines, types or [None] * engines)
    return _share_cores(engines, cores)


def of_type(gpus: Sequence[CudaGpu], wanted: str | None) -> tuple[CudaGpu, ...]:
    """The GPUs that an engine of this type of GPU, in any spelling, may have. All of them if it names none, or one that
    the machine does not have, or if nothing tells what they are: the cluster file's word is then good for costs alone.
    """
    known = None if wanted is None else find_gpu(wanted)
    fits = tuple(gpu for gpu in gpus if known is not None and find_gpu(gpu.name) is known)
    return fits or tuple(gpus)


def emptiest(gpus: Sequence[CudaGpu], count: int, load: Mapping[str, int]) -> tuple[str, ...]:
    """The ids of `count` of these GPUs, of which there are enough: those with the least load on the fullest of them,
    and of one type if that makes none fuller. `load`: of each GPU by its id, engines or whatever is to be avoided.
    """
    alike = [[gpu for gpu in gpus if gpu.name == name] for name in dict.fromkeys(gpu.name for gpu in gpus)]
    chosen = [sorted(group, key=lambda gpu: load[gpu.id])[:count] for group in (*alike, gpus) if len(group) >= count]
    best = min(chosen, key=lambda group: max(load[gpu.id] for gpu in group))
    return tuple(gpu.id for gpu in best)


def measures_memory(vllm_args: tuple[str, ...]) -> bool:
    """Whether vLLM measures the GPU's memory while it starts: not if its KV cache has a given size."""
    return not given(vllm_args, "--kv-cache-memory-bytes")


def _share_gpus(
    gpus: Sequence[CudaGpu], gpus_each: Sequence[int], types: Sequence[str | None]
) -> tuple[MachineShare, ...]:
    fits = [of_type(gpus, wanted) for wanted in types]
    load = {gpu.id: 0 for gpu in gpus}  # engines on each GPU
    given_out: dict[int, tuple[str, ...]] = {}
    # First those with the least choice, and of these the largest: so pairs and fours of neighbours stay together.
    for engine in sorted(range(len(fits)), key=lambda at: (len(fits[at]), -gpus_each[at])):
        given_out[engine] = emptiest(fits[engine], gpus_each[engine], load)
        for gpu in given_out[engine]:
            load[gpu] += 1
    shares = []
    for engine, among in enumerate(fits):
        on_each = max(load[gpu.id] for gpu in among)  # the fullest decides for all, so that engines of a pool are alike
        memory = None if on_each <= 1 else int(100 * GPU_MEMORY_USED / on_each) / 100
        shares.append(MachineShare(gpus=given_out[engine], gpu_memory_share=memory))
    return tuple(shares)


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

    `visible` holds indices, UUIDs or beginnings of UUIDs; the first one that names no GPU ends the list, and one
    that names a GPU again leaves none at all, as in CUDA.
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
    chosen: dict[str, CudaGpu] = {}
    for word in (each.strip() for each in visible.split(",")):
        by_uuid = [gpu for uuid, gpu in found.values() if word.startswith("GPU-") and uuid.startswith(word)]
        if word in found:
            gpu = found[word][1]
        elif len(by_uuid) == 1:
            gpu = by_uuid[0]
        elif word.startswith(unlisted):
            gpu = CudaGpu(id=word)
        else:
            break
        if gpu.id in chosen:
            return ()
        chosen[gpu.id] = gpu
    return tuple(chosen.values())
