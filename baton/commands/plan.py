"""The cheapest fleet that keeps the promises of a cluster file, for a trace or made-up load.

Searches GPU types, tensor parallel sizes, prefill and decode apart or together, several GPU types in one role, token
budgets, power caps and counts. Bounds rule out fleets that cannot keep them; others are simulated with the router's
own policy and admission, all on the same requests. The answer says how sure it is, what binds, its price and its power,
and what the next step of the promise would take. Ctrl-C gives the best so far. Ends with exit code 1 where nothing
keeps the promises, naming the term that makes it impossible; with 2 for wrong input, promises below the roofline too.

The file's `slo` has the promises. Its `hardware` lists the GPU types, their number, prices and power; --gpus
replaces that list. Flags of vLLM in a pool's `engine_args` hold for its role.

examples:
  baton plan baton.yaml --trace AzureLLMInferenceTrace_conv.csv --gpus H100-SXM=16,L40S=32 --html plan.html
  baton plan baton.yaml --workload workload.yaml --objective energy
  baton plan baton.yaml --rate 20 --requests 3000 --input-tokens 2000 --output-tokens 200 --objective gpus
  baton plan baton.yaml --trace run.jsonl --survive 1 --out planned.yaml
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from baton import clusterfile, plan_file
from baton.commands.load import add_load, add_trace
from baton.file_kinds import is_folder
from baton.gpus import as_told
from baton.load_arrivals import PlannedLoad, planned
from baton.model_sizes import sizes_of
from baton.number_flags import above_zero
from baton.output import emit, say
from baton.plan_steps import EFFORT_SHARE, Step, next_steps
from baton.plan_view import PlanProgress, as_json, show
from baton.planning import EFFORT, OBJECTIVES, SearchResult, Task, goals_of, not_simulated, plan
from baton.simulated import read_gpus
from baton.workload import workload
from baton.written import check_picture
from cluster.errors import UsageError
from cluster.spec import Parsed, Spec
from costs.bounds import Least, least
from costs.hardware import Gpu, gpu_named
from costs.model import ModelShape
from costs.shape import Spans
from goodput.candidates import shapes
from loadgen.shaping import window
from sim.engine_args import unread_line

STRICT = "--strict makes no plan"
"""Ends the line about left-out rows of a trace: what --strict would have done."""

STEPS = 3
"""Next steps that `baton.plan_steps.steps` yields at most, for the progress bar; 0 with --no-steps."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton plan`."""
    add = parser.add_argument
    add("file", metavar="FILE", help="a cluster file: model, promises, hardware")
    add("--model", help="which of the file's models (default: its first)")
    add(
        "--objective",
        action=_Once,
        choices=tuple(OBJECTIVES),
        default="cost",
        help="what is made small: " + "; ".join(f"{name}: {text}" for name, text in OBJECTIVES.items()),
    )
    add("--gpus", metavar="TYPE=N,…", help="types and how many there are (default: the file's `hardware`)")
    add(
        "--power-w",
        type=above_zero,
        metavar="W",
        help="all GPUs together may draw so much: power caps are searched, too",
    )
    add("--survive", type=int, choices=(0, 1), default=0, help="the promises hold with one instance lost, too")
    add("--strict", action="store_true", help="warnings about the file, and rows left out of a trace: exit 1, no plan")
    add(
        "--effort",
        type=_effort,
        default=EFFORT,
        metavar="N",
        help="requests to simulate at most; each fleet counts as 150 more (default %(default)s: about two minutes "
        "on two cores)",
    )
    add(
        "--replay-decisions",
        metavar="CLUSTER|LOG",
        help="instead: decide a controller's kept log again, by this file, and say what comes out otherwise",
    )
    add("--no-steps", action="store_true", help="do not ask what the next step of the promise would take")
    add("--processes", type=int, metavar="N", help="simulate so many at a time (default: one a core)")
    add("--on", metavar="ray", help="simulate on a Ray cluster: ray, or ray://HOST:PORT; the answer is the same")
    group = parser.add_argument_group("what to write; never over a file that is there")
    group.add_argument("--out", type=Path, metavar="FILE", help="the cluster file to run")
    group.add_argument("--html", type=Path, metavar="FILE", help="a report on one page; needs matplotlib")
    group.add_argument("--plot", type=Path, metavar="FILE", help="price against attainment and TTFT: PNG, SVG or PDF")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout")
    load = parser.add_argument_group("the load")
    load.add_argument("--workload", metavar="FILE", help="several classes at once (docs/plan.md), or a ServeGen folder")
    add_load(load, sends=False)
    add_trace(parser.add_argument_group("from a trace"))


