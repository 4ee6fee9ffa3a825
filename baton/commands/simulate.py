"""A trace, or made-up load, through a simulated fleet: router, agents and rules are the product's own.

Engines are twins of vLLM. The report is that of `baton load` on the real fleet. The same flags and seed print the same
bytes. docs/simulator.md tells what is modelled and what is not. Flags of vLLM after `--` hold for
every instance.

examples:
  baton simulate --prefill 2 --decode 4 --rate 20 --requests 2000 --ttft-ms 500 --tpot-ms 40
  baton simulate --cluster baton.yaml --trace AzureLLMInferenceTrace_conv.csv --rate-scale 4 --json
  baton simulate --model Qwen/Qwen3-32B --gpu H200 --both 4 --tp-both 2 --rate 10 -- --max-num-batched-tokens 4096
  baton simulate --prefill 2 --decode 2 --rate 10 --faults chaos --seed 7
  baton simulate --prefill 2 --decode 2 --rate 10 --changes changes.jsonl --gpus H100-SXM=6 --start-up-p95-s 120
  baton simulate --prefill 1 --decode 1 --rate 5 --chrome-trace run.json --trace-window 10-12
  baton simulate --replay decisions.jsonl
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from baton.commands.load import add_load, add_trace
from baton.decisions_again import opened_log, replay_file
from baton.load_arrivals import planned
from baton.load_view import print_report
from baton.number_flags import LARGEST, above_zero, shown
from baton.output import emit, say
from baton.simulated import GPU, MODEL, PlannedSimulation, planned_fleet, read_gpus
from baton.unused_flags import refuse_given
from baton.written import check_folders, check_written
from cluster.errors import UsageError
from cluster.instance import Role
from cluster.spec import POLICY
from cluster.spec.units import unit_of
from cluster.text_file import text_in
from goodput.actions import Start
from loadgen.arrival import Arrival
from loadgen.record import line_of
from loadgen.report import as_json
from router.scheduler.decision_log import DecisionLog
from router.scheduler.scoring.policies import POLICIES, Policy
from sim.baselines import BASELINES, follow
from sim.changes import read_changes
from sim.faults import PRESETS, Fault, Faults, preset, read_faults
from sim.faults import as_json as faults_json
from sim.provisioning import Site, Timed
from sim.result import Result
from sim.roughness import ROUGH, SMOOTH
from sim.settings import SimSettings
from sim.trace_view import TraceView
from sim.world import World

WINDOW_S = (0.0, 10.0)
"""The seconds of a --chrome-trace without --trace-window."""

_SHOWN = {
    "client_us": "client to router, one way, us",
    "router_us": "a request in the router, us",
    "hop_us": "router to engine, one way, us",
    "pull_front_ms": "a decode leg before its pull, ms",
    "handshake_ms": "a pair's first pull waits this long, ms; 0 = pairs are warm",
    "first_token_s": "deadline for the first token, s",
    "routers": "routers that share the instances' credits; one is simulated",
}
"""Settings that have a flag; sim/settings.py says where defaults are from."""

_OF_A_RUN = (
    *("cluster", "model", "gpu", "prefill", "decode", "both", "tp_prefill", "tp_decode", "tp_both", "policy"),
    *("start_up_p95_s", "changes", "gpus", "flips", "cold_start", *_SHOWN, "faults", "fault_every_s", "trace"),
    *("rate", "arrivals", "cv", "input_tokens", "output_tokens", "prefix_tokens", "prefix_groups", "requests"),
    *("duration_s", "dry_run", "format", "tick_ms", "skip_bad", "digests", "peers", "rough", "no_checks", "ttft_ms"),
    *("tt2t_ms", "tpot_ms", "e2e_ms", "out", "chrome_trace", "trace_window", "decision_log"),
)
"""Flags that --replay refuses, by their names in the parsed arguments."""

LATENCY_MAX = 60_000_000
"""Largest value of these, in their own units: a minute if it is in microseconds. Longer ones simulate for ever."""

_LARGEST = {"routers": 10_000, "first_token_s": 1_000_000}
"""The same for those that are no latency."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton simulate`."""
    fleet = parser.add_argument_group("the fleet")
    fleet.add_argument(
        "--cluster", metavar="FILE", help="a cluster file: its pools as they start, its classes, its policy"
    )
    fleet.add_argument("--model", help=f"without --cluster: what to serve (default {MODEL})")
    fleet.add_argument("--gpu", help=f"type of GPU for pools that name none (default {GPU})")
    for role in Role:
        fleet.add_argument(f"--{role.value}", type=_natural, metavar="N", help=f"instances of role `{role.value}`")
    for role in Role:
        fleet.add_argument(
            f"--tp-{role.value}", type=_natural, metavar="N", help=f"GPUs of an instance of role `{role.value}`"
        )
    fleet.add_argument("--policy", help=f"one of {', '.join(sorted(policies()))} (default {POLICY}, or --cluster's)")
    _add_changes(fleet)
    fleet.add_argument("--cold-start", action="store_true", help="engines start with the load, not before it")
    defaults = {each.name: each.default for each in fields(SimSettings)}
    for name, text in _SHOWN.items():
        kind = int if name == "routers" else float
        fleet.add_argument(
            f"--{name.replace('_', '-')}", type=kind, metavar="X", help=f"{text} (default {defaults[name]})"
        )
    add_load(parser.add_argument_group("the load"), sends=False)
    add_trace(parser.add_argument_group("from a trace"))
    wrong = parser.add_argument_group("what goes wrong")
    wrong.add_argument(
        "--faults", metavar="FILE|PRESET", help=f"JSON, one fault a line, or one of {', '.join(PRESETS)}"
    )
    wrong.add_argument(
        "--fault-every-s", type=above_zero, metavar="S", help="a preset's mean gap, for each kind of fault"
    )
    wrong.add_argument(
        "--digests", action="store_true", help="compare pulled blocks with the held ones, as Baton's connector can"
    )
    wrong.add_argument(
        "--peers", action="store_true", help="instances share prompts' beginnings, as with Baton's connector"
    )
    wrong.add_argument(
        "--rough",
        action="store_true",
        help="engines change speed and stall, their front ends queue, prompt tokens are estimated (docs/simulator.md)",
    )
    wrong.add_argument("--no-checks", action="store_true", help="do not check the laws after each event")
    told = parser.add_argument_group("what to report")
    for name in ("ttft", "tt2t", "tpot", "e2e"):
        told.add_argument(f"--{name}-ms", type=above_zero, metavar="MS", help="target of requests without a class")
    told.add_argument(
        "--out", type=Path, metavar="FILE", help="one line per request, as `baton load --out` writes them"
    )
    told.add_argument("--chrome-trace", type=Path, metavar="FILE", help="for chrome://tracing or ui.perfetto.dev")
    told.add_argument("--trace-window", type=_window, metavar="A-B", help="its seconds (default 0-10)")
    told.add_argument(
        "--decision-log", type=Path, metavar="FILE", help="what each choice depended on, as `baton router` writes it"
    )
    told.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="simulate nothing: make such a log's choices again, and compare",
    )
    told.add_argument("--json", action="store_true", help="one JSON object on stdout; the time it took goes to stderr")


