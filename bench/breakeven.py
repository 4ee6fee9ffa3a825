"""Compares always, never and Baton's own choice of handing over on the same traces; replays single choices both ways.

    BATON_DATA=/path/to/data make bench-breakeven             a quarter of an hour on two cores
    make bench-breakeven ARGS="--only mixed"                  traces, regret or mixed
    make bench-breakeven ARGS=--publish                       writes docs/

Traces, targets (5 ×) and GPUs are those of `bench.policy_grid`, fleet A, as two pools in the split that balances them
on average, and with every instance doing both (2,048 tokens a step). The rate is nine tenths of what Baton's own choice
serves there, found on the first 2,500 requests.

    traces   whole, three ways (of ServeGen, which has no end, 10,000 requests): attainment with the interval that ten
             stretches of the run give, and latency per token of the answer
    regret   500 sampled requests: the trace is replayed from 200 requests before (ServeGen: 800, its answers are long)
             to 100 after, with that one request handed over and not handed over, all else the same. Regret: by how much
             the sum of latencies per token, its own and all later ones, is above that of the better way
    mixed    Azure code, conversation and ServeGen in equal numbers on 4 instances that do both, no targets: mean
             latency under the policy `workload` and under rivals that know nothing of the requests' work
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from bench import inputs, published
from bench import policy_grid as grid
from bench.policy_cell import arrangement, pools_of
from bench.policy_loads import load
from bench.policy_tables import interval
from bench.published import Table, target
from cluster.instance import Role
from costs import shipped
from loadgen.arrival import Arrival
from sim.experiments.breakeven import MODES, PATIENCE_S, Regret, in_mode, outcome, regret
from sim.experiments.contest import served, splits, whole
from sim.experiments.loads import Size, UnitLoad
from sim.experiments.systems import EqualInstances, Shelf, System, simulate
from sim.experiments.tuning import Case, guess
from sim.result import Result

FACTOR: Final = 5
FLEET: Final = grid.FLEETS[0]
FLEETS: Final = ("two pools", "all do both")
BUDGET: Final = 2048
REQUESTS: Final = {"ServeGen R1": 10_000}
WHOLE: Final = 100_000
"""More than any other trace has."""

RATE_REQUESTS: Final = 2500
RATE_TOLERANCE: Final = 0.15
LOAD: Final = 0.9
"""Of the rate that Baton's own choice serves."""

DECISIONS: Final = 500
BEFORE: Final = {"ServeGen R1": 800}
BEFORE_MOST: Final = 200
AFTER: Final = 100
SEED: Final = 1

MIXED: Final = ("Azure code", "Azure conversation", "ServeGen R1")
MIXED_COUNT: Final = 4
MIXED_EACH: Final = 1000
MIXED_LOADS: Final = (0.7, 0.9)
MIXED_RIVALS: Final = ("round_robin", "least_requests")
INTELLIGENT_ROUTER: Final = 0.11
"""Its published gain in mean end-to-end latency over round robin (papers differ in model, fleet and load from this)."""

LIMIT: Final = 0.02


def shelf_of() -> Shelf:
    """Costs that ship."""
    return Shelf(shipped.models(), shipped.profiles())


class Ground:
    """One trace on one fleet, at its rate."""

    def __init__(self, name: str, fleet: str, data: Path) -> None:
        trace = next(each for each in grid.TRACES if each.name == name)
        cell = grid.Cell(trace, FACTOR, FLEET)
        self.name, self.fleet = name, fleet
        self.targets = cell.targets
        self.load = load(data, replace(trace, requests=REQUESTS.get(name, WHOLE)), grid.TUNING_WINDOW)
        self.shelf = shelf_of()
        case = Case(
            name=name,
            model=grid.MODEL,
            load=self.load,
            targets=cell.targets,
            size=Size(fewest=RATE_REQUESTS, most=RATE_REQUESTS, lives=1.0),
            tolerance=RATE_TOLERANCE,
        )
        pools = pools_of(cell)
        family = (
            splits(case, self.shelf, pools, grid.OURS, admission=True)
            if fleet == FLEETS[0]
            else whole(pools, [BUDGET], grid.OURS, admission=True)
        )
        self.system = family.systems[family.start]
        found, _ = served(case, self.shelf, self.system, guess(case, self.shelf, self.system))
        assert found, f"{name} on {self.system}: serves nothing within its targets"
        self.rate = LOAD * found

    def named(self) -> dict[str, Any]:
        """The first columns of a row."""
        system = arrangement(self.system)
        return {"trace": self.name, "fleet": self.fleet, "system": system, "rate": round(self.rate, 3)}

    def arrivals(self, first: int, last: int) -> list[Arrival]:
        """Some of the requests at the rate, from second 0 on."""
        some = UnitLoad(self.load.name, self.load.arrivals[first:last])
        return some.at_rate(self.rate, last - first)


