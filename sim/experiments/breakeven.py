"""Always hand off, never, or as the policy says: the same traces three ways, and single decisions both ways.

The modes are thin policies around `router.scheduler.scoring.workload`: they restrict what it may choose, and decide
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from msgspec import structs

from loadgen.arrival import Arrival
from loadgen.report import Targets
from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.scheduler.scoring.policies import Policy
from router.scheduler.scoring.workload import weighed, workload
from sim.experiments.goodput import steady
from sim.experiments.systems import Shelf, System, simulate
from sim.kernel import NS
from sim.result import Result

_PAIRS, _SINGLES = -0.999999, 1e9
"""In place of `HYSTERESIS` and `ALIKE`: every pair is cheaper than any single instance, or dearer; each kind keeps its
order."""

STRETCHES: Final = 10
"""Of a run, as samples for an interval: much longer than a queue lives."""

PATIENCE_S: Final = 300.0
"""No request expires: a latency is wanted of every request."""


def always(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """The best pair; where a single instance is all there is room for now, wait. What cannot be handed over is not."""
    if not wanted.hand_over or wanted.prefill_only:
        return workload(fleet, wanted)
    chosen = weighed(fleet, wanted, _PAIRS, _PAIRS)
    if chosen.decode is not None and chosen.prefill is None:
        return Chosen(None, None, "no pair has room", wait=True)
    return chosen


def locally(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """The best single instance of those the policy itself may take: no prefill instance."""
    chosen = weighed(fleet, wanted, _SINGLES, _SINGLES)
    if chosen.prefill is not None:
        return Chosen(None, None, "no single instance has room", wait=True)
    return chosen


def never(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """The best single instance, prefill instances too: in a fleet that never hands off they would decode."""
    return workload(fleet, structs.replace(wanted, hand_over=False))


MODES: Final[Mapping[str, Policy]] = {"always": always, "never": never, "auto": workload}


def in_mode(system: System, policy: Policy) -> System:
    """The same fleet under one of them. All have the admission, which keeps the book that they read."""
    return replace(system, make_policy=lambda _members: policy, admission=True)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What came of a run."""

    attainment: float
    stretches: list[float]
    """The same of `STRETCHES` parts of it, one after the other."""
    latency_ms: float
    """Mean of requests' whole latencies per token of their answers."""
    handed_over: float
    """Share of the requests."""


def outcome(result: Result, targets: Targets) -> RunOutcome:
    """Of a whole run; attainment as everywhere, of its middle."""
    latency = normalised_ms(result)
    met = result.met(targets)[steady(result)]
    return RunOutcome(
        attainment=float(met.mean()),
        stretches=[float(each.mean()) for each in np.array_split(met, STRETCHES)],
        latency_ms=float(np.nanmean(latency)),
        handed_over=float((result.columns["flags"] & 1).astype(bool).mean()),
    )


def normalised_ms(result: Result) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Latency per token of the answer, by request; NaN of those that failed."""
    found = result.latency_s("e2e") * 1000 / np.maximum(1, result.columns["made_tokens"])
    return np.where(result.good(), found, np.nan)


# --- one decision, both ways ------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Forced:
    """`workload`, but for the request that arrives at `arrived`, which is handed over or not as `pair` says."""

    arrived: float
    pair: bool
    free: bool | None = None
    """Whether it would have been handed over; None: it was asked for when the policy would have waited."""
    asked: bool = False

    def __call__(self, fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
        """One of the modes for that request."""
        if wanted.arrived != self.arrived:
            return workload(fleet, wanted)
        unforced = workload(fleet, wanted)
        if not self.asked and unforced.decode is not None:
            self.free = unforced.prefill is not None
        self.asked = True
        return (always if self.pair else locally)(fleet, wanted)


@dataclass(frozen=True, slots=True)
class Regret:
    """One decision: what its own and all following requests came to with either choice."""

    auto: bool
    """Handed over by the policy's own choice."""
    latency_ms: tuple[float, float]
    """Sum of normalised latencies: not handed over, handed over."""
    missed: tuple[int, int]

    @property
    def relative(self) -> float:
        """What the chosen way cost more than the better one, over the latter; 0 where it was the better one."""
        return self.latency_ms[self.auto] / min(self.latency_ms) - 1

    @property
    def gain(self) -> float:
        """What the other way would have cost more; negative where it would have been better."""
        return self.latency_ms[not self.auto] / self.latency_ms[self.auto] - 1

    @property
    def more_missed(self) -> int:
        """Targets missed with the chosen way, less with the other."""
        return self.missed[self.auto] - self.missed[not self.auto]


Run = Callable[[Policy], Result]


def regret(
    system: System, model: str, shelf: Shelf, arrivals: Sequence[Arrival], number: int, targets: Targets
) -> Regret | None:
    """Replay these arrivals with number `number` forced each way. None where it cannot be handed over, or not be."""

    def run(policy: Policy) -> Result:
        return simulate(in_mode(system, policy), model, shelf, arrivals, PATIENCE_S, targets)

    arrived = round(arrivals[number].at_s * NS) / NS
    ways = [Forced(arrived, pair=False), Forced(arrived, pair=True)]
    results = [run(way) for way in ways]
    if [_handed_over(result, number) for result in results] != [False, True]:
        return None
    free = [way.free for way in ways if way.free is not None]
    auto = free[0] if free else _handed_over(run(workload), number)
    sums = [float(np.nansum(normalised_ms(result)[number:])) for result in results]
    missed = [int((~result.met(targets)[number:]).sum()) for result in results]
    return Regret(auto, (sums[0], sums[1]), (missed[0], missed[1]))


def _handed_over(result: Result, number: int) -> bool:
    return bool(result.columns["flags"][number] & 1)