def _add_changes(fleet: argparse._ArgumentGroup) -> None:
    """Flags of starts, and of a fleet that changes during the run."""
    fleet.add_argument(
        "--start-up-s", type=above_zero, default=60.0, metavar="S", help="an engine's start (default %(default)g)"
    )
    fleet.add_argument(
        "--start-up-p95-s",
        type=above_zero,
        metavar="S",
        help="19 of 20 starts take at most this (default: all the same)",
    )
    fleet.add_argument(
        "--start-fails", type=above_zero, default=0.0, metavar="SHARE", help="share of starts that fail (default 0)"
    )
    fleet.add_argument(
        "--changes",
        type=Path,
        metavar="FILE",
        help='instances that start, drain, flip and stop, as JSON lines: {"at_s": 30, "do": "start", "pool": "decode", '
        '"instance": "decode-9"}; pools are the roles that the fleet begins with',
    )
    fleet.add_argument(
        "--gpus", metavar="TYPE=N,…", help="GPUs by type; an instance that finds none free waits (default: no limit)"
    )
    fleet.add_argument("--flips", action="store_true", help="without --cluster: instances may take another role")


def policies() -> dict[str, Callable[[], Policy]]:
    """A maker of each policy, the router's and rivals', by name. Some rivals' have state: each run makes its own."""
    return {**BASELINES, **{name: partial(_same, policy) for name, policy in POLICIES.items()}}


