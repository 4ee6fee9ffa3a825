"""The output of `baton plan`: progress on stderr, the answer as a table or as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, Self

from baton.output import say
from baton.plan_steps import Step
from baton.planning import FleetResults, Planner, Point, SearchResult, Task, counted, price_per_hour
from goodput.search import SearchState
from loadgen.arrival import Arrival
from sim.evaluate import Evaluation

PLAIN_EVERY_S = 5.0
"""Seconds between two lines of progress where there is no terminal."""


class PlanProgress:
    """A bar on a terminal, elsewhere a line every `PLAIN_EVERY_S`. It shows which share of the effort is spent: a
    search that can find no cheaper fleet ends earlier.
    """

    def __init__(self, effort: float) -> None:
        self._said_s = time.monotonic()
        self._effort = effort
        self._before = 0
        self._last = 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("planning"), BarColumn(24), TimeElapsedColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True, highlight=False), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._effort)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def tick(self, found: SearchState, planner: Planner) -> None:
        """Show the search's state; called after each trial."""
        if found.spent < self._last:  # another search has begun
            self._before += self._last
        self._last = found.spent
        best = "nothing holds yet"
        if found.best is not None:
            best = f"best so far: {counted(planner.arrangements[found.best.space.name], found.best.counts)}"
        line = f"{found.trials} of the fleets simulated; {best}"
        if self._bar is not None:
            self._bar.update(self._task, completed=min(self._effort, self._before + found.spent), description=line)
        elif time.monotonic() - self._said_s >= PLAIN_EVERY_S:
            self._said_s = time.monotonic()
            say(f"{min(1.0, (self._before + found.spent) / self._effort):.0%} of the effort, {line}")


def per_million(answer: FleetResults) -> float | None:
    """Price of a million output tokens; None without output."""
    seen = answer.seen
    if not seen.output_tokens:
        return None
    return answer.price_per_hour * seen.seconds / 3600 / seen.output_tokens * 1e6


# --- JSON -------------------------------------------------------------------------------------------------------------


def as_json(outcome: SearchResult, steps: Sequence[Step], task: Task, took_s: float) -> dict[str, Any]:
    """The whole result, for programs."""
    found = outcome.found
    return {
        "event": "planned",
        "objective": task.objective,
        "model": task.model.api_name,
        "requests": len(task.arrivals),
        "survive": task.survive,
        "power_w_max": task.power_w,
        "best": None if outcome.best is None else answer_json(outcome.best),
        "limit": outcome.scarcest,
        "others": [answer_json(each) for each in outcome.others],
        "because": outcome.because,
        "next_steps": [_step(each) for each in steps],
        "proven": found.proven,
        "presumed": outcome.presumed,
        "stopped": outcome.stopped,
        "tried": [_point(each) for each in outcome.points],
        "search": {
            "arrangements": outcome.considered,
            "ruled_out_by_bounds": outcome.ruled_out,
            "arrangements_left": found.open_spaces,
            "fleets_simulated": outcome.trials,
            "requests_simulated": outcome.simulated,
            "effort_spent": outcome.spent,
            "requests_of_the_sample": outcome.sampled,
            "requests_left_out": outcome.left_out,
            "seconds": round(took_s, 1),
        },
    }


def _step(step: Step) -> dict[str, Any]:
    return {
        "step": step.name,
        "asks": step.asks,
        "best": None if step.answer is None else answer_json(step.answer),
        "because": step.because,
    }


def _point(point: Point) -> dict[str, Any]:
    return {
        "fleet": counted(point.arrangement, point.counts),
        "price_per_hour": round(price_per_hour(point.arrangement, point.counts), 4),
        "holds": point.holds,
        "attained": point.attained,
        "ended_early": not point.whole,
        "ttft_p95_ms": point.ttft_p95_ms,
    }


def answer_json(answer: FleetResults) -> dict[str, Any]:
    """One fleet with its figures."""
    seen = answer.seen
    return {
        "fleet": str(answer),
        "pools": [
            {
                "role": kind.role.value,
                "instances": count,
                "gpu": kind.gpu.name,
                "tp": kind.tp,
                "max_num_batched_tokens": kind.batched_tokens,
                "power_cap_w": None if kind.power_cap >= 1 else kind.power_cap_w,
                "busy": seen.busy.get(f"{kind.role.value}-{at}"),
            }
            for at, (kind, count) in enumerate(zip(answer.arrangement, answer.counts, strict=True))
        ],
        "gpus": answer.gpus,
        "price_per_hour": round(answer.price_per_hour, 4),
        "price_per_million_output_tokens": per_million(answer),
        "gpu_hours": {gpu: seconds / 3600 for gpu, seconds in seen.gpu_seconds.items()},
        "mean_power_w": seen.energy_j / seen.seconds if seen.seconds else None,
        "power_w_max": answer.power_w,
        "kwh": seen.energy_j / 3.6e6,
        "joules_per_output_token": seen.energy_j / seen.output_tokens if seen.output_tokens else None,
        "attainment": {name: _attained(seen, name) for name in seen.classes},
        "binds": seen.binds,
        "holds": seen.holds,
    }


def _attained(seen: Evaluation, name: str) -> dict[str, Any]:
    each = seen.classes[name]
    return {
        "share": each.share,
        "low": each.low,
        "high": each.high,
        "requests": each.requests,
        "missed": dict(each.missed),
        "keeps": each.keeps,
    }


# --- for people -------------------------------------------------------------------------------------------------------


def headline(outcome: SearchResult, task: Task) -> str:
    """The result in one line."""
    if outcome.best is None:
        return f"no plan: {outcome.because}"
    found = "" if outcome.found.proven else " found"
    return f"the cheapest fleet{found} by {task.objective} that keeps the promises: {outcome.best}"


