"""How much KV cache fits beside the weights.

    capacity = (memory × share − weights − activations − reserve) / KV bytes per token, per GPU, in whole blocks

as vLLM does: `share` is its ``gpu_memory_utilization``, activations are measured by a step of
``max_num_batched_tokens`` before the cache is made. Here they are computed: an estimate, 1 to 5 % above
DistServe's table of OPT on A100 at a share of 0.95. A live engine's own number is better.
"""

from __future__ import annotations

from costs.hardware import Dtype, Gpu
from costs.model import ModelShape
from costs.shape import CostShape
from costs.transfer import BLOCK_TOKENS

GIB = 1 << 30

MEMORY_SHARE = 0.92
"""vLLM 0.32's default of ``gpu_memory_utilization``."""

RESERVE_GIB = 0.55
"""CUDA context and libraries on each GPU (aiconfigurator 0.12's system files: 551 MB)."""

COLLECTIVE_GIB = 0.38
"""NCCL's buffers where several GPUs work together (same source: 342 MB for 2 GPUs, 392 MB for 4 and 8)."""

LOGITS_REQUESTS = 256
"""Requests whose logits vLLM's measuring step holds: its default ``max_num_seqs`` on smaller GPUs."""


def batched_tokens_default(gpu: Gpu) -> int:
    """vLLM 0.32's default ``max_num_batched_tokens`` for its server on this GPU (`EngineArgs.get_batch_defaults`)."""
    if gpu.memory_gib >= 160:
        return 16384
    return 8192 if gpu.memory_gib >= 70 and not gpu.name.startswith("A100") else 2048


def seqs_default(name: str, memory_gib: float) -> int:
    """vLLM 0.32's default ``max_num_seqs`` for its server on a GPU of this name and memory (the same function).

    vLLM caps it at ``max_num_batched_tokens``; `batched_tokens_default` is larger on every GPU.
    """
    large = memory_gib >= 160 or (memory_gib >= 70 and "A100" not in name.upper())
    return 1024 if large else 256


def activation_bytes(model: ModelShape, shape: CostShape, batched_tokens: int) -> int:
    """Peak memory of the largest step, in bytes: the residual stream, one MLP's inner layer, and the logits.

    Inside an MLP live its input, its output and the gated inner layer; only the inner layer is split over ranks.
    """
    width = model.intermediate
    if model.experts:
        visited = model.experts.per_token * model.experts.intermediate + model.experts.shared_intermediate
        width = max(width if model.dense_layers else 0, visited)
    inner = width * (3 if model.gated else 2) / shape.tp
    layer = batched_tokens * (4 * model.hidden + inner) * model.rest_bytes
    logits = min(LOGITS_REQUESTS, batched_tokens) * model.vocab * 4 * 2  # fp32, and a copy for sampling
    return round(layer + logits)


def kv_bytes_free(
    model: ModelShape,
    gpu: Gpu,
    shape: CostShape,
    *,
    memory_share: float = MEMORY_SHARE,
    batched_tokens: int | None = None,
) -> int:
    """Bytes for KV cache on each GPU; 0 if not even the weights fit."""
    tokens = batched_tokens_default(gpu) if batched_tokens is None else batched_tokens
    reserve = RESERVE_GIB + (COLLECTIVE_GIB if shape.tp * shape.dp > 1 else 0)
    used = model.weight_bytes_per_gpu(shape) + activation_bytes(model, shape, tokens) + reserve * GIB
    return max(0, round(gpu.memory_gib * GIB * memory_share - used))


def kv_capacity_tokens(
    model: ModelShape,
    gpu: Gpu,
    shape: CostShape,
    *,
    kv_dtype: Dtype | None = None,
    memory_share: float = MEMORY_SHARE,
    batched_tokens: int | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> int:
    """Tokens of KV cache that one data-parallel rank holds, in whole blocks.

    Layers with a sliding window count in full, as in engines with one kind of block (vLLM with a connector that is not
    hybrid-aware). A hybrid-aware engine has more room.
    """
    free = kv_bytes_free(model, gpu, shape, memory_share=memory_share, batched_tokens=batched_tokens)
    tokens = free // model.kv_bytes_per_token_per_gpu(shape, kv_dtype)
    return tokens // block_tokens * block_tokens