class _Once(argparse.Action):
    """A flag that is refused if it is given twice with two values."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, f"{self.dest}_given", None)
        if before not in {None, values}:
            raise UsageError(f"{option} {before} and {option} {values}: give one of them")
        setattr(namespace, f"{self.dest}_given", values)
        setattr(namespace, self.dest, values)


def _effort(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number above 0")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Plan and print: 0 with an answer; 1 if no fleet keeps the targets, or --strict refuses the input.

    With --replay-decisions: 0 if every decision is the same again, else 1.
    """
    _check(args)
    if args.replay_decisions is not None:
        return _decide_again(args)
    parsed = _parsed(args.file)
    spec = parsed.usable()
    load = _load(args)
    if args.strict and (load.bad or parsed.problems):
        for line in (*map(str, parsed.problems), *load.left_out(STRICT)):
            say(line)
        say("--strict: no plan is made from this; correct it, or leave --strict out")
        return 1
    task = _task(args, spec, load)
    unread = not_simulated(task.model)
    began_s = time.monotonic()
    outcome, steps = _planned(args, task)
    took_s = time.monotonic() - began_s
    try:
        _write(args, parsed.text, task, outcome, steps, took_s)
    finally:  # a file that cannot be written must not cost the answer
        if args.json:
            more = {"not_simulated": unread, "bad_rows": list(load.bad)}
            emit({**as_json(outcome, steps, task, took_s), **more})
        else:
            show(outcome, steps, task, took_s)
    for line in (*([unread_line(unread)] if unread else []), *load.notes, *load.left_out(STRICT)):
        say(line)
    return 0 if outcome.best is not None else 1


def _check(args: argparse.Namespace) -> None:
    """Refuse flags that cannot be used, before anything that takes long.

    Raises:
        UsageError: the message names the flag.
    """
    if args.vllm_args:
        raise UsageError("`baton plan` takes no vLLM flags: give them to the file's pools (`engine_args`)")
    if args.processes is not None and args.processes < 1:
        raise UsageError(f"--processes {args.processes}: give 1 or more")
    if args.dry_run:
        raise UsageError("--dry-run is `baton load`'s: a plan sends nothing")
    written = [(flag, path) for flag in ("--out", "--html", "--plot") if (path := getattr(args, flag[2:])) is not None]
    for flag, path in written:
        _free(flag, path)
    for (flag, path), (other, same) in combinations(written, 2):
        if path.absolute() == same.absolute():
            raise UsageError(f"{flag} and {other} name one file: {path}")
    check_picture("--plot", args.plot)
    if args.html is not None or args.plot is not None:
        from baton.load_plots import need_matplotlib

        need_matplotlib("--html" if args.html is not None else "--plot")


def _free(flag: str, path: Path) -> None:
    """Refuse a path for a result if a file is there, or its folder is missing."""
    try:
        taken, folder = path.exists(), path.absolute().parent.is_dir()
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror or error}") from None
    if taken:
        raise UsageError(f"{flag} {path}: there is such a file; name another")
    if not folder:
        raise UsageError(f"{flag} {path}: there is no folder {path.parent}")


def _decide_again(args: argparse.Namespace) -> int:
    """Replay a controller's log: 0 if every decision is the same again; 1 otherwise."""
    from baton.scaling_log import decide_again, log_of

    found = decide_again(args.file, log_of(args.replay_decisions))
    if args.json:
        emit({"controllers": found.controllers, "events": found.events, "different": list(found.different)})
    else:
        for line in found.different:
            print(line)
        same = "all as they were" if not found.different else f"{len(found.different)} otherwise"
        print(f"{found.events} events of {found.controllers} controllers decided again: {same}")
    return 1 if found.different else 0


UNUSED_BY_WORKLOADS: Mapping[str, float | None] = {
    **dict.fromkeys(("rate", "arrivals", "cv", "input_tokens", "output_tokens", "prefix_tokens", "requests"), None),
    **dict.fromkeys(("prefix_groups", "duration_s", "format", "tick_ms"), None),
    "speed": 1.0,
    "rate_scale": 1.0,
    "from_s": 0.0,
}
"""Flags that a workload file would silently ignore, with their defaults; other values are refused beside it."""


def _parsed(name: str) -> Parsed:
    parsed = clusterfile.read(name)
    if parsed.spec is None or parsed.errors:
        told = "; ".join(str(each) for each in parsed.errors[:3])
        raise UsageError(f"{name} has errors (`baton lint {name}` lists them): {told}")
    if not parsed.spec.slo:
        raise UsageError(f"{name} promises nothing: give it classes under `slo`, like interactive: {{ttft_ms: 500}}")
    return parsed


def _load(args: argparse.Namespace) -> PlannedLoad:
    if args.workload is not None and args.trace is not None:
        raise UsageError("--workload makes load up, --trace replays one: give one of them")
    if args.workload is not None and is_folder(Path(args.workload)):
        args.trace = args.workload
    elif args.workload is not None:
        for name, usual in UNUSED_BY_WORKLOADS.items():
            if getattr(args, name) != usual:
                raise UsageError(f"--{name.replace('_', '-')} beside --workload: say it in the workload file")
        return _some(PlannedLoad(workload(Path(args.workload), args.seed, strict=args.strict)))
    if args.trace is None and args.rate is None:
        raise UsageError("no load to plan for: give --trace FILE, --workload FILE, or --rate with lengths")
    return _some(planned(args))


