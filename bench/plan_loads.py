"""The loads of `bench.plan`, fixed before its first result: four traces, their targets, and their averages.

Targets (5 × the unloaded latency on H100, nine in ten arrivals) and windows are `bench.policy_grid`'s, of each window
the first half: a plan simulates a load dozens of times. Each trace's rate is a round number for which several GPUs are
needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from baton import planning
from baton.planning import Task
from bench import policy_loads
from bench.policy_grid import MODEL, TRACES, Trace
from cluster.spec import Model, Pool, Pools
from costs.hardware import gpu_named
from costs.shipped import model_named
from goodput.demand import ClassPromise as Promised
from goodput.demand import demand_of
from loadgen.arrival import Arrival
from loadgen.arrivals import poisson
from loadgen.report import Targets
from router.core.values import Promise
from sim.evaluate import Goal

FACTOR: Final = 5
ATTAINMENT: Final = 0.9
RATES: Final[Mapping[str, float]] = MappingProxyType(
    {"Azure code": 40.0, "Azure conversation": 100.0, "Mooncake conversation": 8.0, "ServeGen R1": 30.0}
)
"""Rate of each trace's load, requests a second."""
GPUS: Final = (("H100-SXM", 32),)
EFFORT: Final = planning.EFFORT
"""Requests that a plan may simulate: the user's default. (It was a third of that until plans ran compiled.)"""
SEED: Final = 25
MADE_ON, HELD_OUT = 0, 1
"""Windows of a trace: the one that plans are made on, and a stretch of the same kind that no plan has seen."""


@dataclass(frozen=True, slots=True)
class Averages:
    """The averages that a planner gets."""

    rate: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    """Tokens of each prompt that an unlimited prefix cache would have."""


def task_of(trace: Trace, data: Path, window: int = MADE_ON) -> Task:
    """One window of a trace at its rate."""
    load = policy_loads.load(data, trace, window)
    arrivals = load.at_rate(RATES[trace.name], trace.requests // 2)
    return task(arrivals, goal_of(trace), block_tokens=trace.block_tokens)


def task(arrivals: Sequence[Arrival], goal: Goal, *, block_tokens: int | None = None) -> Task:
    """Llama-3.1-8B on H100s."""
    args = {} if block_tokens is None else {"block-size": block_tokens}
    pool = Pool(engine_args=args)
    return Task(
        model=Model(name=MODEL, pools=Pools(prefill=pool, decode=pool, both=pool)),
        shape=model_named(MODEL),
        gpus=tuple((gpu_named(name), count) for name, count in GPUS),
        arrivals=tuple(arrivals),
        goals={"all": goal},
        usual="all",
        effort=EFFORT,
    )


def goal_of(trace: Trace) -> Goal:
    """The trace's promise."""
    ttft_ms, tpot_ms = trace.unloaded("H100")
    return goal(round(FACTOR * ttft_ms, 1), round(FACTOR * tpot_ms, 2), ATTAINMENT)


def goal(ttft_ms: float | None, tpot_ms: float, attainment: float) -> Goal:
    """A goal in the form of a cluster file's class."""
    return Goal(
        targets=Targets(ttft_ms, None, tpot_ms, None),
        attainment=attainment,
        promise=Promise(ttft_ms=ttft_ms or 0.0, tpot_ms=tpot_ms),
    )


def averages(made_on: Task) -> Averages:
    """Means of a load."""
    demand = demand_of(made_on.arrivals, {"all": Promised(ttft_ms=1.0)}, "all")
    return Averages(
        rate=(len(demand) - 1) / demand.span_s,
        input_tokens=round(float(demand.inputs.mean())),
        output_tokens=round(float(demand.outputs.mean())),
        cached_tokens=round(float(demand.cached.mean())),
    )


def averaged(made_on: Task) -> Task:
    """The same task with every request the mean one, and Poisson arrivals at the mean rate: what a planner sees that is
    told averages. What the mean request has in a cache is one beginning that all of them share.
    """
    mean = averages(made_on)
    times = poisson(mean.rate, np.random.default_rng(SEED))
    block = max((each.block_tokens for each in made_on.arrivals), default=0) or 1
    prefix = tuple(range(1, mean.cached_tokens // block + 1))
    arrivals = tuple(
        Arrival(
            at_s=next(times),
            input_tokens=mean.input_tokens,
            output_tokens=mean.output_tokens,
            prefix=prefix,
            block_tokens=block if prefix else 0,
        )
        for _ in made_on.arrivals
    )
    return replace(made_on, arrivals=arrivals)


def traces(names: Sequence[str] = ()) -> list[Trace]:
    """The traces of these names; all without names."""
    return [each for each in TRACES if not names or each.name in names]
