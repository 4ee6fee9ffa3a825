"""`baton load` beside `vllm bench serve`, and what one core of it holds.

    make bench-load                    three rounds of both, then 1,000 streams a second, about 4 minutes
    make bench-load ARGS=--quick       one round; ARGS=--publish writes docs/benchmarks

Both send the same load to the same mock engine, in turns: equal lengths, and constant gaps, because two draws of
Poisson arrivals differ in throughput by chance alone. What both count is compared: time to the first token from
sending, time per token after it, whole answers per second. Then `baton load` alone sends streams of 50 tokens at 1,000
a second to an engine that costs nothing, on one core, and says how late it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.contestants import engines, lone_twin
from bench.processes import BATON_COMMAND, ROOT, Cores, Failed, asked, cores, stopping
from bench.published import Table, machine, note_of, publish, result, say, show, target
from bench.router_tables import shown, text
from loadgen.prompts import text_of

TOKENIZER = ROOT / "engine" / "tiny" / "model"
RATE, REQUESTS = 50, 500
INPUT_TOKENS, OUTPUT_TOKENS = 64, 50
NO_BURSTS = 1_000_000
"""`vllm bench serve --burstiness`: the shape of a gamma distribution; at this value gaps are constant."""

BATON, VLLM = "baton load", "vllm bench serve"
ASKED = {"ttft_ms": "time to first token, from sending", "tpot_ms": "time per token after it", "rate": "answers/s"}

STREAMS_RATE, STREAMS_S = 1000, 8
PACE_MS = 20
"""Between tokens: 1,000 streams a second of 50 tokens are 1,000 open ones and 50,000 events a second."""


def by_baton(url: str, model: str, seed: int, on: frozenset[int]) -> dict[str, float]:
    """One round of ours."""
    words = [*BATON_COMMAND, "load", url, "--model", model, "--chars-per-token", "1", "--arrivals", "constant"]
    words += ["--rate", str(RATE), "--requests", str(REQUESTS), "--seed", str(seed)]
    words += ["--input-tokens", str(INPUT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS), "--json"]
    report = json.loads(_output(words, on))
    if report["completed"] != REQUESTS:
        raise Failed(f"{BATON}: {report['completed']} of {REQUESTS} answered: {report['errors']}")
    return {
        "ttft_ms": report["ttft_sent_ms"]["mean"],
        "tpot_ms": report["tpot_ms"]["mean"],
        "rate": report["completed_rate"],
        "ttft_due_ms": report["ttft_ms"]["mean"],
    }


def by_vllm(url: str, model: str, seed: int, on: frozenset[int]) -> dict[str, float]:
    """One round of theirs."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
        words += ["--base-url", url, "--endpoint", "/v1/completions", "--model", model, "--tokenizer", str(TOKENIZER)]
        words += ["--dataset-name", "sharegpt", "--dataset-path", str(_prompts(Path(folder), seed))]
        words += ["--sharegpt-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(REQUESTS), "--ignore-eos"]
        words += ["--request-rate", str(RATE), "--burstiness", str(NO_BURSTS), "--seed", str(seed), "--disable-tqdm"]
        words += ["--save-result", "--result-dir", folder, "--result-filename", "found.json"]
        _output(words, on)
        report = json.loads((Path(folder) / "found.json").read_text())
    if report["completed"] != REQUESTS:
        raise Failed(f"{VLLM}: {report['completed']} of {REQUESTS} answered")
    return {
        "ttft_ms": report["mean_ttft_ms"],
        "tpot_ms": report["mean_tpot_ms"],
        "rate": report["request_throughput"],
    }


def _prompts(folder: Path, seed: int) -> Path:
    """Texts like ours, in ShareGPT's form.

    The random ones of `vllm bench serve` are often equal once the tokenizer has read them: the engine's prefix cache
    answers (measured: 91 of 200, and 2 % off the time per token).
    """
    path = folder / "prompts.json"
    texts = (text_of(f"bench-load {seed} {number}".encode(), INPUT_TOKENS) for number in range(REQUESTS))
    path.write_text(json.dumps([{"conversations": [{"value": each}, {"value": "an answer"}]} for each in texts]))
    return path


def _output(words: Sequence[str], on: frozenset[int]) -> str:
    """A command's stdout."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, on)
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        os.sched_setaffinity(0, mine)
    if done.returncode:
        raise Failed(f"{' '.join(words[:4])} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def compare(rounds: int, where: Cores) -> dict[str, list[dict[str, float]]]:
    """Both in turns on one mock; who begins changes from round to round."""
    found: dict[str, list[dict[str, float]]] = {BATON: [], VLLM: []}
    running, url = lone_twin(where.measured)
    with stopping([running]):
        running.wait_for(f"{url}/health")
        model = str(asked(f"{url}/v1/models")["data"][0]["id"])
        tools = [(BATON, by_baton), (VLLM, by_vllm)]
        by_baton(url, model, 0, where.sender)  # warms up the mock
        for number in range(rounds):
            for name, tool in tools if number % 2 else reversed(tools):
                found[name].append(tool(url, model, 1 + number, where.sender))
                told = ", ".join(f"{what} {value:.2f}" for what, value in found[name][-1].items())
                say(f"[{number + 1}/{rounds}] {name}: {told}")
    return found


def streams(where: Cores) -> dict[str, Any]:
    """1,000 streams a second from one core."""
    running, urls = engines(1, where.measured)
    with stopping([running]):
        asked(f"{urls[0]}/bench", {"pace_ms": PACE_MS})
        words = [*BATON_COMMAND, "load", urls[0], "--model", "bench", "--chars-per-token", "5"]
        words += ["--rate", str(STREAMS_RATE), "--duration-s", str(STREAMS_S), "--input-tokens", "64"]
        words += ["--output-tokens", str(OUTPUT_TOKENS), "--json"]
        report: dict[str, Any] = json.loads(_output(words, where.sender))
    kept = ("sent", "completed", "failed", "offered_rate", "output_tokens", "cpu_share", "late_ms", "notes")
    found = {name: report[name] for name in kept}
    say(f"{STREAMS_RATE} streams a second: {json.dumps(found)}")
    return found


def comparison_table(found: dict[str, list[dict[str, float]]]) -> tuple[Table, dict[str, Any], dict[str, Any]]:
    """What both measured in the round that other programs disturbed least, and the ratio."""
    rows: list[list[str]] = []
    figures: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    for name, meaning in ASKED.items():
        rounds = {tool: [each[name] for each in found[tool]] for tool in (VLLM, BATON)}
        theirs, ours = ((max if name == "rate" else min)(rounds[tool]) for tool in (VLLM, BATON))
        figures[name] = {**rounds, "ratio": round(ours / theirs, 4)}
        targets[f"{name}: off by"] = target(abs(ours / theirs - 1), 0.03, digits=4)
        every = ("; ".join(text(value, 2) for value in rounds[tool]) for tool in (VLLM, BATON))
        rows.append([meaning, text(theirs, 2), text(ours, 2), f"{ours / theirs:.3f}", *every])
    figures["ttft_due_ms"] = [each["ttft_due_ms"] for each in found[BATON]]
    title = f"{REQUESTS} answers of {OUTPUT_TOKENS} tokens at {RATE} req/s: means, in the least disturbed round of each"
    return Table(title, ["", VLLM, BATON, "ratio", f"{VLLM}, rounds", f"{BATON}, rounds"], rows), figures, targets


def least_late(tries: list[dict[str, Any]]) -> dict[str, Any]:
    """The try that other programs disturbed least."""
    return min(tries, key=lambda each: float(each["late_ms"]["p99"]))


def streams_table(found: dict[str, Any]) -> tuple[Table, dict[str, Any]]:
    """One core, and how late it was."""
    late, share = found["late_ms"], found["cpu_share"]
    whole = found["completed"] / found["sent"] if found["sent"] else None
    row = [text(found["offered_rate"], 0), f"{found['completed']:,} of {found['sent']:,}"]
    row += [f"{found['output_tokens']:,}", text(share, 2), text(late["p50"], 2), text(late["p99"], 2)]
    columns = ["offered streams/s", "whole answers", "tokens", "of one core", "sent late p50, ms", "p99, ms"]
    targets = {
        f"{STREAMS_RATE} streams/s: whole answers of those sent": target(whole, 1.0, at_most=False),
        f"{STREAMS_RATE} streams/s: of one core": target(shown(share, 3), 1.0),
    }
    return Table(f"`baton load` on one core, streams of {OUTPUT_TOKENS} tokens", columns, [row]), targets


def main() -> int:
    """Measure, show, and with --publish write it down."""
    parser = argparse.ArgumentParser(
        prog="bench-load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round, about a minute")
    parser.add_argument("--rounds", type=int, metavar="N", help="default: 3, with --quick 1")
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks/load.json and the page's tables")
    args = parser.parse_args()
    facts, where = machine(), cores()
    say(f"{where}; load {facts['load_before']}")
    try:
        rounds = args.rounds or (1 if args.quick else 3)
        compared, figures, targets = comparison_table(compare(rounds, where))
        tries = [streams(where) for _ in range(rounds)]
        found = least_late(tries)
    except Failed as error:
        sys.exit(f"bench-load: {error}")
    held, held_targets = streams_table(found)
    show([compared, held])
    told = result("load", {**figures, "streams": found, "streams_tries": tries}, {**targets, **held_targets})
    if args.publish:
        publish(told, [compared, held], facts, note_of(facts, str(where)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
