"""Aggregated against disaggregated: the ten scenarios of aiconfigurator, and real traces.

The figures of the tool (aiconfigurator 0.12, vLLM, 32 GPUs; README of the profile data) are averages without queues,
with no term for moving KV. Ours: Poisson arrivals, nine in ten requests within both targets, KV over the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cluster.instance import Role
from loadgen.lengths import FixedLength
from loadgen.report import Targets
from sim.experiments.loads import Size, UnitLoad, made_up
from sim.experiments.systems import EqualInstances, Shelf
from sim.experiments.tuning import Best, Case, aggregated, best_of, best_split

SEED: Final = 1
BUDGETS: Final = (512, 1024, 2048, 256, 8192)
"""``max_num_batched_tokens`` of aggregated instances; the likeliest first, so that others are dropped soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One comparison: many attributes, as it holds targets, shapes, load, policy and what others published of it."""

    name: str
    model: str
    gpu: str
    ttft_ms: float
    tpot_ms: float
    whole_tps: tuple[int, ...]
    """Tensor parallelism of aggregated instances: the published one first."""
    prefill_tp: int
    decode_tp: int
    gpus: int
    lengths: tuple[int, int] | None = None
    """Tokens of prompt and answer; None: those of a trace."""
    published: tuple[float, float] | None = None
    """Output tokens a second and GPU, aggregated and disaggregated."""
    policy: str = "least_requests"
    prefix_caching: bool = False

    @property
    def targets(self) -> Targets:
        """The targets, both of which must be met."""
        return Targets(self.ttft_ms, None, self.tpot_ms, None)

    def load(self, count: int) -> UnitLoad:
        """Its made-up requests; only where it has `lengths`."""
        assert self.lengths is not None
        return made_up(self.name, FixedLength(self.lengths[0]), FixedLength(self.lengths[1]), SEED, count)


def _ten() -> tuple[Scenario, ...]:
    qwen, l70, l8 = "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-8B"
    rows: tuple[tuple[str, str, int, int, int, int, tuple[int, ...], int, int, int, float, float], ...] = (
        (qwen, "H200", 4000, 500, 1000, 20, (4, 2), 1, 4, 32, 438, 603),
        (qwen, "H200", 4000, 500, 1000, 50, (2, 4), 1, 2, 16, 669, 650),
        (qwen, "H200", 4000, 500, 2000, 30, (4, 2), 1, 4, 32, 562, 650),
        (qwen, "H200", 8192, 128, 2000, 50, (2, 4), 1, 4, 32, 90, 106),
        (qwen, "H100", 4000, 500, 1000, 20, (8, 4), 1, 8, 32, 368, 536),
        (qwen, "B200", 4000, 500, 1000, 20, (2, 1), 1, 2, 16, 884, 1104),
        (l70, "H200", 4000, 500, 1000, 20, (8, 4), 2, 4, 32, 178, 246),
        (l8, "H200", 4000, 500, 1000, 20, (1, 2), 1, 2, 8, 2381, 2257),
        (l8, "H100", 4000, 500, 1000, 20, (2, 1), 1, 2, 8, 1856, 1951),
        (l8, "H100", 2048, 28, 500, 20, (1, 2), 1, 1, 16, 386, 477),
    )
    return tuple(
        Scenario(
            name=f"{model.rpartition('/')[2]} {gpu} {tokens}/{answer}, {ttft}/{tpot} ms",
            model=model,
            gpu=gpu,
            ttft_ms=ttft,
            tpot_ms=tpot,
            whole_tps=tps,
            prefill_tp=prefill,
            decode_tp=decode,
            gpus=gpus,
            lengths=(tokens, answer),
            published=(whole, apart),
        )
        for model, gpu, tokens, answer, ttft, tpot, tps, prefill, decode, gpus, whole, apart in rows
    )


TEN: Final = _ten()
"""Shapes are the published ones; fewer GPUs where a model is so fast that 32 would need many requests to fill.
Aggregated fleets may also take one other shape."""


def _traces() -> tuple[Scenario, ...]:
    l8, h100 = "meta-llama/Llama-3.1-8B", "H100"
    rows = (
        ("Azure code", "interactive", 500, 30, "least_requests", False),
        ("Azure code", "standard", 2000, 100, "least_requests", False),
        ("Azure conversation", "interactive", 500, 30, "least_requests", False),
        ("Azure conversation", "standard", 2000, 100, "least_requests", False),
        ("Mooncake conversation", "tight", 5000, 30, "cache_aware", True),
        ("Mooncake conversation", "its own", 30_000, 100, "cache_aware", True),
    )
    return tuple(
        Scenario(
            name=f"{trace}, {ttft}/{tpot} ms",
            model=l8,
            gpu=h100,
            ttft_ms=ttft,
            tpot_ms=tpot,
            whole_tps=(1, 2),
            prefill_tp=1,
            decode_tp=1,
            gpus=6,
            policy=policy,
            prefix_caching=caching,
        )
        for trace, _, ttft, tpot, policy, caching in rows
    )


TRACES: Final = _traces()
"""Targets fixed beforehand: MLPerf's for Llama-3.1-8B (2000/100, interactive 500/30), Mooncake's own (30 s/100 ms), and
one that is tight for it."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Both systems at their best."""

    scenario: Scenario
    case: Case
    whole: Best
    apart: Best

    @property
    def ratio(self) -> float:
        """Goodput per GPU, disaggregated over aggregated; 0 where neither serves anything."""
        return self.apart.per_gpu / self.whole.per_gpu if self.whole.per_gpu else 0.0


def compare(scenario: Scenario, load: UnitLoad, shelf: Shelf, size: Size, tolerance: float) -> Compared:
    """Tune both and put them side by side."""
    case = case_of(scenario, load, size, tolerance)
    one = EqualInstances(role=Role.BOTH, count=1, tp=1, gpu=scenario.gpu, prefix_caching=scenario.prefix_caching)
    whole = best_of(case, shelf, aggregated(one, scenario.gpus, scenario.whole_tps, BUDGETS, scenario.policy))
    apart = best_split(case, shelf, pair(scenario), scenario.gpus, scenario.policy)
    return Compared(scenario, case, whole, apart)


def case_of(scenario: Scenario, load: UnitLoad, size: Size, tolerance: float) -> Case:
    """What both systems are given."""
    return Case(
        name=scenario.name,
        model=scenario.model,
        load=load,
        targets=scenario.targets,
        size=size,
        tolerance=tolerance,
    )


def pair(scenario: Scenario) -> tuple[EqualInstances, EqualInstances]:
    """One prefill and one decode instance of the scenario."""
    caching = scenario.prefix_caching
    return (
        EqualInstances(role=Role.PREFILL, count=1, tp=scenario.prefill_tp, gpu=scenario.gpu, prefix_caching=caching),
        EqualInstances(role=Role.DECODE, count=1, tp=scenario.decode_tp, gpu=scenario.gpu, prefix_caching=caching),
    )
