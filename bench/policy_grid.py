"""What `bench.policy` compares: loads, targets, fleets, rivals, arrangements, windows, sizes.

24 cells: four traces × targets at 2, 5 and 10 times the unloaded latency × two fleets; Llama-3.1-8B in bf16. Changing a
number here makes all earlier results void; nothing here may be chosen by what comes out.

**Loads.** A trace is cut into disjoint windows of equal numbers of requests, at most six. Two are for tuning, one after
the other as one load: every system finds its best arrangement on them. They are the first one and the last one (the
first alone, if fewer than three others would be left). What is reported comes from the others: goodput on each, ours
over the rival's on the same window, mean and 95 % interval (Student's t). Arrivals keep the trace's own burstiness:
time is stretched until the rate is the one wanted (`sim.experiments.loads.UnitLoad.at_rate`). Mooncake's stamps are
spread inside their tick of 3 s by the reader. ServeGen's clients are drawn instead, one seed a window, from ten o'clock
on, when they send 13 requests a second. Most of its answers there are longer than 1,024 tokens (mean 3,178) and are cut
to that (mean 863): a run must be several times as long as a request.

**Targets.** Unloaded = one idle instance of the fleet's slower GPU: a prompt of the trace's 90th percentile with the
engine's front end, nothing cached; a decode step of one request with the trace's mean context (prompt, and half of the
answer). So an idle fleet is within 2 × for nine in ten requests, and a cell that no system serves is not an impossible
one. Attainment: nine in ten arrivals within both, shed ones missed; 95 and 99 in a hundred are reported beside it.

**Fleets.** Four GPUs. A: four H100. B: two H100 and two A100-80G, as fleets that grew are.

**Rivals.** All of `sim.baselines` with their published constants, as they are and with Baton's admission in front; on
fleet B also weighted by the GPUs' speeds (`dynamo`, `splitwise`, fewest requests). Splitwise books the mean answer of
the tuning windows. `distserve` is `least_requests` on a split found beforehand: with the split tuned the two are one
system, which runs once. **Ours**: the policy `workload` with that admission.

**Arrangements**, the same for all: every instance doing both with its token budget (`max_num_batched_tokens`) swept, on
fleet B also a budget for each GPU type; two pools with the split climbed, of which either may do both as well (P + D,
P + both, both + D), on fleet B beginning with the H100s or with the A100s; TP 2 on all GPUs, or on one of two pools.
Engine settings are equal throughout.

**Sizes.** A run is to last four mean answers or more: its requests by trace and factor (`Trace.requests`,
`Trace.more`), its windows as many as the trace then has. Each row says how many answers a run lasted. Blocks of 128
tokens where prefixes are cached: a fourth of Mooncake's own 512, and much cheaper to simulate than vLLM's 16.

**Tuned and reported apart.** Where Baton's own policy is worked on, windows of odd numbers and the first one are looked
at, and those of even numbers are not (docs/policy.md says how often they were). So the headline, the aim and the gate
are of windows of even numbers alone; the others stand beside them, and intervals are over both.
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

BLIND: Final = (2, 4)
"""The windows that nothing of Baton is tuned on."""

SHARES: Final = (0.9, 0.95, 0.99)
"""Attainments at which goodput is told; the first is what systems are tuned for."""

BUDGETS: Final = (512, 1024, 2048, 8192)
"""``max_num_batched_tokens`` of instances that do both; those of separate pools keep vLLM's default."""

BUDGETS_BY_GPU: Final = ((1024, 512), (2048, 512), (2048, 1024), (8192, 2048))
"""The same for fleets of two types, by type."""

RIVALS: Final = (
    "dynamo",
    "splitwise",
    "cache_aware",
    "least_requests",
    "llm_d_latency",
    "llm_d",
    "dynamo_conditional",
    "power_of_two",
    "round_robin",
    "dynamo, weighted",
    "splitwise, weighted",
    "weighted_requests",
)
"""The likeliest winners first, so that others are dropped soon: the order costs or saves time and changes nothing
else."""
SAME: Final = {"distserve": "least_requests"}
WEIGHTED: Final = ("dynamo, weighted", "splitwise, weighted", "weighted_requests")
"""For fleets of unequal GPUs only."""
OURS: Final = "workload"
WITH_ADMISSION: Final = ("rival_admitted", "ours")
"""The classes of systems that are compared at all attainments."""

TUNING_WINDOW: Final = 0
WINDOWS: Final = (1, 2, 3, 4, 5)
WINDOWS_MIN: Final = 3
"""Windows that are reported, at least."""

TOLERANCE: Final = 0.04
"""A search for goodput ends when the rate is known to this share; a variant replaces one that it beats by this
share."""

COSTS_OFF: Final = (0.4, 0.8, 1.2, 2.5)
"""Sensitivity: factors on the costs that the router believes. Engines keep the true ones."""
SENSITIVITY_CELL: Final = (5, "A")
"""Factor and fleet; one cell a trace."""

