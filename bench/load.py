"""`baton load` beside `vllm bench serve` and `guidellm run`, and the capacity of one core of it.

    make bench-load                    three rounds of all, then 1,000 streams a second, about 10 minutes
    make bench-load ARGS=--quick       one round; ARGS=--publish writes docs/benchmarks

All senders send the same load to the same mock engine, in turns: equal lengths, and constant gaps, because two draws of
Poisson arrivals differ in throughput by chance alone. The benchmark compares what they count: time to the first token
from sending, time per token after it, whole answers per second. guidellm gets an environment of its own,
.bench/guidellm; if it cannot be installed, it is reported and left out. Then `baton load` alone sends streams of 50
tokens at 1,000 a second to an engine that costs nothing, on one core, and reports how late it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.contestants import engines, lone_twin
from bench.processes import BATON_COMMAND, ROOT, Cores, Failed, asked, cores, stopping
from bench.published import Table, machine, note_of, publish, result, say, show, target
from bench.rivals import NotInstalled, environment, version_of
from bench.router_tables import shown, text
from loadgen.prompts import text_of

TOKENIZER = ROOT / "engine" / "tiny" / "model"
RATE, REQUESTS = 50, 500
INPUT_TOKENS, OUTPUT_TOKENS = 64, 50
NO_BURSTS = 1_000_000
"""`vllm bench serve --burstiness`: the shape of a gamma distribution; at this value gaps are constant."""

BATON, VLLM, GUIDELLM = "baton load", "vllm bench serve", "guidellm run"
ASKED = {"ttft_ms": "time to first token, from sending", "tpot_ms": "time per token after it", "rate": "answers/s"}

STREAMS_RATE, STREAMS_S = 1000, 8
PACE_MS = 20
"""Milliseconds between tokens: 1,000 streams a second of 50 tokens are 1,000 open ones and 50,000 events a second."""


def by_baton(url: str, model: str, seed: int, on: frozenset[int]) -> dict[str, float]:
    """One round of `baton load`."""
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
    """One round of `vllm bench serve`."""
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


def by_guidellm(program: Path, url: str, model: str, seed: int, on: frozenset[int]) -> dict[str, float]:
    """One round of guidellm, with one process as the others. Its usual several processes wait for each other on the
    sender's one core (first tokens then came after 224 to 1,302 ms, where one process sees 56), and measure themselves.

    The figure is its time between tokens; its "time per output token" includes the first token.
    """
    with tempfile.TemporaryDirectory() as folder:
        prompts, result_file = Path(folder) / "prompts.jsonl", Path(folder) / "found.json"
        rows = [{"prompt": each, "output_tokens_count": OUTPUT_TOKENS} for each in _texts(seed)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = [
            "env",
            "HF_HUB_OFFLINE=1",
            "GUIDELLM__MAX_WORKER_PROCESSES=1",
            str(program),
            "run",
            "--profile",
            f"kind=constant,rate={RATE}",
        ]
        words += ["--backend", f"kind=openai_http,target={url},request_format=/v1/completions,model={model}"]
        words += ["--constraint", f"kind=max_requests,count={REQUESTS}", "--data", f"kind=json_file,path={prompts}"]
        words += ["--tokenizer", f"kind=hf_auto,model={TOKENIZER}", "--disable-console"]
        words += ["--output", f"kind=json,path={result_file}"]
        _output(words, on)
        metrics = json.loads(result_file.read_text())["benchmarks"][0]["metrics"]
    answered = metrics["request_totals"]["successful"]
    tokens = metrics["output_token_count"]["successful"]["mean"]
    if answered != REQUESTS or tokens != OUTPUT_TOKENS:
        raise Failed(f"{GUIDELLM}: {answered} of {REQUESTS} answered, with {tokens} tokens each")
    return {
        "ttft_ms": metrics["time_to_first_token_ms"]["successful"]["mean"],
        "tpot_ms": metrics["inter_token_latency_ms"]["successful"]["mean"],
        "rate": metrics["requests_per_second"]["successful"]["mean"],
    }


def _texts(seed: int) -> list[str]:
    """Prompts of one round: as long as `baton load`'s, none repeating another."""
    return [text_of(f"bench-load {seed} {number}".encode(), INPUT_TOKENS) for number in range(REQUESTS)]


def _prompts(folder: Path, seed: int) -> Path:
    """Texts like `baton load`'s, in ShareGPT's form.

    The random ones of `vllm bench serve` are often equal once the tokenizer has read them, and the engine's prefix
    cache answers (measured: 91 of 200, and 2 % off the time per token).
    """
    path = folder / "prompts.json"
    talks = [{"conversations": [{"value": each}, {"value": "an answer"}]} for each in _texts(seed)]
    path.write_text(json.dumps(talks))
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


Tool = Callable[[str, str, int, frozenset[int]], dict[str, float]]
"""URL, model, seed, cores → the sender's counts."""


def contestants() -> tuple[dict[str, Tool], str]:
    """All senders that this machine can run; and in one line, why one is missing."""
    tools: dict[str, Tool] = {BATON: by_baton, VLLM: by_vllm}
    try:
        folder = environment("guidellm")
    except NotInstalled as error:
        return tools, f"{GUIDELLM} cannot be installed here and is left out: {error}"
    return {**tools, GUIDELLM: partial(by_guidellm, folder / "guidellm")}, ""


def compare(rounds: int, where: Cores, contest: dict[str, Tool]) -> dict[str, list[dict[str, float]]]:
    """All senders in turns on one mock; the first one changes from round to round."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contest}
    running, url = lone_twin(where.measured)
    with stopping([running]):
        running.wait_for(f"{url}/health")
        model = str(asked(f"{url}/v1/models")["data"][0]["id"])
        tools = list(contest.items())
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
            targets[f"{name}: off {tool} by"] = target(abs(ratio - 1), 0.03, digits=4)
        row = [meaning, text(best[BATON], 2)]
        row += [cell for tool in rivals for cell in (text(best[tool], 2), f"{ratios[tool]:.3f}")]
        rows.append([*row, *("; ".join(text(value, 2) for value in rounds[tool]) for tool in found)])
    figures["ttft_due_ms"] = [each["ttft_due_ms"] for each in found[BATON]]
    title = f"{REQUESTS} answers of {OUTPUT_TOKENS} tokens at {RATE} req/s: means, in the least disturbed round of each"
    columns = ["", BATON, *(cell for tool in rivals for cell in (tool, "ours / theirs"))]
    return Table(title, [*columns, *(f"{tool}, rounds" for tool in found)], rows), figures, targets


def least_late(tries: list[dict[str, Any]]) -> dict[str, Any]:
    """The try that other programs disturbed least."""
    return min(tries, key=lambda each: float(each["late_ms"]["p99"]))


def streams_table(found: dict[str, Any]) -> tuple[Table, dict[str, Any]]:
    """One core's streams, and their lateness."""
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
    """Measure, report, and with --publish write it down."""
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
        contest, missing = contestants()
        if missing:
            say(missing)
        compared, figures, targets = comparison_table(compare(rounds, where, contest))
        tries = [streams(where) for _ in range(rounds)]
        found = least_late(tries)
    except Failed as error:
        sys.exit(f"bench-load: {error}")
    held, held_targets = streams_table(found)
    show([compared, held])
    told = result("load", {**figures, "streams": found, "streams_tries": tries}, {**targets, **held_targets})
    if args.publish:
        versions = missing or f"guidellm {version_of('guidellm', 'guidellm')}"
        publish(told, [compared, held], facts, note_of(facts, f"{where}; {versions}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