# --- parts ------------------------------------------------------------------------------------------------------------


def of_trace(ground: Ground) -> dict[str, Any]:
    """A trace three ways."""
    arrivals = ground.arrivals(0, len(ground.load.arrivals))
    modes = {}
    for mode, policy in MODES.items():
        system = in_mode(ground.system, policy)
        result = simulate(system, grid.MODEL, ground.shelf, arrivals, PATIENCE_S, ground.targets)
        modes[mode] = asdict(outcome(result, ground.targets))
        gc.collect()
    return {
        **ground.named(),
        "part": "traces",
        "modes": modes,
    }


def of_regret(ground: Ground) -> dict[str, Any]:
    """Sampled decisions of one trace on one fleet."""
    before = BEFORE.get(ground.name, BEFORE_MOST)
    draws = np.random.default_rng(SEED).permutation(np.arange(before, len(ground.load.arrivals) - AFTER))
    wanted = DECISIONS // (len(grid.TRACES) * len(FLEETS)) + (ground.fleet == FLEETS[0])
    found: list[Regret] = []
    for number in draws.tolist():
        if len(found) == wanted:
            break
        if ground.load.arrivals[number].output_tokens < 2:
            continue
        arrivals = ground.arrivals(number - before, number + AFTER)
        one = regret(ground.system, grid.MODEL, ground.shelf, arrivals, before, ground.targets)
        if one is not None:
            found.append(one)
    rows = [{**asdict(each), "relative": each.relative, "gain": each.gain} for each in found]
    return {**ground.named(), "part": "regret", "decisions": rows}


def of_mixed(window: int, data: Path) -> dict[str, Any]:
    """One window of the mix under every policy, at every load."""
    shelf = shelf_of()
    pools = (EqualInstances(role=Role.BOTH, count=MIXED_COUNT, tp=1, gpu=FLEET.slower, batched_tokens=BUDGET),)
    mix = mixed(data, window)

    def run(policy: str, rate: float) -> Result:
        system = System(name="mixed", pools=pools, policy=policy)
        found = simulate(system, grid.MODEL, shelf, mix.at_rate(rate, len(mix.arrivals)), PATIENCE_S)
        gc.collect()
        return found

    capacity = throughput(run(MIXED_RIVALS[0], 1000.0))
    latency = {
        str(part): {
            policy: float(np.nanmean(run(policy, part * capacity).latency_s("e2e")))
            for policy in (grid.OURS, *MIXED_RIVALS)
        }
        for part in MIXED_LOADS
    }
    return {"part": "mixed", "window": window, "capacity": round(capacity, 3), "latency_s": latency}


def mixed(data: Path, window: int) -> UnitLoad:
    """Three traces in equal numbers, each with its own bursts, at a mean rate of 1."""
    several = [load(data, replace(trace, requests=MIXED_EACH), window) for trace in grid.TRACES if trace.name in MIXED]
    together = sorted((each for one in several for each in one.arrivals), key=lambda each: each.at_s)
    return UnitLoad("mixed", [msgspec.structs.replace(each, at_s=each.at_s * len(several)) for each in together])


def throughput(result: Result) -> float:
    """Requests a second of a fleet that never runs dry: between the fifth and the half of the answers that end."""
    ends = np.sort(result.columns["end_ns"]) / 1e9
    low, high = len(ends) // 5, len(ends) // 2
    return float((high - low) / (ends[high] - ends[low]))


PARTS: Final = ("traces", "regret", "mixed")

Job = tuple[tuple[str, ...], Any, str]


def jobs(parts: Sequence[str]) -> list[Job]:
    """(parts, trace or window, fleet), the longest first."""
    both = tuple(part for part in ("traces", "regret") if part in parts)
    traces = [trace.name for trace in reversed(grid.TRACES)]
    found: list[Job] = [(both, trace, fleet) for trace in traces for fleet in FLEETS if both]
    return found + [(("mixed",), window, "") for window in grid.WINDOWS if "mixed" in parts]