GOAL_CLOSED: Final = 0.5
"""Share of the gap between the best admitted rival and the bound that Baton is to close."""
GOAL_SHARE: Final = 0.5
"""Share of the cells in which `GOAL_CLOSED` is to be reached."""
GATE_RATIO: Final = 0.98


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of the grid a run measures."""

    name: str
    rivals: tuple[str, ...]
    windows_max: int
    cells: tuple[str, ...] = ()
    """Names of the cells; empty: all."""


FULL: Final = Plan("full", RIVALS, len(WINDOWS))
QUICK: Final = Plan(
    "quick",
    ("dynamo", "splitwise", "least_requests", "llm_d_latency", "dynamo_conditional", *WEIGHTED),
    3,
    (
        "Azure code, 5 ×, fleet A",
        "Azure code, 5 ×, fleet B",
        "Azure conversation, 5 ×, fleet A",
        "Mooncake conversation, 5 ×, fleet A",
    ),
)
"""The rivals that won most cells of the full grid's earlier runs, and the one that knows the targets."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet: its GPUs by type, one instance on each."""

    name: str
    gpus: tuple[tuple[str, int], ...]
    slower: str

    @property
    def count(self) -> int:
        """GPUs of all types."""
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
    """Requests of a window, and of a run, unless `more` says otherwise."""
    unloaded_ms: tuple[tuple[str, float, float], ...]
    """(GPU, time to the first token, time per token after it) of one idle instance, milliseconds."""
    prefix_caching: bool = False
    block_tokens: int | None = None
    answer_max: int | None = None
    from_s: float = 0.0
    """ServeGen: when in its clients' day a window begins."""
    more: tuple[tuple[int, int], ...] = ()
    """(factor, requests of a run) for which a run of four mean answers needs more requests."""
    rows: int = 0
    """Answered requests in the file; 0: as many as wanted."""

    def unloaded(self, gpu: str) -> tuple[float, float]:
        """Milliseconds: TTFT and TPOT."""
        return next((ttft, tpot) for name, ttft, tpot in self.unloaded_ms if name == gpu)


TRACES: Final = (
    Trace(
        name="Azure code",
        file="azure2023/AzureLLMInferenceTrace_code.csv",
        requests=1450,
        rows=8819,
        unloaded_ms=(("H100", 125.8, 6.96), ("A100-80G-SXM", 342.6, 12.86)),
    ),
    Trace(
        name="Azure conversation",
        file="azure2023/AzureLLMInferenceTrace_conv.csv",
        requests=1600,
        more=((5, 2400), (10, 4800)),
        rows=19366,
        unloaded_ms=(("H100", 67.5, 6.92), ("A100-80G-SXM", 176.8, 12.79)),
    ),
    Trace(
        name="Mooncake conversation",
        file="mooncake/conversation_trace.jsonl",
        requests=1200,
        rows=12031,
        unloaded_ms=(("H100", 868.8, 7.45), ("A100-80G-SXM", 2650.3, 13.74)),
        prefix_caching=True,
        block_tokens=128,
    ),
    Trace(
        name="ServeGen R1",
        file="servegen-deepseek-r1",
        requests=2500,
        more=((5, 4200), (10, 6500)),
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
    def requests(self) -> int:
        """Requests of a run."""
        return dict(self.trace.more).get(self.factor, self.trace.requests)

    @property
    def tuning_windows(self) -> tuple[int, ...]:
        """The windows on which every system finds its best arrangement."""
        others = self._others
        return (TUNING_WINDOW, others[-1]) if len(others) > WINDOWS_MIN else (TUNING_WINDOW,)

    def windows(self, plan: Plan) -> tuple[int, ...]:
        """The windows that are reported: the others that the trace has, the blind ones first."""
        left = [each for each in self._others if each not in self.tuning_windows]
        return tuple(sorted(left, key=lambda each: each not in BLIND)[: plan.windows_max])

    @property
    def _others(self) -> tuple[int, ...]:
        most = self.trace.rows // self.requests - 1 if self.trace.rows else len(WINDOWS)
        return WINDOWS[:most]

    @property
    def targets(self) -> Targets:
        """Targets of TTFT and TPOT, milliseconds; a request has to meet both."""
        ttft_ms, tpot_ms = self.trace.unloaded(self.fleet.slower)
        return Targets(round(self.factor * ttft_ms, 1), None, round(self.factor * tpot_ms, 2), None)


def differs(policy: str, cell: Cell) -> bool:
    """Whether this rival differs from the rivals that run anyway, in this cell."""
    return policy not in WEIGHTED or len(cell.fleet.gpus) > 1


def cells() -> Iterator[Cell]:
    """All cells: each trace, factor and fleet."""
    for trace in TRACES:
        for factor in FACTORS:
            for fleet in FLEETS:
                yield Cell(trace, factor, fleet)
