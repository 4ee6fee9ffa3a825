"""Simulates aggregated against disaggregated serving, rivals against each other, and two papers on their own profiles.

    BATON_DATA=/path/to/data make bench-compare
    BATON_DATA=/path/to/data make bench-compare ARGS="--quick --only scenarios"

What is compared and what is modelled: docs/benchmarks.md, and the modules of sim/experiments. All random draws come
from the seeds in the output; the same command gives the same figures on every machine. Without BATON_DATA the parts
that need traces are left out. `--publish` writes docs/benchmarks/compare.json, the tables in
docs/benchmarks.md and, with matplotlib, docs/figures/compare-*.svg; with `--only` it replaces just that part.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bench import compare_figures, compare_tables, inputs, published
from costs import shipped
from loadgen.arrival import Arrival
from loadgen.traces import azure, mooncake
from sim.experiments import distserve, rivals, scenarios, splitwise, splitwise_gap
from sim.experiments.loads import FULL, QUICK, Size, UnitLoad, traced
from sim.experiments.systems import Shelf
from sim.experiments.tuning import Best

SEED = 1
COUNT = 3500
"""Requests of a load; a shorter run takes the first ones of them."""
LENGTH_MAX = 131_072
FILES = {
    "Azure code": ("azure2023/AzureLLMInferenceTrace_code.csv", azure.read),
    "Azure conversation": ("azure2023/AzureLLMInferenceTrace_conv.csv", azure.read),
    "Mooncake conversation": ("mooncake/conversation_trace.jsonl", mooncake.read),
}
SPLITWISE_MODELS = ("bigscience/bloom", "meta-llama/Llama-2-70b-hf")
PERF_MODEL = "profiles/splitwise/perf_model.csv"
GAP_REQUESTS = (1200, 4000)
"""Requests of a run with our number of machines, and of one with the paper's."""
GAP_TOLERANCE = 0.06
SLOWER_BESIDE = 2.0
"""Attention of decodes beside prompts, times as slow as alone: as was measured on two boards (docs/costs.md)."""


@dataclass(frozen=True)
class Plan:
    """How thorough a run is: its sizes and searches."""

    size: Size
    tolerance: float
    shelf: Shelf
    data: Path | None
    loads: dict[str, UnitLoad]
    found: dict[str, scenarios.Compared]
    """Trace scenarios that were compared already: the rivals' part starts from them."""

    def trace(self, name: str, length_max: int = LENGTH_MAX) -> UnitLoad | None:
        """The trace's first requests; None without data."""
        if self.data is None:
            return None
        key = f"{name} {length_max}"
        if key not in self.loads:
            file, read = FILES[name]
            with (self.data / "traces" / file).open() as lines:
                rows = (row for row in read(lines, np.random.default_rng(SEED), None) if isinstance(row, Arrival))
                self.loads[key] = traced(name, islice(rows, COUNT * 2), COUNT, length_max)
        return self.loads[key]


def told(best: Best) -> dict[str, Any]:
    """One tuned system."""
    return {
        "system": str(best.system),
        "rate": round(best.rate, 4),
        "per_gpu": round(best.per_gpu, 5),
        "runs": best.runs,
        "tried": best.tried,
    }


def compared(found: scenarios.Compared) -> dict[str, Any]:
    """Both sides of a scenario."""
    scenario = found.scenario
    return {
        "scenario": scenario.name,
        "model": scenario.model,
        "gpu": scenario.gpu,
        "gpus": scenario.gpus,
        "targets": {"ttft_ms": scenario.ttft_ms, "tpot_ms": scenario.tpot_ms},
        "policy": scenario.policy,
        "tokens": {"in": round(found.case.load.mean_input(), 1), "out": round(found.case.load.mean_output(), 1)},
        "aggregated": told(found.whole),
        "disaggregated": told(found.apart),
        "ratio": round(found.ratio, 4),
        "published": scenario.published,
    }


def of_scenarios(plan: Plan) -> Iterator[dict[str, Any]]:
    """Ten published scenarios."""
    for scenario in scenarios.TEN:
        load = scenario.load(COUNT)
        found = compared(scenarios.compare(scenario, load, plan.shelf, plan.size, plan.tolerance))
        yield found


