"""The command line of a mock in the place of a vLLM server, under an agent. Pure: a function of its `EngineSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from baton.gpus import as_told
from cluster.spec import Hardware, PlannedInstance, flags
from costs.hardware import find_gpu
from engine.vllm.spec import EngineSpec, value_of
from sim.engine_args import read_words

MOCK_MODEL = "meta-llama/Llama-3.1-8B"
"""The model of a mock if none is named."""


NO_HARDWARE: Final[Mapping[str, Hardware]] = MappingProxyType({})

_SAME: Final = {
    "max-num-batched-tokens": "--max-num-batched-tokens",
    "max-num-seqs": "--max-num-seqs",
    "max-model-len": "--max-model-len",
    "block-size": "--block-size",
    "num-gpu-blocks-override": "--kv-blocks",
}
"""Flags of vLLM that a mock has, too, under its own names."""


def mock_ranks(args: tuple[str, ...]) -> int:
    """Data parallel ranks of a mock with these flags."""
    said = value_of(args, "--dp")
    return int(said) if said is not None and said.isdecimal() and int(said) > 0 else 1


def mock_args(instance: PlannedInstance, hardware: Mapping[str, Hardware] = NO_HARDWARE) -> tuple[str, ...]:
    """The flags of a mock in the place of an instance of a cluster file: its GPUs, and those of its vLLM flags that
    change a mock's timing. Other flags are left out, and so is a GPU that the cost model does not know.

    A mock takes a power cap as a share of the data sheet's power. `hardware` of the file may say another power: the
    share stays the same.
    """
    words = ["--tp", str(instance.shape.tp)] if instance.shape.tp > 1 else []
    words += ["--dp", str(instance.shape.dp)] if instance.shape.dp > 1 else []
    gpu = None if instance.gpu is None else find_gpu(instance.gpu)
    words += [] if gpu is None else ["--gpu", gpu.name]
    if instance.power_cap_w is not None:
        more = 1.0 if gpu is None else gpu.tdp_w / as_told(gpu, hardware).tdp_w
        words += ["--power-cap-w", f"{instance.power_cap_w * more:g}"]
    read = read_words(instance.vllm_args)
    for name, number in read.numbers.items():
        words += [_SAME[name], f"{number:.0f}"] if name in _SAME else []
    if kv_dtype := read.words.get(flags.KV_DTYPE):
        words += ["--kv-cache-dtype", kv_dtype]
    return tuple(words)


def mock_command(spec: EngineSpec) -> list[str]:
    """`baton mock` with one instance, at the engine's own address; the user's flags last."""
    words = [spec.python, "-m", "baton", "mock", "--instances", f"{spec.role.value}=1", "--name", spec.instance]
    words += ["--host", spec.host, "--port", str(spec.port), "--model", spec.model]
    words += ["--drain-s", str(spec.shutdown_timeout_s)]
    if spec.served_name is not None:
        words += ["--served-model-name", spec.served_name]
    if spec.kv_lease_s is not None:
        words += ["--lease-s", str(spec.kv_lease_s)]
    if spec.digests:
        words.append("--digests")
    return [*words, *spec.extra_args]
