"""From a steady run to a comparison: its load made anew from several seeds, beside its published figures.

Settings are those of the table and the published ones of that campaign (`workloads`), else vLLM 0.15's defaults; costs
are the cost model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from cluster.errors import UsageError
from costs.bounds import does_not_fit
from costs.cost import costs_of
from costs.hardware import gpu_named
from costs.model import ModelShape
from costs.profile import Profile
from costs.shape import Spans
from engine.twin.config import TwinConfig, Version
from sim.validate.drive import drive
from sim.validate.engines import check_source, engine_text
from sim.validate.figures import Figure, RunComparison, over_seeds
from sim.validate.measured import MEMORY_SHARE_THEN, Steady
from sim.validate.times import Array, RequestTimes
from sim.validate.workloads import steady, warm_up, workload_named

STEADY_SEQS: Final = 128
"""``--max-num-seqs`` of the steady runs (their published settings)."""
STEADY_MODEL_LEN: Final = 4096
"""``--max-model-len`` of the steady runs (same source)."""
SHARE: Final = 0.1
"""The part of each stage's 10 or 20 minutes that is replayed: one minute of a steady load shows what ten show
(docs/validation.md)."""
SHARE_MIN: Final = 0.02
"""The smallest such part: shorter ones consist of little else than their start."""
SEEDS: Final = 5
BUSY_STEPS: Final = 1.0
"""Steps by which a busy server and client delay all of an answer, its first token above all. **Fitted** to the nine
steady runs, whose mean TTFT came out 18 to 33 % low without it: their medians of (measured - predicted) / step lie
between 0.8 and 1.6, median 1.0. docs/validation.md has the errors with each run left out of the fit.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyLoad:
    """How a steady run is replayed."""

    seeds: int = SEEDS
    share: float = SHARE
    repeated: bool = True
    """`repeated` of `workloads.steady`."""
    first_token_ms: float | None = None
    """In place of the cost model's figure, to see how much depends on it; None: the cost model's."""
    busy_steps: float = BUSY_STEPS

    def __post_init__(self) -> None:
        assert self.seeds >= 1 and SHARE_MIN <= self.share <= 1, f"seeds or share: {self}"


USUAL: Final = SteadyLoad()


def replay_steady(
    row: Steady, model: ModelShape, profiles: Sequence[Profile], load: SteadyLoad = USUAL, *, must_fit: bool = False
) -> RunComparison:
    """The run's load, made anew from several seeds, beside its published means and percentiles.

    Raises:
        UsageError: the model does not fit, the workload is unknown, or `must_fit` and no profile does.
    """
    workload, gpu, shape = workload_named(row.workload), gpu_named(row.gpu), Spans(tp=row.tp)
    refused = does_not_fit(model, gpu, shape, memory_share=MEMORY_SHARE_THEN)
    if refused:
        raise UsageError(refused)
    costs = costs_of(
        model,
        gpu,
        shape,
        profiles=profiles,
        memory_share=MEMORY_SHARE_THEN,
        batched_tokens=row.max_num_batched_tokens,
    )
    check_source(costs, must_fit=must_fit)
    config = TwinConfig(
        num_blocks=costs.kv_capacity_tokens // 16 - 1,
        max_num_batched_tokens=row.max_num_batched_tokens,
        max_num_seqs=STEADY_SEQS,
        max_model_len=STEADY_MODEL_LEN,
        version=Version(async_scheduling=True, pull_after_forward=False),  # the default since vLLM 0.14
    )
    first_token_ms = costs.first_token_ms if load.first_token_ms is None else load.first_token_ms
    seen, preemptions = [], 0
    for seed in range(load.seeds):
        planned = steady(workload, np.random.default_rng(seed), share=load.share, repeated=load.repeated)
        driven = drive(config, costs, planned)
        seen.append(client_side(driven.times.after(warm_up(load.share)), first_token_ms, load.busy_steps))
        preemptions += driven.preemptions
    return RunComparison(
        name=f"{row.gpu.lower()}-{row.number}",
        model=f"{row.model} tp{row.tp}",
        engine=f"{row.workload}, {engine_text('0.15.1', costs, config)}",
        because=costs.because,
        figures=tuple(_steady_figures(row, workload.output_tokens, seen)),
        notes=("marked cpu_offload: not modelled (docs/validation.md)",) if row.offload else (),
        requests=sum(len(times.outputs) for times in seen),
        preemptions=preemptions,
    )


def client_side(times: RequestTimes, first_token_ms: float, busy_steps: float) -> RequestTimes:
    """As a client sees it: later by a request's own CPU time, and by so many mean steps of a busy server."""
    later_ms = first_token_ms + busy_steps * float(times.tpot.mean())
    return replace(times, first=times.first + later_ms, last=times.last + later_ms)


def _steady_figures(row: Steady, output_tokens: int, seen: Sequence[RequestTimes]) -> Iterator[Figure]:
    def mean(of: Callable[[RequestTimes], Array]) -> list[float]:
        return [float(of(times).mean()) for times in seen]

    def percentile(of: Callable[[RequestTimes], Array], part: int) -> list[float]:
        return [float(np.percentile(of(times), part)) for times in seen]

    def ttft(times: RequestTimes) -> Array:
        return times.ttft

    def e2e(times: RequestTimes) -> Array:
        return times.e2e

    yield over_seeds("TTFT mean", "ms", row.ttft_mean, mean(ttft))
    yield over_seeds("TTFT p90", "ms", row.ttft_p90, percentile(ttft, 90))
    yield over_seeds("TTFT p99", "ms", row.ttft_p99, percentile(ttft, 99))
    # All answers are equally long, so that the means of TTFT and E2E say what the mean TPOT was.
    tpot = (row.e2e_mean - row.ttft_mean) / (output_tokens - 1)
    yield over_seeds("TPOT mean", "ms", tpot, mean(lambda times: times.tpot))
    yield over_seeds("ITL mean", "ms", row.itl_mean, mean(lambda times: times.latency_per_token))
    yield over_seeds("E2E mean", "ms", row.e2e_mean, mean(e2e))
    yield over_seeds("E2E p90", "ms", row.e2e_p90, percentile(e2e, 90))
    yield over_seeds("E2E p99", "ms", row.e2e_p99, percentile(e2e, 99))
