"""The senders that `make bench-load` compares: each sends one load to one mock engine and says what it counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.processes import BATON_COMMAND, ROOT, Failed
from bench.rivals import NotInstalled, environment
from loadgen.prompts import text_of

TOKENIZER = ROOT / "engine" / "tiny" / "model"
NO_BURSTS = 1_000_000
"""`vllm bench serve --burstiness`: the shape of a gamma distribution; at this value gaps are constant."""

BATON, VLLM, GUIDELLM = "baton load", "vllm bench serve", "guidellm run"
CHARS_PER_TOKEN = 4
"""The mock counts so many characters of a prompt as one token."""


@dataclass(frozen=True, slots=True)
class Load:
    """What every sender sends: requests at constant gaps, with prompts of one length and answers of one length."""

    name: str
    rate: int
    requests: int
    input_tokens: int
    output_tokens: int
    tp: int
    """GPUs of the mock engine that answers it."""

    def texts(self, sender: str, seed: int) -> list[str]:
        """A sender's prompts of one round: as long as `baton load`'s, none like another's."""
        chars = self.input_tokens * CHARS_PER_TOKEN
        return [text_of(f"{sender} {seed} {number}".encode(), chars) for number in range(self.requests)]


Told = dict[str, float]
"""A sender's own means: `ttft_ms`, `tpot_ms`, `rate`."""

Tool = Callable[[Load, str, str, int, frozenset[int]], Told]
"""Load, URL, model, seed, cores → what the sender counted."""


def senders() -> tuple[dict[str, Tool], str]:
    """All senders that this machine can run; and in one line, why one is missing."""
    tools: dict[str, Tool] = {BATON: by_baton, VLLM: by_vllm}
    try:
        folder = environment("guidellm")
    except NotInstalled as error:
        return tools, f"{GUIDELLM} cannot be installed here and is left out: {error}"
    return {**tools, GUIDELLM: partial(by_guidellm, folder / "guidellm")}, ""


def by_baton(load: Load, url: str, model: str, seed: int, on: frozenset[int]) -> Told:
    """One round of `baton load`."""
    words = [*BATON_COMMAND, "load", url, "--model", model, "--chars-per-token", str(CHARS_PER_TOKEN)]
    words += ["--arrivals", "constant", "--rate", str(load.rate), "--requests", str(load.requests), "--seed", str(seed)]
    words += ["--input-tokens", str(load.input_tokens), "--output-tokens", str(load.output_tokens), "--json"]
    report = json.loads(output(words, on))
    if report["completed"] != load.requests:
        raise Failed(f"{BATON}: {report['completed']} of {load.requests} answered: {report['errors']}")
    return {
        "ttft_ms": report["ttft_sent_ms"]["mean"],
        "tpot_ms": report["tpot_ms"]["mean"],
        "rate": report["completed_rate"],
    }


def by_vllm(load: Load, url: str, model: str, seed: int, on: frozenset[int]) -> Told:
    """One round of `vllm bench serve`.

    It gets the prompts from a file in ShareGPT's form, where it takes at most 1,024 tokens of its tokenizer: with ours,
    characters. Its random ones are often equal once the tokenizer has read them, and the engine's
    prefix cache answers (measured: 91 of 200, and 2 % off the time per token).
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
        words += ["--base-url", url, "--endpoint", "/v1/completions", "--model", model, "--tokenizer", str(TOKENIZER)]
        prompts = Path(folder) / "prompts.json"
        prompts.write_text(
            json.dumps(
                [{"conversations": [{"value": each}, {"value": "an answer"}]} for each in load.texts(VLLM, seed)]
            )
        )
        words += ["--dataset-name", "sharegpt", "--dataset-path", str(prompts), "--disable-shuffle"]
        words += ["--sharegpt-output-len", str(load.output_tokens)]
        words += ["--num-prompts", str(load.requests), "--ignore-eos", "--request-rate", str(load.rate)]
        words += ["--burstiness", str(NO_BURSTS), "--seed", str(seed), "--disable-tqdm"]
        words += ["--save-result", "--result-dir", folder, "--result-filename", "found.json"]
        output(words, on)
        report = json.loads((Path(folder) / "found.json").read_text())
    if report["completed"] != load.requests:
        raise Failed(f"{VLLM}: {report['completed']} of {load.requests} answered")
    return {
        "ttft_ms": report["mean_ttft_ms"],
        "tpot_ms": report["mean_tpot_ms"],
        "rate": report["request_throughput"],
    }


def by_guidellm(program: Path, load: Load, url: str, model: str, seed: int, on: frozenset[int]) -> Told:
    """One round of guidellm, with one process as the others. Its usual several processes wait for each other on the
    sender's one core (first tokens then came after 224 to 1,302 ms, where one process sees 56), and measure themselves.

    The figure is its time between tokens; its "time per output token" includes the first token.
    """
    with tempfile.TemporaryDirectory() as folder:
        prompts, result_file = Path(folder) / "prompts.jsonl", Path(folder) / "found.json"
        rows = [{"prompt": each, "output_tokens_count": load.output_tokens} for each in load.texts(GUIDELLM, seed)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ["env", "HF_HUB_OFFLINE=1", "GUIDELLM__MAX_WORKER_PROCESSES=1", str(program), "run"]
        words += ["--profile", f"kind=constant,rate={load.rate}"]
        words += ["--backend", f"kind=openai_http,target={url},request_format=/v1/completions,model={model}"]
        words += ["--constraint", f"kind=max_requests,count={load.requests}"]
        words += ["--data", f"kind=json_file,path={prompts}", "--tokenizer", f"kind=hf_auto,model={TOKENIZER}"]
        words += ["--disable-console", "--output", f"kind=json,path={result_file}"]
        output(words, on)
        metrics = json.loads(result_file.read_text())["benchmarks"][0]["metrics"]
    answered = metrics["request_totals"]["successful"]
    tokens = metrics["output_token_count"]["successful"]["mean"]
    if answered != load.requests or tokens != load.output_tokens:
        raise Failed(f"{GUIDELLM}: {answered} of {load.requests} answered, with {tokens} tokens each")
    return {
        "ttft_ms": metrics["time_to_first_token_ms"]["successful"]["mean"],
        "tpot_ms": metrics["inter_token_latency_ms"]["successful"]["mean"],
        "rate": metrics["requests_per_second"]["successful"]["mean"],
    }


def output(words: Sequence[str], on: frozenset[int]) -> str:
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
