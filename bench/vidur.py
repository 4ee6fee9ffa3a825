"""Vidur beside Baton's simulator: the same requests through the same fleet, and the cost of each.

    make bench-vidur                    three rounds, about 11 minutes; Vidur is installed into .bench/vidur first
    make bench-vidur ARGS=--quick       one round of one fleet; ARGS=--publish writes docs/benchmarks

Lengths are those of Azure's conversation trace of 2023 (BATON_DATA; without it made-up ones with its median and 90th
percentile), arrivals are Poisson, all from one seed and written once, as a trace that both read. K replicas of
Llama-3-8B on an H100 each take them in turns, with chunked prefill within 2,048 tokens a step: vLLM's scheduling, which
Vidur calls Sarathi. Vidur's operator tables are made from our cost model (bench/vidur_tables.py): this compares speed,
and the means beside each other show no more than that both did the same work.

Measured is the CPU time of the simulation alone, without imports, tables and reading the trace, per request; each run
is a process of its own. Target: Vidur takes at least 10 times the CPU time of Baton's simulator. *Vidur* is its fastest
setting: the predictor in C++, no metrics kept. *Vidur as it comes* has its Python predictor, its metrics and Chrome
trace, but draws no plots.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from bench import rivals
from bench.published import Table, machine, note_of, publish, result, say, show, target
from bench.vidur_ours import engine
from bench.vidur_tables import DATE, GRANULARITY, Bounds, table_csv, tables, trace_csv, within
from loadgen import arrivals, lengths, traces
from loadgen.arrival import Arrival
from loadgen.made import made

BOUNDS = Bounds(batch=256, chunk=2048, tokens=16_384)
"""`tokens`: Azure's longest prompt has 14,050."""
MODEL = {"model": "meta-llama/Llama-3.1-8B", "their_model": "meta-llama/Llama-3-8B"}
"""Models of one size; Vidur does not know the newer name."""
GPU = {"gpu": "H100-SXM", "their_device": "h100"}

BATON, VIDUR, AS_IT_COMES = "Baton", "Vidur", "Vidur as it comes"
RATIO = 10.0
MEANS_OFF = 0.03
ROOT = rivals.ROOT


@dataclass(frozen=True, slots=True)
class Cell:
    """One load on one fleet."""

    replicas: int
    rate: float
    """Requests a second and replica: 8, as in bench/sim.py; these lengths overload a replica at 20."""
    requests: int
    longer: int = 1
    """Factor on the lengths of Azure's answers."""

    def __str__(self) -> str:
        more = f", answers × {self.longer}" if self.longer > 1 else ""
        return f"{self.replicas} × {self.rate:g} req/s{more}"


FULL = (
    Cell(1, 8, 2000), Cell(8, 8, 4000), Cell(32, 8, 12_000), Cell(128, 8, 32_000),
    Cell(8, 2, 2000), Cell(8, 4, 3000), Cell(8, 16, 4000), Cell(8, 2, 2000, longer=4),
)  # fmt: skip
QUICK = (Cell(8, 8, 1000),)
WITH_ALL = Cell(8, 8, 4000)
"""The cell in which Vidur also runs with its defaults."""


def load(cell: Cell, seed: int = 1) -> Iterator[Arrival]:
    """The requests of one cell."""
    rng = np.random.default_rng(seed)
    path = _trace()
    if path is None:
        inputs, outputs = (lengths.parse(f"lognormal:p50={p50},p90={p90}") for p50, p90 in ((1020, 2735), (129, 424)))
    else:
        rows = [row for row in traces.FORMATS["azure"](path.open(), rng, None) if isinstance(row, Arrival)]
        inputs = lengths.empirical(row.input_tokens for row in rows)
        outputs = lengths.empirical(row.output_tokens for row in rows)
    times = arrivals.poisson(cell.rate * cell.replicas, rng)
    found = islice(made(times, inputs, outputs, rng), cell.requests)
    longer = (replace(each, output_tokens=each.output_tokens * cell.longer) for each in found)
    return within(longer, BOUNDS.tokens)


def _trace() -> Path | None:
    data = os.environ.get("BATON_DATA")
    return None if data is None else next(Path(data).glob("traces/azure2023/*conv*.csv"), None)


