"""Rivals' planners as code, each asked the same question: how few H100s serve these averages within these targets?

- `aiconfigurator` (NVIDIA): closed forms on operator tables, steady state; the best aggregated and the best
  disaggregated arrangement for a target rate of requests.
- `aisimulate` (NVIDIA, its successor): event-driven, `target: min_gpus`, which takes Poisson arrivals of one length and
  no trace. Its goal for goodput is the attainment that the trace is promised. It divides by the whole run, in which the
  last answers drain: the goal is lowered by as much (asked for nine tenths of the rate, it refused 12 of 12 fleets that
  served every request in time), and the run is several answers long.

Both have H100 tables of vLLM 0.24 of their own, and take no costs from outside: what they choose is run in our
simulator. Answers are kept in .bench/plan-answers by what was asked: they are the same every time, and AISimulate's
take minutes of CPU each.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import pickle
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from bench import rivals
from bench.plan_loads import ATTAINMENT, SEED, Averages
from bench.published import say
from cluster.instance import Role
from costs.hardware import gpu_named
from goodput.candidates import Arrangement, InstanceKind
from goodput.search import Counts
from loadgen.report import Targets

MODEL: Final = "meta-llama/Meta-Llama-3.1-8B"
SYSTEM: Final = "h100_sxm"
GPU: Final = gpu_named("H100-SXM")
TRIALS: Final = 12
"""Trials of AISimulate's search, which begins at random."""
GPUS_MAX: Final = 16
"""Most GPUs that AISimulate may look at: twice as many as any plan here takes, and half of Baton's limit. This is in
its favour: of 12 fleets of up to 32 GPUs that it tried at first, none had fewer than eight."""
RUN_S: Final = 10.0
RUN_ANSWERS: Final = 3
"""The arrivals of a run of AISimulate's last for at least `RUN_S` seconds, and for this many mean answers."""
REQUESTS_MIN: Final = 300
KEPT: Final = rivals.ROOT / ".bench" / "plan-answers"
LIMIT_S: Final = 3600
"""Time limit of a rival's planner, seconds. A planner ends in minutes; on a busy machine, much later."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A planner's choice."""

    name: str
    arrangement: Arrangement
    counts: Counts
    predicted: float | None
    """Requests a second within the targets, as the planner predicts."""
    took_s: float
    cpu_s: float

    def __str__(self) -> str:
        """`3 × both tp1 1024 tokens`: the budget of a step, where the plan names one."""
        pairs = zip(self.counts, self.arrangement, strict=True)
        return " + ".join(f"{count} × {kind.role.value} tp{kind.tp}{_budget(kind)}" for count, kind in pairs)

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return sum(count * kind.gpus for count, kind in zip(self.counts, self.arrangement, strict=True))


def _budget(kind: InstanceKind) -> str:
    return f" {kind.batched_tokens} tokens" if kind.batched_tokens else ""


def installed() -> Path | None:
    """The folder of the rivals' programs; None if they cannot be installed."""
    try:
        return rivals.environment("plan")
    except rivals.NotInstalled as error:
        say(f"AISimulate and aiconfigurator are not installed, so they are left out: {error}")
        return None


NAMES: Final = ("aiconfigurator", "AISimulate")


def ask(programs: Path, mean: Averages, targets: Targets, names: Sequence[str]) -> list[Plan]:
    """The answers of these planners; one that finds nothing is left out and reported."""
    found = []
    questions = zip(NAMES, (_aiconfigurator, _aisimulate), strict=True)
    for name, question in ((name, question) for name, question in questions if name in names):
        try:
            found.append(_answered(name, question, programs, mean, targets))
        except (subprocess.SubprocessError, LookupError, OSError, ValueError) as error:
            say(f"{name} gave no plan: {str(error)[:300]}")
    return found


Answered = tuple[Arrangement, Counts, float | None]
Question = Callable[[Path, Averages, Targets, Path], Answered]


def _answered(name: str, question: Question, programs: Path, mean: Averages, targets: Targets) -> Plan:
    """The planner's answer, from now or from an earlier run."""
    asked = (name, mean, targets, TRIALS, GPUS_MAX, RUN_S, RUN_ANSWERS, rivals.pinned("plan").read_text())
    kept = KEPT / f"{name}-{hashlib.sha256(repr(asked).encode()).hexdigest()[:16]}.pickle"
    if kept.exists():
        before: Plan = pickle.loads(kept.read_bytes())  # noqa: S301 - a file that this wrote
        return before
    began_s, began = time.monotonic(), os.times()
    with tempfile.TemporaryDirectory() as folder:
        answer = question(programs, mean, targets, Path(folder))
    ended = os.times()
    cpu_s = ended.children_user + ended.children_system - began.children_user - began.children_system
    plan = Plan(name, *answer, took_s=time.monotonic() - began_s, cpu_s=cpu_s)
    KEPT.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(pickle.dumps(plan))
    return plan


