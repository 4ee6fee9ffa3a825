"""Baton against the best rival with the same admission and the same arrangements, and against a bound; all simulated.

    BATON_DATA=/path/to/data make bench-policy                  24 cells: some three hours on two cores; resumable
    BATON_DATA=/path/to/data make bench-policy ARGS=--quick     4 cells, 8 of 12 rivals, 3 windows: some twenty minutes
    make bench-policy ARGS="--minutes 30"                       begins no cell after that; the next run goes on
    make bench-policy ARGS="--only 'Azure code' --only '5 ×'"   cells that have all of these in their names
    make bench-policy ARGS=--fresh                              from the beginning
    make bench-policy ARGS=--publish                            writes docs/; cells that are missing are said to be

What is compared is `bench.policy_grid`; how the best arrangement is found, `sim.experiments.contest`; what goodput is,
`sim.experiments.curves`; the bound, `sim.experiments.ceiling`. Finished cells are kept in .bench/policy.jsonl with the
state of the sources that made them: results of other sources are not used. Published cells count as finished, too, also
those of another machine. Everything is repeatable: the same sources and data give the same figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench import inputs, policy_figures, policy_grid, policy_tables, published
from bench.policy_cell import of_cell
from bench.sources import digest_of, reached
from costs import shipped
from sim.experiments.systems import Shelf

PROCESSES: Final = 2
ROOT: Final = Path(__file__).resolve().parent.parent
KEPT: Final = ROOT / ".bench" / "policy.jsonl"
PUBLISHED: Final = published.DOCS / "benchmarks" / "policy.json"
SOURCES: Final = ("bench/policy_cell.py", "bench/policy_grid.py")
"""Results depend on these, on what they import, and on the models and profiles of `costs/`."""
LONGEST: Final = ("ServeGen R1", "Mooncake conversation", "Azure code", "Azure conversation")
"""Traces by how long their cells take: the longest first, so that both processes end together."""


def digest() -> str:
    """The digest of the sources: not of the modules that make tables and figures, nor of what no simulation reaches."""
    tables = {each for each in (ROOT / "costs").rglob("*") if each.suffix in (".json", ".csv")}
    return digest_of(reached((ROOT / name for name in SOURCES), ROOT) | tables, ROOT)


def kept(sources: str, plan: str) -> dict[str, dict[str, Any]]:
    """Rows of this plan's earlier runs by cell, the published ones included; those of other sources, and a last line
    cut off, are left out.
    """
    rows = {row["cell"]: row for row in _published() if row["sources"] == sources and row.get("plan") == plan}
    others = 0
    for line in KEPT.read_text().splitlines() if KEPT.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["sources"] != sources:
            others += 1
        elif row.get("plan") == plan:
            rows[row["cell"]] = row
    if others:
        published.say(f"policy: {others} cells in {KEPT.name} are of other sources; they are run again")
    return rows


def _published() -> list[dict[str, Any]]:
    """The published cells: simulations give the same figures on any machine."""
    told: dict[str, Any] = json.loads(PUBLISHED.read_text()) if PUBLISHED.exists() else {"figures": {"cells": []}}
    cells: list[dict[str, Any]] = told["figures"]["cells"]
    return cells


def keep(row: dict[str, Any]) -> None:
    """Keep one finished cell."""
    KEPT.parent.mkdir(exist_ok=True)
    with KEPT.open("a") as out:
        out.write(json.dumps(row) + "\n")


def one(name: str, data: Path, sources: str, plan: policy_grid.Plan) -> dict[str, Any]:
    """A cell, in a process of its own."""
    gc.set_threshold(200_000, 20, 20)  # runs that end early leave cycles, and little else is garbage
    cell = next(each for each in policy_grid.cells() if each.name == name)
    row = of_cell(cell, data, Shelf(shipped.models(), shipped.profiles()), plan)
    return {**row, "sources": sources, "plan": plan.name}


def rows_of(
    names: Sequence[str], run: Callable[[str], dict[str, Any]], processes: int, ends_s: float
) -> Iterator[dict[str, Any]]:
    """These cells, in the order in which they finish; none begins after `ends_s` of the monotonic clock."""
    left = list(names)
    with ProcessPoolExecutor(processes) as pool:
        try:
            running: set[Future[dict[str, Any]]] = set()
            while running or left:
                while left and len(running) < processes and time.monotonic() < ends_s:
                    running.add(pool.submit(run, left.pop(0)))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for each in done:
                    yield each.result()
        except BaseException:  # an interrupt too: cells that have not begun do not begin
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def ordered(plan: policy_grid.Plan) -> list[policy_grid.Cell]:
    """The plan's cells; 5 × first, so that a run that is stopped has seen all traces, then the longest first."""
    found = [cell for cell in policy_grid.cells() if cell.name in plan.cells or not plan.cells]
    return sorted(found, key=lambda cell: (cell.factor != 5, LONGEST.index(cell.trace.name), cell.fleet.name != "B"))