class Contest:
    """Runs both on one cell after the other. Their inputs lie in one folder."""

    def __init__(self, folder: Path, theirs: Path | None) -> None:
        self._folder = folder
        self._theirs = theirs
        self._job = {
            **MODEL,
            **GPU,
            **asdict(BOUNDS),
            "granularity": GRANULARITY,
            "date": DATE,
            "policy": "round_robin",
        }
        costs, config = engine(self._job)
        self._job |= {"blocks": config.num_blocks, "tables": str(folder / "tables"), "trace": str(folder / "trace.csv")}
        self.because = costs.because
        if theirs is not None:
            say(f"tables for Vidur from {costs.because}")
            (folder / "tables").mkdir()
            for name, rows in tables(costs, BOUNDS):
                packed = lzma.compress(table_csv(rows).encode(), preset=1)
                (folder / "tables" / f"{name}.csv.xz").write_bytes(packed)

    def names(self, cell: Cell) -> list[str]:
        """The simulators that run in this cell."""
        if self._theirs is None:
            return [BATON]
        return [BATON, VIDUR, AS_IT_COMES] if cell == WITH_ALL else [BATON, VIDUR]

    def run(self, cell: Cell, name: str) -> dict[str, Any]:
        """One of them, in a process of its own."""
        job, found = self._folder / "job.json", self._folder / "found.json"
        asked = {"replicas": cell.replicas, "native": name == VIDUR, "metrics": name == AS_IT_COMES}
        job.write_text(json.dumps({**self._job, **asked}))
        words = [sys.executable, "-m", "bench.vidur_ours"]
        if name != BATON:
            words = [str(self._theirs), "-I", str(ROOT / "bench" / "vidur_theirs.py")]
        done = subprocess.run([*words, str(job), str(found)], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"bench-vidur: {name} ended with {done.returncode}: {done.stderr[-2000:]}")
        told: dict[str, Any] = json.loads(found.read_text())
        if told["served"] != cell.requests:
            sys.exit(f"bench-vidur: {name} served {told['served']} of {cell.requests} requests of {cell}")
        return told | {"cpu_us": told["cpu_s"] / cell.requests * 1e6}

    def rounds(self, cells: tuple[Cell, ...], count: int) -> Results:
        """All cells this many times; the first simulator changes from round to round."""
        results: Results = {}
        for number in range(count):
            for cell in cells:
                (self._folder / "trace.csv").write_text(trace_csv(load(cell)))
                names = self.names(cell)
                for name in reversed(names) if number % 2 else names:
                    told = self.run(cell, name)
                    results.setdefault((cell, name), []).append(told)
                    spent = (
                        f"{told['cpu_us']:,.0f} µs of CPU a request, {told['cpu_s']:.1f} s, {told['peak_mb']:,.0f} MB"
                    )
                    say(f"[{number + 1}/{count}] {cell}, {cell.requests:,} requests: {name} {spent}")
        return results


Results = dict[tuple[Cell, str], list[dict[str, Any]]]
"""The results of every round of a cell and a simulator."""


def ratio(results: Results, cell: Cell, name: str = VIDUR) -> float | None:
    """The median over the rounds of Vidur's CPU time to Baton's; None if it did not run."""
    theirs, ours = results.get((cell, name), []), results.get((cell, BATON), [])
    found = [its["cpu_us"] / our["cpu_us"] for its, our in zip(theirs, ours, strict=False)]
    return statistics.median(found) if found else None


def summary(results: Results) -> tuple[list[Table], dict[str, Any], dict[str, Any]]:
    """Tables, figures and targets."""
    cost, means = [], []
    figures: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    for (cell, name), rounds in results.items():
        middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        times = ratio(results, cell, name)
        figures.setdefault(str(cell), {"requests": cell.requests})[name] = {
            **{key: round(value, 3) for key, value in middle.items()},
            "cpu_us_rounds": [round(each["cpu_us"], 1) for each in rounds],
            "ratio": None if times is None else round(times, 2),
        }
        head = [f"{cell}, {name}", f"{cell.requests:,}"]
        cost.append(
            [*head, f"{middle['cpu_us']:,.0f}", _times(times), f"{middle['cpu_s']:,.1f}", f"{middle['peak_mb']:,.0f}"]
        )
        means.append([head[0], *(f"{middle[key]:,.1f}" for key in ("requests_s", "ttft_ms", "e2e_ms"))])
        if name == BATON:
            targets[f"Vidur's CPU to ours, {cell}"] = target(ratio(results, cell), RATIO, at_most=False, digits=2)
        elif name == VIDUR:
            ours = statistics.median(each["e2e_ms"] for each in results[cell, BATON])
            targets[f"mean E2E off by, {cell}"] = target(abs(middle["e2e_ms"] / ours - 1), MEANS_OFF, digits=4)
    columns = ["replicas × load, simulator", "requests", "CPU µs a request", "to ours", "CPU s", "peak MB"]
    shown = ["replicas × load, simulator", "requests/s", "TTFT mean, ms", "E2E mean, ms"]
    titles = (
        "CPU of the simulation alone, medians",
        "What they simulated with costs from one source, which says nothing of accuracy",
    )
    return [Table(titles[0], columns, cost), Table(titles[1], shown, means)], figures, targets


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} ×"


def _installed() -> Path | None:
    """The Python that has Vidur."""
    try:
        return rivals.environment("vidur") / "python"
    except rivals.NotInstalled as error:
        say(f"Vidur is not installed, so only our simulator runs: {error}")
        return None


def main() -> int:
    """Measure, report, and with --publish write it down."""
    parser = argparse.ArgumentParser(
        prog="bench-vidur", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of 8 replicas, about a quarter of a minute")
    parser.add_argument("--rounds", type=int, metavar="N", help="default: 3, with --quick 1")
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks/vidur.json and the page's tables")
    args = parser.parse_args()
    count = (1 if args.quick else 3) if args.rounds is None else args.rounds
    if count < 1:
        parser.error(f"argument --rounds: {count}: must be at least 1")
    theirs = _installed()
    if args.publish and (theirs is None or _trace() is None):
        parser.error("argument --publish: needs Vidur installed, and BATON_DATA with traces/azure2023")
    facts = machine()
    with tempfile.TemporaryDirectory() as folder:
        contest = Contest(Path(folder), theirs)
        results = contest.rounds(QUICK if args.quick else FULL, count)
    shown, figures, targets = summary(results)
    show(shown)
    trace = _trace()
    source = {"lengths": "made up (no BATON_DATA)" if trace is None else trace.name, "costs": contest.because}
    told = result("vidur", {**figures, **source, "version": rivals.version_of("vidur", "vidur")}, targets)
    if args.publish:
        publish(told, shown, facts, note_of(facts, f"Vidur {told['figures']['version']}, {count} rounds"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
