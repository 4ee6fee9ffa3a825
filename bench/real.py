"""Requests served in time by two real engines: Baton's choice, the same engines serving whole, and plain vLLM.

    BATON_DATA=/path/to/data make bench-real                      two hours: 10 repeats of 2 minutes, 2 rates
    make bench-real ARGS=--quick                                  under 15 minutes: 3 repeats of 20 seconds
    make bench-real ARGS=--full                                   six hours: 7 contestants in place of 3, 3 rates
    make bench-real ARGS="--models fat"                           64 KB of KV a token
    make bench-real ARGS=--publish                                writes docs/ from a whole run

Contestants are in `bench/real_contestants.py`. All are up at once; one at a time gets load, so that what else the
machine does meets all alike. It goes on where it stopped: runs are kept in .bench/real-MODEL.json, and used while
sources and machine are the same (`--fresh` forgets them).

Everything is fixed before the first run that counts, on the two engines that serve whole. The trace's first requests,
all sent at once, give the rate at which the pair saturates (its last answers come alone, so that it is somewhat more).
Rates are parts of it, below saturation, and with the rates it is known which part of the trace is sent. A prompt of
that part's 90th percentile with its mean answer, one at a time through the router, gives the unloaded latency. Targets
are 2, 5 and 10 times its median, and admission keeps to those of 5. A repeat is one stretch of the trace, sent to
every contestant at every rate: the same requests in the same order (`bench/real_load.py`). Where the trace is too short
for ten stretches, neighbours share requests, and the note says how many. Contestants take turns inside a repeat, and
each repeat begins with the next of them.

A run in which the sender itself was late says nothing of the engines: it is tried once more, then void, and with it
its repeat's ratio. If an engine of plain vLLM or its router has ended, or if the sender did not send everything, the
benchmark ends; earlier runs are kept.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from bench import inputs
from bench.connectors_models import FAT, TINY, Model
from bench.processes import ROOT, page
from bench.published import DOCS, machine, note_of, publish, result, save, say, show
from bench.real_contestants import ADMITTED, CALIBRATES, CONTESTANTS, SERVED, USUAL, Serving, serving
from bench.real_figures import draw
from bench.real_load import FROM_S, SHORTER, TRACE, Shape, shaped, write
from bench.real_tables import note, tables, targets
from bench.rivals import NotInstalled
from bench.sources import below, digest_of, elsewhere
from loadgen.record import Record
from loadgen.report import Targets, met

FACTORS: Final = (2, 5, 10)
"""Targets over unloaded latency."""
LATE_PART: Final = 0.05
"""Part of the strictest TTFT target: a sender that was later than this at p99 voids the run."""
WARM: Final = 60
"""Requests to each contestant before those that count: the router uses predicted times after twenty timed prompts."""
WARM_PART: Final = 0.4
"""The rate of those requests, as a part of the saturated rate."""
TIMEOUT_S: Final = 120
"""A request that takes longer is given up, and counts as missed."""
ALONE: Final = 12
"""Requests from which the unloaded latency is measured, one at a time."""
SATURATES: Final = 200
"""Requests that are sent all at once, for the saturated rate."""
LETTERS: Final = "97-123"
"""Token ids of prompts: lower-case letters to the model that ships, which reads bytes."""
PRIORITY: Final = 1
"""The sender's real-time priority, where the machine permits: the engines have all cores. Niceness would not do: Linux
weighs sessions against one another first (sched_autogroup), and engines have sessions of their own."""
TRIES: Final = 2
"""Tries of a run in which the sender was late."""
MODELS: Final = {model.name: model for model in (TINY, FAT)}
SOURCES: Final = (
    "router", "engine", "decode", "prefill", "kvtransfer", "cluster", "loadgen", "baton", "costs", "bench/real.py",
    "bench/real_cluster.py", "bench/real_contestants.py", "bench/real_load.py", "bench/connectors_models.py",
    "bench/contestants.py", "bench/pair.py",
)  # fmt: skip
"""Sources of what runs: kept runs of other sources are not used."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a run."""

    contestants: tuple[str, ...]
    repeats: int
    seconds: float
    """Seconds of sending in one run."""
    parts: tuple[float, ...]
    """Rates, as parts of the rate at which the two that serve whole saturate."""

    def rates(self, capacity: float) -> list[float]:
        """The rates of the runs, requests a second; `capacity`: the saturated rate."""
        return [round(part * capacity, 3) for part in self.parts]

    def requests(self, rates: Sequence[float]) -> int:
        """Requests of a repeat's longest run; at a lower rate its first ones are sent."""
        return max(2, round(max(rates) * self.seconds))


