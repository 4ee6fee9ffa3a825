"""Goodput on real engines: one prefills and one decodes, against the same two doing both, behind the same router.

    BATON_DATA=/path/to/data make bench-real                      about 25 minutes, the model that ships
    BATON_DATA=/path/to/data make bench-real ARGS="--models fat"  64 KB of KV a token: about an hour
    make bench-real ARGS=--quick                                  under 5 minutes

Two vLLM engines on CPU, a core each, started by `baton up` from a cluster file; the load comes from `baton load`, open
loop. Contestants differ in that file's pools, connector and policy alone:

    apart-vllm    1 prefill + 1 decode, vLLM's connector as Baton's launcher tunes it; first tokens are seeded
    apart-baton   the same with Baton's connector
    both-N        two engines that serve whole requests, chunked prefill with N tokens a step (`max_num_batched_tokens`)
    free          two engines of role both, Baton's connector: Baton chooses for each request whether it is handed over

All have prefix caching on (no two prompts here share one), admission, and the same classes. Policy `least_load` hands
over whenever it can, and cannot where there is no prefill instance (`both-N` are two of role decode): so those two
arrangements are what they are called. `free` has Baton's own policy, `workload`. A table says how much was handed over.

Everything is fixed before the first run that counts: on two engines that do both, a prompt of the load's 90th
percentile with a mean answer, one at a time through the router, is the unloaded latency; targets are 2, 5 and 10 times
its median. All requests at once give a rate near that at which the pair saturates (its last answers come alone, so
that it is somewhat more); the load's rates are 0.3 to 1.2 times that.
Every rate, class and contestant gets the same requests in the same order (`bench/real_load.py`; how many, the time says
that a run may take), after some that teach the router what a prompt costs there. Goodput is where attainment crosses
90 %, between two rates by a straight line.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench import inputs
from bench.connectors_models import FAT, TINY, Model
from bench.processes import ROOT, page
from bench.published import DOCS, machine, note_of, publish, result, say, show
from bench.real_cluster import up
from bench.real_figures import draw
from bench.real_load import CONTEXT, FROM_S, SHORTER, TRACE, Shape, shaped, write
from bench.real_tables import note, tables, targets
from cluster.instance import Role

FACTORS: Final = (2, 5, 10)
"""Targets over unloaded latency."""
LEASE_S: Final = 30
"""vLLM's own default, and not the 120 s of Baton's launcher on CPU: both connectors get the same."""
WARM: Final = 40
"""Requests before those that count: the router uses its predicted times after twenty timed prompts."""
SERVED: Final = "bench"
"""The model's name to clients."""
TIMEOUT_S: Final = 120
"""A request that takes longer is given up, and counts as missed."""
ALONE: Final = 12
"""Requests of the unloaded latency."""
LETTERS: Final = "97-123"
"""Token ids of prompts: lower-case letters to the model that ships, which reads bytes."""
MODELS: Final = {model.name: model for model in (TINY, FAT)}


@dataclass(frozen=True, slots=True)
class Contestant:
    """Two engines."""

    told: str
    pools: Mapping[Role, int]
    connector: str = "nixl"
    budget: int | None = None
    """Tokens of a step; None: vLLM's default."""
    policy: str = "least_load"


