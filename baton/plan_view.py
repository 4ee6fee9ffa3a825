"""What `baton plan` shows: progress on stderr, the answer as a table, and the cluster file to run."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Self

from baton.output import say
from baton.planning import Answer, Outcome, Planner, Task
from goodput.search import Found
from sim.evaluate import Evaluation

PLAIN_EVERY_S = 5.0


class Progress:
    """A live line on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self._said_s = time.monotonic()
        self._status: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True, highlight=False).status("planning")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def tick(self, found: Found, planner: Planner) -> None:
        """After a trial."""
        best = "nothing holds yet"
        if found.best is not None:
            arrangement = planner.arrangements[found.best.space.name]
            pairs = zip(arrangement, found.best.counts, strict=True)
            best = "best so far: " + " + ".join(f"{count} × {kind}" for kind, count in pairs)
        line = f"{found.trials} fleets simulated, {found.open_spaces} arrangements left; {best}"
        if self._status is not None:
            self._status.update(line)
        elif time.monotonic() - self._said_s >= PLAIN_EVERY_S:
            self._said_s = time.monotonic()
            say(line)


def per_million(answer: Answer) -> float | None:
    """Price of a million output tokens; None where there were none."""
    seen = answer.seen
    if not seen.output_tokens:
        return None
    return answer.price_per_hour * seen.seconds / 3600 / seen.output_tokens * 1e6


def as_json(outcome: Outcome, task: Task, took_s: float) -> dict[str, Any]:
    """The whole of it, for programs."""
    return {
        "event": "planned",
        "objective": task.objective,
        "model": task.model.api_name,
        "requests": len(task.arrivals),
        "survive": task.survive,
        "best": None if outcome.best is None else _answer(outcome.best),
        "others": [_answer(each) for each in outcome.others],
        "because": outcome.because,
        "proven": outcome.found.proven,
        "stopped": outcome.stopped,
        "search": {
            "arrangements": outcome.considered,
            "ruled_out_by_bounds": outcome.ruled_out,
            "fleets_simulated": outcome.found.trials,
            "seconds": round(took_s, 1),
        },
    }


def _answer(answer: Answer) -> dict[str, Any]:
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
            }
            for kind, count in zip(answer.arrangement, answer.counts, strict=True)
        ],
        "gpus": answer.gpus,
        "price_per_hour": round(answer.price_per_hour, 4),
        "price_per_million_output_tokens": per_million(answer),
        "gpu_hours": {gpu: seconds / 3600 for gpu, seconds in seen.gpu_seconds.items()},
        "mean_power_w": seen.energy_j / seen.seconds if seen.seconds else None,
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


def show(outcome: Outcome, task: Task, took_s: float) -> None:
    """A table for people."""
    found = outcome.found
    if outcome.best is None:
        print(f"no plan: {outcome.because}")
    else:
        print(
            f"the cheapest fleet by {task.objective} that keeps the promises:" if found.proven else "the best so far:"
        )
        _show(outcome.best)
        for other in outcome.others:
            print("\nanother arrangement that was seen to keep them:")
            _show(other)
    ruled = f"{outcome.ruled_out:,} of {outcome.considered:,} arrangements ruled out by bounds"
    say(f"{ruled}; {found.trials} fleets simulated in {took_s:.1f} s on {len(task.arrivals):,} requests")
    if outcome.stopped:
        say(f"stopped early: {found.open_spaces} arrangements were not looked at, one of them may be cheaper")


def _show(answer: Answer) -> None:
    seen = answer.seen
    print(f"  {answer}")
    million = per_million(answer)
    per = "" if million is None else f", {million:,.2f} a million output tokens"
    print(f"  {answer.gpus} GPUs, {answer.price_per_hour:,.2f} an hour{per}")
    if seen.output_tokens and seen.seconds and seen.energy_j:
        watts, joules = seen.energy_j / seen.seconds, seen.energy_j / seen.output_tokens
        print(f"  {watts:,.0f} W on average, {joules:,.2f} J an output token")
    for name, each in seen.classes.items():
        misses = ", ".join(f"{count:,} {what}" for what, count in each.missed.items() if count) or "none"
        interval = f"{each.low:.1%} to {each.high:.1%}"
        print(f"  {name}: {each.share:.2%} of {each.requests:,} (95 % interval {interval}); missed: {misses}")
    if seen.binds:
        print(f"  what binds: {seen.binds}")


def pools_of(answer: Answer, given: Mapping[str, Any]) -> dict[str, Any]:
    """The `pools` of a cluster file; what the file says of a role beside what was planned is kept."""
    pools: dict[str, Any] = {}
    for kind, count in zip(answer.arrangement, answer.counts, strict=True):
        kept = dict(given.get(kind.role.value) or {})
        args = dict(kept.get("engine_args") or {})
        args.pop("max_num_batched_tokens", None)
        if kind.batched_tokens is not None:
            args["max-num-batched-tokens"] = kind.batched_tokens
        kept.update({"min": count, "max": count, "start": count, "gpu": kind.gpu.name, "shape": {"tp": kind.tp}})
        if args:
            kept["engine_args"] = args
        pools[kind.role.value] = kept
    return pools
