"""Lower bounds of an engine's times, whatever its kernels: targets below them are mistakes (`baton lint`).

The bounds take the hardware's peaks, one request alone, no collectives and no overhead. A first token needs the
prompt's arithmetic and one reading of the weights, whichever takes longer. Every further token needs the same of its
own, and one reading of its context's KV.
"""

from __future__ import annotations

from dataclasses import dataclass

from costs.hardware import Dtype, Gpu
from costs.memory import MEMORY_SHARE, kv_bytes_free
from costs.model import ModelShape
from costs.roofline import peaks
from costs.shape import CostShape, shown
from costs.step import StepWork, decoding, prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """The least times of one model on one shape of one GPU type."""

    ttft_ms: float
    tpot_ms: float
    because: str


def least_step_ms(
    model: ModelShape, gpu: Gpu, shape: CostShape, work: StepWork, *, kv_dtype: Dtype | None = None
) -> float:
    """A step's arithmetic or its reading at the hardware's peaks, whichever takes longer.

    Other data-parallel ranks may have no tokens in the step: then all ranks compute the experts of this rank's tokens.
    All tokens may choose the same experts, so a step reads at least those of one token. With whole experts on each
    rank (`ep`) that is the mean over the ranks, and the fullest rank reads no less.
    """
    peak = peaks(model, gpu, shape, kv_dtype=kv_dtype)
    tokens = work.new_tokens + work.batch
    if not tokens:
        return 0.0
    token_ms = peak.token_ms - peak.expert_token_ms * (1 - 1 / shape.dp)
    arithmetic = token_ms * tokens + peak.area_ms * work.area
    experts = peak.experts_ms * (1 - model.experts.miss) if model.experts else 0.0
    return max(arithmetic, peak.weights_ms + experts + peak.context_ms * work.sum_context)


def least(
    model: ModelShape,
    gpu: Gpu,
    shape: CostShape,
    *,
    prompt_tokens: int = 1,
    context_tokens: int = 1,
    kv_dtype: Dtype | None = None,
) -> Least:
    """The least time to first token of a prompt, and the least time per token after it, for a request alone on the
    engine.
    """
    ttft = least_step_ms(model, gpu, shape, prompt(prompt_tokens), kv_dtype=kv_dtype)
    tpot = least_step_ms(model, gpu, shape, decoding(1, context_tokens), kv_dtype=kv_dtype)
    because = (
        f"{prompt_tokens:,} tokens at {gpu.tflops(model.linear_dtype):,g} TFLOP/s and reading "
        f"{model.weight_bytes_per_gpu(shape) / 1e9:.1f} GB of weights at {gpu.bandwidth_gb_s:,g} GB/s "
        f"on {gpu.name} {shown(shape)}"
    )
    return Least(ttft_ms=ttft, tpot_ms=tpot, because=because)


def does_not_fit(model: ModelShape, gpu: Gpu, shape: CostShape, *, memory_share: float = MEMORY_SHARE) -> str | None:
    """Why the model cannot run on this shape at all; None if its weights leave room for KV cache."""
    if kv_bytes_free(model, gpu, shape, memory_share=memory_share):
        return None
    need, have = model.weight_bytes_per_gpu(shape) / (1 << 30), gpu.memory_gib
    return (
        f"{need:.1f} GiB of weights on each {gpu.name} ({shown(shape)}) leave no room for KV cache "
        f"in {memory_share:.0%} of {have:.1f} GiB"
    )
