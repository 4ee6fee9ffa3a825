"""Start-up patch for tests: vLLM 0.32's CPU build cannot spread a mixture's experts over data parallel ranks.

- Its communicator has no `all_gatherv` and no `reduce_scatterv` (`base_device_communicator.py` raises
  NotImplementedError), so the first step of such an engine ends it. The patch builds both from gloo's collectives:
  parts are padded to one size, and each rank cuts its part out of the sum.
- Its experts ignore which experts a rank has (`expert_map`), and read beyond their weights (a segmentation fault). The
  patch replaces an expert of another rank by this rank's first expert, with weight 0.
"""

from __future__ import annotations

import functools
import inspect
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


def know_own_experts(module: ModuleType) -> None:
    """Make the CPU's kernel compute only the experts that the rank has."""
    experts: Any = module.CPUUnquantizedExperts
    real = experts.apply

    @functools.wraps(real)
    def apply(self: Any, *args: Any, **named: Any) -> None:
        given = inspect.signature(real).bind(self, *args, **named).arguments
        if given["expert_map"] is not None:
            local = given["expert_map"][given["topk_ids"].long()]
            given["topk_weights"] = given["topk_weights"].masked_fill(local < 0, 0.0)
            given["topk_ids"] = local.clamp(min=0).to(given["topk_ids"].dtype)
        real(**given)

    experts.apply = apply


for name, act in (
    ("vllm.distributed.device_communicators.cpu_communicator", lend_collectives),
    ("vllm.model_executor.layers.fused_moe.experts.cpu_moe", know_own_experts),
):
    sys.meta_path.insert(0, AfterImport(frozenset({name}), act))
