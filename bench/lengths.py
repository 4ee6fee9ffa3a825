"""How well answers' lengths are predicted, and the cost of a prediction.

    BATON_DATA=/path/to/data make bench-lengths       about a minute; ARGS=--quick 5,000 requests a trace
    make bench-lengths ARGS=--publish                 writes docs/benchmarks

Every request of a trace, in order of time, is predicted when it arrives and learned from when it would have ended (its
tokens times 30 ms later), as a router would. Compared at p50, p90 and p99:

    Baton           `router.predict.answer_lengths`, with the trace's prompt tokens, and its client where it names one
    uncalibrated    the same without the online calibration
    all alike       the same quantile of the last 3,000 answers, of all clients
    by client       the same quantile of this client's last 3,000 answers
    mean            a client's mean answer so far, for every quantile: what planners that use averages do
    max_tokens      the limit; no trace has one, so the longest answer of the trace stands for it

Pinball loss (tokens; lower is better) says how good a quantile is; coverage is the share of answers at or below it,
which should be the quantile's own. None of the traces has text, `max_tokens` or classes, so the value of these is not
measured. The cost of a cue that means nothing is: every request is given a made-up one of 16 values.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
import time
import tracemalloc
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench import inputs
from bench.published import Table, machine, note_of, publish, result, say, show, target
from loadgen import servegen, traces
from loadgen.arrival import Arrival
from router.predict.answer_lengths import LEVELS, AnswerLengths, Features, Predictor

TOKEN_S = 0.03
SERVEGEN_FROM_S, SERVEGEN_COUNT = 36_000.0, 60_000
WINDOW = 3000
TRACES: Final = {
    "Azure code": ("azure", "traces/azure2023/AzureLLMInferenceTrace_code.csv"),
    "Azure conv": ("azure", "traces/azure2023/AzureLLMInferenceTrace_conv.csv"),
    "Mooncake": ("mooncake", "traces/mooncake/conversation_trace.jsonl"),
    "ServeGen R1": ("servegen", "traces/servegen-deepseek-r1"),
}

Guess = tuple[Sequence[float], Callable[[int], None]]
"""Lengths at `LEVELS`, and a function that takes the real length."""


def read(data: Path, trace: str) -> list[Arrival]:
    """Answered requests in order of time. ServeGen's are drawn from its clients' measured distributions."""
    kind, place = TRACES[trace]
    rng = np.random.default_rng(1)
    if kind == "servegen":
        files = {path.name: path.read_text().splitlines() for path in (data / place).iterdir() if "-" in path.name}
        drawn = servegen.arrivals(servegen.read(files), rng, SERVEGEN_FROM_S)
        return list(itertools.islice(drawn, SERVEGEN_COUNT))
    with (data / place).open() as lines:
        rows = list(traces.FORMATS[kind](lines, rng, None))
    return [row for row in rows if isinstance(row, Arrival) and row.output_tokens > 0]


class Baton:
    """Baton's predictor. `cues` are made up, one of this many values."""

    def __init__(self, *, cues: int = 0, rate: float | None = None) -> None:
        self.predictor = Predictor() if rate is None else Predictor(rate=rate)
        self._cues, self._draw = cues, np.random.default_rng(2)

    def __call__(self, row: Arrival) -> Guess:
        cue = int(self._draw.integers(self._cues)) + 1 if self._cues else 0
        found = self.predictor.predict(Features(row.tenant or "", "model", "", row.input_tokens, cues=cue))
        return found.served, lambda tokens: self.predictor.learn(found, tokens)


class Window:
    """Quantiles of the last answers, by client or of all."""

    def __init__(self, *, by_client: bool) -> None:
        self._by_client = by_client
        self._last: dict[str, tuple[deque[int], list[int]]] = {}

    def __call__(self, row: Arrival) -> Guess:
        last, ordered = self._last.setdefault(row.tenant or "" if self._by_client else "", (deque(), []))
        served = [ordered[int(level * len(ordered))] if ordered else 200 for level in LEVELS]

        def learn(tokens: int) -> None:
            last.append(tokens)
            insort(ordered, tokens)
            if len(last) > WINDOW:
                del ordered[bisect_left(ordered, last.popleft())]

        return served, learn


class Mean:
    """A client's mean."""

    def __init__(self) -> None:
        self._sums: dict[str, list[int]] = {}

    def __call__(self, row: Arrival) -> Guess:
        sums = self._sums.setdefault(row.tenant or "", [0, 0])
        mean = sums[0] / sums[1] if sums[1] else 200.0

        def learn(tokens: int) -> None:
            sums[0] += tokens
            sums[1] += 1

        return [mean] * len(LEVELS), learn


class Longest:
    """One length for all."""

    def __init__(self, tokens: int) -> None:
        self._served = [tokens] * len(LEVELS)

    def __call__(self, row: Arrival) -> Guess:
        return self._served, lambda _: None


