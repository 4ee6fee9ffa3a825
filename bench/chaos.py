"""Clients' results under faults: Baton and vllm-router before the same mocks, under the chaos suite's faults.

    python -m bench.chaos [--quick] [--publish] [--only TEXT] [--json]

Rows, load and judge are those of `tests/chaos` (tests/support/chaos_*.py). Each router is a process of its own, with
three seconds for everything that it can limit; mocks and clients run in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.chaos_fleet import ChaosFleet
from support.chaos_load import Kind
from support.chaos_run import Outcome, Run
from support.chaos_scenarios import LONG_LEASE_S, SCENARIOS, UNSEEN, Hurts, Limits, Scenario, Shape
from support.hands_over import ROUTER

from bench.contestants import BATON, RIVAL
from bench.processes import Running, free_port
from bench.published import Table, machine, note_of, publish, result, say, show, target
from bench.rivals import NotInstalled, environment, version_of
from cluster.instance import Role

LIMIT_S = 3.0
"""Limit to the first token, between two tokens, and for a whole answer: vllm-router has only one limit, for a whole
request."""
LIMITS = Limits(first_token_s=LIMIT_S, stall_s=LIMIT_S, whole_s=LIMIT_S)
SHAPE = Shape(prefill=2, decode=2, both=0)
"""vllm-router knows no engine that does both."""
SEEDS = (0, 1, 2)
READY_S = 30.0

Words = Callable[[list[str], list[str]], tuple[list[str], str]]
"""Prefill and decode URLs → the command, and what gives its endpoint: a line's last word, or the endpoint itself."""


def baton(prefill: list[str], decode: list[str]) -> tuple[list[str], str]:
    """The command of Baton's router: as `baton up` starts it, but with this benchmark's limits."""
    words = [*ROUTER, "--log-level", "ERROR"]
    for flag in ("--first-token-s", "--stall-s", "--whole-s"):
        words += [flag, str(LIMIT_S)]
    words += [word for url in prefill for word in ("--prefill-url", url)]
    return words + [word for url in decode for word in ("--decode-url", url)], ""


def rival(program: Path) -> Words:
    """The command of the rival, as its documentation starts it; retries and circuit breakers are on by default."""

    def words(prefill: list[str], decode: list[str]) -> tuple[list[str], str]:
        port = free_port()
        said = [str(program), "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        said += ["--vllm-pd-disaggregation", "--policy", "round_robin", "--log-level", "error"]
        said += ["--request-timeout-secs", f"{LIMIT_S:.0f}"]
        said += [word for url in prefill for word in ("--prefill", url)]
        return said + [word for url in decode for word in ("--decode", url)], f"http://127.0.0.1:{port}"

    return words


@asynccontextmanager
async def running(name: str, words: Words, fleet: ChaosFleet, own: list[Running]) -> AsyncIterator[str]:
    """A router of this kind that takes requests."""
    urls = {
        role: [fleet.url(each) for each, mock in fleet.mocks.instances.items() if mock.settings.role is role]
        for role in (Role.PREFILL, Role.DECODE)
    }
    command, endpoint = words(urls[Role.PREFILL], urls[Role.DECODE])
    process = Running(name, command, frozenset(os.sched_getaffinity(0)))
    own.append(process)
    try:
        endpoint = endpoint or (await asyncio.to_thread(process.line)).split()[-1]
        await _ready(f"{endpoint}/{'ready' if name == BATON else 'health'}")
        yield endpoint
    finally:
        process.process.kill()
        await asyncio.to_thread(process.stop)


async def _ready(url: str) -> None:
    async with asyncio.timeout(READY_S), aiohttp.ClientSession() as client:
        while True:
            try:
                async with client.get(url) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass  # not yet
            await asyncio.sleep(0.05)


async def measured(scenario: Scenario, name: str, words: Words, seeds: Sequence[int]) -> list[Outcome]:
    """One cell, all seeds at once: a router each."""

    async def one(seed: int) -> Outcome:
        own: list[Running] = []
        run = Run(
            scenario=scenario,
            router=lambda fleet, _: running(name, words, fleet, own),
            seed=seed,
            shape=SHAPE,
            limits=LIMITS,
            lease_s=LONG_LEASE_S,
            strike=(lambda _: own[0].process.kill()) if scenario.drive == "router" else None,
        )
        return await run.outcome()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(seed)) for seed in seeds]
    return [task.result() for task in tasks]


