"""Whether admission keeps its promises: the share of admitted requests, and of all arrivals, that meet their targets.

    make bench-admission                      simulated (minutes), then mocks with a router on the wall clock (minutes)
    make bench-admission ARGS="--only simulated"
    make bench-admission ARGS=--publish       writes docs/benchmarks

A run on mocks is void if the sender sent late or the mocks' clocks woke late: then the machine missed targets.

Two classes that refuse (`when_missed: shed`) come faster than the fleet can serve: one prefill instance, one decode
instance and one of role both, Llama-3.1-8B on H100s. Each scenario of `sim.experiments.overload` runs with the same
arrivals with each of two rules and without; mocks with both and with neither. Margins are learned
(`router.predict.margins`) instead of the widest throughout, and prompts count an answer that they make late
`SHED_WEIGHT` times instead of once. Attainment is of all arrivals: refused ones count as missed. The gains of the
margins and the weight were chosen on other draws.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from bench.contestants import baton
from bench.processes import BATON_COMMAND, ROOT, Running, asked, stopping
from bench.published import Table, machine, note_of, publish, result, say, show, target
from costs import shipped
from loadgen.record import Record
from loadgen.report import Targets
from sim.experiments import overload
from sim.experiments.overload import SCENARIOS, URGENT, Kept, Overload
from sim.experiments.systems import Shelf
from sim.result import Result

SEEDS: Final = (3, 4, 5)
KEPT: Final = 0.97
NO_LOWER: Final = 0.0
"""Least difference of attainment (of all arrivals) between both rules and neither."""
APART: Final = 0.10
NEITHER, NOW = "neither", "both"
RULES: Final = {NEITHER: (False, False), "margins": (True, False), "weight": (False, True), NOW: (True, True)}
"""Whether margins are learned, and whether prompts of classes that refuse weigh the answers that they make late."""
PARTS: Final = ("simulated", "mocks")
PARTS_OF_SLOW: Final = ("before", "in flight, and 5 s after", "later")

SENDER_LATE_MS: Final = 20.0
"""A run on mocks is void if one request in a hundred was sent later than this: a hundredth of the TTFT target."""
ENGINES_LATE_MS: Final = 1.0
"""A run on mocks is void if a mock's clock woke later on average: 2.5 % of the TPOT target, added to each step."""

