"""One cell of `bench.policy_grid`: every class's best arrangement on the tuning windows, then curves on the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bench import policy_grid as grid
from bench.policy_loads import joined, load
from cluster.instance import Role
from sim.experiments import curves
from sim.experiments.ceiling import Ceiling
from sim.experiments.contest import (
    Champion,
    Family,
    crossed,
    doubled,
    equipped,
    homes_of,
    splits,
    whole,
    whole_by_gpu,
)
from sim.experiments.loads import Size
from sim.experiments.systems import EqualInstances, Shelf, System, simulate
from sim.experiments.tuning import Best, Case
from sim.roughness import ROUGH

CLASSES: Final = ("rival", *grid.WITH_ADMISSION)
"""Rivals as they are, rivals with Baton's admission in front, and Baton. All in the same arrangements."""
LIKE_RIVAL: Final = "ours_like_rival"
"""Baton in the arrangement of the best admitted rival: what the policy alone brings."""

HARDER: Final[dict[str, dict[str, Any]]] = {
    "rough": {"rough": ROUGH},
    "three routers": {"routers": 3},
    "answers 2.5 × slower beside prompts": {"beside": 2.5},
}
"""Worlds that are harder to predict: see docs/simulator.md."""

Say = Callable[[str], None]


def case_of(cell: grid.Cell, data: Path, *windows: int) -> Case:
    """The input of all systems in these windows, one after the other."""
    count = cell.requests * len(windows)
    size = Size(fewest=count, most=count, lives=1.0)
    trace = replace(cell.trace, requests=cell.requests)
    return Case(
        name=cell.name,
        model=grid.MODEL,
        load=joined([load(data, trace, each) for each in windows]),
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
    case: Case,
    shelf: Shelf,
    pools: Sequence[EqualInstances],
    policy: str,
    champion: Champion,
    *,
    admission: bool,
) -> Iterator[Family]:
    """The arrangements that every system is tried in, one after the other: later ones use budgets that were best."""
    yield whole(pools, grid.BUDGETS, policy, admission=admission)
    if len(pools) > 1:
        yield whole_by_gpu(pools, grid.BUDGETS_BY_GPU, policy, admission=admission)
    budget = grid.BUDGETS[champion.starts["whole"]]
    for order in orders(pools):
        yield splits(case, shelf, order, policy, admission=admission)
        for roles in ((Role.PREFILL, Role.BOTH), (Role.BOTH, Role.DECODE)):
            yield splits(case, shelf, order, policy, admission=admission, roles=roles, budget=budget)
        yield crossed(order, policy, admission=admission)
        yield splits(case, shelf, doubled(order), policy, admission=admission)
    large = whole(doubled(pools), grid.BUDGETS, policy, admission=admission)
    yield replace(large, name="whole, tp 2")


def contest(case: Case, shelf: Shelf, cell: grid.Cell, rivals: Sequence[str]) -> dict[str, Champion]:
    """The champions of all classes. The next class's search begins at the best arrangement of the one before."""
    found = {name: Champion() for name in CLASSES}
    pools, start, starts = pools_of(cell), 0.0, dict[str, int]()
    policies = [each for each in rivals if grid.differs(each, cell)]
    for name in CLASSES:
        champion = found[name]
        champion.starts = dict(starts)
        for policy in policies if name != "ours" else (grid.OURS,):
            made = (
                replace(family, systems=tuple(equipped(case, shelf, each) for each in family.systems))
                for family in families(case, shelf, pools, policy, champion, admission=name != "rival")
            )
            champion.meet(case, shelf, made, start)
        start, starts = champion.best.per_gpu, champion.starts
        if champion.best.system is not None:  # the likeliest winner first, so that others are dropped soon
            leader = champion.best.system.policy
            policies = [leader, *(each for each in policies if each != leader)]
    return found