def of_beside(plan: Plan) -> Iterator[dict[str, Any]]:
    """Three of them again, with decodes that suffer more beside prompts than the profiles of these GPUs say."""
    slower = [replace(each, mixed_context=SLOWER_BESIDE) for each in plan.shelf.profiles]
    shelf = Shelf(plan.shelf.models, slower)
    for at in (0, 6, 7):
        scenario = scenarios.TEN[at]
        yield compared(scenarios.compare(scenario, scenario.load(COUNT), shelf, plan.size, plan.tolerance))


def of_traces(plan: Plan) -> Iterator[dict[str, Any]]:
    """Real traces at two tightnesses."""
    for scenario in scenarios.TRACES:
        found = on_trace(plan, scenario)
        if found is not None:
            yield compared(found)


def on_trace(plan: Plan, scenario: scenarios.Scenario) -> scenarios.Compared | None:
    """One scenario on its trace; None without data."""
    load = plan.trace(scenario.name.partition(",")[0])
    if load is not None and scenario.name not in plan.found:
        plan.found[scenario.name] = scenarios.compare(scenario, load, plan.shelf, plan.size, plan.tolerance)
    return plan.found.get(scenario.name)


def of_rivals(plan: Plan) -> Iterator[dict[str, Any]]:
    """All routing policies on two traces."""
    for at in (2, 4):
        scenario = scenarios.TRACES[at]
        both = on_trace(plan, scenario)
        if both is None:
            return
        for policy in rivals.POLICIES:
            (row,) = rivals.compare(both, plan.shelf, [policy])
            yield {
                "scenario": scenario.name,
                "policy": policy,
                "disaggregated": told(row.apart),
                "aggregated": told(row.whole),
            }


def of_distserve(plan: Plan) -> Iterator[dict[str, Any]]:
    """The paper's four applications as their targets tighten."""
    profiles = plan.shelf.profiles
    shelf = Shelf(plan.shelf.models, [*profiles, *distserve.vllm_profiles(profiles)])
    for application in distserve.APPLICATIONS:
        for scale in distserve.SCALES:
            load = application.load(COUNT)
            (row,) = distserve.compare(application, load, shelf, plan.size, plan.tolerance, [scale])
            yield {
                "application": application.name,
                "scale": scale,
                "targets": {"ttft_ms": application.ttft_ms * scale, "tpot_ms": application.tpot_ms * scale},
                "theirs": application.theirs,
                "colocated_2023": told(row.old),
                "colocated_same_engine": told(row.same),
                "colocated_chunked": told(row.chunked),
                "disaggregated": told(row.apart),
                "over_2023": row.over_old,
                "over_same_engine": row.over_same,
                "over_chunked": row.over_chunked,
            }


def of_splitwise(plan: Plan) -> Iterator[dict[str, Any]]:
    """The paper's designs at equal power and at equal cost."""
    load = plan.trace("Azure conversation", splitwise.LENGTH_MAX - 2)
    if load is None:
        return
    budgets = (("power", splitwise.ISO_POWER, splitwise.POWER), ("cost", splitwise.ISO_COST, splitwise.COST))
    size = splitwise.SIZE if plan.size is FULL else plan.size
    for model in SPLITWISE_MODELS:
        for budget, designs, weight in budgets:
            for row in splitwise.compare(model, designs, weight, load, plan.shelf, size, plan.tolerance):
                yield {
                    "model": model,
                    "equal": budget,
                    "design": row.design.name,
                    "chunked": row.chunked,
                    "machines": [list(each) for each in row.design.machines],
                    "power": round(row.design.power, 1),
                    "cost": round(row.design.cost, 2),
                    **told(row.best),
                }