def _some(load: PlannedLoad) -> PlannedLoad:
    """The load from its first request on: GPUs that wait for it have no part in what the load takes."""
    if not load.arrivals:
        raise UsageError("the load holds no request: nothing to plan for")
    return replace(load, arrivals=list(window(load.arrivals, load.arrivals[0].at_s)))


def _task(args: argparse.Namespace, spec: Spec, load: PlannedLoad) -> Task:
    model = clusterfile.named_model(spec, args.model, args.file)
    shape, gpus = sizes_of(model.name), _gpus(args, spec)
    named = {each.slo_class for each in load.arrivals if each.slo_class is not None}
    if unknown := sorted(named - set(spec.slo)):
        raise UsageError(
            f"the load has requests of class {', '.join(unknown)}; {args.file} promises {', '.join(spec.slo)}"
        )
    task = Task(
        model=model,
        shape=shape,
        gpus=gpus,
        arrivals=tuple(load.arrivals),
        goals=goals_of(spec),
        usual=next(iter(spec.slo)),
        objective=args.objective,
        survive=args.survive,
        power_w=args.power_w,
        effort=args.effort,
    )
    _above_the_roofline(args.file, spec, shape, gpus)
    return task


def _above_the_roofline(file: str, spec: Spec, shape: ModelShape, gpus: tuple[tuple[Gpu, int | None], ...]) -> None:
    """Refuse a target that no engine could keep on any of these GPUs, even with a prompt of one token."""
    found = [least(shape, gpu, Spans(tp=tp)) for gpu, count in gpus for tp in shapes(shape, gpu, count)]
    if not found:
        return

    def first_ms(each: Least) -> float:
        return each.ttft_ms

    first, token = min(found, key=first_ms), min(found, key=lambda each: each.tpot_ms)
    for name, promised in spec.slo.items():
        for target, bound, why in (
            ("ttft_ms", first.ttft_ms, first.because),
            ("tt2t_ms", token.tpot_ms, token.because),
            ("tpot_ms", token.tpot_ms, token.because),
        ):
            value = getattr(promised, target)
            if value is not None and value < bound:
                raise UsageError(
                    f"{file}: slo.{name}.{target} {value:g} is below the roofline of every GPU given: at best "
                    f"{math.ceil(bound * 100) / 100:g} ms ({why}); write that or more, or give faster GPUs"
                )


def _gpus(args: argparse.Namespace, spec: Spec) -> tuple[tuple[Gpu, int | None], ...]:
    counts: Mapping[str, int | None] = (
        read_gpus(args.gpus, "--gpus")
        if args.gpus is not None
        else {name: each.count for name, each in spec.hardware.items()}
    )
    if not counts:
        raise UsageError(f"{args.file} names no GPU under `hardware`: add them there, or give --gpus H100-SXM=16")
    types = [gpu_named(name).name for name in spec.hardware]
    for at, name in enumerate(spec.hardware):
        if types[at] in types[:at]:
            raise UsageError(f"{args.file}: hardware.{name} is {types[at]}, which has another entry: keep one")
    return tuple((as_told(gpu_named(name), spec.hardware), count) for name, count in counts.items())


def _planned(args: argparse.Namespace, task: Task) -> tuple[SearchResult, list[Step]]:
    steps: list[Step] = []
    where = {"on": args.on, "processes": args.processes}
    asked = 0 if args.no_steps else STEPS
    with PlanProgress(task.effort * (1 + asked * EFFORT_SHARE)) as progress:
        outcome = plan(task, progress.tick, **where)
        try:
            if asked and not outcome.stopped and outcome.last is not None:
                steps.extend(next_steps(outcome.last.planner.task, outcome.last, progress.tick, **where))
        except KeyboardInterrupt:
            outcome.stopped = True
    return outcome, steps


def _write(
    args: argparse.Namespace, given: str, task: Task, outcome: SearchResult, steps: list[Step], took_s: float
) -> None:
    """Write the files that flags ask for; before anything is printed, since a pipe may lose that.

    `given`: the text of the cluster file, as it was read.
    """
    from baton import plan_report

    if args.html is not None:
        plan_report.write(args.html, plan_report.page(outcome, steps, task, took_s), "--html")
        say(f"wrote {args.html}")
    if args.plot is not None:
        plan_report.write(args.plot, plan_report.picture(outcome, task, args.plot.suffix[1:]), "--plot")
        say(f"wrote {args.plot}")
    if args.out is not None and outcome.best is not None:
        plan_file.write(args.out, plan_file.text_of(given, task, outcome.best))
        say(f"wrote {args.out}: `baton lint {args.out}`, then `baton up {args.out}`")