def load_line(task: Task) -> str:
    """The load of the plan: how many requests, how fast, how long."""
    arrivals = task.arrivals
    count, span_s = len(arrivals), arrivals[-1].at_s - arrivals[0].at_s
    pace = f" in {span_s:,.0f} s ({(count - 1) / span_s:,.3g} a second)" if span_s > 0 else ""
    tokens_in, tokens_out = (sum(each) / count for each in zip(*map(_lengths, arrivals), strict=True))
    noun = "request" if count == 1 else "requests"
    return f"{count:,} {noun}{pace}, {tokens_in:,.0f} tokens in and {tokens_out:,.0f} out on average"


def _lengths(arrival: Arrival) -> tuple[int, int]:
    return arrival.input_tokens, arrival.output_tokens


def figures(answer: FleetResults) -> list[tuple[str, str]]:
    """Names and values of one fleet."""
    seen, million = answer.seen, per_million(answer)
    found = [
        ("GPUs", f"{answer.gpus}, {sum(seen.gpu_seconds.values()) / 3600:,.2f} GPU-hours for this load"),
        ("price", f"{answer.price_per_hour:,.2f} an hour" + _per_million(million)),
    ]
    if seen.energy_j and seen.seconds:
        token = f", {seen.energy_j / seen.output_tokens:,.2f} J an output token" if seen.output_tokens else ""
        watts = f"{seen.energy_j / seen.seconds:,.0f} W on average, {answer.power_w:,.0f} W at most"
        found.append(("power", f"{watts}, {seen.energy_j / 3.6e6:,.3g} kWh{token}"))
    for name, each in seen.classes.items():
        missed = ", ".join(f"{count:,} {what}" for what, count in each.missed.items() if count) or "none"
        interval = f"95 % interval {each.low:.2%} to {each.high:.2%}"
        found.append(
            (f"class {name}", f"{each.share:.2%} of {each.requests:,} attained ({interval}); missed: {missed}")
        )
    busy = ", ".join(
        f"{kind.role.value} {kind.gpu.name} {seen.busy.get(f'{kind.role.value}-{at}', 0.0):.0%}"
        for at, kind in enumerate(answer.arrangement)
    )
    found.append(("engines busy", busy))
    if seen.binds:
        found.append(("what binds", f"{seen.binds}: most of the misses"))
    return found


def _per_million(million: float | None) -> str:
    return "" if million is None else f", {million:,.2f} a million output tokens"


def step_rows(outcome: SearchResult, steps: Sequence[Step]) -> list[tuple[str, str, str]]:
    """Each step's target, its fleet, and its price beside the plan's."""
    rows = []
    for each in steps:
        if each.answer is None or outcome.best is None:
            rows.append((each.asks, each.because, ""))
            continue
        more = each.answer.price_per_hour - outcome.best.price_per_hour
        share = f" ({more / outcome.best.price_per_hour:+.0%})" if outcome.best.price_per_hour else ""
        price = f"{each.answer.price_per_hour:,.2f} an hour{share}"
        same = str(each.answer) == str(outcome.best)
        rows.append((each.asks, "the same fleet holds" if same else str(each.answer), price))
    return rows


def doubts(outcome: SearchResult) -> list[str]:
    """Lines for people: the assumptions of the answer, and what was not tried."""
    found = outcome.found
    told = [f"presumed: {each}" for each in outcome.presumed] if outcome.best is not None else []
    if outcome.best is not None and not found.proven and not outcome.stopped:
        left = f"{found.open_spaces} arrangements may hold something cheaper, the likeliest at {found.open_scale:.2f}"
        told.append(f"not proven: {left} times what bounds ask for; --effort looks further")
    if outcome.left_out:
        told.append(
            f"{outcome.left_out:,} requests of the load were not simulated: what is said is of even stretches of it, "
            "and a peak between them was not seen; a larger --effort takes more of it, --duration-s or --requests less"
        )
    if outcome.stopped:
        told.append("stopped early, by Ctrl-C: the best so far")
    return told


def cost_line(outcome: SearchResult, task: Task, took_s: float) -> str:
    """One line on the effort that the plan took."""
    ruled = f"{outcome.ruled_out:,} of {outcome.considered:,} arrangements ruled out by bounds"
    sample = f", {outcome.sampled:,} of them in a sample first" if outcome.sampled else ""
    load = f"a load of {len(task.arrivals):,} request{'s' * (len(task.arrivals) != 1)}{sample}"
    return f"{ruled}; {outcome.trials} fleets simulated ({outcome.simulated:,} requests) on {load}; {took_s:.1f} s"


def show(outcome: SearchResult, steps: Sequence[Step], task: Task, took_s: float) -> None:
    """Print the whole result for people: the answer on stdout, doubts and effort on stderr."""
    print(headline(outcome, task))
    print(f"  {'load':<14} {load_line(task)}")
    if outcome.best is not None:
        _show(outcome.best)
        if outcome.scarcest:
            print(f"  {'nearest bound':<14} {outcome.scarcest}")
    for other in outcome.others:
        print(f"\nanother way that was seen to keep them: {other}")
        _show(other)
    if steps:
        print("\nwhat the next step of the promise would take:")
        for asks, fleet, price in step_rows(outcome, steps):
            print(f"  {asks}\n    {fleet}{': ' if price else ''}{price}")
    for line in (*doubts(outcome), cost_line(outcome, task, took_s)):
        say(line)


def _show(answer: FleetResults) -> None:
    for name, value in figures(answer):
        print(f"  {name:<14} {value}")
