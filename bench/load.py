"""`baton load` beside `vllm bench serve` and `guidellm run`, and the capacity of one core of it.

    make bench-load                    three rounds of all, then 1,000 streams a second, about 12 minutes
    make bench-load ARGS=--quick       one round; ARGS=--publish writes docs/benchmarks

All senders send the same load to the same mock engine, in turns: equal lengths, and constant gaps, because two draws of
Poisson arrivals differ in throughput by chance alone. The benchmark compares what they count: time to the first token
from sending, time per token after it, whole answers per second. Beside each sender's time to the first token stands the
engine's own for the same requests, by its metric `vllm:time_to_first_token_seconds`: the difference is the sender's
and the connection's. There are two loads (`LOADS`), fixed before the first run. guidellm gets an environment of its
own, .bench/guidellm; if it cannot be installed, it is reported and left out. Then `baton load` alone sends streams of
50 tokens at 1,000 a second to an engine that costs nothing, on one core, and reports how late it was.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.contestants import engines, lone_twin
from bench.load_senders import BATON, Load, Told, Tool, by_baton, output, senders
from bench.processes import BATON_COMMAND, Cores, Failed, asked, cores, page, stopping
from bench.published import Table, machine, note_of, publish, result, say, show, target
from bench.rivals import version_of
from bench.router_tables import shown, text

LOADS: Final[Sequence[Load]] = (
    Load("short prompts", rate=50, requests=500, input_tokens=16, output_tokens=50, tp=1),
    Load("guidellm's example", rate=50, requests=500, input_tokens=256, output_tokens=128, tp=1),
)
"""The second has the lengths of the first example in guidellm's README. Both have the fewest GPUs that hold them."""

ASKED: Final = {
    "ttft_ms": "time to first token, from sending",
    "tpot_ms": "time per token after it",
    "rate": "answers/s",
}
ENGINE: Final = "engine_ttft_ms"
"""Beside a sender's own figures: what the engine counted for the same requests."""

STREAMS_RATE, STREAMS_S, STREAMS_TOKENS = 1000, 8, 50
PACE_MS = 20
"""Milliseconds between tokens: 1,000 streams a second of 50 tokens are 1,000 open ones and 50,000 events a second."""

Found = dict[str, list[Told]]
"""By sender: each round's figures."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What the engine has counted so far, by its own metrics."""

    first_token_s: float
    """The sum of all requests' times to the first token."""
    first_tokens: float
    cached_tokens: float
    """Tokens of prompts that its prefix cache answered."""

    @classmethod
    def of(cls, metrics: str) -> Counted:
        """From a page of metrics.

        Raises:
            Failed: a metric is missing.
        """
        return cls(
            first_token_s=_value(metrics, "vllm:time_to_first_token_seconds_sum"),
            first_tokens=_value(metrics, "vllm:time_to_first_token_seconds_count"),
            cached_tokens=_value(metrics, "vllm:prefix_cache_hits_total"),
        )

    def first_token_ms(self, before: Counted) -> float:
        """The mean time to the first token of the requests since `before`.

        Raises:
            Failed: there was none, or the cache answered prompts, so that another sender's round cannot be compared.
        """
        if self.cached_tokens != before.cached_tokens:
            raise Failed(
                f"the engine's cache answered {self.cached_tokens - before.cached_tokens:.0f} tokens of prompts"
            )
        if self.first_tokens == before.first_tokens:
            raise Failed("the engine counted no first token")
        return 1000 * (self.first_token_s - before.first_token_s) / (self.first_tokens - before.first_tokens)


def _value(metrics: str, name: str) -> float:
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", metrics, re.MULTILINE)
    if found is None:
        raise Failed(f"the engine does not count {name}")
    return float(found[1])


def compare(load: Load, rounds: int, where: Cores, contest: dict[str, Tool]) -> Found:
    """All senders in turns on one mock; the first one changes from round to round."""
    found: Found = {name: [] for name in contest}
    running, url = lone_twin(where.measured, ("--tp", str(load.tp)))
    with stopping([running]):
        running.wait_for(f"{url}/health")
        model = str(asked(f"{url}/v1/models")["data"][0]["id"])
        tools = list(contest.items())
        by_baton(load, url, model, 0, where.sender)  # warms up the mock
        for number in range(rounds):
            for name, tool in tools if number % 2 else reversed(tools):
                before = Counted.of(page(f"{url}/metrics"))
                told = tool(load, url, model, 1 + number, where.sender)
                told[ENGINE] = Counted.of(page(f"{url}/metrics")).first_token_ms(before)
                found[name].append(told)
                figures = ", ".join(f"{what} {value:.2f}" for what, value in told.items())
                say(f"{load.name} [{number + 1}/{rounds}] {name}: {figures}")
    return found


