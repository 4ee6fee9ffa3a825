"""One cell of `bench.policy_grid`: every class's best arrangement, then the champions on windows none was tuned on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench import policy_grid as grid
from bench.policy_loads import load
from cluster.instance import Role
from sim.experiments.contest import Champion, Family, served, splits, whole
from sim.experiments.loads import Size
from sim.experiments.systems import EqualInstances, Shelf, System, simulate
from sim.experiments.tuning import Best, Case

CLASSES: Final = ("rival", "rival_admitted", "ours")
"""Rivals as they are, rivals with Baton's admission in front, and Baton."""

Say = Callable[[str], None]


def case_of(cell: grid.Cell, data: Path, window: int) -> Case:
    """The input of all systems in this window."""
    size = Size(fewest=cell.trace.requests, most=cell.trace.requests, lives=1.0)
    return Case(
        name=cell.name,
        model=grid.MODEL,
        load=load(data, cell.trace, window),
        targets=cell.targets,
        size=size,
        tolerance=grid.TOLERANCE,
    )


def pools_of(cell: grid.Cell) -> tuple[EqualInstances, ...]:
    """The fleet's instances by GPU."""
    trace = cell.trace
    return tuple(
        EqualInstances(
            role=Role.BOTH,
            count=count,
            tp=1,
            gpu=gpu,
            prefix_caching=trace.prefix_caching,
            block_tokens=trace.block_tokens,
        )
        for gpu, count in cell.fleet.gpus
    )


def orders(pools: Sequence[EqualInstances]) -> list[tuple[EqualInstances, ...]]:
    """Which GPUs the first side of a split begins with."""
    return [tuple(pools)] if len(pools) == 1 else [tuple(pools), tuple(reversed(pools))]


def families(
    case: Case, shelf: Shelf, pools: Sequence[EqualInstances], policy: str, *, admission: bool
) -> Iterator[Family]:
    """The arrangements that a rival is tried in."""
    yield whole(pools, grid.BUDGETS, policy, admission=admission)
    for order in orders(pools):
        yield splits(case, shelf, order, policy, admission=admission)


def contest(case: Case, shelf: Shelf, pools: Sequence[EqualInstances]) -> dict[str, Champion]:
    """The champions of all classes. The next class's search begins at the best arrangement of the one before."""
    found = {name: Champion() for name in CLASSES}
    start, starts, policies = 0.0, dict[str, int](), list(grid.RIVALS)
    for name in ("rival", "rival_admitted"):
        champion = found[name]
        champion.starts = dict(starts)
        for policy in policies:
            champion.meet(case, shelf, families(case, shelf, pools, policy, admission=name != "rival"), start)
        start, starts = champion.best.per_gpu, champion.starts
        policies.sort(key=lambda policy, best=champion.best: best.system is None or policy != best.system.policy)
    ours = found["ours"]
    ours.starts = dict(starts)
    ours.meet(case, shelf, families(case, shelf, pools, grid.OURS, admission=True), start)
    budget = grid.BUDGETS[ours.starts["whole"]]
    for roles in ((Role.PREFILL, Role.BOTH), (Role.BOTH, Role.DECODE)):
        for order in orders(pools):
            ours.meet(case, shelf, [splits(case, shelf, order, grid.OURS, admission=True, roles=roles, budget=budget)])
    return found


def of_cell(cell: grid.Cell, data: Path, shelf: Shelf) -> dict[str, Any]:
    """Its row of the result."""
    began_s = time.process_time()
    pools = pools_of(cell)
    tuning = case_of(cell, data, grid.TUNING_WINDOW)
    champions = contest(tuning, shelf, pools)
    rates: dict[str, list[float]] = {name: [] for name in CLASSES}
    sensitive = (cell.factor, cell.fleet.name) == grid.SENSITIVITY_CELL
    off: dict[str, list[float]] = {str(each): [] for each in grid.COSTS_OFF} if sensitive else {}
    for window in grid.WINDOWS:
        case, shift = case_of(cell, data, window), 1.0
        for name in CLASSES:
            rates[name].append(rate_of(case, shelf, champions[name].best, shift))
            if rates[name][-1]:  # windows are easier or harder for all: the next search begins nearer
                shift = rates[name][-1] / champions[name].best.rate
        ours = champions["ours"].best
        for each, found in off.items() if window in grid.SENSITIVITY_WINDOWS else ():
            assert ours.system is not None
            misled = replace(ours, system=replace(ours.system, costs_off=float(each)))
            found.append(rate_of(case, shelf, misled, shift))
    return {
        "cell": cell.name,
        "trace": cell.trace.name,
        "factor": cell.factor,
        "fleet": cell.fleet.name,
        "gpus": cell.fleet.count,
        "targets": {"ttft_ms": cell.targets.ttft_ms, "tpot_ms": cell.targets.tpot_ms},
        "classes": {name: told(champions[name].best, rates[name]) for name in CLASSES},
        "lives": {name: lives(tuning, shelf, champions[name].best) for name in ("rival", "ours")},
        "costs_off": {each: [round(rate, 4) for rate in found] for each, found in off.items()},
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def rate_of(case: Case, shelf: Shelf, best: Best, shift: float) -> float:
    """Goodput of a tuned system in another window, searched from `shift` times its goodput in its own."""
    return served(case, shelf, best.system, best.rate * shift)[0] if best.system is not None and best.rate else 0.0


def lives(case: Case, shelf: Shelf, best: Best) -> float | None:
    """Length of a run at the best rate, in mean answers; None if the system serves nothing."""
    if best.system is None or not best.rate:
        return None
    arrivals = case.load.at_rate(best.rate, case.size.count(best.rate, case.life_s))
    result = simulate(best.system, case.model, shelf, arrivals, case.expires_s, case.targets, None)
    took_s = float(np.nanmean(result.latency_s("e2e")))
    return round((arrivals[-1].at_s - arrivals[0].at_s) / took_s, 1)


def told(best: Best, rates: Sequence[float]) -> dict[str, Any]:
    """The figures of one class."""
    assert best.system is not None
    return {
        "policy": best.system.policy,
        "arrangement": arrangement(best.system),
        "tuning_rate": round(best.rate, 4),
        "rates": [round(rate, 4) for rate in rates],
        "runs": best.runs,
        "tried": len(best.tried),
    }


def arrangement(system: System) -> str:
    """`2P H100 + 2P A100 + 4D A100`, `8× H100 (2048)`: × does both, in brackets the token budget."""
    letters = {Role.PREFILL: "P", Role.DECODE: "D", Role.BOTH: "×"}
    homes = _homes(system)
    parts = []
    for at, pool in enumerate(system.pools):
        letter = letters[pool.role] if homes is None else "PD"[at >= homes]
        budget = f" ({pool.batched_tokens})" if pool.batched_tokens and pool.role is Role.BOTH else ""
        parts.append(f"{pool.count}{letter} {pool.gpu.partition('-')[0]}{budget}")
    return " + ".join(parts)


def _homes(system: System) -> int | None:
    """Splitwise's machines can all do both, and one pool is their home: how many of its pools are for prompts."""
    return None if system.make_policy is None else int(getattr(system.make_policy, "args", (0,))[0])
