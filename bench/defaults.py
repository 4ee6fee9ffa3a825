"""What `baton router` is worth without settings, with URLs alone, beside vllm-router with each of its policies.

    make bench-defaults                       about 25 minutes; installs vllm-router into .bench/ first
    make bench-defaults ARGS=--quick          one round of the small fleet: does it work?
    make bench-defaults ARGS=--publish        writes docs/benchmarks

Mock engines with prefix caches stand for the fleet: what a router chooses is all that differs. Sessions come in an open
loop (`bench.chats`): in one scenario four system prompts are shared by sessions of six turns, cold first, then by other
users with the same system prompts; in the other every request is alone with its text. All have the same arrivals, the
same pauses and texts of their own, on engines that have just been started; contestants follow one another within a
round, each round in another order. Ends with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import uvloop

from bench.chats import Scenario, Seen, hold
from bench.contestants import baton, rival
from bench.processes import BATON_COMMAND, Running, page, stopping
from bench.published import Table, machine, note_of, publish, result, say, show, target
from bench.rivals import NotInstalled, environment, version_of

MODEL = "meta-llama/Llama-3.1-8B"
STEP_MS, PER_1K_MS = 10.0, 45.0
"""A prompt of 2,000 tokens takes 100 ms."""

OURS, PLAIN = "baton", "baton --policy least_load"
RIVALS = ("round_robin", "cache_aware", "power_of_two", "consistent_hash")

SESSIONS = Scenario(
    name="sessions", sessions=40, per_s=8.0, turns=6, systems=4, system_tokens=1600, user_tokens=100, answer_tokens=24,
    think_s=0.5,
)  # fmt: skip
ALONE = Scenario(
    name="no shared prefix", sessions=200, per_s=16.0, turns=1, systems=0, system_tokens=1900, user_tokens=100,
    answer_tokens=24, think_s=0.0,
)  # fmt: skip

COLD, WARM, NONE = "sessions, cold", "sessions, warm", "no shared prefix"
SIZES = (4, 16)
"""Prefill instances, and as many decode ones. The load grows with them."""

WITH, WITHOUT = 0.6, 1.02
"""Mean TTFT over that of the best rival: with something to gain, and without."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One phase of one contestant."""

    ttft_ms: float
    p99_ms: float
    computed: float
    """Part of all prompt tokens that an engine computed."""
    late_ms: float
    failed: int


@dataclass(slots=True)
class Rounds:
    """All rounds of one contestant in one phase."""

    ran: list[Ran] = field(default_factory=list)

    @property
    def mean_ms(self) -> float:
        """Over all rounds."""
        return statistics.fmean(each.ttft_ms for each in self.ran)

    def as_json(self) -> dict[str, Any]:
        """For the published figures."""
        return {
            "ttft_mean_ms": round(self.mean_ms, 2),
            "ttft_mean_ms_by_round": [round(each.ttft_ms, 2) for each in self.ran],
            "ttft_p99_ms": round(statistics.fmean(each.p99_ms for each in self.ran), 2),
            "computed_share": round(statistics.fmean(each.computed for each in self.ran), 4),
            "sent_late_ms_p99": round(max(each.late_ms for each in self.ran), 2),
            "failed": sum(each.failed for each in self.ran),
        }


def started(stack: ExitStack, contestant: str, size: int) -> tuple[str, list[str]]:
    """Fresh engines and the contestant before them; its address and theirs."""
    everywhere, running = frozenset(os.sched_getaffinity(0)), list[Running]()
    stack.enter_context(stopping(running))
    words = [*BATON_COMMAND, "mock", "--instances", f"prefill={size},decode={size}", "--port", "0", "--model", MODEL]
    mocks = Running("mock", [*words, "--step-ms", f"{STEP_MS:g}", "--prefill-ms-per-1k", f"{PER_1K_MS:g}"], everywhere)
    running.append(mocks)
    urls = [mocks.line().split()[-1] for _ in range(2 * size)]
    prefills, decodes = urls[:size], urls[size:]
    if contestant.startswith(OURS):
        router, endpoint = baton(prefills, decodes, everywhere, contestant.split()[1:])
    else:
        program = str(environment("router") / "vllm-router")
        router, endpoint = rival(program, prefills, decodes, everywhere, contestant)
    running.append(router)
    return endpoint, urls


def computed(urls: Sequence[str]) -> float:
    """Prompt tokens that engines have computed so far."""
    name, found = 'source="local_compute"', 0.0
    for url in urls:
        lines = page(f"{url}/metrics").splitlines()
        found += sum(float(line.rpartition(" ")[2]) for line in lines if name in line and not line.startswith("#"))
    return found


def phases(size: int) -> Iterator[tuple[str, Scenario, str]]:
    """Each phase with its scenario, and a name for its shared system prompts."""
    more = size // SIZES[0]
    sessions = replace(SESSIONS, sessions=SESSIONS.sessions * more, per_s=SESSIONS.per_s * more)
    yield COLD, sessions, "shared"
    yield WARM, sessions, "shared"
    yield NONE, replace(ALONE, sessions=ALONE.sessions * more, per_s=ALONE.per_s * more), ""


