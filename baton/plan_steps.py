"""Plans what stricter targets would take: a tighter TTFT, one more nine of attainment, more load. For `baton plan`.

Each step is planned anew on the arrangements that were best for the present targets. A fleet that failed those fails
stricter ones, so only dearer fleets are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from baton.planning import FleetResults, Planner, Searched, Task, Tell
from goodput.candidates import Arrangement
from goodput.search import Trial
from loadgen.shaping import denser
from sim.evaluate import Goal

TIGHTER = 0.75
"""Factor on each TTFT target in the step "tighter TTFT"."""

MORE = 1.25
"""Factor on the requests in the step "more load"."""

ARRANGEMENTS_MAX = 12
"""Most arrangements that a step looks at."""

EFFORT_SHARE = 0.15
"""Share of the plan's effort that each step may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, and the fleet that it needs."""

    name: str
    asks: str
    """The target of the step, for people."""
    answer: FleetResults | None = None
    because: str = ""
    """Without an answer: what makes the step impossible, or that no fleet was found."""


def steps(task: Task) -> Iterator[tuple[str, str, Task, bool]]:
    """Of each step: name, target for people, task, and whether it has stricter targets on the same load."""
    goals = task.goals
    firsts = {name: goal.targets.ttft_ms for name, goal in goals.items() if goal.targets.ttft_ms is not None}
    if firsts:
        told = ", ".join(f"{name} {ms * TIGHTER:g} ms" for name, ms in firsts.items())
        tighter = {name: _tighter(goal) for name, goal in goals.items()}
        yield "tighter TTFT", f"TTFT {1 - TIGHTER:.0%} tighter ({told})", replace(task, goals=tighter), True
    if any(goal.attainment < 1 for goal in goals.values()):
        nines = {name: replace(goal, attainment=1 - (1 - goal.attainment) / 10) for name, goal in goals.items()}
        told = ", ".join(f"{name} {goal.attainment * 100:.6g} %" for name, goal in nines.items())
        yield "one more nine", f"one more nine of attainment ({told})", replace(task, goals=nines), True
    more = tuple(denser(task.arrivals, MORE, np.random.default_rng(0)))
    yield (
        "more load",
        f"{MORE:g} × the load ({len(more):,} request{'s' * (len(more) != 1)})",
        replace(task, arrivals=more),
        False,
    )


def _tighter(goal: Goal) -> Goal:
    first = goal.targets.ttft_ms
    if first is None:
        return goal
    return replace(
        goal,
        targets=msgspec.structs.replace(goal.targets, ttft_ms=first * TIGHTER),
        promise=replace(goal.promise, ttft_ms=goal.promise.ttft_ms * TIGHTER),
    )


def next_steps(
    task: Task, last: Searched, progress: Tell, *, on: str | None = None, processes: int | None = None
) -> Iterator[Step]:
    """Plan each step. Nothing if `last` found no fleet; ends after a step that the user stops by Ctrl-C.

    `on`, `processes`: as in `baton.fanout.opened`.
    """
    if last.found.best is None:
        return
    likely = _likely(last)
    for name, asks, harder, stricter in steps(task):
        failed = [each for each in last.found.failed if each.space.kinds] if stricter else []
        searched = Searched(Planner(harder, likely), failed=_dearest_first(failed), equals=0)
        searched.found.scales.update(last.found.scales)
        if searched.planner.spaces:
            searched.run(progress, effort=task.effort * EFFORT_SHARE, on=on, processes=processes)
        best = searched.found.best
        yield Step(
            name=name,
            asks=asks,
            answer=None if best is None else searched.answer(best),
            because="" if best is not None else _why(searched),
        )
        if searched.stopped:
            return


def _why(searched: Searched) -> str:
    if searched.planner.spaces and not searched.found.proven:
        return f"none found among {searched.found.trials} fleets that were tried"
    because = searched.planner.why_not(searched.found)
    return because if searched.planner.spaces else f"impossible: {because}"


def _likely(last: Searched) -> list[Arrangement]:
    """Arrangements of the fleets that held, cheapest first; the best fleet's is among them."""
    best = last.found.best
    held = sorted(last.found.held, key=lambda trial: trial.price)
    names = dict.fromkeys(trial.space.name for trial in ([best] if best is not None else []) + held)
    return [last.planner.arrangements[name] for name in list(names)[:ARRANGEMENTS_MAX]]


def _dearest_first(failed: list[Trial]) -> list[Trial]:
    return sorted(failed, key=lambda trial: -trial.price)
