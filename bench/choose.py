"""What one choice costs the router: CPU microseconds, by policy and size of the fleet.

    make bench-choose                     half a minute
    make bench-choose ARGS=--publish      writes docs/

A fleet of Llama-3.1-8B on H100 at work: eight requests an instance under way, engines' loads known, prompts of 100 to
3,000 tokens whose first five chunks somebody may have cached. Timed is a request's whole way through the desk until it
has its places: what is foretold of it, the choice, the entries in the book. Each time is the least of thirty rounds,
all cells in each, as a machine has slow minutes; the time of a thread, so that others add caches' misses and nothing
else.
"""

from __future__ import annotations

import argparse
import gc
import math
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
from router.desk import Desk, Seat
from router.journey import Choose
from router.policy import FORESEEING, POLICIES
from router.prefixes import Prefixes
from router.records import Promise, Wanted
from router.speeds import make_of
from router.view import View

SIZES: Final = (16, 1000)
TARGETS_US: Final = {16: 60.0, 1000: 200.0}
"""Of `workload`, the choice alone (design 12)."""
ROUNDS, REQUESTS = 30, 300
PROMISE: Final = Promise(ttft_ms=500.0, tpot_ms=30.0)
ASK: Final = Choose(frozenset(), hand_over=True)
FLEETS: Final = {"prefill and decode": (Role.PREFILL, Role.DECODE), "both": (Role.BOTH,)}


class Desks:
    """One fleet at work, and requests for it."""

    def __init__(self, policy: str, size: int, roles: tuple[Role, ...], *, admission: bool) -> None:
        costs = costs_of(shipped.models()["meta-llama/Llama-3.1-8B"], gpu_named("H100"), profiles=shipped.profiles())
        make = make_of(costs)
        view = View(lambda _: make)
        self.policy: Final = POLICIES[policy]
        self.desk: Final = Desk(view, self.policy, admission=admission, foresees=self.policy in FORESEEING)
        if self.desk.foresight is not None:
            view.all().prefixes = Prefixes()
        self.promise: Final = PROMISE if admission else Promise()
        self.rng: Final = Random(1)
        self.now = 0.0
        for number in range(size):
            role = roles[number % len(roles)]
            name = InstanceId(f"{role.value}-{number}")
            view.add(Instance(id=name, role=role, url="u"))
            view.seen(name, ({"id": "m"},), Load(waiting=self.rng.randrange(3), kv_usage=self.rng.random()))
            view.get(name).credits = 256
        for _ in range(size * 8):
            self.desk.choose(self.seat(0.2 / size), ASK, self.now)

    def asks(self) -> Wanted:
        """As the desk would ask the policy for the next one."""
        promise = self.promise
        return replace(self.seat(0.0).wanted, ttft_ms=promise.ttft_ms, tpot_ms=promise.tpot_ms, now=self.now)

    def seat(self, gap_s: float) -> Seat:
        """The next request."""
        self.now += gap_s
        names = self.rng.randrange(50) * 100
        wanted = Wanted(
            model="m",
            hand_over=True,
            prompt_tokens=self.rng.randrange(100, 3000),
            prefix=tuple(range(names, names + 5)),
            prefix_block_tokens=256.0,
            arrived=self.now,
        )
        if self.desk.foresight is None:
            return Seat(wanted, self.promise)
        wanted, lengths = self.desk.foresight.foretell(wanted, max_tokens=512)
        seat = Seat(wanted, self.promise)
        seat.expected.lengths = lengths
        return seat


def time_us(action: Callable[[], int]) -> float:
    """CPU of one repetition; the action returns their number."""
    began = time.thread_time()
    count = action()
    return (time.thread_time() - began) / count * 1e6


def measured(here: Desks, size: int) -> tuple[float, float]:
    """The choice alone, and the whole way through the desk, microseconds."""
    fleet = here.desk.view.all()

    def pass_through() -> int:
        gap_s = 0.02 / size
        for _ in range(REQUESTS):
            seat = here.seat(gap_s)
            here.desk.choose(seat, ASK, here.now)
            here.desk.prompt_over(seat, here.now, done=True)
            here.desk.finish(seat, here.now, 100)
        return REQUESTS

    asked = [here.asks() for _ in range(REQUESTS)]  # a request is priced once: each round has requests of its own

    def choose() -> int:
        for wanted in asked:
            here.policy(fleet, wanted)
        return REQUESTS

    return time_us(choose), time_us(pass_through)


def main(words: list[str]) -> int:
    """Measure, tell, publish."""
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
    figures: dict[str, Any] = {name: {"choice_us": math.inf, "desk_us": math.inf} for name in names.values()}
    desks = {cell: Desks(cell[0], cell[2], FLEETS[cell[3]], admission=cell[1]) for cell in cells}
    gc.freeze()  # as `baton router` has it
    gc.set_threshold(10_000)
    for number in range(ROUNDS):
        for cell, here in desks.items():
            least = figures[names[cell]]
            for name, found in zip(least, measured(here, cell[2]), strict=True):
                least[name] = min(least[name], round(found, 1))
        published.say(f"choose: round {number + 1} of {ROUNDS}")
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
    columns = ["policy", "admission", "instances", "roles", "choice, µs", "through the desk, µs"]
    tables = [published.Table("CPU of one request", columns, rows)]
    if not arguments.json:
        published.show(tables)
    told = published.result("choose", figures, targets)
    if arguments.publish:
        published.publish(told, tables, facts, published.note_of(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