_APART = {Role.PREFILL: 1, Role.DECODE: 1}
CONTESTANTS: Final = {
    "apart-vllm": Contestant("1 P + 1 D, vLLM's connector", _APART),
    "apart-baton": Contestant("1 P + 1 D, Baton's connector", _APART, "baton"),
    **{
        f"both-{budget}": Contestant(f"2 that do both, {budget} tokens a step", {Role.DECODE: 2}, budget=budget)
        for budget in (256, 512, 2048)
    },
    "free": Contestant("2 of role both, Baton's choice", {Role.BOTH: 2}, "baton", policy="workload"),
}
CALIBRATES: Final = "both-512"


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a run."""

    contestants: tuple[str, ...]
    requests_min: int
    requests_max: int
    """Of each run."""
    seconds: float
    """Seconds of sending, for one contestant under one class: on slow engines a run has fewer requests before it gets
    longer."""
    parts: tuple[float, ...]
    """Rates, as parts of the rate at which the pair that does both saturates."""

    def rates(self, capacity: float) -> list[float]:
        """Requests a second."""
        return [round(part * capacity, 3) for part in self.parts]

    def requests(self, rates: Sequence[float]) -> int:
        """Requests of each run: every rate sends the same ones."""
        in_time = int(self.seconds / sum(1 / rate for rate in rates))
        return max(self.requests_min, min(self.requests_max, in_time))


FULL: Final = Scale(tuple(CONTESTANTS), 40, 200, 55.0, (0.3, 0.6, 0.9, 1.2))
QUICK: Final = Scale(("apart-baton", CALIBRATES, "free"), 10, 60, 10.0, (0.4, 1.0))
WARM_FILE: Final = "warm.jsonl"
WARM_PART: Final = 0.5
"""Of that rate, for the requests that warm up."""


def cluster_file(
    contestant: Contestant, model: Model, path: str, classes: Mapping[int, Mapping[str, float]] | None = None
) -> dict[str, Any]:
    """What `baton up` is given (JSON is YAML): classes are named `x2`, `x5`, `x10`; None: nothing is promised."""
    args: dict[str, Any] = {"enable-prefix-caching": True}
    if contestant.budget is not None:
        args["max-num-batched-tokens"] = contestant.budget
    if model.shape is not None:
        args |= {"load-format": "dummy", "dtype": model.dtype, "max-model-len": CONTEXT}
    pools = {
        role.value: {"start": count, "engine_args": args, "env": {"VLLM_CPU_KVCACHE_SPACE": f"{model.kv_gib}"}}
        for role, count in contestant.pools.items()
    }
    name = "baton-tiny" if model.shape is None else path
    promised = {
        f"x{factor}": {**each, "attainment": 0.9, "when_missed": "queue"} for factor, each in (classes or {}).items()
    }
    return {
        "models": [{"name": name, "served_name": SERVED, "pools": pools}],
        "transfer": {"connector": contestant.connector, "lease_s": LEASE_S},
        "router": {"policy": contestant.policy},
        **({"slo": promised} if promised else {}),
    }


def load(url: str, *words: str) -> dict[str, Any]:
    """One `baton load`: its report."""
    fixed = ["--json", "--model", SERVED, "--token-ids", LETTERS, "--timeout-s", f"{TIMEOUT_S}"]
    argv = [sys.executable, "-m", "baton", "load", url, *fixed, *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"bench-real: {' '.join(argv)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@dataclass(frozen=True, slots=True)
class Bench:
    """One model: its load, and the folder of its files."""

    model: Model
    shape: Shape
    scale: Scale
    folder: Path

    @property
    def trace(self) -> str:
        """The file of the load."""
        return str(self.folder / "load.jsonl")

    def write(self) -> None:
        """Write the load, and the warm-up load: the first time, when the load is still at its longest."""
        write(self.shape.arrivals, Path(self.trace))
        warm = self.folder / WARM_FILE
        if not warm.exists():
            write(self.shape.arrivals[:WARM], warm)

    def file(self, contestant: Contestant, classes: Mapping[int, Mapping[str, float]] | None = None) -> str:
        """A cluster file, written."""
        path = self.folder / "baton.yaml"
        path.write_text(json.dumps(cluster_file(contestant, self.model, self.model.path(self.folder), classes)))
        return str(path)

    def calibrate(self) -> tuple[float, dict[int, dict[str, float]], dict[str, float]]:
        """Requests a second of the saturated pair, targets of each class, and the unloaded latency they come from."""
        self.write()
        with up([self.file(CONTESTANTS[CALIBRATES])], "bench-real") as said:
            url = said["endpoint"]
            lengths = ["--input-tokens", f"{self.shape.long_prompt}", "--output-tokens", f"{self.shape.answer}"]
            one = ["--max-concurrency", "1", "--rate", "1000", "--arrivals", "constant", *lengths]
            load(url, *one, "--requests", "4")  # first shapes
            alone = load(url, *one, "--requests", f"{ALONE}")
            full = load(url, "--trace", self.trace, "--speed", "1e6")
        unloaded = {"ttft_ms": alone["ttft_sent_ms"]["p50"], "tpot_ms": alone["tpot_ms"]["p50"]}
        classes = {factor: {what: round(factor * ms, 1) for what, ms in unloaded.items()} for factor in FACTORS}
        return full["completed_rate"], classes, unloaded

    def run(self, name: str, found: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All rates and classes of one contestant, as fixed by `begun`."""
        cells = []
        classes = {factor: found["targets"][str(factor)] for factor in found["factors"]}
        with up([self.file(CONTESTANTS[name], classes)], "bench-real") as said:
            speed = self.shape.speed(found["capacity"] * WARM_PART)
            warm = ["--trace", f"{self.folder / WARM_FILE}", "--speed", f"{speed}"]
            load(said["endpoint"], *warm, "--header", f"x-slo-class:x{max(classes)}")
            for factor, promised in classes.items():
                for rate in found["rates"]:
                    cells.append(self._cell(said, name, factor, rate, promised))
                    seen = f"{cells[-1]['attainment']:.1%}, {cells[-1]['handed_over']} handed over"
                    say(f"  {name}, {factor} ×, {rate:.2f}/s: {seen}")
        return cells

    def _cell(
        self, said: Mapping[str, Any], name: str, factor: int, rate: float, promised: Mapping[str, float]
    ) -> dict[str, Any]:
        before = _handed_over(said["admin"])
        words = [f"--trace={self.trace}", f"--speed={self.shape.speed(rate)}", f"--header=x-slo-class:x{factor}"]
        report = load(said["endpoint"], *words, *(f"--{_flag(what)}={ms}" for what, ms in promised.items()))
        kept = ("attainment", "failed", "completed_rate", "ttft_ms", "tt2t_ms", "tpot_ms", "late_ms", "notes")
        return {
            "contestant": name,
            "factor": factor,
            "rate": rate,
            "requests": report["sent"],
            "handed_over": _handed_over(said["admin"]) - before,
            **{what: report[what] for what in kept},
        }


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _handed_over(admin: str) -> int:
    """Requests whose decode leg pulled, since the router's start."""
    found = re.search(r'^baton_handoffs_total\{result="ok"\} (\S+)$', page(f"{admin}/metrics"), re.MULTILINE)
    return int(float(found[1])) if found else 0