def _aiconfigurator(programs: Path, mean: Averages, targets: Targets, folder: Path) -> Answered:
    words = [
        *("cli", "default", "--model-path", MODEL, "--system", SYSTEM, "--backend", "vllm", "--no-color"),
        *("--isl", str(mean.input_tokens), "--osl", str(mean.output_tokens), "--prefix", str(mean.cached_tokens)),
        *("--ttft", str(targets.ttft_ms), "--tpot", str(targets.tpot_ms)),
        *("--target-request-rate", f"{mean.rate:.2f}", "--top-n", "1", "--save-dir", str(folder)),
    ]
    _run([str(programs / "aiconfigurator"), *words], folder)
    rows = [_row(path) for path in folder.rglob("best_config_topn.csv")]
    row = min(rows, key=lambda each: (float(each["total_gpus_needed"]), -float(each["tokens/s/gpu"])))
    times = int(float(row["replicas_needed"]))
    predicted = float(row["seq/s"]) * times
    if "(p)workers" in row:
        kinds = (_kind(Role.PREFILL, row["(p)tp"]), _kind(Role.DECODE, row["(d)tp"]))
        return kinds, (times * int(float(row["(p)workers"])), times * int(float(row["(d)workers"]))), predicted
    return (_kind(Role.BOTH, row["tp"]),), (times,), predicted


def _row(path: Path) -> Mapping[str, str]:
    with path.open() as lines:
        return next(csv.DictReader(lines))


def _aisimulate(programs: Path, mean: Averages, targets: Targets, folder: Path) -> Answered:
    parallel = {"parallelism": {"preset": "default"}}
    requests, least_rps = _run_of(mean, targets)
    source = {"type": "synthetic", "input_tokens": mean.input_tokens, "output_tokens": mean.output_tokens}
    question = {
        "traffic": {
            "source": {**source, "cached_prefix_tokens": mean.cached_tokens},
            "load": {"type": "poisson", "requests_per_second": round(mean.rate, 2), "seed": SEED},
            "stop": {"requests": requests},
        },
        "engine": {
            "mode": {"choices": ["aggregated", "disaggregated"]},
            "model": MODEL,
            "hardware": SYSTEM,
            "backend": "vllm",
            "context_length": 2 * (mean.input_tokens + mean.output_tokens),
            "workers": {"aggregated": parallel, "prefill": parallel, "decode": parallel},
        },
        "evaluation": {"sla": {"ttft_ms": targets.ttft_ms, "itl_ms": targets.tpot_ms}},
        "optimization": {
            "target": "min_gpus",
            "strict_sla": True,
            "constraints": {"max_candidate_gpus": GPUS_MAX, "min_goodput_rps": round(least_rps, 2)},
        },
        "execution": {"resources": {"initialization_timeout_seconds": float(LIMIT_S)}},
        "optimizer": {"max_trials": TRIALS, "parallelism": 2, "seed": SEED},
    }
    (folder / "question.yaml").write_text(yaml.safe_dump(question))
    words = ["recommend", "-c", str(folder / "question.yaml"), "--output-dir", str(folder / "answer")]
    _run([str(programs / "aisimulate"), *words], folder)
    best_file = folder / "answer" / "recommendations" / "0001.yaml"
    if not best_file.exists():
        raise LookupError(
            f"none of {TRIALS} fleets that it tried serves {least_rps:.1f} a second in time, as it counts"
        )
    best = yaml.safe_load(best_file.read_text())
    workers: dict[str, Any] = best["engine"]["workers"]
    roles = {"aggregated": Role.BOTH, "prefill": Role.PREFILL, "decode": Role.DECODE}
    used = [(roles[name], worker) for name, worker in workers.items() if worker]
    kinds = tuple(
        _kind(role, each["parallelism"]["tensor"], each["scheduler"]["max_batched_tokens"]) for role, each in used
    )
    return kinds, tuple(each["parallelism"]["replicas"] for _, each in used), _predicted(folder / "answer", mean)


def _run_of(mean: Averages, targets: Targets) -> tuple[int, float]:
    """How many requests AISimulate simulates, and the goodput that is the promise: answers at half their target of time
    per token end the run so much later than its last arrival.
    """
    answer_s = mean.output_tokens * (targets.tpot_ms or 0.0) / 2 / 1000
    requests = max(REQUESTS_MIN, round(mean.rate * max(RUN_S, RUN_ANSWERS * answer_s)))
    return requests, ATTAINMENT * requests / (requests / mean.rate + answer_s)


def _predicted(folder: Path, mean: Averages) -> float | None:
    """Requests a second in time that it sees in its choice's run, of those that arrive: its own figure divides by the
    run with its drain.
    """
    csv.field_size_limit(1 << 30)
    with (folder / "recommendation.csv").open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["is_top_n"].lower() in {"true", "1"}]
    if not rows:
        return None
    metrics = json.loads(min(rows, key=lambda row: float(row["used_gpus"]))["metrics_json"])
    return float(metrics["goodput_completed_requests"]) / float(metrics["num_requests"]) * mean.rate


def _kind(role: Role, tp: str | int, tokens: int | None = None) -> InstanceKind:
    """With the token budget that it names; vLLM's default where it names none, as vLLM would start."""
    return InstanceKind(role=role, gpu=GPU, tp=int(float(tp)), batched_tokens=tokens if role is Role.BOTH else None)


def _run(words: Sequence[str], folder: Path) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise ValueError(lines[-1] if lines else f"ended with {done.returncode}")