def judged(rows: list[Arrival], guess: Callable[[Arrival], Guess]) -> dict[str, Any]:
    """Loss and coverage over a whole trace, the cold start included."""
    loss, covered = np.zeros(len(LEVELS)), np.zeros(len(LEVELS))
    levels = np.array(LEVELS)
    running: list[tuple[float, int, int, Callable[[int], None]]] = []
    for number, row in enumerate(rows):
        while running and running[0][0] <= row.at_s:
            _, _, tokens, learn = heapq.heappop(running)
            learn(tokens)
        served, learn = guess(row)
        off = row.output_tokens - np.array(served, dtype=float)
        loss += np.maximum(levels * off, (levels - 1) * off)
        covered += off <= 0
        heapq.heappush(running, (row.at_s + row.output_tokens * TOKEN_S, number, row.output_tokens, learn))
    return {"loss": (loss / len(rows)).round(2).tolist(), "coverage": (covered / len(rows)).round(4).tolist()}


def contestants(rows: list[Arrival]) -> Iterator[tuple[str, Callable[[Arrival], Guess]]]:
    """By name, fresh."""
    yield "Baton", Baton()
    yield "uncalibrated", Baton(rate=0.0)
    yield "Baton, a useless cue", Baton(cues=16)
    yield "all alike", Window(by_client=False)
    if any(row.tenant for row in rows):
        yield "by client", Window(by_client=True)
    yield "mean", Mean()
    yield "max_tokens", Longest(max(row.output_tokens for row in rows))


def quality(data: Path, count: int | None) -> tuple[Table, dict[str, Any]]:
    """Every trace and contestant."""
    table, figures = [], {}
    for trace in TRACES:
        rows = read(data, trace)[:count]
        for name, guess in contestants(rows):
            found = judged(rows, guess)
            figures[f"{trace}, {name}"] = found
            loss = [f"{each:,.1f}" for each in found["loss"]]
            table.append([trace, name, *loss, *(f"{each:.1%}" for each in found["coverage"])])
            say(f"{trace}, {name}: {found}")
    columns = ["trace", "predicted by", "loss p50", "p90", "p99", "answers ≤ p50", "≤ p90", "≤ p99"]
    return Table("Pinball loss in tokens, and coverage", columns, table), figures


def microseconds(call: Callable[[], Any], calls: int = 300, rounds: int = 20) -> float:
    """CPU of one call, of the least disturbed round."""
    found = []
    for _ in range(rounds):
        began = time.thread_time_ns()
        for _ in range(calls):
            call()
        found.append((time.thread_time_ns() - began) / calls / 1000)
    return min(found)


def cost() -> tuple[Table, dict[str, float]]:
    """CPU with all seven levels known, and memory at the limit of keys."""
    predictor = Predictor()
    features = Features("acme", "model", "chat", 1000, max_tokens=512, cues=3)
    found: AnswerLengths = predictor.predict(features)
    for tokens in range(1, 500):
        predictor.learn(found, tokens)
    found = predictor.predict(features)
    figures = {
        "predict, us": microseconds(lambda: predictor.predict(features)),
        "learn, us": microseconds(lambda: predictor.learn(found, 100)),
        "another quantile, us": microseconds(lambda: found.quantile(0.8)),
        "mean of what remains, us": microseconds(lambda: found.mean_remaining(100)),
    }
    tracemalloc.start()
    full = Predictor()
    for number in range(4000):
        each = Features(f"tenant {number % 700}", "model", "chat", 1 << number % 15, 512, cues=number % 16)
        full.learn(full.predict(each), 100)
    figures[f"MB at {len(full):,} keys"] = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    rows = [[name, f"{value:.1f}"] for name, value in figures.items()]
    return Table("What predicting costs", ["what", "value"], rows), {k: round(v, 2) for k, v in figures.items()}


def targets_of(figures: dict[str, Any], costs: dict[str, float]) -> dict[str, Any]:
    """The targets on every trace, and on all together."""
    found: dict[str, Any] = {}
    ratios = []
    for trace in TRACES:
        ours, alike = figures[f"{trace}, Baton"], figures[f"{trace}, all alike"]
        off = max(abs(share - level) for share, level in zip(ours["coverage"], LEVELS, strict=True))
        found[f"{trace}: coverage off by"] = target(off, 0.02, digits=4)
        ratios += [a / b for a, b in zip(ours["loss"], alike["loss"], strict=True)]
    found["loss to all alike, worst of all traces and levels"] = target(max(ratios), 1.05)
    found["loss to all alike, geometric mean"] = target(float(np.exp(np.mean(np.log(ratios)))), 0.85)
    found["predict, us"] = target(costs["predict, us"], 10)
    found["learn, us"] = target(costs["learn, us"], 10)
    return found


def main() -> int:
    """Measure, report, and with --publish write it down."""
    parser = argparse.ArgumentParser(
        prog="bench-lengths", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the first 5,000 requests of each trace")
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks/lengths.json and the tables")
    args = parser.parse_args()
    traces = inputs.required("bench-lengths", [place for _, place in TRACES.values()], told_in="docs/load.md")
    facts = machine()
    costs_table, costs = cost()
    table, figures = quality(traces, 5000 if args.quick else None)
    show([table, costs_table])
    said = result("lengths", {**figures, "cost": costs}, targets_of(figures, costs))
    if args.publish:
        publish(said, [table, costs_table], facts, note_of(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
