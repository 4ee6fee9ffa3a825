"""Start-up patch for tests: what vLLM 0.32's CPU build lacks to spread a mixture's experts over data parallel ranks.

Its communicator has no `all_gatherv` and no `reduce_scatterv` (`base_device_communicator.py` raises
NotImplementedError), so the first step of such an engine ends it. Both are made of what gloo has: parts are padded to
one size, and sums are cut.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from engine.vllm.cpu_site.sitecustomize import AfterImport


def lend_collectives(module: ModuleType) -> None:
    """Give the CPU's communicator the two collectives."""
    import torch

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(input_, list):
            return [all_gatherv(self, each, dim, sizes) for each in input_]
        assert dim == 0
        counts = sizes or [len(input_)] * self.world_size
        padded = input_.new_zeros((max(counts), *input_.shape[1:]))
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in counts]
        torch.distributed.all_gather(parts, padded, group=self.cpu_group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def reduce_scatterv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        assert dim == 0
        counts = sizes or [len(input_) // self.world_size] * self.world_size
        total = input_.clone()
        torch.distributed.all_reduce(total, group=self.cpu_group)
        begin = sum(counts[: self.rank_in_group])
        return total[begin : begin + counts[self.rank_in_group]].clone()

    communicator: Any = module.CpuCommunicator
    communicator.all_gatherv, communicator.reduce_scatterv = all_gatherv, reduce_scatterv


sys.meta_path.insert(
    0, AfterImport(frozenset({"vllm.distributed.device_communicators.cpu_communicator"}), lend_collectives)
)
