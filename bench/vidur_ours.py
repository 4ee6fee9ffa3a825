"""One run of our simulator on the job that Vidur gets: `python -m bench.vidur_ours JOB.json FOUND.json`.

A fleet of instances that do both phases, each with the settings of Vidur's replicas. What Vidur does not model takes no
time here: HTTP, the router, the engine's front end, asynchronous scheduling. Everything else is simulated as always:
journeys, credits, heartbeats, the router's view, a row for every request. Contents, checks and prefix caches are off,
as in bench/sim.py.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.vidur_tables import arrivals_of
from cluster.ids import InstanceId
from cluster.instance import Role
from costs.cost import Costs
from costs.hardware import gpu_named
from costs.shape import ONE_GPU
from costs.shipped import model_named, profiles
from engine.twin.config import TwinConfig
from router.scheduler.scoring.policies import POLICIES
from sim.baselines import BASELINES
from sim.engine_args import engine_of, read_words
from sim.fleet import SimulatedMember, member
from sim.settings import SimSettings
from sim.world import World


def engine(job: dict[str, Any]) -> tuple[Costs, TwinConfig]:
    """One instance's costs and settings."""
    words = ["--no-enable-prefix-caching", "--no-async-scheduling"]
    words += ["--max-num-batched-tokens", str(job["chunk"]), "--max-num-seqs", str(job["batch"])]
    words += ["--max-model-len", str(job["tokens"])]
    model, gpu = model_named(job["model"]), gpu_named(job["gpu"])
    return engine_of(Role.BOTH, model, gpu, ONE_GPU, read_words(words), profiles=profiles())


def fleet(job: dict[str, Any]) -> list[SimulatedMember]:
    """The replicas."""
    costs, config = engine(job)
    first = replace(member("both", Role.BOTH, "m", costs, config), prompt_front_ns=0)
    return [replace(first, name=InstanceId(f"both-{number}")) for number in range(job["replicas"])]


def _peak_mb() -> float:
    """The peak memory of this process. `ru_maxrss` would count its parent's before the fork."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The cost of the run, and its result."""
    arrivals = list(arrivals_of(Path(job["trace"]).read_text()))
    policy = BASELINES[job["policy"]]() if job["policy"] in BASELINES else POLICIES[job["policy"]]
    world = World(fleet(job), SimSettings(checks=False, router_us=0.0, hop_us=0.0), policy=policy)
    before_mb = _peak_mb()
    gc.collect()
    gc.disable()  # for both simulators
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    try:
        result = world.run(arrivals)
    finally:
        gc.enable()
    cpu_s, wall_s = time.process_time() - began_cpu_s, time.perf_counter() - began_s
    peak_mb = _peak_mb()
    report = result.report()
    return {
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "before_mb": before_mb,
        "peak_mb": peak_mb,
        "served": report.completed,
        "requests_s": report.completed_rate,
        "ttft_ms": report.ttft_ms.mean,
        "e2e_ms": report.e2e_ms.mean,
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))
