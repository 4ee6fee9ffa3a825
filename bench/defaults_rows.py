"""What `bench.defaults` measures, and what makes a row void. Pure.

A row is one load on one fleet. All rows are by URL: the router is told nothing of what its engines cost. The fleets'
engines are far from what it assumes: 5 to 60 times slower for a prompt than an 8B model on an H100.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from bench.chats import Scenario

OURS: Final = "baton"
PLAIN: Final = "baton --policy least_load"
RIVALS: Final = (
    "round_robin", "cache_aware", "power_of_two", "consistent_hash", "random", "sticky_least_loaded", "kv_aware",
)  # fmt: skip
"""All policies of vllm-router. `kv_aware` hears of no engine's cache here: mocks send no such events, and vLLM sends
them only where it is told to."""

GAIN, GAIN_P99, NO_WORSE = 0.6, 0.8, 1.02
"""Our TTFT over the best simple rule's: mean and p99 where sessions share prefixes among several instances, and the
mean elsewhere."""

SENDER_LATE: Final = 0.1
"""A sample is void if one turn in a hundred was sent later than this part of the mean TTFT."""
ENGINES_LATE_MS: Final = 2.0
"""A sample is void if the mocks' clocks woke later than this on average: a fifth of the shortest step."""
CPU_WAIT: Final = 0.1
"""A sample is void if the router's threads waited for a core longer than this part of the mean TTFT, per request: then
the machine was measured, not the router. Waits while an answer streams are counted, too."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One load on one fleet. A fleet's phases follow one another on the same processes."""

    name: str
    scenario: Scenario
    shared: str = ""
    """Part of the shared system prompts' names: phases with the same one find each other's in the caches."""
    gains: bool = False
    """There is something to gain from prefixes: the targets are `GAIN` and `GAIN_P99`, not `NO_WORSE`."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines, equal but for their roles, and the loads sent to them."""

    name: str
    roles: tuple[tuple[str, int], ...]
    phases: tuple[Phase, ...]
    step_ms: float = 10.0
    per_1k_ms: float = 45.0
    """A prompt of 2,000 tokens takes 100 ms."""
    timing: str = "gpu"

    def flags(self) -> list[str]:
        """The flags of `baton mock` for these engines."""
        counts = ",".join(f"{role}={count}" for role, count in self.roles)
        costs = ["--step-ms", f"{self.step_ms:g}", "--prefill-ms-per-1k", f"{self.per_1k_ms:g}"]
        return ["--instances", counts, *costs, "--timing", self.timing]


SESSIONS: Final = Scenario(
    name="sessions", sessions=40, per_s=8.0, turns=6, systems=4, system_tokens=1600, user_tokens=100, answer_tokens=24,
    think_s=0.5,
)  # fmt: skip
ALONE: Final = Scenario(
    name="no shared prefix", sessions=200, per_s=16.0, turns=1, systems=0, system_tokens=1900, user_tokens=100,
    answer_tokens=24, think_s=0.0,
)  # fmt: skip
COLD, WARM, NONE, FIRST = "sessions, cold", "sessions, warm", "no shared prefix", "no shared prefix, the first minute"
FIRST_MINUTE: Final = replace(ALONE, sessions=960)
"""Requests of a minute."""

FEW_SESSIONS: Final = replace(SESSIONS, sessions=12, per_s=1.5)
FEW_ALONE: Final = replace(ALONE, sessions=40, per_s=3.0)
CPU_SESSIONS: Final = replace(
    SESSIONS, sessions=12, per_s=1.0, turns=4, system_tokens=300, user_tokens=40, answer_tokens=12, think_s=1.0
)
CPU_ALONE: Final = replace(ALONE, sessions=36, per_s=2.5, system_tokens=200, user_tokens=40, answer_tokens=12)


def _of_size(size: int) -> Fleet:
    """A fleet of `size` prefill and `size` decode instances; the load grows with them."""
    more = size // 4
    sessions = replace(SESSIONS, sessions=SESSIONS.sessions * more, per_s=SESSIONS.per_s * more)
    alone = replace(ALONE, sessions=ALONE.sessions * more, per_s=ALONE.per_s * more)
    phases = (Phase(COLD, sessions, "shared", gains=True), Phase(WARM, sessions, "shared", gains=True))
    return Fleet(f"{size}+{size}", _split(size), (*phases, Phase(NONE, alone)))