def one(job: Job, data: Path) -> list[dict[str, Any]]:
    """A job's rows, in a process of its own."""
    gc.set_threshold(200_000, 20, 20)
    parts, what, fleet = job
    began_s = time.process_time()
    if parts == ("mixed",):
        rows = [of_mixed(what, data)]
    else:
        ground = Ground(what, fleet, data)
        rows = [{"traces": of_trace, "regret": of_regret}[part](ground) for part in parts]
    return [{**row, "cpu_s": round((time.process_time() - began_s) / len(rows), 1)} for row in rows]


# --- what it comes to -------------------------------------------------------------------------------------------------


def worse_by(modes: dict[str, Any]) -> tuple[float, float, float]:
    """How much worse Baton's own choice (auto) is than the better of the two others: the attainment lost as a share of
    theirs, half the width of that share's interval, and the latency added as a share of theirs.
    """
    auto, others = modes["auto"], [modes["always"], modes["never"]]
    better = max(others, key=lambda each: float(each["attainment"]))
    latency = min(each["latency_ms"] for each in others)
    attained = better["attainment"]
    if not attained:
        return 0.0, 0.0, auto["latency_ms"] / latency - 1
    pairs = zip(better["stretches"], auto["stretches"], strict=True)
    _, half = interval([(theirs - ours) / attained for theirs, ours in pairs])
    return 1 - auto["attainment"] / attained, half, auto["latency_ms"] / latency - 1