def _same(policy: Policy) -> Policy:
    return policy


def run(args: argparse.Namespace) -> int:
    """Simulate and print: 0 if some request was served; 1 if none was, or the run broke off.

    With --replay: 0 if all choices are the same again, else 1.
    """
    if args.replay is not None:
        refuse_given(args, _OF_A_RUN, "belongs to a simulation, and --replay makes a log's choices again")
        return replay_file(args.replay, {name: make() for name, make in policies().items()}, as_json=args.json)
    with ExitStack() as closing:
        return _run(args, closing)


def _run(args: argparse.Namespace, closing: ExitStack) -> int:
    _refuse_unused(args)
    _check_files(args)
    load = planned(args)
    fleet = planned_fleet(args, contents=args.faults is not None)
    name = args.policy or fleet.policy
    policy = _policy(name)
    if args.dry_run:
        raise UsageError("--dry-run is `baton load`'s: simulating costs nothing")
    settings = _settings(args, fleet)
    site, changes = _site(args, fleet)
    faults = _faults(args, fleet, load.arrivals, changes)
    log = args.decision_log and DecisionLog(opened_log(args.decision_log, "--decision-log", closing), name)
    try:
        world = World(
            fleet.members, settings, policy=policy, model=fleet.model, promises=fleet.promises, log=log, site=site
        )
    except ValueError as error:
        raise UsageError(f"the fleet cannot begin: {error}") from None
    world.provisioning.schedule(changes)
    Faults(world, faults, args.seed)
    view = _trace_view(args, world)
    follow(world, policy)
    began_s = time.monotonic()
    with _Progress(world, len(load.arrivals)):
        result = _simulate(world, load.arrivals, args)
    if result is None:
        return 1
    took_s = time.monotonic() - began_s
    try:
        _write_files(args, result, load.arrivals, view)
    finally:  # a file that cannot be written costs no report
        _tell(args, fleet, result, settings, faults, (*load.notes, *fleet.notes))
    rate = len(result.columns) / max(took_s, 1e-9)
    say(f"simulated {result.end_ns / 1e9:,.1f} s in {took_s:.1f} s: {rate:,.0f} requests/s")
    return 0 if result.good().any() or not len(result.columns) else 1


def _refuse_unused(args: argparse.Namespace) -> None:
    """Refuse a flag that has no effect without another one."""
    if args.faults not in PRESETS:
        refuse_given(args, ["fault_every_s"], f"belongs to a preset: give --faults one of {', '.join(PRESETS)}")
    if args.chrome_trace is None:
        refuse_given(args, ["trace_window"], "says which seconds --chrome-trace has: give --chrome-trace FILE")


def _check_files(args: argparse.Namespace) -> None:
    """Refuse results that could not be written, or would overwrite an input: inputs are read first, results written
    last.
    """
    written = {"--out": args.out, "--chrome-trace": args.chrome_trace, "--decision-log": args.decision_log}
    read = ("trace", "input_tokens", "output_tokens", "cluster", "faults", "changes")
    check_folders(written)
    check_written(written, [(f"--{name.replace('_', '-')}", getattr(args, name)) for name in read])