@dataclass(slots=True)
class Contender:
    """A tuned system, and its runs on one window."""

    system: System
    case: Case
    shelf: Shelf
    base: float
    """Requests a second at lattice step 0; the same for all contenders of a cell."""
    runs: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By lattice step."""

    def rate(self, step: int) -> float:
        """Requests a second."""
        return self.base * curves.RATIO**step

    def nearest(self, rate: float) -> int:
        """The lattice step of a rate."""
        return round(math.log(rate / self.base) / math.log(curves.RATIO))

    def run(self, step: int) -> dict[str, Any]:
        """One whole run."""
        if step not in self.runs:
            case = self.case
            arrivals = case.load.at_rate(self.rate(step), case.size.fewest)
            result = simulate(self.system, case.model, self.shelf, arrivals, case.expires_s, case.targets, None)
            self.runs[step] = curves.details(result, case.targets)
        return self.runs[step]

    def trace(self, start: float, shares: Sequence[float]) -> None:
        """Run what its curve needs."""
        curves.traced(lambda step: float(self.run(step)["attained"]), self.nearest(start), shares)

    def goodput(self, share: float) -> float:
        """Where its curve crosses this share."""
        return curves.rate_at({self.rate(step): run["attained"] for step, run in self.runs.items()}, share)


def of_cell(cell: grid.Cell, data: Path, shelf: Shelf, plan: grid.Plan) -> dict[str, Any]:
    """Its row of the result."""
    began_s = time.process_time()
    tuning = case_of(cell, data, *cell.tuning_windows)
    champions = contest(tuning, shelf, cell, plan.rivals)
    tuned = {name: champions[name].best for name in CLASSES}
    if tuned["rival_admitted"].system is not None:
        tuned[LIKE_RIVAL] = _like(tuned["rival_admitted"])
    windows = [
        {"number": at, **_window(cell, case_of(cell, data, at), shelf, tuned, grid.SHARES)} for at in cell.windows(plan)
    ]
    return {
        "cell": cell.name,
        "trace": cell.trace.name,
        "factor": cell.factor,
        "fleet": cell.fleet.name,
        "gpus": cell.fleet.count,
        "requests": cell.requests,
        "targets": {"ttft_ms": cell.targets.ttft_ms, "tpot_ms": cell.targets.tpot_ms},
        "classes": {name: told(tuned[name], champions[name].best.tried) for name in CLASSES},
        "windows": windows,
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def _like(rival: Best) -> Best:
    """Baton in a rival's arrangement."""
    assert rival.system is not None
    roles = homes_of(rival.system)
    pools = tuple(replace(pool, role=role) for pool, role in zip(rival.system.pools, roles, strict=True))
    return replace(rival, system=replace(rival.system, policy=grid.OURS, make_policy=None, pools=pools))


def _window(
    cell: grid.Cell, case: Case, shelf: Shelf, tuned: dict[str, Best], shares: Sequence[float]
) -> dict[str, Any]:
    """All contenders on one window."""
    found = _contenders(case, shelf, tuned, shares)
    told: dict[str, Any] = {name: _told_window(each, shares) for name, each in found.items()}
    bound = bound_of(cell, case, shelf)
    highest = max((each.goodput(shares[0]) for each in found.values()), default=0.0) or 1.0
    told["bound"] = {"rates": {str(share): round(bound.goodput(share, highest), 4) for share in shares}}
    _compare(told, found, bound)
    if (cell.factor, cell.fleet.name) == grid.SENSITIVITY_CELL and "ours" in found:
        told["costs_off"] = _costs_off(found["ours"])
        told["harder"] = {name: _harder(found, **changes) for name, changes in HARDER.items()}
    return told


