"""Power and energy of a step.

    power = TDP × min(1, base + compute·u_c + memory·u_m)

u_c is the time of the step's arithmetic at the peak rate, as a part of the step; u_m is the same for its reading.
`base` is the draw of a GPU that works but waits. Fitted to Splitwise's measurements (A100, two models, TP 2 to 8: peak
power of prompts, average power of generation; 4.8 % mean, 30 % largest error of 44 rows). Applied to other GPUs in
proportion to their TDP, for want of a table: an assumption.

A *power cap* below the TDP makes the GPU lower the clock of its cores, not that of its memory: arithmetic takes
1/clock times as long, reading takes as long as before. Prompts draw the whole TDP, so that under a cap of the share c

    base + (1 − base)·clock^CLOCK_EXPONENT = c

The exponent is fitted to one point: an H100 held to half of its TDP takes 1.3 times as long to prefill and no longer to
decode (Splitwise, whose capped profiles ship as the variant ``capped``). POLCA and DynamoLLM report the same shape:
prompts pay for a cap, generation hardly does. Below half of the TDP nothing was published: no cap is taken there.

Not modelled: CPUs, fans, network.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from costs.hardware import Gpu
from costs.roofline import Peaks
from costs.step import StepCost, StepWork

BASE_SHARE = 0.30
COMPUTE_SHARE = 1.14
MEMORY_SHARE = 0.71
"""`power_terms` in tools/fit_profiles.py fits the three again; the sum is capped at the TDP, which prompts reach."""


CAP_MIN: Final = 0.5
"""Lowest power cap, as a share of the TDP, for which there is a measurement."""

CLOCK_EXPONENT: Final = 4.8
"""Exponent of power over the cores' clock, from the one point above: (0.5 − 0.30)/0.70 = (1/1.3)^4.8."""


def clock_under(cap: float) -> float:
    """The cores' clock while they compute prompts under a power cap, as a share of their full clock.

    Args:
        cap: a share of the TDP, `CAP_MIN` to 1.

    Raises:
        ValueError: the cap is out of this range.
    """
    if not CAP_MIN <= cap <= 1:
        raise ValueError(f"a power cap of {cap:g} of the TDP: must be from {CAP_MIN:g} to 1; nothing is known below")
    return float(((cap - BASE_SHARE) / (1 - BASE_SHARE)) ** (1 / CLOCK_EXPONENT))


def cap_of(watts: float, tdp_w: float) -> float:
    """A cap in watts as a share of the TDP, within what was measured: a cap above the TDP is none, and a cap below
    `CAP_MIN` counts as `CAP_MIN`.
    """
    return min(1.0, max(CAP_MIN, watts / tdp_w))


def slowed(cost: StepCost, clock: float) -> StepCost:
    """Step costs at another clock of the cores: arithmetic is slower, reading is not."""
    return replace(
        cost,
        token_ms=cost.token_ms / clock,
        start_ms=cost.start_ms / clock,
        area_ms=cost.area_ms / clock,
        crowd_ms=cost.crowd_ms / clock,
    )


def utilisation(peak: Peaks, work: StepWork, step_ms: float) -> tuple[float, float]:
    """u_c and u_m of a step that took `step_ms`; each at most 1."""
    if step_ms <= 0:
        return 0.0, 0.0
    tokens = work.new_tokens + work.batch
    arithmetic = peak.token_ms * tokens + peak.area_ms * work.area
    experts = peak.experts_ms * (1 - peak.expert_miss**tokens)
    reading = peak.weights_ms + experts + peak.context_ms * work.sum_context
    return min(1.0, arithmetic / step_ms), min(1.0, reading / step_ms)


def power_w(gpu: Gpu, compute: float, memory: float, cap: float = 1.0) -> float:
    """Watts of one GPU at these utilisations; idle where both are 0, at most `cap` of its TDP."""
    if compute <= 0 and memory <= 0:
        return gpu.idle_w
    share = BASE_SHARE + COMPUTE_SHARE * compute + MEMORY_SHARE * memory
    return max(gpu.idle_w, gpu.tdp_w * min(cap, share))


def energy_j(watts: float, step_ms: float, gpus: int) -> float:
    """Joules of a step on `gpus` GPUs."""
    return watts * gpus * step_ms / 1000