def _simulate(world: World, arrivals: Sequence[Arrival], args: argparse.Namespace) -> Result | None:
    """Run the simulation; None if it broke off: stderr then has the error, and the command that repeats the run."""
    gc.disable()  # a run makes no cycles to speak of, and a million live objects make each collection slow
    try:
        return world.run(arrivals)
    except KeyboardInterrupt:
        kept = "there is no report, and nothing was written" + (" but --decision-log so far" * bool(args.decision_log))
        say(f"simulate: stopped at {world.kernel.now_s:,.0f} s of the run: {kept}")
        raise
    except Exception as error:  # noqa: BLE001 - any of them ends the run here, with the one command that brings it back
        told = str(error) or "an assertion failed"
        say(f"simulate: {type(error).__name__} at {world.kernel.now_s:.9f} s of the run: {told}")
        say(f"simulate: seed={args.seed}; to see it again: {again(sys.argv[1:], args.seed)}")
        return None
    finally:
        gc.enable()


def again(words: Sequence[str], seed: int) -> str:
    """The command that repeats a run: its `words`, with --seed if they have none."""
    named = any(word == "--seed" or word.startswith("--seed=") for word in words)
    at = words.index("--") if "--" in words else len(words)
    extra = [] if named else ["--seed", str(seed)]
    return shlex.join(["baton", *words[:at], *extra, *words[at:]])


def _settings(args: argparse.Namespace, fleet: PlannedSimulation) -> SimSettings:
    found = SimSettings(
        seed=args.seed,
        cold_start=args.cold_start,
        checks=not args.no_checks,
        digests=args.digests,
        peers=args.peers,
        rough=ROUGH if args.rough else SMOOTH,
    )
    of_file = {name: getattr(fleet, name) for name in ("first_token_s", "stall_s") if getattr(fleet, name) is not None}
    of_flags = {name: getattr(args, name) for name in _SHOWN if getattr(args, name) is not None}
    for name, value in of_flags.items():
        limit, most = name in {"first_token_s", "routers"}, _LARGEST.get(name, LATENCY_MAX)
        if not 0 <= value <= most or (limit and not value):
            what = f"a number of {unit_of(name)}" if name != "routers" else "a whole number"
            least = "0 or more" if not limit else "1 or more" if name == "routers" else "above 0"
            raise UsageError(f"--{name.replace('_', '-')} {shown(value)}: write {what}, {least}, up to {most:,}")
    return replace(found, **{**of_file, **of_flags})


def _policy(name: str) -> Policy:
    known = policies()
    if name not in known:
        raise UsageError(f"--policy {name}: there is {', '.join(sorted(known))}")
    return known[name]()


def _site(args: argparse.Namespace, fleet: PlannedSimulation) -> tuple[Site, tuple[Timed, ...]]:
    """The pools and GPUs from which instances start, and the changes of --changes with their times."""
    pools = {each.role.value: each for each in fleet.members}
    site = Site(pools=pools, gpus=read_gpus(args.gpus, "--gpus") if args.gpus is not None else {})
    if args.changes is None:
        return site, ()
    text = text_in(args.changes, "--changes", "give a file of changes")
    try:
        return site, read_changes(text, list(pools))
    except UsageError as error:
        raise UsageError(f"--changes {args.changes}: {error}") from None


def _faults(
    args: argparse.Namespace, fleet: PlannedSimulation, arrivals: Sequence[Arrival], changes: Sequence[Timed]
) -> tuple[Fault, ...]:
    if args.faults is None:
        return ()
    started = [each.action.instance for each in changes if isinstance(each.action, Start)]
    names = [*(each.name for each in fleet.members), *started]
    span_s = arrivals[-1].at_s if arrivals else 0.0
    if args.faults in PRESETS:
        return preset(args.faults, args.seed, names, span_s, args.fault_every_s)
    text = text_in(Path(args.faults), "--faults", f"give a file of faults, or one of {', '.join(PRESETS)}")
    try:
        return read_faults(text, names)
    except UsageError as error:
        raise UsageError(f"--faults {args.faults}: {error}") from None


