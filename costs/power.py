"""Power and energy of a step.

    power = TDP × min(1, base + compute·u_c + memory·u_m)

u_c is the time that the step's arithmetic would take at the peak, as a part of the step, u_m the time that its reading
would take; `base` is a GPU that works but waits. Fitted to Splitwise's measurements (A100, two models, TP 2 to 8: peak
power of prompts, average power of generation; 4.8 % mean, 30 % largest error of 44 rows). Applied to other GPUs in
proportion to their TDP, for want of a table: an assumption.

Not modelled: power caps (Splitwise's capped H100 takes 1.3 times as long to prefill and no longer to decode: its
profiles ship as the variant ``capped``), clocks, CPUs, fans, network.
"""

from __future__ import annotations

from costs.hardware import Gpu
from costs.roofline import Peaks
from costs.step import Work

BASE_SHARE = 0.30
COMPUTE_SHARE = 1.14
MEMORY_SHARE = 0.71
"""`power_terms` in tools/fit_profiles.py fits the three again; the sum is capped at the TDP, which prompts reach."""


def utilisation(peak: Peaks, work: Work, step_ms: float) -> tuple[float, float]:
    """u_c and u_m of a step that took `step_ms`; each at most 1."""
    if step_ms <= 0:
        return 0.0, 0.0
    tokens = work.new_tokens + work.batch
    arithmetic = peak.token_ms * tokens + peak.area_ms * work.area
    experts = peak.experts_ms * (1 - peak.expert_miss**tokens)
    reading = peak.weights_ms + experts + peak.context_ms * work.sum_context
    return min(1.0, arithmetic / step_ms), min(1.0, reading / step_ms)


def power_w(gpu: Gpu, compute: float, memory: float) -> float:
    """Watts of one GPU at these utilisations; idle where both are 0."""
    if compute <= 0 and memory <= 0:
        return gpu.idle_w
    share = BASE_SHARE + COMPUTE_SHARE * compute + MEMORY_SHARE * memory
    return max(gpu.idle_w, gpu.tdp_w * min(1.0, share))


def energy_j(watts: float, step_ms: float, gpus: int) -> float:
    """Joules of a step on `gpus` GPUs."""
    return watts * gpus * step_ms / 1000
