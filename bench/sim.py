"""How fast the simulator is: 1,000 instances and a million requests on one core.

    BATON_DATA=/path/to/data python bench/sim.py [--quick] [--requests N] [--instances N] [--parts]

The load is Azure's conversation trace of 2023, made denser by copies and then faster, so that the fleet is about half
busy (8 requests a second and instance); without BATON_DATA, made-up lengths with its median and 90th percentile.
The fleet is 2 prefill to 3 decode instances of Llama-3.1-8B on an H100 each. No checks (`--no-checks`), and no prefix
caches, as no prompt of this trace is known to share anything (`-- --no-enable-prefix-caching`).
Targets: 600 us of CPU per request (10 minutes for the million) and 4 GB; a choice among 1,000 instances in 200 us and
among 16 in 60 us. `--quick` is 20,000 requests; `--parts` says where the time goes, and is slower for it.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from costs.hardware import gpu_named
from costs.shape import ONE_GPU
from costs.shipped import model_named, profiles
from loadgen import arrivals, lengths, traces
from loadgen.arrival import Arrival
from loadgen.made import made
from loadgen.report import Targets
from loadgen.shaping import denser, faster
from router.policy import POLICIES
from router.policy.candidates import Wanted
from router.view import View
from sim.engine_args import engine_of, read_words
from sim.fleet import Member, member
from sim.result import Result
from sim.settings import Settings
from sim.world import World

TRACE = "traces/azure2023/AzureLLMInferenceTrace_conv.csv"
RATE = 8.0
"""Requests a second and instance."""


def load(instances: int, count: int) -> tuple[str, Iterator[Arrival]]:
    """Where it is from, and the arrivals."""
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


def fleet(instances: int) -> list[Member]:
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


def choice_us(instances: int, times: int = 2000) -> float:
    """Microseconds of one choice with the changes around it: two legs begin, two end."""
    view, wanted = View(), Wanted(model="m", hand_over=True)
    rng = np.random.default_rng(0)
    for number in range(instances):
        name = InstanceId(f"i{number}")
        view.add(Instance(id=name, role=Role.PREFILL if number % 5 < 2 else Role.DECODE, url="u"))
        view.seen(name, ({"id": "m"},), Load(waiting=int(rng.integers(3)), kv_usage=float(rng.random())))
        view.get(name).credits = 256
    choose, spent = POLICIES["least_load"], 0.0
    for _ in range(times):
        began = time.thread_time()
        chosen = choose(view.all(), wanted)
        spent += time.thread_time() - began
        for name in (chosen.prefill, chosen.decode):
            assert name is not None
            view.leg_started(name)
            if rng.random() < 0.9:
                view.leg_ended(name)
    return spent / times * 1e6


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


def main() -> None:
    """Run, print the table and the line for machines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 requests")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--parts", action="store_true", help="profile: where the time goes")
    arguments = parser.parse_args()
    count = 20_000 if arguments.quick else arguments.requests
    origin, found = load(arguments.instances, count)
    world = World(fleet(arguments.instances), Settings(checks=False))
    profile = cProfile.Profile() if arguments.parts else None
    gc.disable()
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    result: Result = world.run(found) if profile is None else profile.runcall(world.run, found)
    wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    gc.enable()
    report = result.report(Targets(ttft_ms=500, tpot_ms=40))
    gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    done = len(result.columns)
    figures = {
        "requests": done,
        "instances": arguments.instances,
        "simulated_s": round(result.end_ns / 1e9, 1),
        "wall_s": round(wall_s, 1),
        "cpu_s": round(cpu_s, 1),
        "cpu_us_per_request": round(cpu_s / done * 1e6, 1),
        "events_per_request": round(result.events / done, 2),
        "peak_gb": round(gb, 2),
        "choice_us_16": round(choice_us(16), 1),
        "choice_us_1000": round(choice_us(1000), 1),
        "served": report.completed,
        "attainment": report.attainment,
    }
    print(f"{origin}, {result.counts}")
    for name, value in figures.items():
        print(f"{name:22} {value}")
    if profile is not None:
        parts(profile, done)
    limits = {"cpu_us_per_request": 600.0, "peak_gb": 4.0, "choice_us_16": 60.0, "choice_us_1000": 200.0}
    targets = {
        name: {
            "value": figures[name],
            "target": limit,
            "met": bool(figures[name] is not None and figures[name] <= limit),
        }
        for name, limit in limits.items()
    }
    print(json.dumps({"bench": "sim", "figures": figures, "targets": targets}))


if __name__ == "__main__":
    main()