COMMANDS: Final = {NEITHER: (sys.executable, "-m", "bench.admission_router"), NOW: BATON_COMMAND}
"""What a router before mocks is started with. By rules."""
MOCKS: Final = ("prefill=1", "decode=1", "both=1")
CLUSTER: Final = """\
models:
  - name: {model}
    pools:
      prefill: {{min: 1, max: 1, gpu: H100-SXM}}
      decode: {{min: 1, max: 1, gpu: H100-SXM}}
slo:
  interactive: {{ttft_ms: 2000, tpot_ms: 40, when_missed: shed}}
  batch: {{ttft_ms: 20000, tpot_ms: 200, when_missed: shed}}
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """All seeds of one scenario with one rule."""

    results: tuple[Result, ...]

    def kept(self, name: str = "", part: str = "", scenario: Overload | None = None) -> Kept:
        """Counts of a class's requests, in one of `PARTS_OF_SLOW`; empty `name`: of all classes, empty `part`: of the
        whole run.
        """
        parts = []
        for each in self.results:
            among = np.ones(len(each.columns), dtype=np.bool_)
            if name:
                among &= overload.of_class(each, name)
            if part and scenario is not None:
                among &= overload.around(scenario, each)[part]
            parts.append(overload.kept(each, among))
        return sum(parts, Kept(0, 0, 0))

    def deciles(self) -> list[float]:
        """Attainment by decile of prompt length, mean of the seeds."""
        found = [
            overload.by_decile(each.columns["input_tokens"], each.met(Targets(), overload.targets()))
            for each in self.results
        ]
        return [float(each) for each in np.mean(found, axis=0)]


def simulated(scenario: Overload, shelf: Shelf, seeds: Sequence[int]) -> dict[str, Ran]:
    """One scenario with each rule."""
    found = {}
    for rule, (learns, weighs) in RULES.items():
        results = tuple(overload.run(scenario, shelf, seed, learns=learns, weighs=weighs) for seed in seeds)
        found[rule] = Ran(results)
        urgent, overall = found[rule].kept(URGENT), found[rule].kept()
        say(f"  {scenario.name}, {rule}: kept {urgent.kept:.3f}, attained {overall.attained:.3f}")
    return found


def figures_of(ran: dict[str, Ran], scenario: Overload) -> dict[str, Any]:
    """The figures of one scenario for the published file, by rule."""
    found: dict[str, Any] = {}
    for rule, each in ran.items():
        urgent, overall = each.kept(URGENT), each.kept()
        found[rule] = {
            "arrived": overall.arrived,
            "interactive": {"arrived": urgent.arrived, "admitted": urgent.admitted, "met": urgent.met},
            "kept": round(urgent.kept, 4),
            "kept_of_all": round(overall.kept, 4),
            "attained_interactive": round(urgent.attained, 4),
            "attained": round(overall.attained, 4),
        }
        if scenario.slow:
            found[rule]["around"] = {part: round(each.kept(URGENT, part, scenario).kept, 4) for part in PARTS_OF_SLOW}
        if scenario.prompts[0] != scenario.prompts[1]:
            found[rule]["by_decile"] = [round(one, 3) for one in each.deciles()]
    return found


def targets_of(name: str, figures: dict[str, Any], scenario: Overload) -> dict[str, Any]:
    """The targets of one scenario, with their values."""
    mine, before = figures[NOW], figures[NEITHER]
    kept = mine["around"]["later"] if scenario.slow else mine["kept"]
    where = ", 5 s after the middle and later" if scenario.slow else ""
    found = {
        f"{name}: kept of what was let in{where}": target(kept, KEPT, at_most=False),
        f"{name}: attainment, less that before": target(mine["attained"] - before["attained"], NO_LOWER, at_most=False),
    }
    if scenario.within < 1.0:
        by = mine["by_decile"]
        found[f"{name}: attainment of the middle deciles less that of the longest"] = target(
            (by[4] + by[5]) / 2 - by[9], APART
        )
    return found


# --- mocks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OnMocks:
    """One run on the wall clock."""

    kept: Kept
    """Of the urgent class, as the next two."""
    late_first: int
    """Admitted requests that missed their TTFT target."""
    late_next: int
    """Admitted requests that missed their TPOT target."""
    overall: Kept
    """Of both classes."""
    sender_late_ms: float
    """How late requests were sent: the 99th percentile."""
    engines_late_ms: float
    """The mean lateness of a mock's clock: the largest of all mocks."""

    def void(self) -> str:
        """Why the run says nothing of admission; empty: it is valid."""
        if self.sender_late_ms > SENDER_LATE_MS:
            return f"the sender was late by {self.sender_late_ms:.1f} ms (p99)"
        if self.engines_late_ms > ENGINES_LATE_MS:
            return f"a mock's clock was late by {self.engines_late_ms:.1f} ms on average"
        return ""

    def as_json(self) -> dict[str, Any]:
        """For the published file."""
        return {
            "arrived": self.kept.arrived,
            "admitted": self.kept.admitted,
            "kept": round(self.kept.kept, 4),
            "attained_interactive": round(self.kept.attained, 4),
            "attained": round(self.overall.attained, 4),
            "late_first_tokens": self.late_first,
            "late_tokens": self.late_next,
            "sender_late_ms_p99": round(self.sender_late_ms, 2),
            "engines_late_ms": round(self.engines_late_ms, 3),
            "void": self.void(),
        }


def on_mocks(seed: int, rules: str) -> OnMocks:
    """The first scenario against mocks, by URL: what the router knows of them it has to learn.

    `rules`: of `COMMANDS`.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running: list[Running] = []
        stack.enter_context(stopping(running))
        endpoint, mocks = _started(running, folder, COMMANDS[rules])
        records = _sent(endpoint, SCENARIOS[0], folder, seed)
        late_ms = max(asked(f"{url}/mock/state")["lateness"]["mean_ms"] for url in mocks)
        return seen_of(records, late_ms)


def _started(running: list[Running], folder: Path, command: Sequence[str]) -> tuple[str, list[str]]:
    """Mocks and a router before them, started with `command`; their addresses."""
    everywhere = frozenset(os.sched_getaffinity(0))
    words = [*BATON_COMMAND, "mock", "--instances", ",".join(MOCKS), "--port", "0", "--model", overload.MODEL]
    running.append(Running("mock", words, everywhere))
    prefill, decode, both = urls = [running[0].line().split()[-1] for _ in MOCKS]
    (folder / "baton.yaml").write_text(CLUSTER.format(model=overload.MODEL))
    more = ["--both-url", both, "--config", str(folder / "baton.yaml")]
    router, endpoint = baton([prefill], [decode], everywhere, more, command=command)
    running.append(router)
    return endpoint, urls


def _sent(endpoint: str, scenario: Overload, folder: Path, seed: int) -> list[Record]:
    """Send the scenario's load; its records."""
    trace, out = folder / "load.jsonl", folder / "out.jsonl"
    trace.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in scenario.arrivals(seed)))
    words = [*BATON_COMMAND, "load", endpoint, "--trace", str(trace), "--format", "baton", "--out", str(out), "--json"]
    subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return [msgspec.json.decode(line, type=Record) for line in out.read_bytes().splitlines()]


