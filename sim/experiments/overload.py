"""Overloads in which classes refuse: how many requests keep their targets, of the admitted and of all. Simulated.

Two classes come in equal numbers, more than the fleet can serve. In one scenario engines are as the router knows them
by URL: of unknown speed, and none can be told its answer's first token. In another, answers become three times as long
in the middle of the run, longer than any that the router has learned from. In another, an instance that decodes takes
twice as long for everything from the middle on: requests in flight at that time, and those of `SETTLES_S` after it, are
reported apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cluster.instance import Role
from loadgen.arrival import Arrival
from loadgen.report import Targets
from router.core.values import Promise
from router.fleet.view import FleetView
from router.scheduler.scheduler import Scheduler
from router.scheduler.scoring.policies import POLICIES
from sim.experiments.systems import EqualInstances, Shelf
from sim.faults import Fault, Faults
from sim.result import Result
from sim.settings import SimSettings
from sim.world import World

MODEL: Final = "meta-llama/Llama-3.1-8B"
GPU: Final = "H100"

URGENT: Final = "interactive"
PROMISES: Final[Mapping[str, Promise]] = {
    URGENT: Promise(ttft_ms=2000.0, tpot_ms=40.0, sheds=True),
    "batch": Promise(ttft_ms=20_000.0, tpot_ms=200.0, sheds=True),
}

SETTLES_S: Final = 5.0
"""Seconds after an instance has slowed down in which the router's predictions need not hold."""
LONGER: Final = 3
SLOWER: Final = 2
LENGTHS: Final = (300, 12_000)
PARTS_OF_SLOW: Final = ("before", "in flight, and 5 s after", "later")
"""The requests of a run in which an instance slows down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """One scenario."""

    name: str
    fleet: tuple[tuple[Role, int], ...] = ((Role.PREFILL, 1), (Role.DECODE, 1), (Role.BOTH, 1))
    per_s: float = 25.0
    """Arrivals a second, of each class."""
    seconds: float = 30.0
    prompts: tuple[int, int] = (3000, 3000)
    """The least and the most tokens; drawn evenly in their logarithm."""
    answers: tuple[int, int] = (20, 200)
    longer: int = 1
    """Answers of the second half are so many times as long."""
    within: float = 1.0
    """`Promise.lengths_within` of both classes."""
    told: bool = True
    """The router knows what the engines' steps cost; else it has to learn that, as of engines given by URL."""
    seeded: bool = True
    """D's engine can be told P's first token; else D's own is the client's first, after the hand-over's pause, as of
    engines given by URL."""
    slow: str = ""
    """The instance that is `SLOWER` times slower from the middle on; empty: none."""

    @property
    def middle_s(self) -> float:
        """The middle of the run, in seconds: when something changes."""
        return self.seconds / 2

    def arrivals(self, seed: int) -> list[Arrival]:
        """Poisson, each class by itself."""
        rng, found = np.random.default_rng(seed), list[Arrival]()
        for name in PROMISES:
            at_s = float(rng.exponential(1 / self.per_s))
            while at_s < self.seconds:
                low, high = self.prompts
                times = self.longer if at_s >= self.middle_s else 1
                found.append(
                    Arrival(
                        at_s=round(at_s, 9),
                        input_tokens=round(low * (high / low) ** float(rng.random())),
                        output_tokens=int(rng.integers(*self.answers, endpoint=True)) * times,
                        slo_class=name,
                    )
                )
                at_s += float(rng.exponential(1 / self.per_s))
        return sorted(found, key=lambda each: each.at_s)


SCENARIOS: Final = (
    Overload(name="two classes"),
    Overload(name="two classes, costs unknown", told=False),
    Overload(name="two classes, by URL", told=False, seeded=False),
    Overload(name="answers longer than foretold", longer=LONGER),
    Overload(
        name="a decode instance slows down",
        fleet=((Role.PREFILL, 1), (Role.DECODE, 2), (Role.BOTH, 1)),
        slow="decode-1-00",
    ),
    Overload(name="prompts of all lengths", prompts=LENGTHS),
    Overload(name="prompts of all lengths, within 0.05", prompts=LENGTHS, within=0.05),
)


