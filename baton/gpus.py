"""The GPU types of a cluster file: those of the cost model, with the price, power and memory that the file says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cluster.spec import Hardware
from costs.hardware import Gpu, find_gpu


def said_of(gpu: Gpu, hardware: Mapping[str, Hardware]) -> Hardware | None:
    """The entry of a GPU type in `hardware` of the cluster file, in whatever spelling; None: it has none."""
    types = {found.name: each for name, each in hardware.items() if (found := find_gpu(name)) is not None}
    return types.get(gpu.name)


def as_told(gpu: Gpu, hardware: Mapping[str, Hardware]) -> Gpu:
    """A GPU type as `hardware` of the cluster file has it, in whatever spelling; as it is if the file does not say."""
    said = said_of(gpu, hardware)
    if said is None:
        return gpu
    power_w = gpu.tdp_w if said.power_w is None else said.power_w
    return replace(
        gpu,
        usd_per_hour=gpu.usd_per_hour if said.price_per_hour is None else said.price_per_hour,
        memory_gib=gpu.memory_gib if said.memory_gib is None else said.memory_gib,
        tdp_w=power_w,
        idle_w=gpu.idle_w * power_w / gpu.tdp_w,
    )