def _contenders(case: Case, shelf: Shelf, tuned: dict[str, Best], shares: Sequence[float]) -> dict[str, Contender]:
    """The tuned systems with their curves: of the two with admission at all shares, of the others at the first."""
    base = max(best.rate for best in tuned.values()) or 1.0
    found: dict[str, Contender] = {}
    shift = 1.0
    for name, best in tuned.items():
        if best.system is None or not best.rate:
            continue
        mine = found[name] = Contender(best.system, case, shelf, base)
        mine.trace(best.rate * shift, shares if name in grid.WITH_ADMISSION else shares[:1])
        if reached := mine.goodput(shares[0]):  # windows are easier or harder for all: the next begins nearer
            shift = reached / best.rate
    return found


def bound_of(cell: grid.Cell, case: Case, shelf: Shelf) -> Ceiling:
    """What no policy can beat in any arrangement of this cell's GPUs."""
    pools = pools_of(cell)
    tried = [replace(pool, batched_tokens=each) for pool in (*pools, *doubled(pools)) for each in (None, *grid.BUDGETS)]
    return Ceiling.of(case, shelf, tried, case.load.arrivals[: case.size.fewest])


def _told_window(each: Contender, shares: Sequence[float]) -> dict[str, Any]:
    return {
        "rates": {str(share): round(each.goodput(share), 4) for share in shares},
        "curve": [[round(each.rate(step), 4), run["attained"]] for step, run in sorted(each.runs.items())],
    }


def _compare(told: dict[str, Any], found: dict[str, Contender], bound: Ceiling) -> None:
    """Both classes with admission at one rate: where the rival's goodput is."""
    rival = found.get("rival_admitted")
    if rival is None or not (reached := rival.goodput(grid.SHARES[0])):
        return
    step = rival.nearest(reached)
    for name in grid.WITH_ADMISSION:
        if name in found:
            told[name]["there"] = found[name].run(step)
    told["bound"]["there"] = round(bound.least(rival.rate(step)), 4)


def _costs_off(ours: Contender) -> dict[str, float]:
    """Attainment at Baton's goodput where the router believes other costs."""
    reached = ours.goodput(grid.SHARES[0])
    if not reached:
        return {}
    step = ours.nearest(reached)
    found = {"1": float(ours.run(step)["attained"])}
    for each in grid.COSTS_OFF:
        misled = replace(ours, system=replace(ours.system, costs_off=each), runs={})
        found[f"{each:g}"] = float(misled.run(step)["attained"])
    return found


def _harder(found: dict[str, Contender], **changes: Any) -> dict[str, float]:
    """Goodput of both classes with admission in the worlds of `HARDER`."""
    rates: dict[str, float] = {}
    for name in grid.WITH_ADMISSION:
        if name in found and (reached := found[name].goodput(grid.SHARES[0])):
            hard = replace(found[name], system=replace(found[name].system, **changes), runs={})
            hard.trace(reached, grid.SHARES[:1])
            rates[name] = round(hard.goodput(grid.SHARES[0]), 4)
    return rates


def told(best: Best, tried: Sequence[str]) -> dict[str, Any]:
    """The figures of one class on the tuning windows."""
    if best.system is None:
        return {"policy": "–", "arrangement": "none", "tuning_rate": 0.0, "runs": best.runs, "tried": len(tried)}
    return {
        "policy": best.system.policy,
        "arrangement": arrangement(best.system),
        "tuning_rate": round(best.rate, 4),
        "runs": best.runs,
        "tried": len(tried),
    }


def arrangement(system: System) -> str:
    """`2P H100 + 2P A100 + 4D A100`, `4× H100 tp2 (2048)`: × does both, in brackets the token budget."""
    letters = {Role.PREFILL: "P", Role.DECODE: "D", Role.BOTH: "×"}
    parts = []
    for pool, role in zip(system.pools, homes_of(system), strict=True):
        budget = f" ({pool.batched_tokens})" if pool.batched_tokens and role is Role.BOTH else ""
        shape = f" tp{pool.tp}" if pool.tp > 1 else ""
        parts.append(f"{pool.count}{letters[role]} {pool.gpu.partition('-')[0]}{shape}{budget}")
    return " + ".join(parts)
