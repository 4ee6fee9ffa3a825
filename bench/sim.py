"""The speed of the simulator: 1,000 instances and a million requests on one core.

    BATON_DATA=/path/to/data make bench-sim [ARGS="--quick | --publish | --requests N --instances N --parts"]

The load is Azure's conversation trace of 2023, made denser by copies and then faster, so that the fleet is about half
busy (8 requests a second and instance); without BATON_DATA, made-up lengths with its median and 90th percentile.
The fleet is 2 prefill to 3 decode instances of Llama-3.1-8B on an H100 each. No checks (`--no-checks`), and no prefix
caches, as no prompt of this trace is known to share anything (`-- --no-enable-prefix-caching`).
Targets: the million within 10 minutes (600 us of CPU per request) and 4 GB. `--quick` is 20,000 requests; `--parts`
says where the time goes, and is slower for it.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bench import published
from cluster.ids import InstanceId
from cluster.instance import Role
from costs.hardware import gpu_named
from costs.shape import ONE_GPU
from costs.shipped import model_named, profiles
from loadgen import arrivals, lengths, traces
from loadgen.arrival import Arrival
from loadgen.made import made
from loadgen.report import Targets
from loadgen.shaping import denser, faster
from sim.engine_args import engine_of, read_words
from sim.fleet import SimulatedMember, member
from sim.result import Result
from sim.settings import SimSettings
from sim.world import World

TRACE = "traces/azure2023/AzureLLMInferenceTrace_conv.csv"
RATE = 8.0
"""Requests a second and instance."""


def load(instances: int, count: int) -> tuple[str, Iterator[Arrival]]:
    """The load's origin, and its arrivals."""
    rate, rng = RATE * instances, np.random.default_rng(1)
    data = os.environ.get("BATON_DATA")
    path = None if data is None else next(Path(data).glob(f"{Path(TRACE).parent}/*conv*.csv"), None)
    if path is None:
        inputs, outputs = (lengths.parse(f"lognormal:p50={p50},p90={p90}") for p50, p90 in ((1020, 2735), (129, 424)))
        return "made-up lengths (no BATON_DATA)", islice(made(arrivals.poisson(rate, rng), inputs, outputs, rng), count)
    rows = [row for row in traces.FORMATS["azure"](path.open(), rng, None) if isinstance(row, Arrival)]
    copies = max(1.0, count / len(rows))
    here = len(rows) * copies / (rows[-1].at_s - rows[0].at_s)
    return f"{path.name} x {copies:.1f}", islice(faster(denser(rows, copies * 1.01, rng), rate / here), count)


def fleet(instances: int) -> list[SimulatedMember]:
    """2 prefill to 3 decode instances."""
    model, gpu = model_named("meta-llama/Llama-3.1-8B"), gpu_named("H100-SXM")
    found = []
    for role, count in ((Role.PREFILL, instances * 2 // 5), (Role.DECODE, instances - instances * 2 // 5)):
        costs, config = engine_of(
            role, model, gpu, ONE_GPU, read_words(["--no-enable-prefix-caching"]), profiles=profiles()
        )
        first = member(role.value, role, "m", costs, config)
        found += [replace(first, name=InstanceId(f"{role.value}-{number}")) for number in range(count)]
    return found


def parts(profile: cProfile.Profile, count: int) -> None:
    """Own time by package, microseconds per request."""
    found: dict[str, float] = {}
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, object]] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, _, name), (_, _, own_s, _, _) in stats.items():
        path = Path(file)
        part = "/".join(path.parts[-3:-1]) if "twin" in path.parts else path.parent.name or "built in"
        found[f"heap ({name})" if "heapp" in name else part] = found.get(part, 0.0) + own_s
    for part, own_s in sorted(found.items(), key=lambda each: -each[1])[:14]:
        print(f"  {part:24} {own_s / count * 1e6:8.1f} us a request")


def told(arrivals: Iterator[Arrival], count: int) -> Iterator[Arrival]:
    """The same arrivals; a line on stderr at each twentieth of them."""
    began_s = time.monotonic()
    for number, each in enumerate(arrivals, 1):
        yield each
        if number % max(1, count // 20) == 0:
            published.say(f"bench-sim: {number:,} of {count:,} requests have come, {time.monotonic() - began_s:.0f} s")


def simulate(instances: int, count: int, *, profile: cProfile.Profile | None) -> tuple[str, Result, dict[str, Any]]:
    """The load's origin, the result, and its cost. Python's garbage collector is off meanwhile."""
    origin, found = load(instances, count)
    world, arrivals = World(fleet(instances), SimSettings(checks=False)), told(found, count)
    gc.disable()
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    result: Result = world.run(arrivals) if profile is None else profile.runcall(world.run, arrivals)
    wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    gc.enable()
    report = result.report(Targets(ttft_ms=500, tpot_ms=40))
    done = len(result.columns)
    gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return (
        origin,
        result,
        {
            "requests": done,
            "instances": instances,
            "simulated_s": round(result.end_ns / 1e9, 1),
            "wall_s": round(wall_s, 1),
            "cpu_s": round(cpu_s, 1),
            "cpu_us_per_request": round(cpu_s / done * 1e6, 1),
            "events_per_request": round(result.events / done, 2),
            "peak_gb": round(gb, 2),
            "served": report.completed,
            "attainment": None if report.attainment is None else round(report.attainment, 4),
        },
    )


def main(words: list[str]) -> int:
    """Run, print the table and the line for machines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 requests; not for publishing")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--parts", action="store_true", help="profile: where the time goes")
    parser.add_argument("--publish", action="store_true", help="write docs/")
    arguments = parser.parse_args(words)
    if arguments.publish and (arguments.quick or arguments.parts):
        parser.error("--publish wants the whole run, without a profile")
    facts = published.machine()
    count = 20_000 if arguments.quick else arguments.requests
    profile = cProfile.Profile() if arguments.parts else None
    origin, result, figures = simulate(arguments.instances, count, profile=profile)
    rows = [[name.replace("_", " "), f"{value:,}" if value is not None else "–"] for name, value in figures.items()]
    tables = [published.Table("One run, one process", ["figure", "value"], rows)]
    published.show(tables)
    if profile is not None:
        parts(profile, len(result.columns))
    whole = (figures["requests"], figures["instances"]) == (1_000_000, 1000)
    targets = {
        "cpu_us_per_request": published.target(figures["cpu_us_per_request"], 600.0),
        "peak_gb": published.target(figures["peak_gb"], 4.0),
    }
    if whole:  # a time on the clock says something of the whole run alone, and of a machine that does nothing else
        targets["wall_s"] = published.target(figures["wall_s"], 600.0)
    line = published.result("sim", figures, targets)
    if arguments.publish:
        published.publish(
            line, tables, facts, published.note_of(facts, f"{origin}; {result.counts['pulls']:,} hand-overs")
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