COLUMNS = (Kind.RIGHT, Kind.ERROR, Kind.WRONG, Kind.HUNG)


def added_up(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One cell's figures, with an example of each forbidden outcome."""
    kinds: Counter[Kind] = Counter()
    for each in outcomes:
        kinds += each.kinds
    examples = {
        verdict.kind.value: verdict.why
        for each in outcomes
        for verdict in each.verdicts
        if verdict.kind in {Kind.WRONG, Kind.HUNG, Kind.ERROR}
    }
    held = sum(sum(each.leaked.values()) for each in outcomes)
    counted = {kind.value: kinds[kind] for kind in (*COLUMNS, Kind.LEFT)}
    return {**counted, "leaked holds": held, "examples": examples}


def rows(figures: dict[str, dict[str, Any]], names: Sequence[str]) -> Table:
    """Scenario by router."""
    shown = [*(kind.value for kind in COLUMNS), "leaked holds"]
    columns = [
        "scenario",
        *(f"{name}: {column}" if not at else column for name in names for at, column in enumerate(shown)),
    ]
    listed = [
        [scenario, *(f"{cells[name][column]:,}" for name in names for column in shown)]
        for scenario, cells in figures.items()
    ]
    total = ["**all**", *(f"**{_sum(figures, name, column):,}**" for name in names for column in shown)]
    return Table("What clients got, and what stayed behind", columns, [*listed, total])


def _sum(figures: dict[str, dict[str, Any]], name: str, column: str, scenarios: Sequence[str] | None = None) -> int:
    return sum(cells[name][column] for scenario, cells in figures.items() if scenarios is None or scenario in scenarios)


def targets(figures: dict[str, dict[str, Any]], listed: Sequence[Scenario]) -> dict[str, Any]:
    """The suite's targets, as far as a process shows them."""
    known = [each.name for each in listed if each.hurts is Hurts.UNSEEN]
    kept = [name for name in figures if name not in known]
    unhurt = [each.name for each in listed if each.hurts is Hurts.NOBODY]
    strict = [each.name for each in listed if not each.lease]
    return {
        "wrong text": target(_sum(figures, BATON, Kind.WRONG.value, kept), 0, digits=0),
        "hung": target(_sum(figures, BATON, Kind.HUNG.value), 0, digits=0),
        "errors where another instance could do it": target(
            _sum(figures, BATON, Kind.ERROR.value, unhurt), 0, digits=0
        ),
        "leaked holds where somebody could release them": target(
            _sum(figures, BATON, "leaked holds", strict), 0, digits=0
        ),
    }


def main() -> None:
    """The whole table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks/chaos.json and the table")
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios whose name contains this")
    args = parser.parse_args()
    listed = [each for each in (*SCENARIOS, *UNSEEN) if args.only in each.name and each.drive != "registry"]
    if not listed:
        sys.stderr.write(
            f"--only {args.only!r} fits no scenario; names: {', '.join(each.name for each in (*SCENARIOS, *UNSEEN))}\n"
        )
        sys.exit(2)
    starts: dict[str, Words] = {BATON: baton}
    facts, missing = machine(), ""
    try:
        starts[RIVAL] = rival(environment("router") / "vllm-router")
    except NotInstalled as error:
        missing = f"vllm-router cannot be installed here and is left out: {error}"
        say(missing)
    seeds = SEEDS[:1] if args.quick else SEEDS
    figures: dict[str, dict[str, Any]] = {}
    for number, scenario in enumerate(listed, 1):
        figures[scenario.name] = {}
        for name, words in starts.items():
            cell = added_up(uvloop.run(measured(scenario, name, words, seeds)))
            figures[scenario.name][name] = cell
            counted = ", ".join(f"{count} {what}" for what, count in cell.items() if what != "examples" and count)
            say(f"{number}/{len(listed)} {scenario.name}, {name}: {counted}")
    tables = [rows(figures, list(starts))]
    show(tables)
    told = result("chaos", figures, targets(figures, listed))
    if args.publish:
        version = "" if missing else f"vllm-router {version_of('router', 'vllm-router')}"
        publish(told, tables, facts, note_of(facts, missing or version))


if __name__ == "__main__":
    main()