def without_rules(scheduler: Scheduler, *, learns: bool = False, weighs: bool = False) -> None:
    """Take rules from a scheduler; the arguments are those of `run`."""
    if not learns:
        inflight = scheduler.view.all().inflight
        inflight.margins.shed.step = inflight.first_margins.step = 0.0
    if not weighs:
        scheduler.scoring.shed_weight = 1.0


def run(scenario: Overload, shelf: Shelf, seed: int, *, learns: bool = True, weighs: bool = True) -> Result:
    """One run. `learns`: margins follow what was missed; else they stay the widest. `weighs`: prompts of classes that
    refuse count answers that they make late `SHED_WEIGHT` times; else once.
    """
    pools = [EqualInstances(role=role, count=count, tp=1, gpu=GPU) for role, count in scenario.fleet]
    settings = SimSettings(checks=False, seeding=scenario.seeded)
    view = None if scenario.told else FleetView(lambda _: None)
    members, policy = shelf.members(MODEL, pools), POLICIES["workload"]
    promises = {name: replace(each, lengths_within=scenario.within) for name, each in PROMISES.items()}
    world = World(members, settings, policy=policy, model=MODEL, promises=promises, view=view)
    for front in world.fronts:
        without_rules(front.scheduler, learns=learns, weighs=weighs)
    if scenario.slow:
        name = next(each.name for each in world.instances if each.name == scenario.slow)
        slow = Fault(at_s=scenario.middle_s, kind="slow", instance=name, duration_s=1e6, factor=SLOWER)
        Faults(world, [slow], seed)
    return world.run(scenario.arrivals(seed))


def targets() -> dict[str, Targets]:
    """The targets of each class."""
    return {name: Targets(each.ttft_ms, None, each.tpot_ms, None) for name, each in PROMISES.items()}


@dataclass(frozen=True, slots=True)
class Kept:
    """How some requests ended."""

    arrived: int
    admitted: int
    met: int

    def __add__(self, other: Kept) -> Kept:
        """The counts of both together."""
        return Kept(self.arrived + other.arrived, self.admitted + other.admitted, self.met + other.met)

    @property
    def kept(self) -> float:
        """The share of the admitted requests that met every target."""
        return self.met / self.admitted if self.admitted else 1.0

    @property
    def attained(self) -> float:
        """The share of all arrivals that met every target."""
        return self.met / self.arrived if self.arrived else 1.0


def kept(result: Result, among: NDArray[np.bool_] | None = None) -> Kept:
    """How these requests ended; None: all requests."""
    rows, met = result.columns, result.met(Targets(), targets())
    among = np.ones(len(rows), dtype=np.bool_) if among is None else among
    admitted = rows["status"] != 429
    return Kept(int(among.sum()), int((among & admitted).sum()), int((among & met).sum()))


def of_class(result: Result, name: str) -> NDArray[np.bool_]:
    """Which rows are of this class."""
    found: NDArray[np.bool_] = result.columns["slo_class"] == result.classes.index(name)
    return found


def around(scenario: Overload, result: Result) -> dict[str, NDArray[np.bool_]]:
    """`split` of a simulated run."""
    return split(scenario, result.columns["at_ns"] / 1e9, result.columns["end_ns"] / 1e9)


def split(scenario: Overload, at_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> dict[str, NDArray[np.bool_]]:
    """Requests that were over before the middle, that were in flight then or came soon after, and that came later.

    `at_s`, `end_s`: when each was due and when it ended, in seconds since the start of the load.
    """
    before, later = end_s < scenario.middle_s, at_s >= scenario.middle_s + SETTLES_S
    return dict(zip(PARTS_OF_SLOW, (before, ~before & ~later, later), strict=True))


def by_decile(tokens: Sequence[int] | NDArray[Any], met: NDArray[np.bool_]) -> list[float]:
    """Attainment by decile of prompt length, the shortest first."""
    order = np.argsort(np.asarray(tokens), kind="stable")
    return [float(met[part].mean()) for part in np.array_split(order, 10)]