def summed(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """All decisions together."""
    all_rows = list(rows)
    relative = np.array([row["relative"] for row in all_rows])
    gain = np.array([row["gain"] for row in all_rows])
    more_missed = [row["missed"][row["auto"]] - row["missed"][not row["auto"]] for row in all_rows]
    return {
        "decisions": len(all_rows),
        "handed_over": float(np.mean([row["auto"] for row in all_rows])),
        "regret_mean": float(relative.mean()),
        "regret_p95": float(np.quantile(relative, 0.95)),
        "worse": float((relative > 0).mean()),
        "gain_mean": float(gain.mean()),
        "gain_half": 1.96 * float(gain.std(ddof=1)) / math.sqrt(len(gain)),
        "more_missed_each": float(np.mean(more_missed)),
    }


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Everything that is published; single decisions are summed up."""
    traces = [row for row in rows if row["part"] == "traces"]
    decisions = [row for row in rows if row["part"] == "regret"]
    windows = [row for row in rows if row["part"] == "mixed"]
    found: dict[str, Any] = {"cpu_s": round(sum(row["cpu_s"] for row in rows), 1)}
    if traces:
        worse = [worse_by(row["modes"]) for row in traces]
        found["traces"] = traces
        found["worst_attainment"], found["worst_latency"] = (max(each[at] for each in worse) for at in (0, 2))
    if decisions:
        found["regret"] = [
            {**{key: row[key] for key in ("trace", "fleet", "rate")}, **summed(row["decisions"])} for row in decisions
        ]
        found["regret_of_all"] = summed(each for row in decisions for each in row["decisions"])
    if windows:
        found["mixed"] = [gains(windows, str(part), rival) for part in MIXED_LOADS for rival in MIXED_RIVALS]
    return found


def gains(windows: Sequence[dict[str, Any]], part: str, rival: str) -> dict[str, Any]:
    """How much lower Baton's latency is than a rival's, window by window."""
    each = [1 - row["latency_s"][part][grid.OURS] / row["latency_s"][part][rival] for row in windows]
    mean, half = interval(each)
    seconds = {name: float(np.mean([row["latency_s"][part][name] for row in windows])) for name in (grid.OURS, rival)}
    return {"load": float(part), "rival": rival, "gain": mean, "half": half, "latency_s": seconds}


def targets_of(found: dict[str, Any]) -> dict[str, Any]:
    """The targets."""
    made = {}
    if "traces" in found:
        made["worse_attainment"] = target(found["worst_attainment"], LIMIT)
        made["worse_latency"] = target(found["worst_latency"], LIMIT)
    if "mixed" in found:
        least = min(each["gain"] for each in found["mixed"] if each["rival"] == MIXED_RIVALS[0])
        made["latency_gain"] = target(least, INTELLIGENT_ROUTER, at_most=False)
    return made


def tables_of(found: dict[str, Any]) -> list[Table]:
    """Tables of the parts that ran."""
    makers = {"traces": _traces, "regret": _regret, "mixed": _mixed}
    return [make(found) for name, make in makers.items() if name in found]


def _traces(found: dict[str, Any]) -> Table:
    def cells(row: dict[str, Any]) -> list[str]:
        modes = row["modes"]
        said = [f"{modes[name]['attainment']:.1%}, {modes[name]['latency_ms']:.1f}" for name in MODES]
        lost, half, added = worse_by(modes)
        share = f"{modes['auto']['handed_over']:.0%}"
        return [
            f"{row['trace']}, {row['system']}",
            f"{row['rate']:.1f}",
            *said,
            share,
            f"{lost:+.1%} ± {half:.1%}, {added:+.1%}",
        ]

    columns = ("trace, fleet", "req/s", *MODES, "auto hands over", "auto worse than the better by")
    title = "Whole traces: attainment, and latency per token of the answer in ms"
    return Table(title, columns, [cells(row) for row in found["traces"]])


def _regret(found: dict[str, Any]) -> Table:
    def cells(name: str, row: dict[str, Any]) -> list[str]:
        return [
            name,
            str(row["decisions"]),
            f"{row['handed_over']:.0%}",
            f"{row['regret_mean']:.2%}",
            f"{row['regret_p95']:.2%}",
            f"{row['worse']:.0%}",
            f"{row['gain_mean']:+.2%} ± {row['gain_half']:.2%}",
            f"{row['more_missed_each']:+.2f}",
        ]

    rows = [cells(f"{row['trace']}, {row['fleet']}", row) for row in found["regret"]]
    columns = (
        "trace, fleet",
        "decisions",
        "handed over",
        "mean regret",
        "p95",
        "the other way was better",
        "the other way costs",
        "targets missed, less the other way's",
    )
    title = f"Single decisions both ways, over the request and the {AFTER - 1} after it"
    return Table(title, columns, [*rows, cells("all", found["regret_of_all"])])


def _mixed(found: dict[str, Any]) -> Table:
    rows = [
        [
            f"{each['load']:.0%}",
            each["rival"],
            f"{each['latency_s'][each['rival']]:.2f}",
            f"{each['latency_s'][grid.OURS]:.2f}",
            f"{each['gain']:+.1%} ± {each['half']:.1%}",
        ]
        for each in found["mixed"]
    ]
    columns = ("load", "rival", "its mean latency, s", "ours, s", "ours lower by")
    return Table(f"Mixed traces on {MIXED_COUNT} {FLEET.slower}, no targets", columns, rows)


def parsed(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(PARTS), action="append", help="this part; may be given again")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="jobs at a time")
    parser.add_argument("--publish", action="store_true", help="write docs/")
    parser.add_argument("--json", action="store_true", help="the line of JSON alone on stdout, no tables")
    arguments = parser.parse_args(words)
    if arguments.only and arguments.publish:
        parser.error("--only --publish: only a whole run is published")
    return arguments


def main(words: list[str]) -> int:
    """Run the parts, report, publish."""
    arguments = parsed(words)
    root = inputs.required("breakeven")
    facts = published.machine()
    wanted = jobs(arguments.only or list(PARTS))
    rows: dict[Job, list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(max(1, arguments.processes)) as pool:
        running: dict[Future[list[dict[str, Any]]], Job] = {pool.submit(one, job, root): job for job in wanted}
        for done in as_completed(running):
            job = running[done]
            rows[job] = done.result()
            left = len(wanted) - len(rows)
            spent_s = sum(row["cpu_s"] for row in rows[job])
            said = f"{' and '.join(job[0])}: {job[1]} {job[2]}".rstrip()
            published.say(f"breakeven: {said} ({spent_s:.0f} s of CPU; {left} left)")
    found = figures_of([row for job in wanted for row in rows[job]])
    tables = tables_of(found)
    if not arguments.json:
        published.show(tables)
    told = published.result("breakeven", found, targets_of(found))
    if arguments.publish:
        published.publish(told, tables, facts, published.note_of(facts, "simulated"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