def run(contestant: str, size: int, number: int) -> dict[str, Ran]:
    """One contestant's part of a round."""
    found = {}
    with ExitStack() as stack:
        endpoint, urls = started(stack, contestant, size)
        for at, (phase, scenario, shared) in enumerate(phases(size)):
            before = computed(urls)
            seed = 1000 * number + at
            seen = uvloop.run(
                hold(endpoint, MODEL, scenario, f"{contestant} {number} {phase}", f"{shared} {number}", seed)
            )
            found[phase] = ran_of(seen, computed(urls) - before)
            say(
                f"  {contestant}, {size}+{size}, {phase}: {found[phase].ttft_ms:.1f} ms, p99 {found[phase].p99_ms:.0f},"
                f" computed {found[phase].computed:.2f}, late p99 {found[phase].late_ms:.1f},"
                f" {len(seen.ttft_ms)} answers"
            )
            for why in seen.failed[:3]:
                say(f"    failed: {why}")
    return found


def ran_of(seen: Seen, tokens: float) -> Ran:
    """Of a phase in which engines computed so many tokens."""
    ttft_ms, late_ms = seen.ttft_ms or [math.inf], seen.late_ms or [0.0]
    return Ran(
        ttft_ms=statistics.fmean(ttft_ms),
        p99_ms=quantile(ttft_ms, 0.99),
        computed=tokens / max(1, seen.prompt_tokens),
        late_ms=quantile(late_ms, 0.99),
        failed=len(seen.failed),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share does not exceed."""
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


Measured = dict[tuple[int, str], dict[str, Rounds]]
"""By size of the fleet and phase: by contestant."""


def contest(sizes: Sequence[int], contestants: Sequence[str], rounds: int) -> Measured:
    """Run everything."""
    found: Measured = {(size, phase): {} for size in sizes for phase in (COLD, WARM, NONE)}
    for size, number in itertools.product(sizes, range(rounds)):
        order = list(contestants)
        random.Random(number).shuffle(order)
        say(f"{size} prefill and {size} decode instances, round {number + 1} of {rounds}: {', '.join(order)}")
        for contestant in order:
            for phase, ran in run(contestant, size, number).items():
                found[size, phase].setdefault(contestant, Rounds()).ran.append(ran)
    return found


def compared(by: dict[str, Rounds]) -> tuple[float, tuple[float, float], str]:
    """Our mean TTFT over the best rival's, over all rounds; the least and the most of any round; its name."""
    best = min((contestant for contestant in by if contestant in RIVALS), key=lambda contestant: by[contestant].mean_ms)
    ratios = [mine.ttft_ms / theirs.ttft_ms for mine, theirs in zip(by[OURS].ran, by[best].ran, strict=True)]
    return by[OURS].mean_ms / by[best].mean_ms, (min(ratios), max(ratios)), best


def main() -> None:
    """Measure, print, publish."""
    parser = argparse.ArgumentParser(
        prog="bench-defaults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of the small fleet")
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks/defaults.json and the tables")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each size (default %(default)s)")
    parser.add_argument("--size", type=int, action="append", metavar="N", help="only with so many of each role")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this contestant (repeatable)")
    args = parser.parse_args()
    facts = machine()
    contestants = [OURS, PLAIN, *RIVALS]
    try:
        environment("router")
    except NotInstalled as error:
        say(f"vllm-router cannot be installed here and is left out: {error}")
        contestants = [OURS, PLAIN]
    if args.only:
        contestants = [contestant for contestant in [OURS, PLAIN, *RIVALS] if contestant in args.only]
    sizes = tuple(args.size or (SIZES[:1] if args.quick else SIZES))
    measured = contest(sizes, contestants, 1 if args.quick else args.rounds)
    tell(measured, facts, publishes=args.publish)


def tell(measured: Measured, facts: dict[str, Any], *, publishes: bool) -> None:
    """Tables, the last line, the pages."""
    figures: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    tables = []
    for (size, phase), by in measured.items():
        name = f"{size}+{size}, {phase}"
        figures[name] = {contestant: rounds.as_json() for contestant, rounds in by.items()}
        rows = [
            [
                contestant if contestant.startswith(OURS) else f"vllm-router, {contestant}",
                f"{told['ttft_mean_ms']:.1f}",
                " to ".join(f"{each(told['ttft_mean_ms_by_round']):.1f}" for each in (min, max)),
                f"{told['ttft_p99_ms']:.0f}",
                f"{1 - told['computed_share']:.2f}",
            ]
            for contestant, told in figures[name].items()
        ]
        columns = ["", "TTFT mean, ms", "by round", "p99, ms", "tokens not computed"]
        tables.append(Table(f"{size} prefill and {size} decode instances, {phase}", columns, rows))
        if OURS in by and any(contestant in RIVALS for contestant in by):
            ratio, (least, most), best = compared(by)
            figures[name]["over_best_rival"] = {"best": best, "ratio": round(ratio, 3), "by_round": [least, most]}
            limit = WITHOUT if phase == NONE else WITH
            targets[f"{name}: TTFT over the best of vllm-router ({best})"] = target(ratio, limit)
    show(tables)
    told = result("defaults", figures, targets)
    if publishes:
        more = f"vllm-router {version_of('router', 'vllm-router')}, mock engines, all on one machine"
        publish(told, tables, facts, note_of(facts, more))
    if not targets or not all(each["met"] for each in targets.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