def of_splitwise_gap(plan: Plan) -> Iterator[dict[str, Any]]:
    """Three of the paper's ratios while its simulator's assumptions are taken over, one after the other."""
    load = plan.trace("Azure conversation", splitwise.LENGTH_MAX - 2)
    if load is None or plan.data is None:
        return
    with (plan.data / PERF_MODEL).open() as lines:
        lookups = splitwise_gap.lookups(csv.DictReader(lines))
    few = plan.size is not FULL
    for said, assumed in splitwise_gap.STEPS:
        at_most = GAP_REQUESTS[1] if assumed.full_size else GAP_REQUESTS[0]
        count = at_most // 4 if few else at_most
        ground = splitwise_gap.Ground(
            model=splitwise_gap.MODEL,
            load=splitwise_gap.drawn(load, count, SEED) if assumed.drawn else load,
            shelf=plan.shelf,
            lookups=lookups,
            requests=count,
            tolerance=max(plan.tolerance, GAP_TOLERANCE),
        )
        yield {
            "step": said,
            "requests": count,
            "rates": {
                name: {"rate": round(found.rate, 4), "machines": [list(each) for each in found.design.machines]}
                for name, found in splitwise_gap.waterfall(ground, assumed).items()
            },
        }


PARTS: dict[str, Callable[[Plan], Iterator[dict[str, Any]]]] = {
    "scenarios": of_scenarios,
    "beside": of_beside,
    "traces": of_traces,
    "rivals": of_rivals,
    "distserve": of_distserve,
    "splitwise": of_splitwise,
    "splitwise_gap": of_splitwise_gap,
}


def parsed(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests and a coarser search; not for publishing")
    parser.add_argument("--only", choices=sorted(PARTS), action="append", help="this part; may be given again")
    parser.add_argument("--publish", action="store_true", help="write docs/")
    parser.add_argument("--json", action="store_true", help="the line of JSON alone on stdout, no tables")
    arguments = parser.parse_args(words)
    if arguments.quick and arguments.publish:
        parser.error("--quick --publish: quick runs are too short for steady queues; publish a full one")
    return arguments


def main(words: list[str]) -> int:
    """Run the parts, report, publish."""
    arguments = parsed(words)
    if inputs.missing():
        published.say("compare: no traces; set BATON_DATA to a folder that holds traces/. What needs them is left out")
    size, tolerance = (QUICK, 0.08) if arguments.quick else (FULL, 0.04)
    facts = published.machine()
    plan = Plan(size, tolerance, Shelf(shipped.models(), shipped.profiles()), inputs.folder(), {}, {})
    figures = before(arguments)
    gc.disable()  # runs make no cycles to speak of; collected between them
    for name in arguments.only or PARTS:
        began_s, rows = time.process_time(), []
        for row in PARTS[name](plan):
            rows.append(row)
            published.say(f"compare: {name}: {compare_tables.line(row)}")
            gc.collect()
        figures[name] = rows
        figures.setdefault("cpu_s", {})[name] = round(time.process_time() - began_s, 1)
        if arguments.publish:
            save(figures, facts)
    tables = compare_tables.tables(figures)
    if not arguments.json:
        published.show(tables)
    published.result("compare", figures, {})
    if arguments.publish:
        publish(figures, tables, facts)
    return 0


def before(arguments: argparse.Namespace) -> dict[str, Any]:
    """The parts of the last published run that this one leaves alone."""
    path = published.DOCS / "benchmarks" / "compare.json"
    kept: dict[str, Any] = {}
    if arguments.only and arguments.publish and path.exists():
        kept = json.loads(path.read_text())["figures"]
    kept.update(seed=SEED, requests_max=FULL.most, requests_min=FULL.fewest, lives=FULL.lives)
    return kept


def save(figures: dict[str, Any], facts: dict[str, Any]) -> None:
    """Save the figures so far: a run of half an hour may be stopped."""
    path = published.DOCS / "benchmarks" / "compare.json"
    path.write_text(json.dumps({"bench": "compare", "figures": figures, "machine": facts}, indent=1) + "\n")


def publish(figures: dict[str, Any], tables: list[published.Table], facts: dict[str, Any]) -> None:
    """docs/benchmarks/compare.json, the tables, the figures."""
    note = published.note_of(facts, compare_tables.how(figures))
    published.publish({"bench": "compare", "figures": figures, "targets": {}}, tables, facts, note)
    missing = compare_figures.draw(figures, published.DOCS / "figures", facts["date"])
    if missing:
        published.say(f"compare: {missing}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