def parsed(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few cells, rivals and windows: some minutes")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="begin no cell after that")
    return of_cells(parser, words)


def of_cells(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """The command line of a benchmark of cells: what `parser` knows, and the arguments that all of these have."""
    parser.add_argument("--fresh", action="store_true", help="forget finished cells")
    parser.add_argument("--only", action="append", metavar="TEXT", help="cells that have all of these in their names")
    parser.add_argument("--processes", type=int, default=PROCESSES, metavar="N", help="cells at a time")
    parser.add_argument("--publish", action="store_true", help="write docs/")
    parser.add_argument("--json", action="store_true", help="the line of JSON alone on stdout, no tables")
    arguments = parser.parse_args(words)
    if arguments.only and arguments.publish:
        parser.error("--only --publish: only a whole run is published")
    return arguments


def main(words: list[str]) -> int:
    """Run missing cells, report, publish."""
    arguments = parsed(words)
    traces, facts, sources = inputs.required("policy"), published.machine(), digest()
    plan = policy_grid.QUICK if arguments.quick else policy_grid.FULL
    if arguments.fresh:
        KEPT.unlink(missing_ok=True)
    wanted = [cell.name for cell in ordered(plan) if all(each in cell.name for each in arguments.only or ())]
    rows = {} if arguments.fresh else kept(sources, plan.name)
    missing = [name for name in wanted if name not in rows]
    began_s = time.monotonic()
    run = partial(one, data=traces, sources=sources, plan=plan)
    for row in rows_of(missing, run, max(1, arguments.processes), began_s + 60 * arguments.minutes):
        keep(row)
        rows[row["cell"]] = row
        left = sum(name not in rows for name in wanted)
        spent = f"{(time.monotonic() - began_s) / 60:.0f} min"
        published.say(f"policy: {policy_tables.line(row)} ({row['cpu_s']:.0f} s of CPU; {left} cells left, {spent})")
    in_order = [rows[cell.name] for cell in policy_grid.cells() if cell.name in wanted and cell.name in rows]
    if not in_order:
        published.say("policy: no cell is finished yet")
        return 1
    figures = policy_tables.figures(in_order, plan.name)
    figures["sources"] = sources
    figures["missing"] = [name for name in wanted if name not in rows]
    if figures["missing"]:
        published.say(f"policy: {len(figures['missing'])} cells have not run: {'; '.join(figures['missing'])}")
    tables = policy_tables.tables(figures)
    published.say(f"policy: {policy_tables.said(figures)}")
    if not arguments.json:
        published.show(tables)
    told = published.result("policy", figures, policy_tables.targets(figures))
    if arguments.publish:
        published.publish(told, tables, facts, published.note_of(facts, policy_tables.how(figures)))
        missed = policy_figures.draw(figures, published.DOCS / "figures", facts["date"])
        if missed:
            published.say(f"policy: {missed}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
