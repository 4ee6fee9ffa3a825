"""How much more averages promise than a trace lets a fleet serve, and which property of the trace makes the difference.

A fleet's goodput on a trace is compared with its goodput on what averages leave of it, both by our simulator with the
same costs: so nothing differs but the load. Some of the trace's properties are kept and the others averaged, to see
which one matters. A plan takes whole instances, and their spare capacity hides an error at some rates: therefore the
figure is the share of all rates at which the fleet that averages choose breaks its promise.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from baton.planning import Planner, Task
from bench.plan_loads import GPUS, RATES, averaged, averages, task_of, traces
from bench.published import Table, say, target
from cluster.instance import Role
from costs.hardware import gpu_named
from goodput.candidates import InstanceKind
from loadgen.arrival import Arrival
from sim.evaluate import holds
from sim.experiments.goodput import highest

KIND: Final = InstanceKind(role=Role.BOTH, gpu=gpu_named(GPUS[0][0]), batched_tokens=2048)
"""The instance of plans from averages: one H100 that does both."""
COUNTS: Final = (1, 2, 3, 4)
MOST: Final = COUNTS[-1]
TOLERANCE: Final = 0.03
TRACE, MEANS = "trace", "means, Poisson"
LOADS: Final = ("means, even gaps", MEANS, "means, its arrivals", "its lengths, Poisson", TRACE)
"""What is averaged: lengths, arrivals, or both. Even gaps are the load of closed forms: no queue but the batch."""


def of_averages(data: Path, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Each trace's row."""
    rows = []
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for trace in traces(names):
            task, rate = task_of(trace, data), RATES[trace.name]
            loads = loads_of(task)
            asked = [(name, count) for name in LOADS for count in (COUNTS if name in {MEANS, TRACE} else (MOST,))]
            came = [pool.submit(goodput, task, loads[name], rate * count / MOST, count) for name, count in asked]
            found: dict[str, list[float]] = {}
            for (name, _), each in zip(asked, came, strict=True):
                found.setdefault(name, []).append(each.result())
            rows.append({"trace": trace.name, "planned_rate": rate, **figures_of(found)})
            say(f"averages: {rows[-1]}")
    return rows


def loads_of(task: Task) -> dict[str, Sequence[Arrival]]:
    """The trace, and the trace with some properties averaged."""
    mean = averages(task)
    means = averaged(task).arrivals
    even = [msgspec.structs.replace(each, at_s=at / mean.rate) for at, each in enumerate(means)]
    retimed = [msgspec.structs.replace(each, at_s=other.at_s) for each, other in zip(task.arrivals, means, strict=True)]
    bursty = [msgspec.structs.replace(each, at_s=other.at_s) for each, other in zip(means, task.arrivals, strict=True)]
    return dict(zip(LOADS, (even, means, bursty, retimed, task.arrivals), strict=True))


def goodput(task: Task, arrivals: Sequence[Arrival], guess: float, count: int) -> float:
    """The highest mean rate at which so many instances keep the promise on a load, faster or slower."""
    fleet = Planner(replace(task, arrivals=tuple(arrivals)), [(KIND,)]).fleet((KIND,), (count,))
    own = (len(arrivals) - 1) / (arrivals[-1].at_s - arrivals[0].at_s)

    def keeps(rate: float) -> bool:
        scaled = [msgspec.structs.replace(each, at_s=each.at_s * own / rate) for each in arrivals]
        return holds(fleet, scaled, task.goals, task.usual)

    return highest(keeps, guess, TOLERANCE).rate


def figures_of(found: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Goodputs, their ratio, and the share of rates at which a plan from averages fails."""
    most = {name: round(rates[-1], 2) for name, rates in found.items()}
    return {
        "goodput": {name: [round(rate, 2) for rate in rates] for name, rates in found.items()},
        "overstated": round(most[MEANS] / most[TRACE], 3) if most[TRACE] else None,
        "fails_at": round(fails_at(found[MEANS], found[TRACE]), 3),
    }


def fails_at(told: Sequence[float], served: Sequence[float]) -> float:
    """Share of the rates at which the smallest fleet that is enough by averages breaks its promise; of all rates up to
    the one that the largest fleet serves by averages.

    Args:
        told: by number of instances from 1 on, the rate that is served by averages, requests a second.
        served: the rate that is served on the trace, likewise.
    """
    failing = sum(max(0.0, high - max(low, real)) for low, high, real in zip((0.0, *told), told, served, strict=False))
    return failing / told[-1] if told[-1] else 0.0


def table_of_averages(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The table of all traces."""
    shown = [
        [
            row["trace"],
            *(f"{row['goodput'][name][-1]:.1f}" for name in LOADS),
            "–" if row["overstated"] is None else f"{row['overstated']:.2f} ×",
            f"{row['fails_at']:.0%}",
            f"{row['planned_rate']:g}",
        ]
        for row in rows
    ]
    columns = ["trace, req/s", *LOADS, "averages overstate by", "rates at which their plan fails", "rate of the plans"]
    return Table(f"What {MOST} × {KIND} serve by what is known of a trace", columns, shown)


def targets(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Averages fail at some rate on every trace."""
    failing = sum(row["fails_at"] > TOLERANCE for row in rows)
    name = f"traces on which a plan from averages fails at more than {TOLERANCE:.0%} of rates, of {len(rows)}"
    return {name: target(float(failing), float(len(rows)), at_most=False)}
