"""What `bench.policy` compares, fixed before its first result: loads, targets, fleets, rivals, windows, sizes.

24 cells: four traces × targets at 2, 5 and 10 times the unloaded latency × two fleets; Llama-3.1-8B in bf16. Changing a
number here makes all earlier results void; nothing here may be chosen by what comes out.

**Loads.** A trace is cut into six disjoint windows of equal numbers of requests. The first one is for tuning: every
system finds its best arrangement on it. The other five are what is reported: goodput on each, ours over the rival's on
the same window, mean and 95 % interval (t, four degrees of freedom). Arrivals keep the trace's own burstiness: time is
stretched until the rate is the one wanted (`sim.experiments.loads.UnitLoad.at_rate`). Mooncake's stamps are spread
inside their tick of 3 s by the reader. ServeGen's clients are drawn instead, one seed a window, from ten o'clock on,
when they send 13 requests a second. Most of its answers there are longer than 1,024 tokens (mean 3,178) and are cut to
that (mean 863): a run must be several times as long as a request.

**Targets.** Unloaded = one idle instance of the fleet's slower GPU: a prompt of the trace's 90th percentile with the
engine's front end, nothing cached; a decode step of one request with the trace's mean context (prompt, and half of the
answer). So an idle fleet is within 2 × for nine in ten requests, and a cell that no system serves is not an impossible
one. Attainment: nine in ten arrivals within both, shed ones missed.

**Fleets.** Four GPUs, one instance each. A: four H100. B: two H100 and two A100-80G, as fleets that grew are. (Eight at
first, and answers of up to 2,048 tokens. Two cells of ServeGen's had run, one won by 1.5, one lost by 0.6, when it was
seen that their runs ended before their first answers did: 25 s of arrivals, 60 s an answer. Such a run asks how much an
empty fleet can swallow, which is won by whoever looks ahead the least. Both are void. Half the fleet is twice as many
lives in a run of as many requests, and each row tells how many they were.)

**Rivals.** All of `sim.baselines` with their published constants, each with its own best arrangement: every instance
doing both with its token budget (`max_num_batched_tokens`) swept, or two pools with the split climbed; on fleet B the
prefill pool begins with the H100s or with the A100s. `distserve` is `least_requests` on a split found beforehand: with
the split tuned the two are one system, which runs once. All of it again with Baton's admission in front. **Ours**: the
policy `workload` with that admission; the same arrangements, and pools where one side may do both (P + both, both + D).
Equal instances, GPUs and engine settings throughout; what differs is who chooses.

**Sizes.** Requests of a run by trace: queues need several lives of a request to grow, and ServeGen's fleet holds many
hundreds of requests at once. Blocks of 128 tokens where prefixes are cached: a fourth of Mooncake's own 512, and
much cheaper to simulate than vLLM's 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from loadgen.report import Targets

MODEL: Final = "meta-llama/Llama-3.1-8B"
LENGTH_MAX: Final = 131_072

FACTORS: Final = (2, 5, 10)
"""Targets over unloaded latency."""

BUDGETS: Final = (512, 2048, 8192)
"""``max_num_batched_tokens`` of instances that do both; those of separate pools keep vLLM's default."""

RIVALS: Final = ("dynamo", "cache_aware", "least_requests", "llm_d", "power_of_two", "splitwise", "round_robin")
"""The likeliest winners first, so that others are dropped soon: the order costs or saves time and changes nothing
else."""
SAME: Final = {"distserve": "least_requests"}
OURS: Final = "workload"

TUNING_WINDOW: Final = 0
WINDOWS: Final = (1, 2, 3, 4, 5)

TOLERANCE: Final = 0.04
"""A search for goodput ends when the rate is known to this share; a variant replaces one that it beats by this
share."""

COSTS_OFF: Final = (0.8, 1.2)
"""Sensitivity: factors on the costs that the router believes. Engines keep the true ones."""
SENSITIVITY_CELL: Final = (5, "A")
"""Factor and fleet; one cell a trace."""
SENSITIVITY_WINDOWS: Final = (1, 2, 3)

GOAL_RATIO: Final = 1.3
GOAL_SHARE: Final = 0.5
GATE_RATIO: Final = 0.98


@dataclass(frozen=True, slots=True)
class Fleet:
    """GPUs, one instance of one GPU each."""

    name: str
    gpus: tuple[tuple[str, int], ...]
    slower: str

    @property
    def count(self) -> int:
        """Of all types."""
        return sum(count for _, count in self.gpus)


FLEETS: Final = (
    Fleet("A", (("H100", 4),), "H100"),
    Fleet("B", (("H100", 2), ("A100-80G-SXM", 2)), "A100-80G-SXM"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One load."""

    name: str
    file: str
    """Path below traces/ of the data folder; for ServeGen's it is a folder."""
    requests: int
    """Of a window, and of a run."""
    unloaded_ms: tuple[tuple[str, float, float], ...]
    """(GPU, first token, token after it)."""
    prefix_caching: bool = False
    block_tokens: int | None = None
    answer_max: int | None = None
    from_s: float = 0.0
    """ServeGen: when in its clients' day a window begins."""

    def unloaded(self, gpu: str) -> tuple[float, float]:
        """Milliseconds: TTFT and TPOT."""
        return next((ttft, tpot) for name, ttft, tpot in self.unloaded_ms if name == gpu)


TRACES: Final = (
    Trace(
        name="Azure code",
        file="azure2023/AzureLLMInferenceTrace_code.csv",
        requests=1450,
        unloaded_ms=(("H100", 125.8, 6.96), ("A100-80G-SXM", 342.6, 12.86)),
    ),
    Trace(
        name="Azure conversation",
        file="azure2023/AzureLLMInferenceTrace_conv.csv",
        requests=1600,
        unloaded_ms=(("H100", 67.5, 6.92), ("A100-80G-SXM", 176.8, 12.79)),
    ),
    Trace(
        name="Mooncake conversation",
        file="mooncake/conversation_trace.jsonl",
        requests=1200,
        unloaded_ms=(("H100", 868.8, 7.45), ("A100-80G-SXM", 2650.3, 13.74)),
        prefix_caching=True,
        block_tokens=128,
    ),
    Trace(
        name="ServeGen R1",
        file="servegen-deepseek-r1",
        requests=2500,
        unloaded_ms=(("H100", 34.3, 6.95), ("A100-80G-SXM", 84.3, 12.83)),
        answer_max=1024,
        from_s=36_000.0,
    ),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison."""

    trace: Trace
    factor: int
    fleet: Fleet

    @property
    def name(self) -> str:
        """`Azure code, 5 ×, fleet A`."""
        return f"{self.trace.name}, {self.factor} ×, fleet {self.fleet.name}"

    @property
    def targets(self) -> Targets:
        """Both have to be met."""
        ttft_ms, tpot_ms = self.trace.unloaded(self.fleet.slower)
        return Targets(round(self.factor * ttft_ms, 1), None, round(self.factor * tpot_ms, 2), None)


def cells() -> Iterator[Cell]:
    """All of them."""
    for trace in TRACES:
        for factor in FACTORS:
            for fleet in FLEETS:
                yield Cell(trace, factor, fleet)
