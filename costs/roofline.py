"""Costs from facts alone: a model's sizes against a GPU's peaks, times the part of each peak that a GPU reaches.

    token   = 2·(parameters a token meets)/(tp·peak·compute) + all-reduce bytes/(link·reached)
    area    = heads·(d_k + d_v)·layers/(tp·peak·attention)           causal: half of Σ(L² − p²) pairs
    decode  = weights/(bandwidth·weights) + layers·layer_ms + collective hops
    context = KV bytes of a token/(bandwidth·kv)                     latent attention: or its arithmetic

The parts reached are fitted to the shipped profiles of each GPU (`EFFICIENCY`); the formulas then meet the 28 present
profiles of dense models with a mean error of 4.3 % (table in docs/costs.md). A pipeline's stages follow one another, so
a step's time is that of all layers; `pp` steps are under way at once.

A mixture's prefill line does not begin at 0: all its experts are read, and their products padded, before more tokens
cost more (`mixture_layer_ms`). More than two GPUs without NVLink share the host (`PCIE_RING_LINK`).

Not modelled: uneven experts, overlap of collectives with arithmetic, quantised kernels that fall short of their peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from costs.hardware import Dtype, Gpu
from costs.model import ModelShape
from costs.shape import CostShape, Spans, expert_ranks
from costs.step import StepCost

WINDOW_TOKENS_MAX = 1024
"""Layers whose sliding window is at most this wide are charged a full window for every token (exact once the context is
longer); wider ones are charged as full attention, because Σ(L² − p²) does not say how much of it lies in the window."""

REQUEST_SHARE = 0.5
"""Besides reading its KV, a decoding request costs this part of a prefill token: median of the 28 present profiles
(0.24 to 0.8). The arithmetic of its one token hides behind the weights; the rest shows (sampling, small kernels)."""

FLOOR_SHARE = 1.2
"""Prefill of few tokens, in units of a decode step of few requests: median of the same profiles (1.1 to 1.8)."""

MIXTURE_REQUEST_SHARE = 1.5
"""`REQUEST_SHARE` of mixtures: their 22 profiles have 0.6 to 3.4; with their median, 2, steps of 128 came out high."""

MIXTURE_FLOOR_SHARE = 2.3
"""`FLOOR_SHARE` of mixtures, without their experts: median of the same profiles."""

MIXTURE_DECODE_LAYER_MS = 0.015
"""Extra time of a mixture's layer in a decode step: choosing experts, sorting tokens. From those profiles, on H100."""

PCIE_GB_S = 64.0
"""Links up to here are PCIe, without NVLink."""

PCIE_RING_LINK = 0.44
"""More than two GPUs without NVLink reach this part of their link, divided by their number: their messages share the
host. Profiles of L40S: 0.11 with four GPUs (three models), half of that with eight.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The parts of its peaks that a GPU reaches, and the fixed times of a layer."""

    compute: float
    attention: float
    weights: float
    kv: float
    link: float
    layer_ms: float
    """Launching a layer's kernels, one after the other: it shows if a layer's weights are few."""
    hop_ms: float
    """One all-reduce of few bytes, for each doubling of the GPUs."""
    mixed_context: float = 1.0
    """`Profile.mixed_context`; 1 if no mixed steps were measured."""
    mixture_compute: float = 0.48
    """`compute` of mixtures: their experts' products are smaller, and padded to whole tiles."""
    mixture_layer_ms: float = 0.34
    """Time of a mixture's layer with all experts visited, beside its arithmetic, which does not hide their reading."""


EFFICIENCY = {
    # gpu: compute, attention, weights, kv, link, layer ms, hop ms. Fitted by `efficiencies` in tools/fit_profiles.py to
    # the profiles of present kernels that ship; tests/unit/test_costs_roofline.py fits again and compares.
    "A100-80G-SXM": Efficiency(
        compute=0.80,
        attention=0.56,
        weights=0.72,
        kv=0.75,
        link=0.71,
        layer_ms=0.043,
        hop_ms=0.0046,
        mixture_compute=0.5,
        mixture_layer_ms=0.521,
    ),
    "H100-SXM": Efficiency(
        compute=0.67,
        attention=0.70,
        weights=0.92,
        kv=0.89,
        link=0.75,
        layer_ms=0.046,
        hop_ms=0.0011,
        mixture_compute=0.48,
        mixture_layer_ms=0.317,
    ),
    "H200": Efficiency(
        compute=0.67,
        attention=0.66,
        weights=0.82,
        kv=0.90,
        link=0.79,
        layer_ms=0.040,
        hop_ms=0.0013,
        mixture_compute=0.54,
        mixture_layer_ms=0.304,
    ),
    "B200": Efficiency(
        compute=0.61,
        attention=0.53,
        weights=0.78,
        kv=0.92,
        link=0.61,
        layer_ms=0.031,
        hop_ms=0.0029,
        mixture_compute=0.38,
        mixture_layer_ms=0.24,
    ),
    "L40S": Efficiency(
        compute=0.52,
        attention=0.47,
        weights=0.86,
        kv=0.76,
        link=0.56,
        layer_ms=0.053,
        hop_ms=0.0,
        mixture_compute=0.43,
        mixture_layer_ms=0.935,
    ),
    # One profile each: link, layer and hop as `TYPICAL`.
    "RTX-4090": Efficiency(
        compute=0.95,
        attention=0.85,
        weights=0.96,
        kv=0.87,
        link=0.71,
        layer_ms=0.043,
        hop_ms=0.0013,
        mixed_context=2.31,
    ),
    "RTX-PRO-6000": Efficiency(
        compute=0.81,
        attention=0.60,
        weights=0.86,
        kv=0.83,
        link=0.71,
        layer_ms=0.043,
        hop_ms=0.0013,
        mixed_context=1.78,
    ),
}

