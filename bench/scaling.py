"""The goodput controller against every rival's scaling law: attainment of all arrivals and GPU-hours, all simulated.

    BATON_DATA=/path/to/data make bench-scaling                 the default matrix, under 40 minutes on two cores
    make bench-scaling ARGS=--quick                             one scenario, three minutes
    make bench-scaling ARGS=--full                              whole days, all start-up times, three seeds: hours
    make bench-scaling ARGS="--only step --system Baton"        cells whose names contain the text; these systems
    make bench-scaling ARGS=--publish                           writes docs/ from a whole run

It goes on where it stopped: finished cells are kept in .bench/scaling.jsonl with the state of the sources that made
them. Scenarios are `bench.scaling_grid`; systems are `sim.experiments.scaling`. Dynamo's planner needs its packages
(requirements/bench-scaling.txt, installed into .bench/scaling); where they cannot be had, that is said.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from baton import compiled
from bench import inputs, published, rivals, scaling_grid
from bench.sources import digest_of
from costs import shipped
from sim.baselines.scaling.dynamo import Ask, DynamoPlanner, opening
from sim.experiments import scaling, scaling_ours
from sim.experiments.systems import Shelf

ROOT: Final = Path(__file__).resolve().parent.parent
KEPT: Final = ROOT / ".bench" / "scaling.jsonl"
OURS: Final = "Baton"
DYNAMO: Final = "Dynamo"
SYSTEMS: Final = (OURS, *scaling.RIVALS, DYNAMO)
SOURCES: Final = ("goodput", "router", "sim", "costs", "engine/twin", "loadgen", "bench/scaling_grid.py")
"""Sources that results depend on, but for `CONTROLLER` (Baton's rows alone), `LIVE` (no rows) and `PLANNER`."""
CONTROLLER: Final = (
    *(
        f"goodput/{name}.py"
        for name in (
            "blocked", "changes", "control_rules", "controller", "counters", "decision", "decisionlog",
            "failed_starts", "failover", "flips", "forecast", "forecasters", "manual", "margin", "needs", "overdue",
            "scale_down", "standing", "startups", "stretches", "swings", "traffic",
        )
    ),
    "sim/checked.py",
    "sim/controlled.py",
    "sim/experiments/scaling_ours.py",
)  # fmt: skip
"""Rivals import none of these (`tests/unit/test_bench_scaling.py`): their rows outlive a change of the controller."""
LIVE: Final = (
    "goodput/actuate/", "router/admin/", "router/api/", "router/fleet/discovery.py", "router/fleet/pair_proofs.py",
    "router/fleet/probes.py", "router/fleet/prover.py", "router/http/", "router/request/", "router/telemetry/",
    "sim/validate/",
)  # fmt: skip
"""No simulation imports these."""
PLANNER: Final = ("sim/baselines/scaling/dynamo.py", "bench/dynamo_planner.py", "requirements/bench-scaling.txt")
"""Only Dynamo's rows depend on these."""
COST: Final = 1.15
"""Target: GPU-hours over the clairvoyant's, at most."""
RIVAL: Final = 0.9
"""Target: GPU-hours over those of the best rival that attains, at most."""


def digest(system: str) -> str:
    """The digest of the sources that a system's results depend on."""
    own = {OURS: CONTROLLER, DYNAMO: PLANNER}
    left = {name for other, names in own.items() if other != system for name in names}
    listed = [*SOURCES, *(PLANNER if system == DYNAMO else ())]
    files = {
        each for name in listed for each in ((ROOT / name).rglob("*.py") if (ROOT / name).is_dir() else [ROOT / name])
    }
    names = {each: str(each.relative_to(ROOT)) for each in files}
    return digest_of((each for each, name in names.items() if name not in left and not name.startswith(LIVE)), ROOT)


def kept() -> dict[str, dict[str, Any]]:
    """Rows of earlier runs by cell and system; those of other sources, and a line that was cut off, are left out."""
    rows: dict[str, dict[str, Any]] = {}
    sources = {system: digest(system) for system in SYSTEMS}
    for line in KEPT.read_text().splitlines() if KEPT.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.get("sources") == sources.get(row.get("system")):
            rows[row["key"]] = row
    return rows


def keep(row: Mapping[str, Any]) -> None:
    """Keep one finished run."""
    KEPT.parent.mkdir(exist_ok=True)
    with KEPT.open("a") as out:
        out.write(json.dumps(row) + "\n")


def one(run: Run) -> dict[str, Any]:
    """One system on one cell, in a process of its own."""
    gc.set_threshold(200_000, 20, 20)
    listed = scaling_grid.cells(quick=run.quick, full=run.full, data=run.data)
    cell = next(each for each in listed if each.name == run.cell)
    key, system, data = run.key, run.system, run.data
    began_s, sources = time.monotonic(), digest(system)
    arrivals = cell.scenario.arrivals(data, cell.seed)
    setting = scaling.CellSetting(
        shelf=Shelf(shipped.models(), shipped.profiles()),
        arrivals=arrivals,
        startup_s=cell.startup_s,
        seed=cell.seed,
        caching=cell.scenario.caching,
    )
    own = _ROWS.get(system)
    row = scaling.run(setting, system) if own is None else own(setting)
    named = {"key": key, "cell": cell.name, "scenario": cell.scenario.name, "system": system}
    return {**named, **row, "wall_s": round(time.monotonic() - began_s), "sources": sources}


@dataclass(frozen=True, slots=True)
class Run:
    """A run for one process. It has the cell's name, since functions make loads."""

    cell: str
    system: str
    data: Path | None
    quick: bool
    full: bool

    @property
    def key(self) -> str:
        """The key of its row."""
        return f"{self.cell} | {self.system}"


@contextmanager
def planner(setting: scaling.CellSetting) -> Iterator[tuple[Ask, Mapping[str, Any]]]:
    """Dynamo's own planner in its own environment: a function that asks it, and its answer to the opening.

    Raises:
        rivals.NotInstalled: its packages cannot be installed.
    """
    python = rivals.environment("scaling") / "python"
    words = [str(python), str(ROOT / "bench" / "dynamo_planner.py")]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        said, heard = process.stdin, process.stdout

        def ask(look: Mapping[str, Any]) -> Mapping[str, Any]:
            said.write(json.dumps(look) + "\n")
            said.flush()
            line = heard.readline()
            if not line:
                raise RuntimeError("Dynamo's planner has ended: run bench/dynamo_planner.py to see why")
            answer: Mapping[str, Any] = json.loads(line)
            return answer

        yield ask, ask(opening(setting.law(), scaling.TP, 2 * scaling.MOST))
        said.close()


def dynamo(setting: scaling.CellSetting) -> dict[str, Any]:
    """A row of Dynamo's planner."""
    try:
        with planner(setting) as (ask, first):
            return scaling.measure(setting, DynamoPlanner(setting.law(), ask, first), setting.first())
    except rivals.NotInstalled as error:
        return {"missing": str(error)}


_ROWS: Final[Mapping[str, Callable[[scaling.CellSetting], dict[str, Any]]]] = {OURS: scaling_ours.run, DYNAMO: dynamo}


def rows_of(wanted: Sequence[Run], processes: int) -> Iterator[dict[str, Any]]:
    """These runs, in the order in which they finish."""
    with ProcessPoolExecutor(processes, initializer=compiled.use) as pool:
        try:
            for done in as_completed([pool.submit(one, each) for each in wanted]):
                yield done.result()
        except BaseException:  # an interrupt too: runs that have not begun do not begin
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def judged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One cell: the results of all systems, and Baton's standing among them."""
    by_system = {row["system"]: row for row in rows if "missing" not in row}
    ours, bound = by_system.get(OURS), by_system.get("clairvoyant")
    others = [row for name, row in by_system.items() if name not in (OURS, "clairvoyant") and scaling.attains(row)]
    best = min(others, key=lambda row: row["gpu_hours"], default=None)
    return {
        "attains": ours is not None and scaling.attains(ours),
        "can": bound is not None and scaling.attains(bound),
        "over_clairvoyant": ours["gpu_hours"] / bound["gpu_hours"] if ours and bound else None,
        "over_best_rival": ours["gpu_hours"] / best["gpu_hours"] if ours and best else None,
        "best_rival": best["system"] if best else None,
    }


def tables(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[published.Table]:
    """One table a cell, and one of verdicts."""
    shown = []
    verdicts = []
    for name, cell in rows.items():
        body = [
            [row["system"], row["missing"], "", "", "", ""]
            if "missing" in row
            else [
                row["system"],
                f"{row['attainment']:.2%}",
                f"{row['gpu_hours']:.1f}",
                f"{row['actions_hour']:.1f}",
                str(row["flips"]),
                str(row["direction_changes"]),
            ]
            for row in cell
        ]
        columns = ("system", "attainment", "GPU-hours", "actions an hour", "flips", "changes of direction")
        shown.append(published.Table(title=name, columns=columns, rows=body))
        told = judged(cell)
        verdicts.append(
            [
                name,
                "yes" if told["attains"] else "no",
                *(_ratio(told[each]) for each in _RATIOS),
                told["best_rival"] or "–",
            ]
        )
    heads = ("scenario", "attains", "over the clairvoyant", "over the best rival that attains", "which")
    return [published.Table(title="Verdicts (GPU-hours)", columns=heads, rows=verdicts), *shown]


_RATIOS: Final = ("over_clairvoyant", "over_best_rival")


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"× {value:.2f}"


def targets(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The worst cell of each target."""
    told = [judged(cell) for cell in rows.values()]
    kept_all = [each["attains"] for each in told if each["can"]]
    over = [each["over_clairvoyant"] for each in told if each["over_clairvoyant"] and each["can"] and each["attains"]]
    rival = [each["over_best_rival"] for each in told if each["over_best_rival"] and each["attains"]]
    return {
        "attains_where_the_clairvoyant_does": published.target(
            sum(kept_all) / len(kept_all) if kept_all else None, 1.0, at_most=False
        ),
        "gpu_hours_over_clairvoyant": published.target(max(over, default=None), COST),
        "gpu_hours_over_best_rival": published.target(max(rival, default=None), RIVAL),
    }


def parsed(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="one scenario")
    size.add_argument("--full", action="store_true", help="whole days, all start-up times, three seeds")
    parser.add_argument("--fresh", action="store_true", help="forget finished runs")
    parser.add_argument("--only", action="append", metavar="TEXT", help="cells whose names contain all of these")
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="these systems; default: all")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="runs at a time")
    parser.add_argument("--publish", action="store_true", help="write docs/")
    parser.add_argument("--json", action="store_true", help="the line of JSON alone on stdout, no tables")
    arguments = parser.parse_args(words)
    if arguments.publish and (arguments.only or arguments.quick or arguments.system):
        parser.error("--publish: only a whole run is published; leave out --only, --quick and --system")
    if arguments.processes < 1:
        parser.error(f"--processes {arguments.processes}: must be 1 or more")
    return arguments


def main(words: list[str]) -> int:
    """Run missing cells, report, publish."""
    arguments = parsed(words)
    data, facts = inputs.folder(), published.machine()
    if arguments.fresh:
        KEPT.unlink(missing_ok=True)
    if not arguments.full and not arguments.quick and data is None:
        published.say(f"scaling: scenarios from traces are left out: {inputs.VARIABLE} names no folder with traces")
    cells = scaling_grid.cells(quick=arguments.quick, full=arguments.full, data=data)
    cells = [each for each in cells if all(text in each.name for text in arguments.only or ())]
    wanted = [
        Run(cell.name, system, data, arguments.quick, arguments.full)
        for cell in cells
        for system in (SYSTEMS if cell.rivals else (OURS, "clairvoyant"))
        if system in (arguments.system or SYSTEMS)
    ]
    rows = kept()
    missing = [each for each in wanted if each.key not in rows]
    began_s, left = time.monotonic(), len(missing)
    for row in rows_of(missing, arguments.processes):
        keep(row)
        rows[row["key"]] = row
        left -= 1
        said = row.get("missing") or f"{row['attainment']:.2%}, {row['gpu_hours']:.1f} GPU-hours"
        published.say(f"scaling: {row['key']}: {said} ({left} left, {(time.monotonic() - began_s) / 60:.0f} min)")
    by_cell = {cell.name: [rows[each.key] for each in wanted if each.cell == cell.name] for cell in cells}
    if not arguments.json:
        published.show(tables(by_cell))
    figures = {"cells": by_cell}
    told = published.result("scaling", figures, targets(by_cell))
    if arguments.publish:
        published.publish(told, tables(by_cell)[:1], facts, published.note_of(facts, HOW))
    return 0


HOW: Final = "simulated; every system behind the same router and admission, the same arrivals and start-up times"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
