"""`baton plan` beside other planners, and papers' claims through it: all simulated.

    BATON_DATA=/path/to/data make bench-plan                   an hour on two cores; rivals go into .bench/plan first
    BATON_DATA=/path/to/data make bench-plan ARGS="--only search"

Parts, each a table; `--only` takes some of them, `--publish` writes them into docs/benchmarks (of the parts that ran):

- `traces`: what is planned for four traces by Baton, by the same planner told averages only, and by NVIDIA's planners
  (told averages, too: they take nothing else, bench/plan_rivals.py); each plan is run in our simulator on the stretch
  that it was made for, on the next one, and at other rates.
- `averages`: how much more averages promise than a trace lets a fleet serve (bench/plan_averages.py).
- `search`: 64 GPUs of three types: how long, how much CPU, how many simulations; beside a rule of thumb's fleet.
- `melange`, `splitwise`, `power`: claims of papers (bench/plan_papers.py).

Everything but times is the same in every run: loads, targets and sizes stand in bench/plan_loads.py, fixed before the
first result.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from baton.planning import EFFORT, Planner, SearchResult, Task, plan, price_per_hour
from bench import inputs, plan_averages, plan_papers, plan_rivals
from bench.plan_loads import ATTAINMENT, HELD_OUT, RATES, averaged, averages, task_of, traces
from bench.plan_rivals import Plan
from bench.policy_grid import Trace
from bench.published import DOCS, Table, machine, note_of, publish, result, say, show, target
from costs.hardware import gpu_named
from sim.evaluate import evaluate, holds
from sim.experiments.goodput import highest

BATON, AVERAGES = "baton plan", "the same planner, told averages"
TOLERANCE = 0.1
"""Of the highest rate that a plan serves."""
SEARCH_GPUS = (("H100-SXM", 32), ("H200", 16), ("L40S", 16))
SEARCH_S = 120.0
SEARCH_TRACE, SEARCH_RATE = "Azure conversation", 150.0


@dataclass(frozen=True, slots=True)
class Timed:
    """Baton's plan, with its cost."""

    outcome: SearchResult
    took_s: float
    cpu_s: float


def timed(task: Task) -> Timed:
    """Plan, and count this process's CPU time and its children's."""
    began_s, before = time.monotonic(), os.times()
    outcome = plan(task, lambda *_: None)
    after = os.times()
    return Timed(outcome, time.monotonic() - began_s, sum(after[:4]) - sum(before[:4]))


def ours(name: str, task: Task) -> Plan | None:
    """Baton's plan; None if no fleet holds."""
    found = timed(task)
    best = found.outcome.best
    if best is None:
        say(f"{name}: {found.outcome.because}")
        return None
    return Plan(name, best.arrangement, best.counts, None, found.took_s, found.cpu_s)


# --- plans for traces -------------------------------------------------------------------------------------------------


