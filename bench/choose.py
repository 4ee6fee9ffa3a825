"""CPU microseconds of one choice in the router, by policy and size of the fleet.

    make bench-choose                     two minutes
    make bench-choose ARGS=--publish      writes docs/

A fleet of Llama-3.1-8B on H100 at work, as it is after a minute: each instance computes or answers eight requests, and
each new request takes the place of the oldest; engines' loads are known; prompts have 100 to 3,000 tokens, whose first
five chunks an instance may have cached. Timed are the predictions for a request, the choice, and the bookkeeping when
the request is placed, computed, begins to be answered, and ends. A machine has slow moments: each choice is timed three
times (by equal requests, as one request is priced only once) and the quickest counts. A round is the mean of its two
hundred requests; of twenty rounds of all cells the fifth quickest counts. The clock is the thread's CPU time: other
programs cause cache misses, and nothing else.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import sys
import time
from collections.abc import Callable
from random import Random
from typing import Any, Final

from msgspec.structs import replace

from bench import published
from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from costs import shipped
from costs.cost import costs_of
from costs.hardware import gpu_named
from router.api import reference_cycles
from router.core.journey import Choose
from router.core.values import Promise, Wanted
from router.fleet.view import FleetView
from router.predict.predictors import foretold
from router.predict.prefix_cache import PrefixCacheIndex
from router.predict.step_model import make_of
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import Scheduler
from router.scheduler.scoring.policies import FORESEEING, POLICIES

SIZES: Final = (16, 1000)
TARGETS_US: Final = {16: 60.0, 1000: 200.0}
"""Targets of the policy `workload`, the choice alone: microseconds by number of instances."""
ROUNDS, REQUESTS, TIMES = 20, 200, 3
UNDER_WAY: Final = 8
"""Requests in flight at each instance."""
TAKES_S: Final = 4.0
"""How long each of them takes, in seconds of virtual time."""
PAUSE_S: Final = 0.03
"""The pause of a hand-over."""
ANSWER: Final = 250
"""Tokens of an answer."""
PROMISE: Final = Promise(ttft_ms=500.0, tpot_ms=30.0)
ASK: Final = Choose(frozenset(), hand_over=True)
FLEETS: Final = {"prefill and decode": (Role.PREFILL, Role.DECODE), "both": (Role.BOTH,)}


class Schedulers:
    """One fleet at work, and requests for it."""

    def __init__(self, policy: str, size: int, roles: tuple[Role, ...], *, admission: bool) -> None:
        costs = costs_of(shipped.models()["meta-llama/Llama-3.1-8B"], gpu_named("H100"), profiles=shipped.profiles())
        make = make_of(costs)
        view = FleetView(lambda _: make)
        self.policy: Final = POLICIES[policy]
        self.scheduler: Final = Scheduler(view, self.policy, admission=admission, foresees=self.policy in FORESEEING)
        if self.scheduler.placements is not None:
            view.all().prefixes = PrefixCacheIndex()
        self.promise: Final = PROMISE if admission else Promise()
        self.rng: Final = Random(1)
        self.now = 1.0
        self.gap_s: Final = TAKES_S / (UNDER_WAY * size)
        self.waiting = 0
        """That found no place: the bench would time something else."""
        self._number = 0
        self._due: Final[list[tuple[float, int, Callable[[float], object]]]] = []
        for number in range(size):
            role = roles[number % len(roles)]
            name = InstanceId(f"{role.value}-{number}")
            view.add(Instance(id=name, role=role, url="u"))
            view.seen(name, ({"id": "m"},), Load(waiting=self.rng.randrange(3), kv_usage=self.rng.random()))
            view.get(name).credits = 256
        for _ in range(size * UNDER_WAY * 4):
            self.serve(self.wanted())

    def asks(self, wanted: Wanted) -> Wanted:
        """The request in the form in which the scheduler would ask the policy now."""
        promise = self.promise
        if self.scheduler.placements is not None:
            wanted, _ = foretold(self.scheduler.placements.lengths, wanted, max_tokens=512)
        return replace(wanted, ttft_ms=promise.ttft_ms, tpot_ms=promise.tpot_ms, now=self.now)

    def wanted(self) -> Wanted:
        """The next request."""
        names = self.rng.randrange(50) * 100
        return Wanted(
            model="m",
            hand_over=True,
            prompt_tokens=self.rng.randrange(100, 3000),
            prefix=tuple(range(names, names + 5)),
            prefix_block_tokens=256.0,
            arrived=self.now,
        )

    def serve(self, wanted: Wanted) -> float:
        """Let a request take its places, after everything that was due before it. CPU seconds of both."""
        began = time.thread_time()
        while self._due and self._due[0][0] <= self.now:
            at, _, happens = heapq.heappop(self._due)
            happens(at)
        scheduler, context = self.scheduler, SchedulingContext(wanted, self.promise)
        if scheduler.placements is not None:
            context.wanted, context.expected.lengths = foretold(scheduler.placements.lengths, wanted, max_tokens=512)
        chosen, _ = scheduler.choose(context, ASK, self.now)
        took = time.thread_time() - began
        self.waiting += chosen.decode is None
        computed = self.now + context.ttft_ms / 1000
        self._happens(computed, lambda at: scheduler.prompt_over(context, at, done=True))
        self._happens(computed + PAUSE_S, lambda at: scheduler.opened(context, at))
        self._happens(self.now + TAKES_S, lambda at: scheduler.finish(context, at, ANSWER))
        self.now += self.gap_s
        return took

    def _happens(self, at: float, what: Callable[[float], object]) -> None:
        self._number += 1
        heapq.heappush(self._due, (at, self._number, what))


def measured(here: Schedulers) -> tuple[float, float]:
    """The choice alone, and the whole way through the scheduler, microseconds."""
    fleet, choosing, passing = here.scheduler.view.all(), 0.0, []
    for _ in range(REQUESTS):
        wanted, times = here.wanted(), []
        for _ in range(TIMES):
            asked = here.asks(wanted)
            began = time.thread_time()
            here.policy(fleet, asked)
            times.append(time.thread_time() - began)
        choosing += min(times)
        passing.append(here.serve(wanted))
    return choosing / REQUESTS * 1e6, statistics.mean(passing) * 1e6


def _quick(rounds: list[float]) -> float:
    """Microseconds of the slowest round of the quickest fourth: of twenty rounds, the fifth quickest."""
    return round(sorted(rounds)[len(rounds) // 4 - 1], 1)


def main(words: list[str]) -> int:
    """Measure, report, publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publish", action="store_true", help="write docs/")
    parser.add_argument("--json", action="store_true", help="the line of JSON alone on stdout, no table")
    arguments = parser.parse_args(words)
    facts = published.machine()
    cells = [
        (policy, admission, size, fleet)
        for policy, admission in (("least_load", False), ("workload", False), ("workload", True))
        for size in SIZES
        for fleet in FLEETS
    ]
    names = {cell: f"{cell[0]}{' + admission' if cell[1] else ''}, {cell[2]} {cell[3]}" for cell in cells}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names.values()}
    schedulers = {cell: Schedulers(cell[0], cell[2], FLEETS[cell[3]], admission=cell[1]) for cell in cells}
    reference_cycles.begin()
    for number in range(ROUNDS):
        for cell, here in schedulers.items():
            found[names[cell]].append(measured(here))
        published.say(f"choose: round {number + 1} of {ROUNDS}")
    figures: dict[str, Any] = {
        name: {"choice_us": _quick([one for one, _ in each]), "scheduler_us": _quick([two for _, two in each])}
        for name, each in found.items()
    }
    for cell, here in schedulers.items():
        if here.waiting:
            published.say(f"choose: {here.waiting} found no place: {names[cell]}")
    rows = [
        [
            cell[0],
            "yes" if cell[1] else "no",
            str(cell[2]),
            cell[3],
            *(f"{each:.0f}" for each in figures[name].values()),
        ]
        for cell, name in names.items()
    ]
    targets = {
        f"workload_{size}_us": published.target(
            max(figures[f"workload + admission, {size} {fleet}"]["choice_us"] for fleet in FLEETS), limit
        )
        for size, limit in TARGETS_US.items()
    }
    columns = ["policy", "admission", "instances", "roles", "choice, µs", "through the scheduler, µs"]
    tables = [published.Table("CPU of one request", columns, rows)]
    if not arguments.json:
        published.show(tables)
    told = published.result("choose", figures, targets)
    if arguments.publish:
        published.publish(told, tables, facts, published.note_of(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
