"""From a stamped run to a comparison: its own requests at their own times, beside its own stamps.

Settings are those that the run recorded; costs are the cost model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costs.cost import Costs, costs_of
from costs.hardware import gpu_named
from costs.model import ModelShape
from costs.profile import Profile
from costs.shape import Spans
from engine.twin.config import TwinConfig, Version
from engine.twin.tokens import Segment
from sim.validate.drive import Driven, drive
from sim.validate.engines import check_source, engine_text
from sim.validate.figures import RunComparison, SeriesRow, one_by_one, times_figures
from sim.validate.measured import MeasuredSettings, Requests, Sample, Stamps
from sim.validate.times import Array, RequestTimes
from sim.validate.workloads import PlannedRequest


@dataclass(frozen=True, slots=True)
class Stamped:
    """A stamped run's files, read."""

    name: str
    settings: MeasuredSettings
    requests: Requests
    samples: Sequence[Sample]
    gpu: str
    offset_s: float = 0.0
    """Seconds from the series' time 0 to the first arrival."""


def replay_stamped(
    run: Stamped, model: ModelShape, profiles: Sequence[Profile], *, must_fit: bool = False
) -> RunComparison:
    """The run's own requests at their own times, beside its own stamps.

    Args:
        run: the run.
        model: the sizes of its model.
        profiles: fits to look for costs in.
        must_fit: whether it is a UsageError that none of them is of this model and GPU.
    """
    settings = run.settings
    costs = costs_of(
        model,
        gpu_named(run.gpu),
        Spans(tp=settings.tp),
        profiles=profiles,
        memory_share=settings.memory_share,
        batched_tokens=settings.max_num_batched_tokens,
        kv_tokens=settings.num_blocks * settings.block_size if settings.num_blocks else None,
    )
    check_source(costs, must_fit=must_fit)
    config = _stamped_config(settings, costs)
    planned = [
        PlannedRequest(round(each.arrived_s * 1e9), (Segment(1 + number, each.input_tokens),), each.output_tokens)
        for number, each in enumerate(run.requests.rows)
    ]
    samples = [each for each in run.samples if each.at_s >= run.offset_s]
    driven = drive(config, costs, planned, [round((each.at_s - run.offset_s) * 1e9) for each in samples])
    measured = _measured_times(run.requests.rows)
    return RunComparison(
        name=run.name,
        model=settings.model,
        engine=engine_text(settings.vllm, costs, config),
        because=costs.because,
        figures=tuple(times_figures(measured, driven.times)),
        notes=_stamped_notes(settings),
        requests=len(planned),
        preemptions=driven.preemptions,
        one_by_one=one_by_one(measured, driven.times),
        series=_series(samples, driven),
    )


def _stamped_config(settings: MeasuredSettings, costs: Costs) -> TwinConfig:
    blocks = costs.kv_capacity_tokens // settings.block_size - 1  # vLLM never gives one of them out
    return TwinConfig(
        block_size=settings.block_size,
        num_blocks=blocks,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len or blocks * settings.block_size,
        prefix_caching=settings.prefix_caching,
        version=Version(
            async_scheduling=settings.async_scheduling,
            reserve_full_prompt=settings.reserve_full_prompt,
            pull_after_forward=False,
        ),
    )


def _measured_times(requests: Sequence[Stamps]) -> RequestTimes:
    def ms(name: str) -> Array:
        return np.array([getattr(each, name) for each in requests], dtype=np.float64) * 1000

    return RequestTimes(
        arrived=ms("arrived_s"),
        started=ms("scheduled_s"),
        first=ms("first_token_s"),
        last=ms("last_token_s"),
        outputs=np.array([each.output_tokens for each in requests], dtype=np.float64),
    )


def _stamped_notes(settings: MeasuredSettings) -> tuple[str, ...]:
    if settings.num_blocks:
        return ()
    return ("its KV capacity was not recorded: estimated from the GPU's memory",)


def _series(samples: Sequence[Sample], driven: Driven) -> tuple[SeriesRow, ...]:
    recorded = any(each.kv_percent for each in samples)
    return tuple(
        SeriesRow(
            at_s=measured.at_s,
            running=measured.running,
            running_predicted=predicted.running,
            waiting=measured.waiting,
            waiting_predicted=predicted.waiting,
            kv_percent=measured.kv_percent if recorded else None,
            kv_percent_predicted=100 * predicted.kv_usage,
        )
        for measured, predicted in zip(samples, driven.loads, strict=True)
    )