def _split(size: int) -> tuple[tuple[str, int], ...]:
    return (("prefill", size), ("decode", size))


FLEETS: Final = (
    _of_size(4),
    _of_size(16),
    Fleet("4+4, just started", _split(4), (Phase(FIRST, FIRST_MINUTE),)),
    Fleet("1 of both roles", (("both", 1),), (Phase(COLD, FEW_SESSIONS, "shared"), Phase(NONE, FEW_ALONE))),
    Fleet("1+1", _split(1), (Phase(COLD, FEW_SESSIONS, "shared"), Phase(NONE, FEW_ALONE))),
    Fleet(
        "2+2, as slow as CPUs",
        _split(2),
        (Phase(COLD, CPU_SESSIONS, "shared"), Phase(NONE, CPU_ALONE)),
        step_ms=60.0,
        per_1k_ms=1500.0,
        timing="cpu",
    ),
)
"""The fleets. The router has sent nothing before a fleet's first phase: it begins to learn then."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One phase of one contestant in one round."""

    ttft_ms: float
    p99_ms: float
    computed: float
    """Part of all prompt tokens that an engine computed."""
    late_ms: float
    """How late turns were sent: the 99th percentile."""
    engines_late_ms: float
    """How late mocks' clocks woke: the mean."""
    cpu_ms: float
    """CPU time of the router, for each request."""
    waited_ms: float
    """Time for which the router's threads waited for a core, for each request."""
    failed: int

    def void(self) -> str:
        """Why the sample says nothing of the router; empty: it is valid."""
        if math.isinf(self.ttft_ms):
            return "no answer came"
        if self.late_ms > SENDER_LATE * self.ttft_ms:
            return f"the sender was late by {self.late_ms:.1f} ms (p99)"
        if self.engines_late_ms > ENGINES_LATE_MS:
            return f"the mocks' clocks were late by {self.engines_late_ms:.1f} ms on average"
        if self.waited_ms > CPU_WAIT * self.ttft_ms:
            return f"the router waited {self.waited_ms:.1f} ms for a core, for each request"
        return ""


@dataclass(slots=True)
class Rounds:
    """All samples of one contestant in one row, by round."""

    samples: dict[int, Sample] = field(default_factory=dict)

    @property
    def valid(self) -> dict[int, Sample]:
        """The samples that are not void."""
        return {number: each for number, each in self.samples.items() if not each.void()}

    def as_json(self) -> dict[str, Any]:
        """The published figures; times are of valid samples, `None` without any."""
        all_, valid = list(self.samples.values()), list(self.valid.values())
        return {
            "ttft_mean_ms": _mean([each.ttft_ms for each in valid]),
            "ttft_mean_ms_by_round": [round(each.ttft_ms, 2) for each in valid],
            "ttft_p99_ms": _mean([each.p99_ms for each in valid]),
            "computed_share": _mean([each.computed for each in all_], 4),
            "router_cpu_ms": _mean([each.cpu_ms for each in all_], 3),
            "sent_late_ms_p99": round(max(each.late_ms for each in all_), 2),
            "failed": sum(each.failed for each in all_),
            "void": [each.void() for each in all_ if each.void()],
        }


def _mean(values: Sequence[float], digits: int = 2) -> float | None:
    return round(statistics.fmean(values), digits) if values else None


Row = Mapping[str, Rounds]
"""By contestant."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Ours and the best simple rule, by the rounds in which neither is void."""

    best: str
    ratio: float
    by_round: tuple[float, ...]


def compared(by: Row, others: Sequence[str], figure: str = "ttft_ms") -> Compared | None:
    """Ours over that of `others` with the least mean of `figure`, over the rounds that both have; None: there are
    none.
    """
    if OURS not in by:
        return None
    found = list(_against(by, others, figure))
    return min(found, key=lambda each: each[0])[1] if found else None


def _against(by: Row, others: Sequence[str], figure: str) -> Iterator[tuple[float, Compared]]:
    """With each of `others`: its mean, and what it comes to."""
    ours = by[OURS].valid
    for name in (each for each in others if each in by):
        theirs = by[name].valid
        both = sorted(ours.keys() & theirs.keys())
        if both:
            pairs = [(getattr(ours[number], figure), getattr(theirs[number], figure)) for number in both]
            mine, other = (statistics.fmean(column) for column in zip(*pairs, strict=True))
            yield other, Compared(name, mine / other, tuple(one / two for one, two in pairs))