def seen_of(records: Sequence[Record], engines_late_ms: float) -> OnMocks:
    """What the records show: counts of the urgent class and of both; the sender's lateness of all requests."""
    counts = dict.fromkeys(overload.PROMISES, Kept(0, 0, 0))
    late_first = late_next = 0
    for each in records:
        name, let_in, (first, later) = str(each.slo_class), each.status != 429, _late(each)
        counts[name] += Kept(1, int(let_in), int(let_in and first is False and later is False))
        if let_in and name == URGENT:
            late_first, late_next = late_first + bool(first), late_next + bool(later)
    sent_late_s = sorted(each.sent_s - each.at_s for each in records)
    return OnMocks(
        kept=counts[URGENT],
        late_first=late_first,
        late_next=late_next,
        overall=sum(counts.values(), Kept(0, 0, 0)),
        sender_late_ms=1000 * sent_late_s[int(0.99 * (len(sent_late_s) - 1))],
        engines_late_ms=engines_late_ms,
    )


def _late(record: Record) -> tuple[bool | None, bool | None]:
    """Whether the first token and the others came later than the targets of the request's class; None: none came."""
    if record.error or record.first_token_s is None or record.last_token_s is None:
        return None, None
    goal, tokens = overload.PROMISES[str(record.slo_class)], record.completion_tokens or record.chunks
    tpot_ms = (record.last_token_s - record.first_token_s) * 1000 / max(1, tokens - 1)
    return (record.first_token_s - record.at_s) * 1000 > goal.ttft_ms, tpot_ms > goal.tpot_ms


# --- what it comes to -------------------------------------------------------------------------------------------------


def row(name: str, rule: str, told: dict[str, Any]) -> list[str]:
    """A row of the table: one scenario with one rule."""
    mine = told["interactive"]
    return [
        name,
        rule,
        f"{mine['arrived']}",
        f"{mine['admitted']}",
        f"{told['kept']:.3f}",
        f"{told['attained_interactive']:.3f}",
        f"{told['attained']:.3f}",
    ]


def row_on_mocks(found: OnMocks, rules: str) -> list[str]:
    """The table's row of a run on mocks."""
    kept, void = found.kept, " (void)" if found.void() else ""
    counts = [str(kept.arrived), str(kept.admitted), f"{kept.kept:.3f}{void}", f"{kept.attained:.3f}"]
    return ["two classes, mocks", rules, *counts, f"{found.overall.attained:.3f}"]


def targets_on_mocks(found: Mapping[str, OnMocks]) -> dict[str, Any]:
    """The targets of the runs on mocks, by rules. A target that needs a void run has no value, and is not met."""
    mine, before = found[NOW], found[NEITHER]
    void, either = mine.void(), mine.void() or before.void()
    kept = target(None if void else mine.kept.kept, KEPT, at_most=False)
    less = target(None if either else mine.overall.attained - before.overall.attained, NO_LOWER, at_most=False)
    return {
        "mocks: kept of what was let in": kept | ({"void": void} if void else {}),
        "mocks: attainment, less that before": less | ({"void": either} if either else {}),
    }


def main() -> None:
    """Measure, print, publish."""
    parser = argparse.ArgumentParser(
        prog="bench-admission", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks/admission.json and the tables")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), metavar="N", help="loads drawn (default %(default)s)")
    args = parser.parse_args()
    if not 1 <= args.seeds <= len(SEEDS):
        parser.error(f"--seeds {args.seeds}: there are 1 to {len(SEEDS)}")
    facts = machine()
    figures: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    rows: list[list[str]] = []
    around: list[list[str]] = []
    deciles: list[list[str]] = []
    if args.only != "mocks":
        shelf = Shelf(shipped.models(), shipped.profiles())
        for scenario in SCENARIOS:
            told = figures[scenario.name] = figures_of(simulated(scenario, shelf, SEEDS[: args.seeds]), scenario)
            targets |= targets_of(scenario.name, told, scenario)
            rows += [row(scenario.name, rule, told[rule]) for rule in RULES]
            for rule in RULES:
                if "around" in told[rule]:
                    around.append([rule, *(f"{each:.3f}" for each in told[rule]["around"].values())])
                if "by_decile" in told[rule]:
                    deciles.append([f"{scenario.name}, {rule}", *(f"{each:.2f}" for each in told[rule]["by_decile"])])
    if args.only != "simulated":
        found = {rules: on_mocks(SEEDS[0], rules) for rules in COMMANDS}
        figures["mocks"] = {rules: each.as_json() for rules, each in found.items()}
        targets |= targets_on_mocks(found)
        rows += [row_on_mocks(each, rules) for rules, each in found.items()]
    columns = ["", "rules", "interactive", "let in", "kept of these", "attained", "attained of both classes"]
    tables = [Table("Overloads", columns, rows)]
    if around:
        tables.append(Table("Kept, a decode instance slows down", ["rules", *PARTS_OF_SLOW], around))
    if deciles:
        names = [str(at) for at in range(1, 11)]
        tables.append(Table("Attainment by decile of prompt length, both classes", ["", *names], deciles))
    show(tables)
    told = result("admission", figures, targets)
    if args.publish:
        publish(told, tables, facts, note_of(facts))
    if not all(each["met"] for each in targets.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
