"""The cheapest fleet that keeps the promises of a cluster file, for a trace or made-up load.

Searches GPU types, tensor parallel sizes, prefill and decode apart or together, token budgets and counts. Bounds rule
out what cannot be; what is left is simulated with the router's own policy and admission, every fleet on the same
requests. The answer says how sure it is, what binds, its price and its power. Ctrl-C gives the best so far. Ends with
exit code 1 where nothing keeps the promises, naming the term that makes it impossible.

The file's `slo` is what is promised, `hardware` says which types there are, how many, and their prices; --gpus instead
of it. Flags of vLLM in a pool's `engine_args` hold for its role.

examples:
  baton plan baton.yaml --trace AzureLLMInferenceTrace_conv.csv --gpus H100-SXM=16,L40S=32
  baton plan baton.yaml --rate 20 --requests 3000 --input-tokens 2000 --output-tokens 200 --objective gpus
  baton plan baton.yaml --trace run.jsonl --survive 1 --out planned.yaml
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton import clusterfile
from baton.commands.load import add_load, add_trace
from baton.load_arrivals import planned
from baton.output import emit, say
from baton.plan_view import Progress, as_json, pools_of, show
from baton.planning import OBJECTIVES, Answer, Task, goals_of, plan
from baton.simulated import model_of, read_gpus
from cluster.errors import UsageError
from cluster.spec import Hardware, Model, Spec
from costs.hardware import Gpu, gpu_named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton plan`."""
    parser.add_argument("file", metavar="FILE", help="a cluster file: model, promises, hardware")
    parser.add_argument("--model", help="which of the file's models (default: its first)")
    parser.add_argument(
        "--objective",
        choices=tuple(OBJECTIVES),
        default="cost",
        help="what is made small: " + "; ".join(f"{name}: {text}" for name, text in OBJECTIVES.items()),
    )
    parser.add_argument(
        "--gpus", metavar="TYPE=N,…", help="types and how many there are (default: the file's `hardware`)"
    )
    parser.add_argument(
        "--survive", type=int, choices=(0, 1), default=0, help="the promises hold with one instance lost, too"
    )
    parser.add_argument(
        "--strict", action="store_true", help="rows of a trace that were left out are an error (exit 1)"
    )
    parser.add_argument("--processes", type=int, metavar="N", help="simulate so many at a time (default: one a core)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the cluster file to run; never over another")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_load(parser.add_argument_group("the load"))
    add_trace(parser.add_argument_group("from a trace"))


def run(args: argparse.Namespace) -> int:
    """Plan and print; 0 with an answer, 1 where nothing keeps the promises."""
    if args.vllm_args:
        raise UsageError("`baton plan` takes no vLLM flags: give them to the file's pools (`engine_args`)")
    if args.processes is not None and args.processes < 1:
        raise UsageError(f"--processes {args.processes}: give 1 or more")
    if args.out is not None and args.out.exists():
        raise UsageError(f"--out {args.out}: there is such a file; name another")
    spec = _spec(args.file)
    load = planned(args)
    if not load.arrivals:
        raise UsageError("the load holds no request: nothing to plan for")
    task = _task(args, spec, tuple(load.arrivals))
    began_s = time.monotonic()
    with Progress() as progress:
        outcome = plan(task, progress.tick, args.processes)
    took_s = time.monotonic() - began_s
    if args.json:
        emit(as_json(outcome, task, took_s))
    else:
        show(outcome, task, took_s)
    for note in (*load.notes, *load.bad):
        say(note)
    if args.out is not None and outcome.best is not None:
        _write(args, task, outcome.best)
    if args.strict and load.bad:
        return 1
    return 0 if outcome.best is not None else 1


def _spec(name: str) -> Spec:
    parsed = clusterfile.read(name)
    if parsed.spec is None or parsed.errors:
        told = "; ".join(str(each) for each in parsed.errors[:3])
        raise UsageError(f"{name} has errors (`baton lint {name}` lists them): {told}")
    if not parsed.spec.slo:
        raise UsageError(f"{name} promises nothing: give it classes under `slo`, like interactive: {{ttft_ms: 500}}")
    return parsed.spec


def _task(args: argparse.Namespace, spec: Spec, arrivals: Any) -> Task:
    model = _model(spec, args.model, args.file)
    return Task(
        model=model,
        shape=model_of(model.name),
        gpus=_gpus(args, spec),
        arrivals=arrivals,
        goals=goals_of(spec),
        usual=next(iter(spec.slo)),
        objective=args.objective,
        survive=args.survive,
    )


def _model(spec: Spec, wanted: str | None, file: str) -> Model:
    named = [each for each in spec.models if wanted is None or wanted in {each.name, each.api_name}]
    if not named:
        raise UsageError(f"--model {wanted}: {file} has {', '.join(each.api_name for each in spec.models)}")
    return named[0]


def _gpus(args: argparse.Namespace, spec: Spec) -> tuple[tuple[Gpu, int | None], ...]:
    counts: Mapping[str, int | None] = (
        read_gpus(args.gpus, "--gpus") if args.gpus else {name: each.count for name, each in spec.hardware.items()}
    )
    if not counts:
        raise UsageError(f"{args.file} names no GPU under `hardware`: add them there, or give --gpus H100-SXM=16")
    told = {gpu_named(name).name: each for name, each in spec.hardware.items()}
    return tuple((_told(gpu_named(name), told), count) for name, count in counts.items())


def _told(gpu: Gpu, told: Mapping[str, Hardware]) -> Gpu:
    """With the file's own price, power and memory."""
    said = told.get(gpu.name)
    if said is None:
        return gpu
    return replace(
        gpu,
        usd_per_hour=gpu.usd_per_hour if said.price_per_hour is None else said.price_per_hour,
        tdp_w=gpu.tdp_w if said.power_w is None else said.power_w,
        memory_gib=gpu.memory_gib if said.memory_gib is None else said.memory_gib,
    )


def _write(args: argparse.Namespace, task: Task, best: Answer) -> None:
    """The user's own file with the planned pools."""
    import yaml

    text = yaml.safe_load(Path(args.file).read_text())
    for each in text["models"]:
        if each["name"] == task.model.name:
            each["pools"] = pools_of(best, each.get("pools") or {})
    hardware = dict(text.get("hardware") or {})
    for kind in best.arrangement:
        if not any(gpu_named(name).name == kind.gpu.name for name in hardware):
            hardware[kind.gpu.name] = {}
    text["hardware"] = hardware
    heading = f"# Planned by `baton plan` for {len(task.arrivals):,} requests: {best}\n"
    try:
        with args.out.open("x") as file:
            file.write(heading + yaml.safe_dump(text, sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise UsageError(f"--out {args.out}: {error.strerror or error}") from None
    say(f"wrote {args.out}: `baton lint {args.out}`, then `baton up {args.out}`")