def streams(where: Cores) -> dict[str, Any]:
    """1,000 streams a second from one core."""
    running, urls = engines(1, where.measured)
    with stopping([running]):
        asked(f"{urls[0]}/bench", {"pace_ms": PACE_MS})
        words = [*BATON_COMMAND, "load", urls[0], "--model", "bench", "--chars-per-token", "5"]
        words += ["--rate", str(STREAMS_RATE), "--duration-s", str(STREAMS_S), "--input-tokens", "64"]
        words += ["--output-tokens", str(STREAMS_TOKENS), "--json"]
        report: dict[str, Any] = json.loads(output(words, where.sender))
    kept = ("sent", "completed", "failed", "offered_rate", "output_tokens", "cpu_share", "late_ms", "notes")
    found = {name: report[name] for name in kept}
    say(f"{STREAMS_RATE} streams a second: {json.dumps(found)}")
    return found


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the result."""

    name: str
    table: Table
    figures: dict[str, Any]
    targets: dict[str, Any]


def compared(load: Load, found: Found) -> Part:
    """All measurements of the round that other programs disturbed least, and Baton's over each rival's."""
    rivals = [tool for tool in found if tool != BATON]
    rows: list[list[str]] = []
    figures: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    for name, meaning in ASKED.items():
        rounds = {tool: [each[name] for each in runs] for tool, runs in found.items()}
        best = {tool: (max if name == "rate" else min)(values) for tool, values in rounds.items()}
        ratios = {tool: best[BATON] / best[tool] for tool in rivals}
        figures[name] = {**rounds, "ratio": {tool: round(ratio, 4) for tool, ratio in ratios.items()}}
        for tool, ratio in ratios.items():
            targets[f"{load.name}, {name}: off {tool} by"] = target(abs(ratio - 1), 0.03, digits=4)
        row = [meaning, text(best[BATON], 2)]
        row += [cell for tool in rivals for cell in (text(best[tool], 2), f"{ratios[tool]:.3f}")]
        rows.append([*row, *("; ".join(text(value, 2) for value in rounds[tool]) for tool in found)])
    lengths = f"prompts of {load.input_tokens:,} tokens, answers of {load.output_tokens}"
    title = f"{load.requests} requests at {load.rate} a second, {lengths}: means, in the least disturbed round of each"
    columns = ["", BATON, *(cell for tool in rivals for cell in (tool, "ours / theirs"))]
    return Part(load.name, Table(title, [*columns, *(f"{tool}, rounds" for tool in found)], rows), figures, targets)


def beside_engine(found: dict[Load, Found]) -> Part:
    """How far above the engine's own time to the first token each sender's is, for the same requests."""
    rows: list[list[str]] = []
    figures: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    for load, by_sender in found.items():
        above = {tool: [each["ttft_ms"] - each[ENGINE] for each in runs] for tool, runs in by_sender.items()}
        least = {tool: min(values) for tool, values in above.items()}
        figures[load.name] = {tool: [round(value, 4) for value in values] for tool, values in above.items()}
        nearest = min(value for tool, value in least.items() if tool != BATON)
        name = f"{load.name}: ms above the engine's own TTFT, over the nearest rival's"
        targets[name] = target(least[BATON] / nearest, 1.0)
        for tool, runs in by_sender.items():
            best = runs[above[tool].index(least[tool])]
            figures_of = [text(best["ttft_ms"], 2), text(best[ENGINE], 2), text(least[tool], 2)]
            rounds = "; ".join(text(value, 2) for value in above[tool])
            rows.append([f"{load.name}: {tool}", *figures_of, f"{least[tool] / best[ENGINE]:.1%}", rounds])
    columns = ["load and sender", "sender's, ms", "engine's, ms", "sender's above it, ms", "share of it", "rounds, ms"]
    title = "Time to the first token beside the engine's own for the same requests, in the round where they are nearest"
    return Part("above_engine_ms", Table(title, columns, rows), figures, targets)


def held(tries: list[dict[str, Any]]) -> Part:
    """One core's streams, and their lateness, in the try that other programs disturbed least."""
    found = min(tries, key=lambda each: float(each["late_ms"]["p99"]))
    late, share = found["late_ms"], found["cpu_share"]
    whole = found["completed"] / found["sent"] if found["sent"] else None
    row = [text(found["offered_rate"], 0), f"{found['completed']:,} of {found['sent']:,}"]
    row += [f"{found['output_tokens']:,}", text(share, 2), text(late["p50"], 2), text(late["p99"], 2)]
    columns = ["offered streams/s", "whole answers", "tokens", "of one core", "sent late p50, ms", "p99, ms"]
    targets = {
        f"{STREAMS_RATE} streams/s: whole answers of those sent": target(whole, 1.0, at_most=False),
        f"{STREAMS_RATE} streams/s: of one core": target(shown(share, 3), 1.0),
    }
    table = Table(f"`baton load` on one core, streams of {STREAMS_TOKENS} tokens", columns, [row])
    return Part("streams", table, {**found, "tries": tries}, targets)


def main() -> int:
    """Measure, report, and with --publish write it down."""
    parser = argparse.ArgumentParser(
        prog="bench-load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round, about four minutes")
    parser.add_argument("--rounds", type=int, metavar="N", help="default: 3, with --quick 1")
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks/load.json and the page's tables")
    args = parser.parse_args()
    facts, where = machine(), cores()
    say(f"{where}; load {facts['load_before']}")
    try:
        parts, missing = measured(args.rounds or (1 if args.quick else 3), where)
    except Failed as error:
        sys.exit(f"bench-load: {error}")
    tables = [part.table for part in parts]
    show(tables)
    targets = {name: each for part in parts for name, each in part.targets.items()}
    told = result("load", {part.name: part.figures for part in parts}, targets)
    if args.publish:
        versions = missing or f"guidellm {version_of('guidellm', 'guidellm')}"
        publish(told, tables, facts, note_of(facts, f"{where}; {versions}"))
    return 0


def measured(rounds: int, where: Cores) -> tuple[list[Part], str]:
    """Every part of the result; and in one line, why a sender is missing."""
    contest, missing = senders()
    if missing:
        say(missing)
    found = {load: compare(load, rounds, where, contest) for load in LOADS}
    parts = [compared(load, rows) for load, rows in found.items()]
    return [*parts, beside_engine(found), held([streams(where) for _ in range(rounds)])], missing


if __name__ == "__main__":
    sys.exit(main())