def begun(bench: Bench) -> dict[str, Any]:
    """The facts that are fixed before the first run that counts, without any runs."""
    say(f"{bench.model.name}: unloaded, and saturated")
    capacity, classes, unloaded = bench.calibrate()
    say(f"  {unloaded['ttft_ms']:.0f} ms and {unloaded['tpot_ms']:.1f} ms a token; {capacity:.2f} requests a second")
    rates = bench.scale.rates(capacity)
    shape = bench.shape.first(bench.scale.requests(rates))
    told = shape.summary
    return {
        "capacity": capacity,
        "unloaded": unloaded,
        "targets": {str(factor): each for factor, each in classes.items()},
        "factors": list(classes),
        "rates": rates,
        "contestants": {},
        "load": {
            "requests": told.requests,
            "from_s": FROM_S,
            "shorter": SHORTER,
            "prompt_mean": told.input_mean,
            "answer_mean": told.output_mean,
            "gap_cv": told.gap_cv,
            "cut": shape.cut,
            "speeds": [round(shape.speed(rate), 3) for rate in rates],
        },
        "scale": asdict(bench.scale),
        "cells": [],
    }


def of_model(
    bench: Bench, only: Sequence[str], found: dict[str, Any] | None, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Everything about one model.

    Args:
        bench: the model and the longest load.
        only: contestants.
        found: a kept result to continue: its load, rates, targets and contestants. None: none.
        keep: gets the result after each contestant.
    """
    found = found or begun(bench)
    bench.write()
    bench = replace(bench, shape=bench.shape.first(found["load"]["requests"]))
    bench.write()
    for name in only:
        if name not in found["contestants"]:
            say(f"{bench.model.name}: {CONTESTANTS[name].told}")
            found["cells"] += bench.run(name, found)
            found["contestants"][name] = CONTESTANTS[name].told
            keep(found)
    return found


def main() -> int:
    """Measure, print, publish."""
    parser = argparse.ArgumentParser(prog="make bench-real", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer contestants, rates and requests")
    parser.add_argument(
        "--models", type=_of(MODELS), default=(TINY.name,), metavar="A,B", help=f"of {', '.join(MODELS)}"
    )
    parser.add_argument("--only", type=_of(CONTESTANTS), metavar="A,B", help=f"of {', '.join(CONTESTANTS)}")
    parser.add_argument("--into", type=Path, metavar="FILE", help="keep figures there, and go on with those it has")
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks.md, its JSON and figure")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster ends with it
    facts, scale = machine(), QUICK if args.quick else FULL
    with (inputs.required("bench-real", (TRACE,)) / TRACE).open() as lines:
        shape = shaped(lines, scale.requests_max)
    figures: dict[str, Any] = json.loads(args.into.read_text()) if args.into and args.into.exists() else {}

    def keep(found: dict[str, Any]) -> None:
        figures[name] = found
        if args.into:
            args.into.write_text(json.dumps(figures, indent=1))

    for name in args.models:
        with tempfile.TemporaryDirectory(prefix="bench", ignore_cleanup_errors=True) as folder:
            bench = Bench(MODELS[name], shape, scale, Path(folder))
            of_model(bench, args.only or scale.contestants, figures.get(name), keep)
    made = [table for name, found in figures.items() for table in tables(found, name)]
    show(made)
    told = result("real", figures, targets(figures))
    if args.publish:
        missing = draw(figures, DOCS / "figures", facts["date"])
        if missing:
            say(missing)
        pictures = [] if missing else [f"![attainment by rate, {name}](figures/real-{name}.svg)" for name in figures]
        publish(told, made, facts, "\n\n".join([note_of(facts, note(figures)), *pictures]))
    return 0


def _of(known: Mapping[str, Any]) -> Any:
    def names(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(known)}")
        return found

    return names


if __name__ == "__main__":
    sys.exit(main())
