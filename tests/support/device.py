"""Where live tests' engines compute: on this machine's cores, or with `pytest --gpu` together on its first GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

GIB: Final = 1 << 30
KV_BYTES: Final = GIB
SHARE: Final = 0.1
"""Part of the GPU's memory that vLLM wants to find free for each engine: several start at once."""
EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "tiny.yaml"
_gpus: list[str] = []


def use_gpu(gpu: str) -> None:
    """From now on engines start on this GPU (a value of CUDA_VISIBLE_DEVICES). A `baton up` sees no other one: it would
    spread its engines over all.
    """
    _gpus[:] = [gpu]
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu


def gpus() -> tuple[str, ...]:
    """The GPU of all engines; empty: they compute on cores."""
    return tuple(_gpus)


def engine_args() -> dict[str, str | int | float | bool]:
    """vLLM's flags that make a GPU's engines like those on CPUs: as large blocks, float32, nothing compiled. With a
    fixed size of the KV cache, engines that start beside each other do not count each other's memory.
    """
    if not _gpus:
        return {}
    return {
        "dtype": "float32",
        "enforce-eager": True,
        "block-size": 128,
        "gpu-memory-utilization": SHARE,
        "kv-cache-memory-bytes": KV_BYTES,
    }


def flags() -> tuple[str, ...]:
    """The same as words of a command line, without the type, which `bench.pair` gives."""
    words = ((f"--{name}", *(() if value is True else (f"{value}",))) for name, value in engine_args().items())
    return tuple(word for pair in words for word in pair if pair[0] != "--dtype")


def example() -> str:
    """The cluster file `examples/tiny.yaml`, on a GPU with its engines' flags."""
    pools = EXAMPLE.read_text()
    if args := engine_args():
        assert pools.count("start: 1}") == 3, f"{EXAMPLE}: its pools are no longer written as `NAME: {{start: 1}}`"
        pools = pools.replace("start: 1}", f"start: 1, engine_args: {json.dumps(args)}}}")
    return pools