DEFAULT: Final = Scale(USUAL, 10, 110.0, (0.4, 0.7))
"""With the last answers a run takes two minutes."""
FULL: Final = Scale(tuple(CONTESTANTS), 10, 110.0, (0.4, 0.7, 0.9))
QUICK: Final = Scale(USUAL, 3, 20.0, (0.4, 0.7))


def load(url: str, *words: str) -> dict[str, Any]:
    """One `baton load`: its report."""
    fixed = ["--json", "--model", SERVED, "--token-ids", LETTERS, "--timeout-s", f"{TIMEOUT_S}"]
    argv = [*_first(), sys.executable, "-m", "baton", "load", url, *fixed, *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if not done.stdout.strip():  # a load of which nothing was answered has a report, too
        raise SystemExit(f"bench-real: {' '.join(argv)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@cache
def _first() -> tuple[str, ...]:
    """The words that run a command before all others; none where they are not permitted, and that is said."""
    words = ("chrt", "--rr", f"{PRIORITY}")
    try:
        subprocess.run([*words, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        say("bench-real: the sender gets no priority here (chrt is not permitted): runs may be void")
        return ()
    return words


@dataclass(frozen=True, slots=True)
class Run:
    """One run that is to be measured."""

    repeat: int
    rate: float
    contestant: str

    @property
    def key(self) -> tuple[int, float, str]:
        """Identifies the run."""
        return self.repeat, self.rate, self.contestant


@dataclass(frozen=True, slots=True)
class Bench:
    """One model: its load, and the folder of its files."""

    model: Model
    shape: Shape
    scale: Scale
    folder: Path
    sources: str
    """The digest of the sources."""
    facts: Mapping[str, Any]
    """The machine."""

    def sent(self, shape: Shape, rate: float) -> list[str]:
        """The words of a load of these requests."""
        path = self.folder / "load.jsonl"
        write(shape.arrivals, path)
        return ["--trace", str(path), "--speed", f"{shape.speed(rate)}"]

    def saturated(self, url: str) -> float:
        """Requests that the pair answers a second when the trace's first ones come all at once."""
        shape = self.shape.part(0, min(SATURATES, len(self.shape.arrivals)))
        _alone(url, shape, 4)  # first shapes
        return float(load(url, *self.sent(shape, 1e6 * shape.rate))["completed_rate"])

    def all_sent(self, capacity: float) -> Shape:
        """The part of the trace that is sent, all repeats together; `capacity`: the saturated rate.

        Raises:
            SystemExit: the trace has too few requests for one repeat.
        """
        requests = self.scale.requests(self.scale.rates(capacity))
        try:
            return self.shape.part(0, self.step(requests) * (self.scale.repeats - 1) + requests)
        except ValueError as error:
            raise SystemExit(
                f"bench-real: at {capacity:.1f} requests a second this pair is too fast for the trace: {error}"
            ) from error

    def step(self, requests: int) -> int:
        """Requests from the begin of a repeat's stretch to that of the next one.

        A stretch has `requests`. Where the trace is too short for one stretch after the other, they share some.
        """
        return min(requests, max(0, len(self.shape.arrivals) - requests) // max(1, self.scale.repeats - 1))

    def stretch(self, run: Run, requests: int) -> Shape:
        """The requests of a run: the first ones of its repeat's stretch of the trace."""
        return self.shape.part(run.repeat * self.step(requests), max(2, round(run.rate * self.scale.seconds)))

    def warm(self, there: Serving, capacity: float) -> None:
        """What the router learns from before anything counts."""
        shape = self.shape.part(0, min(WARM, len(self.shape.arrivals)))
        load(there.endpoint, *self.sent(shape, capacity * WARM_PART), *_asks(there))

    def measure(self, there: Serving, run: Run, found: Mapping[str, Any]) -> dict[str, Any]:
        """One run, tried again where the sender was late."""
        strictest = min(each["ttft_ms"] for each in found["targets"].values())
        cell = self._once(there, run, found)
        for _ in range(TRIES - 1):
            if not _late(cell, strictest):
                break
            cell = self._once(there, run, found)
        late = _late(cell, strictest)
        return {**cell, "void": late} if late else cell

    def _once(self, there: Serving, run: Run, found: Mapping[str, Any]) -> dict[str, Any]:
        before, out = _handed_over(there), self.folder / "run.jsonl"
        shape = self.stretch(run, found["load"]["requests"])
        report = load(there.endpoint, *self.sent(shape, run.rate), *_asks(there), "--out", str(out))
        if ended := there.ended():
            raise SystemExit(f"bench-real: {run.contestant}: {ended}")
        records = [msgspec.json.decode(line, type=Record) for line in out.read_bytes().splitlines()]
        if not len(records) == report["sent"] == len(shape.arrivals):
            raise SystemExit(
                f"bench-real: {run.contestant}: {len(shape.arrivals)} requests were to be sent, {report['sent']} were, "
                f"and {len(records)} have a record: is the disk full?"
            )
        kept = ("failed", "completed_rate", "ttft_ms", "tt2t_ms", "tpot_ms", "late_ms")
        return {
            **asdict(run),
            "requests": len(records),
            "seconds": round(len(records) / run.rate, 3),
            "in_time": {factor: _in_time(records, each) for factor, each in found["targets"].items()},
            "handed_over": _handed_over(there) - before,
            **{what: report[what] for what in kept},
        }


def _alone(url: str, shape: Shape, count: int) -> dict[str, Any]:
    """The report of `count` requests, one at a time: prompts of the shape's 90th percentile, mean answers."""
    lengths = ["--input-tokens", f"{shape.long_prompt}", "--output-tokens", f"{shape.answer}"]
    one = ["--max-concurrency", "1", "--rate", "1000", "--arrivals", "constant"]
    return load(url, *one, *lengths, "--requests", f"{count}")


def _late(cell: Mapping[str, Any], ttft_ms: float) -> str:
    """Why a run is void; empty: it counts."""
    late_ms = cell["late_ms"]["p99"] or 0.0
    return f"the sender was {late_ms:.0f} ms late at p99" if late_ms > LATE_PART * ttft_ms else ""


def _asks(there: Serving) -> list[str]:
    return [] if there.slo_class is None else ["--header", f"x-slo-class:{there.slo_class}"]


def _in_time(records: Sequence[Record], promised: Mapping[str, float]) -> int:
    wanted = Targets(ttft_ms=promised["ttft_ms"], tpot_ms=promised["tpot_ms"])
    return sum(met(record, wanted) for record in records)


def _handed_over(there: Serving) -> int:
    """Requests whose decode leg pulled, since the router's start."""
    if there.admin is None:
        return 0
    found = re.search(r'^baton_handoffs_total\{result="ok"\} (\S+)$', page(f"{there.admin}/metrics"), re.MULTILINE)
    return int(float(found[1])) if found else 0


def begun(bench: Bench) -> dict[str, Any]:
    """The facts that are fixed before the first run that counts, without any runs."""
    say(f"{bench.model.name}: unloaded, and saturated")
    with serving(CALIBRATES, bench.model, bench.folder / "calibrate", None) as there:
        capacity = bench.saturated(there.endpoint)
        sent = bench.all_sent(capacity)
        alone = _alone(there.endpoint, sent, ALONE)
    unloaded = {"ttft_ms": alone["ttft_sent_ms"]["p50"], "tpot_ms": alone["tpot_ms"]["p50"]}
    say(f"  {unloaded['ttft_ms']:.0f} ms and {unloaded['tpot_ms']:.1f} ms a token; {capacity:.2f} requests a second")
    rates, told = bench.scale.rates(capacity), sent.summary
    requests = bench.scale.requests(rates)
    return {
        "sources": bench.sources,
        "machine": dict(bench.facts),
        "capacity": capacity,
        "unloaded": unloaded,
        "targets": {str(factor): {what: round(factor * ms, 1) for what, ms in unloaded.items()} for factor in FACTORS},
        "admitted": ADMITTED,
        "rates": rates,
        "repeats": bench.scale.repeats,
        "seconds": bench.scale.seconds,
        "contestants": {name: CONTESTANTS[name].told for name in bench.scale.contestants},
        "load": {
            "requests": requests,
            "shared": round(1 - bench.step(requests) / requests, 3),
            "from_s": FROM_S,
            "shorter": SHORTER,
            "prompt_mean": told.input_mean,
            "answer_mean": told.output_mean,
            "gap_cv": told.gap_cv,
            "cut": sent.cut,
        },
        "cells": [],
    }


def runs(found: Mapping[str, Any]) -> Iterator[Run]:
    """All runs in their order: contestants take turns, and each repeat begins with the next of them."""
    names = list(found["contestants"])
    for repeat in range(found["repeats"]):
        turn = repeat % len(names)
        for rate in found["rates"]:
            for name in (*names[turn:], *names[:turn]):
                yield Run(repeat, rate, name)


def of_model(bench: Bench, found: dict[str, Any] | None, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Everything about one model.

    Args:
        bench: the model and all of its load.
        found: a kept result to continue: its load, rates, targets and contestants. None: none.
        keep: gets the result after each run.
    """
    found = found or begun(bench)
    done = {Run(each["repeat"], each["rate"], each["contestant"]).key for each in found["cells"]}
    wanted = [run for run in runs(found) if run.key not in done]
    if not wanted:
        return found
    say(f"{bench.model.name}: {len(wanted)} runs of {found['seconds']:g} s, {len(done)} are there")
    with ExitStack() as stack:
        up = {}
        for name in found["contestants"]:
            say(f"  starting {name}: {found['contestants'][name]}")
            promised = found["targets"][str(ADMITTED)]
            up[name] = stack.enter_context(serving(name, bench.model, bench.folder / name, promised))
            bench.warm(up[name], found["capacity"])
        for number, run in enumerate(wanted, len(done) + 1):
            cell = bench.measure(up[run.contestant], run, found)
            found["cells"].append(cell)
            keep(found)
            share = cell["in_time"][str(ADMITTED)] / cell["requests"]
            void = f", void: {cell['void']}" if "void" in cell else ""
            say(f"  {number}: {run.contestant}, {run.rate:.2f}/s, repeat {run.repeat + 1}: {share:.1%} in time{void}")
    return found


def kept_at(model: str) -> Path:
    """Where a model's runs are kept."""
    return ROOT / ".bench" / f"real-{model}.json"


def digest() -> str:
    """The digest of the sources."""
    return digest_of(below(SOURCES, ROOT), ROOT)


def resumed(path: Path, sources: str, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """The kept result to continue; None: there is none, or its runs are of other sources or of another machine."""
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    why = elsewhere(found, sources, facts)
    if not why:
        return found
    say(f"bench-real: {path.name}: the {len(found['cells'])} kept runs are of {why}: begins anew, and replaces them")
    return None


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line; None: this process's own."""
    parser = argparse.ArgumentParser(
        prog="make bench-real", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="short runs, kept apart from the others")
    size.add_argument("--full", action="store_true", help="all contestants and rates")
    parser.add_argument(
        "--models", type=_of(MODELS), default=(TINY.name,), metavar="A,B", help=f"of {', '.join(MODELS)}"
    )
    parser.add_argument("--fresh", action="store_true", help="forget kept runs")
    parser.add_argument(
        "--publish", action="store_true", help="write docs/benchmarks.md, its JSON and figure, from a whole run"
    )
    args = parser.parse_args(words)
    if args.publish and (args.quick or TINY.name not in args.models):
        parser.error(f"only a whole run is published: leave out --quick, and have {TINY.name} among --models")
    return args


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, publish."""
    args = parsed(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the clusters end with it
    facts, sources, scale = machine(), digest(), QUICK if args.quick else FULL if args.full else DEFAULT
    size_name = "-quick" if args.quick else "-full" if args.full else ""
    with (inputs.required("bench-real", (TRACE,)) / TRACE).open() as lines:
        shape = shaped(lines, None)
    figures: dict[str, Any] = {}
    for name in args.models:
        path = kept_at(name + size_name)
        path.parent.mkdir(exist_ok=True)
        before = None if args.fresh else resumed(path, sources, facts)

        def keep(found: dict[str, Any], path: Path = path) -> None:
            save(path, json.dumps(found, indent=1))

        with tempfile.TemporaryDirectory(prefix="bench", ignore_cleanup_errors=True) as folder:
            bench = Bench(MODELS[name], shape, scale, Path(folder), sources, facts)
            try:
                figures[name] = of_model(bench, before, keep)
            except NotInstalled as error:
                raise SystemExit(f"bench-real: vllm-router cannot be installed here: {error}") from error
    made = [table for name, found in figures.items() for table in tables(found, name)]
    show(made)
    told = result("real", figures, targets(figures))
    if args.publish:
        facts = figures[TINY.name]["machine"]  # as it was when the runs began
        missing = draw(figures, DOCS / "figures", facts["date"])
        if missing:
            say(missing)
        pictures = [] if missing else [f"![in time by rate, {name}](figures/real-{name}.svg)" for name in figures]
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