TYPICAL = Efficiency(compute=0.67, attention=0.60, weights=0.86, kv=0.87, link=0.71, layer_ms=0.043, hop_ms=0.0013)
"""Efficiency of a GPU without a profile: the medians of those above."""


def efficiency_of(gpu: Gpu) -> Efficiency:
    """The efficiency of this GPU, as fitted or else as typical."""
    return EFFICIENCY.get(gpu.name, TYPICAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Times at the hardware's peaks, in ms. No engine is faster."""

    token_ms: float
    """Arithmetic of one token's matrix products, where all data-parallel ranks have as many tokens."""
    expert_token_ms: float
    """The part of `token_ms` in routed experts; for tokens of one rank alone, all `dp` ranks share it."""
    area_ms: float
    """Arithmetic of attention, per token² of Σ(L² − p²)."""
    request_ms: float
    """Per decoding request: the output layer's arithmetic, and reading full sliding windows."""
    weights_ms: float
    """Reading the weights that every step needs."""
    experts_ms: float
    """Reading every routed expert once."""
    expert_miss: float
    """Probability that one token of each data-parallel rank does not visit a given expert."""
    context_ms: float
    """Reading the KV of one token of context; for latent attention its arithmetic where that takes longer."""
    collective_ms: float
    """Moving one token's bytes between GPUs."""
    hops: float
    """Messages one after the other, in doublings of the GPUs that take part."""


def peaks(model: ModelShape, gpu: Gpu, shape: CostShape, *, kv_dtype: Dtype | None = None) -> Peaks:
    """The model's sizes over the hardware's peaks."""
    gb_per_ms = gpu.bandwidth_gb_s * 1e6
    flat = Spans(tp=shape.tp, dp=shape.dp, ep=shape.ep)  # all stages, one after the other
    experts_bytes = model.expert_params * model.expert_bytes / expert_ranks(flat)
    embedding = 0 if model.tied else model.head_params / shape.tp * model.rest_bytes
    weights_bytes = model.weight_bytes_per_gpu(flat) - experts_bytes - embedding
    window_token_ms, window_request_ms = _windows(model, gpu, shape, kv_dtype)
    collective_ms, hops = _collectives(model, gpu, shape)
    miss = model.experts.miss if model.experts else 1.0
    expert_token_ms = 2 * model.active_expert_params / shape.tp / _flops_per_ms(gpu, model.expert_dtype, model)
    return Peaks(
        token_ms=_linear_token_ms(model, gpu, shape) + expert_token_ms + window_token_ms,
        expert_token_ms=expert_token_ms,
        area_ms=_area_flops(model) * _full_layers(model) / shape.tp / _flops_per_ms(gpu, Dtype.BF16, model),
        request_ms=2 * model.head_params / shape.tp / _flops_per_ms(gpu, Dtype.BF16, model) + window_request_ms,
        weights_ms=weights_bytes / gb_per_ms,
        experts_ms=experts_bytes / gb_per_ms,
        expert_miss=miss**shape.dp,  # tokens of all data-parallel ranks visit experts
        context_ms=_context_ms(model, gpu, shape, kv_dtype) * _full_layers(model) / model.layers,
        collective_ms=collective_ms,
        hops=hops,
    )


def _flops_per_ms(gpu: Gpu, dtype: Dtype, model: ModelShape) -> float:
    """Operations per ms in `dtype`, or in fp32 for a model that is stored in fp32."""
    return gpu.tflops(Dtype.FP32 if model.rest_bytes >= 4 else dtype) * 1e9


def _linear_token_ms(model: ModelShape, gpu: Gpu, shape: CostShape) -> float:
    return 2 * model.linear_params_per_rank(shape.tp) / _flops_per_ms(gpu, model.linear_dtype, model)


def _area_flops(model: ModelShape) -> int:
    """Operations of one layer's attention per token²: 2 for each of d_k and d_v, over the half below the diagonal."""
    if model.latent:
        return model.heads * (model.latent.nope + model.latent.rope + model.latent.value)
    return model.heads * 2 * model.head_dim


def _full_layers(model: ModelShape) -> int:
    """How many layers are charged as full attention."""
    return model.layers - (model.window_layers if model.window_tokens <= WINDOW_TOKENS_MAX else 0)


def _windows(model: ModelShape, gpu: Gpu, shape: CostShape, kv_dtype: Dtype | None) -> tuple[float, float]:
    """ms per prefill token and per decoding request in layers with a narrow window."""
    layers = model.layers - _full_layers(model)
    if not layers:
        return 0.0, 0.0
    arithmetic = 2 * _area_flops(model) * model.window_tokens * layers / shape.tp
    reading = _context_ms(model, gpu, shape, kv_dtype) * model.window_tokens * layers / model.layers
    return arithmetic / _flops_per_ms(gpu, Dtype.BF16, model), reading


def _context_ms(model: ModelShape, gpu: Gpu, shape: CostShape, kv_dtype: Dtype | None) -> float:
    """ms of a decoding request's work on one token of its context, over all layers."""
    flat = Spans(tp=shape.tp)
    reading = model.kv_bytes_per_token_per_gpu(flat, kv_dtype) / (gpu.bandwidth_gb_s * 1e6)
    if model.latent is None:
        return reading
    flops = 2 * model.heads * (2 * model.latent.kv_rank + model.latent.rope) * model.layers / shape.tp
    return max(reading, flops / _flops_per_ms(gpu, Dtype.BF16, model))


def _collectives(model: ModelShape, gpu: Gpu, shape: CostShape) -> tuple[float, float]:
    """ms per token at the link's peak, and hops, over all layers.

    Two all-reduces of the residual stream per layer (a ring moves 2·(tp − 1)/tp of it); with several data-parallel
    ranks a mixture's tokens also travel to their experts and back; a pipeline hands the residual stream on.
    """
    width = model.hidden * model.rest_bytes
    size, hops = 0.0, 0.0
    if shape.tp > 1:
        size += 2 * model.layers * width * 2 * (shape.tp - 1) / shape.tp / _link_bytes_per_ms(gpu, shape.tp)
        hops += 2 * model.layers * math.log2(shape.tp)
    if model.experts and shape.dp > 1:
        ranks = shape.tp * shape.dp
        travels = 2 * model.experts.layers * model.experts.per_token * width / shape.tp * (ranks - 1) / ranks
        size += travels / _link_bytes_per_ms(gpu, ranks)
        hops += 2 * model.experts.layers * math.log2(ranks)
    if shape.pp > 1:
        size += (shape.pp - 1) * width / shape.tp / _link_bytes_per_ms(gpu, shape.tp * shape.pp)
        hops += shape.pp - 1
    return size, hops


def _link_bytes_per_ms(gpu: Gpu, ranks: int) -> float:
    """Bytes per ms inside a node, or over the network if the ranks need several nodes."""
    return (gpu.link_gb_s if ranks <= gpu.node_gpus else gpu.nic_gb_s) * 1e6


def roofline(
    model: ModelShape,
    gpu: Gpu,
    shape: CostShape,
    *,
    efficiency: Efficiency | None = None,
    kv_dtype: Dtype | None = None,
) -> StepCost:
    """The coefficients that the model's sizes and the hardware suggest."""
    reached = efficiency or efficiency_of(gpu)
    peak = peaks(model, gpu, shape, kv_dtype=kv_dtype)
    mixture = model.experts is not None
    link = PCIE_RING_LINK / shape.tp if gpu.link_gb_s <= PCIE_GB_S and shape.tp > 2 else reached.link
    token = peak.token_ms / (reached.mixture_compute if mixture else reached.compute) + peak.collective_ms / link
    weights, experts = peak.weights_ms / reached.weights, peak.experts_ms / reached.weights
    decode = weights + model.layers * reached.layer_ms + peak.hops * reached.hop_ms
    start = 0.0
    if model.experts is not None:
        decode += model.experts.layers * MIXTURE_DECODE_LAYER_MS
        start = model.experts.layers * reached.mixture_layer_ms
    request = (MIXTURE_REQUEST_SHARE if mixture else REQUEST_SHARE) * token + peak.request_ms / reached.kv
    return StepCost(
        floor_ms=(MIXTURE_FLOOR_SHARE if mixture else FLOOR_SHARE) * decode,
        start_ms=start,
        token_ms=token,
        area_ms=peak.area_ms / reached.attention,
        decode_ms=decode,
        context_ms=peak.context_ms / reached.kv,
        request_ms=request,
        crowd_ms=max(0.0, token - request),
        crowd_from=(weights + experts) / token,
        experts_ms=experts,
        expert_miss=peak.expert_miss,
    )