def of_traces(data: Path, names: Sequence[str], asked: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """For each trace, its plans and their results."""
    programs = plan_rivals.installed() if asked else None
    for trace in traces(names):
        task, other = task_of(trace, data), task_of(trace, data, HELD_OUT)
        targets = task.goals["all"].targets
        plans = [ours(BATON, task), ours(AVERAGES, averaged(task))]
        if programs is not None:
            plans += plan_rivals.ask(programs, averages(task), targets, asked)
        for each in plans:
            if each is not None:
                say(f"{trace.name}: {each.name}: {each}, {each.took_s:.0f} s")
                yield f"{trace.name}, {each.name}", judged(trace, each, task, other)


def judged(trace: Trace, chosen: Plan, task: Task, other: Task) -> dict[str, Any]:
    """A plan on its own stretch, on the next one, and at the rate at which it breaks."""
    rate = RATES[trace.name]
    on_trace, on_next, on_averages = (_seen(each, chosen) for each in (task, other, averaged(task)))
    fleet = Planner(task).fleet(chosen.arrangement, chosen.counts)

    def keeps(at: float) -> bool:
        arrivals = [msgspec.structs.replace(each, at_s=each.at_s * rate / at) for each in task.arrivals]
        return holds(fleet, arrivals, task.goals, task.usual)

    goodput = highest(keeps, rate, TOLERANCE).rate
    return {
        "plan": str(chosen),
        "gpus": chosen.gpus,
        "usd_per_hour": round(price_per_hour(chosen.arrangement, chosen.counts), 2),
        "planned_rate": rate,
        "predicted_rate": chosen.predicted,
        "goodput_on_trace": round(goodput, 2),
        "on_trace": on_trace,
        "on_next": on_next,
        "on_averages": on_averages,
        "seconds": round(chosen.took_s, 1),
        "cpu_s": round(chosen.cpu_s, 1),
    }


def _seen(task: Task, chosen: Plan) -> dict[str, Any]:
    fleet = Planner(task).fleet(chosen.arrangement, chosen.counts)
    seen = evaluate(fleet, task.arrivals, task.goals, task.usual).classes["all"]
    return {"share": round(seen.share, 4), "low": round(seen.low, 4), "high": round(seen.high, 4), "keeps": seen.keeps}


def table_of_traces(found: dict[str, dict[str, Any]]) -> Table:
    """The table of the part `traces`."""
    rows = [
        [
            name,
            row["plan"],
            f"{row['gpus']}",
            f"{row['usd_per_hour']:.2f}",
            _share(row["on_trace"]),
            _share(row["on_next"]),
            "–" if "on_averages" not in row else _share(row["on_averages"]),
            f"{row['planned_rate']:g}",
            "–" if row["predicted_rate"] is None else f"{row['predicted_rate']:.1f}",
            f"{row['goodput_on_trace']:.1f}",
            f"{row['seconds']:.0f} ({row['cpu_s']:.0f})",
        ]
        for name, row in found.items()
    ]
    columns = [
        *("trace, planner", "plan on H100", "GPUs", "$/h", "attained on the trace", "on its next stretch"),
        *("on its averages", "planned for, req/s", "predicted", "goodput on the trace", "seconds (CPU)"),
    ]
    return Table(f"Plans for four traces ({ATTAINMENT:.0%} promised), each run in our simulator", columns, rows)


def _share(seen: dict[str, Any]) -> str:
    mark = "" if seen["keeps"] else " **missed**"
    return f"{seen['share']:.1%} ({seen['low']:.1%} to {seen['high']:.1%}){mark}"


def targets_of_traces(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Baton's plan holds on its own stretch; plans from averages do not."""
    kept = [row for name, row in found.items() if name.endswith(BATON)]
    failed = [row for name, row in found.items() if not name.endswith(BATON)]
    told = {f"ours keeps its promise on the trace ({len(kept)} traces)": _share_of(kept, keeps=True)}
    if failed:
        told[f"plans from averages fail on their trace ({len(failed)} plans)"] = _share_of(failed, keeps=False)
    return {name: target(value, 1.0, at_most=False) for name, value in told.items()}


def _share_of(rows: Sequence[dict[str, Any]], *, keeps: bool) -> float | None:
    return sum(row["on_trace"]["keeps"] is keeps for row in rows) / len(rows) if rows else None


# --- the whole search -------------------------------------------------------------------------------------------------


def of_search(data: Path) -> dict[str, Any]:
    """64 GPUs of three types."""
    (trace,) = traces([SEARCH_TRACE])
    task = task_of(trace, data)
    scale = RATES[SEARCH_TRACE] / SEARCH_RATE
    arrivals = tuple(msgspec.structs.replace(each, at_s=each.at_s * scale) for each in task.arrivals)
    gpus = tuple((gpu_named(name), count) for name, count in SEARCH_GPUS)
    found = timed(replace(task, arrivals=arrivals, gpus=gpus, effort=EFFORT))
    best, rule = found.outcome.best, plan_papers.rule_of_thumb(replace(task, arrivals=arrivals, gpus=gpus))
    return {
        "plan": "none" if best is None else str(best),
        "usd_per_hour": None if best is None else round(best.price_per_hour, 2),
        "nearest_bound": found.outcome.scarcest,
        "rule_of_thumb": "none" if rule is None else str(rule),
        "rule_of_thumb_usd_per_hour": None if rule is None else round(rule.price_per_hour, 2),
        "requests": len(arrivals),
        "requests_simulated": found.outcome.simulated,
        "arrangements": found.outcome.considered,
        "ruled_out": found.outcome.ruled_out,
        "simulations": found.outcome.trials,
        "proven": found.outcome.found.proven,
        "seconds": round(found.took_s, 1),
        "cpu_s": round(found.cpu_s, 1),
    }


def table_of_search(row: dict[str, Any]) -> Table:
    """The table of the part `search`."""
    columns = ["GPUs", "plan", "$/h", "whole nodes of one type", "$/h", "arrangements", "ruled out by bounds"]
    columns += ["fleets simulated", "requests", "seconds", "CPU s"]
    there = ", ".join(f"{count} {name}" for name, count in SEARCH_GPUS)
    cells = [there, row["plan"], row["usd_per_hour"], row["rule_of_thumb"], row["rule_of_thumb_usd_per_hour"]]
    cells += [row["arrangements"], row["ruled_out"], row["simulations"], row["requests_simulated"]]
    times = [row["seconds"], row["cpu_s"]]
    return Table("A search over 64 GPUs of three types", columns, [[f"{each}" for each in (*cells, *times)]])


# --- all of it --------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Path], Any]] = {
    "averages": plan_averages.of_averages,
    "melange": plan_papers.of_melange,
    "splitwise": plan_papers.of_splitwise,
    "power": plan_papers.of_power,
}
ALL = ("traces", "search", *PARTS)


def measured(args: argparse.Namespace, data: Path) -> Iterator[tuple[str, Any]]:
    """The figures of each part."""
    for name in (each for each in ALL if each in args.only):
        if name == "traces":
            yield name, dict(of_traces(data, args.trace, args.rivals))
        else:
            yield name, of_search(data) if name == "search" else PARTS[name](data)


def tables(figures: dict[str, Any]) -> list[Table]:
    """Tables of the parts that ran."""
    kinds: dict[str, Callable[[Any], Table]] = {"traces": table_of_traces, "search": table_of_search}
    kinds |= {"averages": plan_averages.table_of_averages, **plan_papers.TABLES}
    return [kinds[name](figures[name]) for name in ALL if name in figures]


def targets(figures: dict[str, Any]) -> dict[str, Any]:
    """The same."""
    wanted = targets_of_traces(figures["traces"]) if "traces" in figures else {}
    if "averages" in figures:
        wanted |= plan_averages.targets(figures["averages"])
    if "search" in figures:
        took = figures["search"]
        wanted["64 GPUs of three types, seconds"] = target(took["seconds"], SEARCH_S, digits=1)
        wanted["the same, CPU seconds over two cores"] = target(took["cpu_s"] / 2, SEARCH_S, digits=1)
    return {**wanted, **plan_papers.targets(figures)}


def main() -> int:
    """Plan, report, and with --publish write it down."""
    parser = argparse.ArgumentParser(
        prog="bench-plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=ALL, default=list(ALL), help="these parts")
    parser.add_argument("--trace", nargs="+", default=[], help="of the part `traces`, these by name")
    parser.add_argument("--rivals", nargs="*", choices=plan_rivals.NAMES, default=list(plan_rivals.NAMES), help="these")
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks/plan.json and the page's tables")
    args = parser.parse_args()
    data = inputs.required("bench-plan")
    facts = machine()
    figures = dict(measured(args, data))
    if args.publish:
        figures = merged(figures)
    show(tables(figures))
    told = result("plan", figures, targets(figures))
    if args.publish:
        publish(told, tables(figures), facts, note_of(facts, "simulated"))
    return 0


def merged(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures, with published ones of the parts and traces that did not run."""
    path = DOCS / "benchmarks" / "plan.json"
    before = json.loads(path.read_text())["figures"] if path.exists() else {}
    rows = figures.get("traces", {})
    rows |= {name: row for name, row in before.get("traces", {}).items() if name not in rows}
    return {**before, **figures, **({"traces": rows} if rows else {})}


if __name__ == "__main__":
    sys.exit(main())
