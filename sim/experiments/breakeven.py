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
"""The number of parts of a run that are samples for an interval: each is much longer than a queue lasts."""

PATIENCE_S: Final = 300.0
"""No request expires: a latency is wanted of every request."""


def always(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """The best pair; wait if only single instances have room. `workload` chooses for what cannot be handed over."""
    if not wanted.hand_over or wanted.prefill_only:
        return workload(fleet, wanted)
    chosen = weighed(fleet, wanted, _PAIRS, _PAIRS)
    if chosen.decode is not None and chosen.prefill is None:
        return Chosen(None, None, "no pair has room", wait=True)
    return chosen


def locally(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """The best single instance of those that `workload` may choose, which excludes prefill instances."""
    chosen = weighed(fleet, wanted, _SINGLES, _SINGLES)
    if chosen.prefill is not None:
        return Chosen(None, None, "no single instance has room", wait=True)
    return chosen


def never(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """The best single instance, prefill instances included: in a fleet that never hands off they would decode."""
    return workload(fleet, structs.replace(wanted, hand_over=False))


MODES: Final[Mapping[str, Policy]] = {"always": always, "never": never, "auto": workload}


def in_mode(system: System, policy: Policy) -> System:
    """The same fleet under this policy, with admission, which keeps the load in flight that the policy reads."""
    return replace(system, make_policy=lambda _members: policy, admission=True)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The result of a run."""

    attainment: float
    stretches: list[float]
    """The attainment of each of `STRETCHES` parts of the run, in order."""
    latency_ms: float
    """Mean over requests of the whole latency per token of the answer."""
    handed_over: float
    """Share of the requests that were handed over."""


def outcome(result: Result, targets: Targets) -> RunOutcome:
    """The outcome of a run. Attainment is that of its middle (`goodput.steady`), latency that of the whole run."""
    latency = normalised_ms(result)
    met = result.met(targets)[steady(result)]
    return RunOutcome(
        attainment=float(met.mean()),
        stretches=[float(each.mean()) for each in np.array_split(met, STRETCHES)],
        latency_ms=float(np.nanmean(latency)),
        handed_over=float((result.columns["flags"] & 1).astype(bool).mean()),
    )


def normalised_ms(result: Result) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Milliseconds per token of the answer, by request; NaN for those that failed."""
    found = result.latency_s("e2e") * 1000 / np.maximum(1, result.columns["made_tokens"])
    return np.where(result.good(), found, np.nan)


# --- one decision, both ways ------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Forced:
    """`workload`, but for the request that arrives at `arrived`, which is handed over or not as `pair` says."""

    arrived: float
    pair: bool
    free: bool | None = None
    """Whether `workload` would have handed it over; None: it would have waited at the first choice."""
    asked: bool = False

    def __call__(self, fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
        """`always` or `locally` for that request, `workload` for all others."""
        if wanted.arrived != self.arrived:
            return workload(fleet, wanted)
        unforced = workload(fleet, wanted)
        if not self.asked and unforced.decode is not None:
            self.free = unforced.prefill is not None
        self.asked = True
        return (always if self.pair else locally)(fleet, wanted)


@dataclass(frozen=True, slots=True)
class Regret:
    """One decision: the results of its own and all later requests with either choice."""

    auto: bool
    """Whether the policy's own choice hands over."""
    latency_ms: tuple[float, float]
    """Sums of normalised latencies: not handed over, handed over."""
    missed: tuple[int, int]
    """Requests that missed a target: not handed over, handed over."""

    @property
    def relative(self) -> float:
        """The extra latency of the chosen way, as a share of the better way's; 0 if it is the better way."""
        return self.latency_ms[self.auto] / min(self.latency_ms) - 1

    @property
    def gain(self) -> float:
        """The extra latency of the other way, as a share of the chosen way's; negative if the other way is better."""
        return self.latency_ms[not self.auto] / self.latency_ms[self.auto] - 1

    @property
    def more_missed(self) -> int:
        """Requests that missed a target with the chosen way, less those with the other."""
        return self.missed[self.auto] - self.missed[not self.auto]


Run = Callable[[Policy], Result]


def regret(
    system: System, model: str, shelf: Shelf, arrivals: Sequence[Arrival], number: int, targets: Targets
) -> Regret | None:
    """Replay these arrivals with request `number` forced each way. None if one of the ways is not possible for it."""

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
