"""Answers how long a piece of work takes on an instance.

`costs_of` takes the best source for a model on a GPU type and shape:

1. a fitted profile of exactly this model, GPU and shape;
2. a profile of this model and GPU in another shape, carried over by how the roofline differs between the two;
3. the roofline;

and the result names its source (`because`). Times are those of one data-parallel rank's engine step. A step of a
pipeline passes through all its stages; `pp` steps are under way at once.

A request's first token takes `prefill_ms` of its engine's steps, and `first_token_ms` more of CPU time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from costs import power
from costs.bounds import Least, least
from costs.hardware import Dtype, Gpu
from costs.memory import MEMORY_SHARE, kv_capacity_tokens
from costs.model import ModelShape
from costs.profile import (
    FIRST_TOKEN_MS,
    KERNEL_STEP_FACTOR,
    Profile,
    by_kind,
    carried_over,
    exact,
    matching,
    nearest,
)
from costs.roofline import EFFICIENCY, Peaks, efficiency_of, peaks, roofline
from costs.shape import ONE_GPU, CostShape, Spans, gpus, shown
from costs.step import ByKind, StepCost, StepKind, StepWork, decoding, kind_of, prompt
from costs.ticks import Ticks
from costs.transfer import Link, handoff, nic, whole_blocks


class CostSource(StrEnum):
    """The source of a cost, in order of trust."""

    PROFILE = "profile"
    CARRIED = "profile of another shape"
    ROOFLINE = "roofline"


@dataclass(frozen=True, slots=True, kw_only=True)
class TicksByKind:
    """`ByKind` in integer nanoseconds."""

    prefill: Ticks
    decode: Ticks
    mixed: Ticks

    @classmethod
    def of(cls, costs: ByKind) -> Self:
        """The coefficients, rounded."""
        return cls(prefill=Ticks.of(costs.prefill), decode=Ticks.of(costs.decode), mixed=Ticks.of(costs.mixed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one instance's steps cost. It has many attributes, as router, planner and simulator ask one value for times,
    memory and power.
    """

    model: ModelShape
    gpu: Gpu
    shape: CostShape
    source: CostSource
    because: str
    """The source of the numbers, and how well it fits."""
    by_kind: ByKind
    ticks: TicksByKind
    peak: Peaks
    first_token_ms: float
    """Time of a request's first token besides its steps, alone in the engine: HTTP, tokenising, answering."""
    kv_capacity_tokens: int
    """KV cache capacity of one data-parallel rank."""
    kv_dtype: Dtype | None = None
    power_cap: float = 1.0
    """Largest draw of each GPU, as a share of its TDP."""

    # -- times in ms --

    def prefill_ms(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Time of a step that computes `new_tokens` of one prompt after `cached_tokens` in the cache."""
        return self.by_kind.prefill.step_ms(prompt(new_tokens, cached_tokens))

    def decode_step_ms(self, batch: int, sum_context: int) -> float:
        """Time of a step that makes one token for each of `batch` requests, whose contexts sum up to `sum_context`."""
        return self.by_kind.decode.step_ms(decoding(batch, sum_context))

    def mixed_step_ms(self, new_tokens: int, cached_tokens: int, batch: int, sum_context: int) -> float:
        """Time of a step that does both (chunked prefill)."""
        return self.step_ms(prompt(new_tokens, cached_tokens) + decoding(batch, sum_context))

    def step_ms(self, work: StepWork) -> float:
        """Time of any step: any number of prompts' chunks and of decoding requests."""
        return self.by_kind.step_ms(work)

    def transfer_ms(self, tokens: int, to: Costs, *, link: Link | None = None, sharers: int = 1) -> float:
        """Time to move a prompt's KV from here to another instance; by default over the network between two nodes."""
        moved = handoff(self.model, tokens, self.shape, to.shape, kv_dtype=self.kv_dtype)
        return moved.ms(link or nic(self.gpu, to.gpu), sharers=sharers)

    def least(self, prompt_tokens: int = 1, context_tokens: int = 1) -> Least:
        """Lower bounds of any engine's times on this hardware."""
        sizes = {"prompt_tokens": prompt_tokens, "context_tokens": context_tokens}
        return least(self.model, self.gpu, self.shape, **sizes, kv_dtype=self.kv_dtype)

    # -- times in ns, exact --

    def step_ns(self, work: StepWork) -> int:
        """`step_ms` as a whole number of nanoseconds, the same on every machine."""
        kind = kind_of(work)
        if kind is StepKind.DECODE:
            return self.ticks.decode.step_ns(work)
        return (self.ticks.prefill if kind is StepKind.PREFILL else self.ticks.mixed).step_ns(work)

    def decode_step_ns(self, batch: int, sum_context: int) -> int:
        """`decode_step_ms` in ns."""
        return self.ticks.decode.decode_step_ns(batch, sum_context)

    def decode_run_ns(self, batch: int, sum_context: int, steps: int) -> int:
        """Exactly the sum of `steps` decode steps, each with `batch` more tokens of context than the one before."""
        return self.ticks.decode.decode_run_ns(batch, sum_context, steps)

    def decode_steps_for(self, batch: int, sum_context: int, duration_ns: int) -> int:
        """The fewest decode steps in a row that take at least `duration_ns`."""
        return self.ticks.decode.decode_steps_for(batch, sum_context, duration_ns)

    # -- memory, power --

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache of one token, held once."""
        return self.model.kv_bytes_per_token(self.kv_dtype)

    def max_batch(self, context_tokens: int) -> int:
        """Requests of this context that fit into one data-parallel rank at once."""
        return self.kv_capacity_tokens // whole_blocks(max(1, context_tokens))

    def power_w(self, work: StepWork) -> float:
        """Watts of all GPUs of one data-parallel rank during this step; idle watts if the step is empty. Pipelines are
        assumed to be full.
        """
        compute, memory = power.utilisation(self.peak, work, self.step_ms(work))
        return power.power_w(self.gpu, compute, memory, self.power_cap) * (gpus(self.shape) // self.shape.dp)

    def capped(self, cap: float) -> Costs:
        """The same costs under a power cap, a share of the TDP from `power.CAP_MIN` to 1: prompts take longer.

        Raises:
            ValueError: the cap is out of this range.
        """
        clock = power.clock_under(cap)
        slowed = ByKind(
            prefill=power.slowed(self.by_kind.prefill, clock),
            decode=power.slowed(self.by_kind.decode, clock),
            mixed=power.slowed(self.by_kind.mixed, clock),
        )
        because = self.because if cap == 1 else f"{self.because}, power capped at {cap:.0%} of the TDP"
        return replace(self, by_kind=slowed, ticks=TicksByKind.of(slowed), power_cap=cap, because=because)

    def energy_j(self, work: StepWork) -> float:
        """Joules of this step. In a pipeline `pp` steps are under way at once; the result is one step's share."""
        return self.power_w(work) * self.step_ms(work) / 1000 / self.shape.pp


def costs_of(
    model: ModelShape,
    gpu: Gpu,
    shape: CostShape = ONE_GPU,
    *,
    profiles: Iterable[Profile] = (),
    only: Profile | None = None,
    kv_dtype: Dtype | None = None,
    memory_share: float = MEMORY_SHARE,
    batched_tokens: int | None = None,
    kv_tokens: int | None = None,
) -> Costs:
    """The costs of a model on one shape of a GPU type.

    Args:
        model: the sizes of the model.
        gpu: the type of GPU.
        shape: how one instance uses its GPUs.
        profiles: the fitted profiles to choose from; `costs.shipped.profiles()` are those of the package.
        only: use this profile, whatever its model, GPU and shape (to reproduce a paper's numbers).
        kv_dtype: format of the KV cache; None = as the activations. Profiles were measured with the activations' format
            and are carried over to others.
        memory_share: vLLM's ``gpu_memory_utilization``.
        batched_tokens: vLLM's ``max_num_batched_tokens``; None = its default for this GPU.
        kv_tokens: KV capacity, if an engine has reported it; None = estimated.
    """
    found = _best(model, gpu, shape, list(profiles), only, kv_dtype)
    costs = by_kind(found.cost, step_factor=found.step_factor, mixed_context=found.mixed_context)
    if kv_tokens is None:
        kv_tokens = kv_capacity_tokens(
            model, gpu, shape, kv_dtype=kv_dtype, memory_share=memory_share, batched_tokens=batched_tokens
        )
    return Costs(
        model=model,
        gpu=gpu,
        shape=shape,
        source=found.source,
        because=found.said,
        by_kind=costs,
        ticks=TicksByKind.of(costs),
        peak=peaks(model, gpu, shape, kv_dtype=kv_dtype),
        first_token_ms=found.first_token_ms,
        kv_capacity_tokens=kv_tokens,
        kv_dtype=kv_dtype,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    source: CostSource
    said: str
    cost: StepCost
    first_token_ms: float
    step_factor: float
    mixed_context: float


def _best(
    model: ModelShape,
    gpu: Gpu,
    shape: CostShape,
    profiles: list[Profile],
    only: Profile | None,
    kv_dtype: Dtype | None,
) -> _Found:
    """The most trusted source for these arguments."""
    if only is not None:
        return _fitted(CostSource.PROFILE, str(only), only, only.cost)
    here = roofline(model, gpu, shape, kv_dtype=kv_dtype)
    candidates = matching(profiles, model, gpu)
    same_kv = kv_dtype is None or kv_dtype.size_bytes == model.rest_bytes
    if same_kv and (profile := exact(candidates, model, shape)):
        return _fitted(CostSource.PROFILE, str(profile), profile, profile.cost)
    if profile := nearest(candidates, shape):
        there = roofline(model, gpu, Spans(tp=profile.tp))
        said = f"{profile}, carried over to {shown(shape)} by the roofline"
        return _fitted(CostSource.CARRIED, said, profile, carried_over(profile.cost, there, here))
    reached = "efficiencies fitted on this GPU" if gpu.name in EFFICIENCY else "efficiencies typical of GPUs"
    said = f"roofline of {model.name or model.fingerprint} on {gpu.name} {shown(shape)}: no profile; {reached}"
    return _Found(
        source=CostSource.ROOFLINE,
        said=said,
        cost=here,
        # The roofline's efficiencies are fitted to kernel times.
        first_token_ms=FIRST_TOKEN_MS,
        step_factor=KERNEL_STEP_FACTOR,
        mixed_context=efficiency_of(gpu).mixed_context,
    )


def _fitted(source: CostSource, said: str, profile: Profile, cost: StepCost) -> _Found:
    origin = profile.origin
    return _Found(
        source=source,
        said=said,
        cost=cost,
        first_token_ms=origin.first_token_ms,
        step_factor=origin.step_factor,
        mixed_context=profile.mixed_context,
    )