def _trace_view(args: argparse.Namespace, world: World) -> TraceView | None:
    if args.chrome_trace is None:
        return None
    from_s, until_s = args.trace_window or WINDOW_S
    return TraceView(world, round(from_s * 1e9), round(until_s * 1e9))


def _write_files(args: argparse.Namespace, result: Result, arrivals: Sequence[Arrival], view: TraceView | None) -> None:
    where = f"--out {args.out}"
    try:
        if args.out is not None:
            with args.out.open("wb") as file:
                file.writelines(line_of(record) for record in result.records(arrivals))
        if view is not None:
            where = f"--chrome-trace {args.chrome_trace}"
            args.chrome_trace.write_text(json.dumps(view.document(result)))
            if view.left_out:
                say(f"--chrome-trace: {view.left_out:,} events were left out; take a shorter --trace-window")
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}") from None


def _tell(
    args: argparse.Namespace,
    fleet: PlannedSimulation,
    result: Result,
    settings: SimSettings,
    faults: tuple[Fault, ...],
    notes: tuple[str, ...],
) -> None:
    report = result.report(fleet.targets, fleet.by_class)
    if not args.json:
        print_report(report)
        told = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in result.counts.items() if count)
        say(f"{len(fleet.members)} instances, {result.gpus} GPUs; {told}")
        if result.energy_j:
            per_token = result.energy_j / report.output_tokens if report.output_tokens else math.inf
            mean_w = result.energy_j / max(1e-9, result.end_ns / 1e9)
            kwh = result.energy_j / 3.6e6
            say(f"the GPUs drew {kwh:.3f} kWh, {mean_w:,.0f} W on average, {per_token:,.2f} J an output token")
        for event in result.fleet_events if args.changes is not None else ():
            because = f": {event.because}" if event.because else ""
            say(f"{event.at_ns / 1e9:10.3f} s  {event.instance} {event.what}{because}")
        for note in notes:
            say(note)
        return
    found = {
        "report": as_json(report),
        "counts": dict(sorted(result.counts.items())),
        "events": result.events,
        "fleet": {
            "instances": len(fleet.members),
            "gpus": result.gpus,
            "gpu_seconds": dict(result.gpu_seconds),
            "energy_j": result.energy_j,
            "model": fleet.model,
        },
        "fleet_events": [
            {"at_s": each.at_ns / 1e9, "instance": each.instance, "what": each.what, "because": each.because}
            for each in (result.fleet_events if args.changes is not None else ())
        ],
        "settings": asdict(settings),
        "faults": faults_json(faults),
        "notes": list(notes),
    }
    emit(json.loads(json.dumps(found, sort_keys=True)))


class _Progress:
    """The progress on stderr: a live line on a terminal, elsewhere a line every `EVERY_S` seconds."""

    EVERY_S = 5.0

    def __init__(self, world: World, planned_count: int) -> None:
        self._planned, self._said_s = planned_count, time.monotonic()
        self._status: Any = None
        world.on_progress = self._tick

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True, highlight=False).status("simulating")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def _tick(self, world: World) -> None:
        rows, now_s = world.book.rows, time.monotonic()
        if self._status is None and now_s - self._said_s < self.EVERY_S:
            return
        self._said_s = now_s
        done = f"{rows.ended:,} of {self._planned:,} done, {len(world.book.open):,} open"
        line = f"{world.kernel.now_s:,.0f} s simulated: {done}"
        self._status.update(line) if self._status is not None else say(line)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, 0 or more")
    return int(text)


def _window(text: str) -> tuple[float, float]:
    begin, _, end = text.partition("-")
    try:
        found = (float(begin), float(end))
    except ValueError:
        found = (0.0, 0.0)
    if not 0 <= found[0] < found[1] <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text}: write the first second and the last, like 10-12")
    return found
