"""The part of `bench.admission` that runs on mocks: `baton mock`, a router by URL before them, and `baton load`.

The scenarios are those of `sim.experiments.overload` that `ON_MOCKS` names, each with every set of rules of `COMMANDS`.
What the router knows of the engines it has to learn. A run takes the load's 30 s, its last answers and the start: 35 to
60 s on an idle machine.

A run is void where the machine was the limit: the sender sent late, mocks' clocks woke late, or an instance was not
slowed down in time. A clock that a fault slows is not late by that: lateness is counted at the engine's own speed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from bench.contestants import baton
from bench.processes import BATON_COMMAND, ROOT, Running, asked, stopping
from bench.published import say, target
from cluster.instance import Role
from loadgen.faults import Applied
from loadgen.record import Record
from sim.experiments import overload
from sim.experiments.overload import SCENARIOS, SLOWER, URGENT, Kept, Overload

KEPT: Final = 0.97
"""Least share of the admitted requests that meet their targets."""
NO_LOWER: Final = 0.0
"""Least difference of attainment (of all arrivals) between both rules and neither."""
NEITHER, NOW = "neither", "both"
COMMANDS: Final = {NEITHER: (sys.executable, "-m", "bench.admission_router"), NOW: BATON_COMMAND}
"""What a router before mocks is started with. By rules."""

LESS_BEFORE: Final = "attainment, less that before"
"""The name of a target, as `kept_name`."""

FIRST: Final = "two classes"
"""Its targets have no scenario in their names: it was the only one on mocks before."""
ON_MOCKS: Final = tuple(
    next(each for each in SCENARIOS if each.name == name)
    for name in (FIRST, "answers longer than foretold", "a decode instance slows down")
)

SENDER_LATE_MS: Final = 20.0
"""A run on mocks is void if one request in a hundred was sent later than this: a hundredth of the TTFT target."""
ENGINES_LATE_MS: Final = 1.0
"""A run on mocks is void if a mock's clock woke later on average: 2.5 % of the TPOT target, added to each step."""
SLOWED_LATE_S: Final = 0.5
"""A run on mocks is void if its instance slowed down later than this after the middle: a tenth of `SETTLES_S`."""

CLUSTER: Final = """\
models:
  - name: {model}
    pools:
      prefill: {{min: {prefill}, max: {prefill}, gpu: H100-SXM}}
      decode: {{min: {decode}, max: {decode}, gpu: H100-SXM}}
slo:
  interactive: {{ttft_ms: 2000, tpot_ms: 40, when_missed: shed}}
  batch: {{ttft_ms: 20000, tpot_ms: 200, when_missed: shed}}
"""


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
    around: Mapping[str, Kept] = field(default_factory=dict)
    """Where an instance slows down: the urgent class by `overload.PARTS_OF_SLOW`."""
    slowed: Applied | None = None
    """The slowdown, as the load generator did it. None: no instance was to slow down."""

    @property
    def promised(self) -> Kept:
        """The requests that the target counts: where an instance slows down, those of 5 s later and on."""
        return self.around["later"] if self.around else self.kept

    def void(self) -> str:
        """Why the run says nothing of admission; empty: it is valid."""
        if self.sender_late_ms > SENDER_LATE_MS:
            return f"the sender was late by {self.sender_late_ms:.1f} ms (p99)"
        if self.engines_late_ms > ENGINES_LATE_MS:
            return f"a mock's clock was late by {self.engines_late_ms:.1f} ms on average"
        if self.slowed is not None and self.slowed.error is not None:
            return f"the instance did not slow down: {self.slowed.error}"
        if self.slowed is not None and self.slowed.done_s - self.slowed.at_s > SLOWED_LATE_S:
            return f"the instance slowed down {self.slowed.done_s - self.slowed.at_s:.1f} s late"
        return ""

    def as_json(self) -> dict[str, Any]:
        """For the published file."""
        found: dict[str, Any] = {
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
        if self.around:
            found["around"] = {part: round(each.kept, 4) for part, each in self.around.items()}
        if self.slowed is not None:
            found["slowed_s"] = self.slowed.done_s
        return found


# --- a run ------------------------------------------------------------------------------------------------------------


def on_mocks(scenario: Overload, seed: int, rules: str) -> OnMocks:
    """One scenario against mocks, by URL: what the router knows of them it has to learn.

    `rules`: of `COMMANDS`.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running: list[Running] = []
        stack.enter_context(stopping(running))
        endpoint, mocks = _started(running, scenario, folder, COMMANDS[rules])
        records, slowed = _sent(endpoint, scenario, folder, seed, mocks[Role.DECODE][-1])
        urls = [url for found in mocks.values() for url in found]
        late_ms = max(asked(f"{url}/mock/state")["lateness"]["mean_ms"] for url in urls)
        found = seen_of(records, scenario, late_ms, slowed)
    told = f"kept {found.promised.kept:.3f}, attained {found.overall.attained:.3f}"
    say(f"  {scenario.name}, mocks, {rules}: {told}" + (f"; void: {found.void()}" if found.void() else ""))
    return found


def _started(
    running: list[Running], scenario: Overload, folder: Path, command: Sequence[str]
) -> tuple[str, dict[Role, list[str]]]:
    """The scenario's fleet as mocks and a router before them, started with `command`; the router's address, and those
    of the mocks by role.
    """
    everywhere, counts = frozenset(os.sched_getaffinity(0)), dict(scenario.fleet)
    fleet = ",".join(f"{role}={count}" for role, count in counts.items())
    words = [*BATON_COMMAND, "mock", "--instances", fleet, "--port", "0", "--model", overload.MODEL]
    running.append(Running("mock", words, everywhere))
    urls = {role: [running[0].line().split()[-1] for _ in range(count)] for role, count in counts.items()}
    (folder / "baton.yaml").write_text(cluster_of(scenario))
    more = ["--config", str(folder / "baton.yaml")]
    more += [word for url in urls[Role.BOTH] for word in ("--both-url", url)]
    router, endpoint = baton(urls[Role.PREFILL], urls[Role.DECODE], everywhere, more, command=command)
    running.append(router)
    return endpoint, urls


def cluster_of(scenario: Overload) -> str:
    """The cluster file of the scenario's fleet."""
    counts = {role.value: count for role, count in scenario.fleet}
    return CLUSTER.format(model=overload.MODEL, prefill=counts["prefill"], decode=counts["decode"])


def _sent(
    endpoint: str, scenario: Overload, folder: Path, seed: int, last_decode: str
) -> tuple[list[Record], Applied | None]:
    """Send the scenario's load; its records, and the slowdown of the last decode mock if there was to be one.

    The load generator slows the mock down itself: its clock alone knows when the load began, which is after the two
    requests by which it measures the tokenizer. It looks for due actions ten times a second, so it asks the mock 0 to
    0.1 s after the middle. `Applied.done_s` is when the mock had answered, so the mock was slow by then.
    """
    trace, out = folder / "load.jsonl", folder / "out.jsonl"
    trace.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in scenario.arrivals(seed)))
    words = [*BATON_COMMAND, "load", endpoint, "--trace", str(trace), "--format", "baton", "--out", str(out), "--json"]
    if scenario.slow:
        words += ["--fault", f"{scenario.middle_s:g}s slow decode factor={SLOWER}", "--target", f"decode={last_decode}"]
    told = msgspec.json.decode(subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    slowed = [msgspec.convert(each, Applied) for each in told.get("faults", ())]
    assert len(slowed) == bool(scenario.slow), f"the load did {slowed}"
    records = [msgspec.json.decode(line, type=Record) for line in out.read_bytes().splitlines()]
    return records, slowed[0] if slowed else None


def seen_of(
    records: Sequence[Record], scenario: Overload, engines_late_ms: float, slowed: Applied | None = None
) -> OnMocks:
    """What the records show: counts of the urgent class and of both; the sender's lateness of all requests."""
    counts = dict.fromkeys(overload.PROMISES, Kept(0, 0, 0))
    late_first = late_next = 0
    for each in records:
        let_in, (first, later) = each.status != 429, _late(each)
        counts[str(each.slo_class)] += _counted(each)
        if let_in and each.slo_class == URGENT:
            late_first, late_next = late_first + bool(first), late_next + bool(later)
    sent_late_s = sorted(each.sent_s - each.at_s for each in records)
    return OnMocks(
        kept=counts[URGENT],
        late_first=late_first,
        late_next=late_next,
        overall=sum(counts.values(), Kept(0, 0, 0)),
        sender_late_ms=1000 * sent_late_s[int(0.99 * (len(sent_late_s) - 1))],
        engines_late_ms=engines_late_ms,
        around=around(records, scenario) if scenario.slow else {},
        slowed=slowed,
    )


def around(records: Sequence[Record], scenario: Overload) -> dict[str, Kept]:
    """The urgent class by `overload.PARTS_OF_SLOW`, split by the scenario's middle as simulated runs are."""
    urgent = [each for each in records if each.slo_class == URGENT]
    at_s, end_s = (np.array([getattr(each, name) for each in urgent]) for name in ("at_s", "end_s"))
    return {
        part: sum((_counted(each) for each, mine in zip(urgent, among, strict=True) if mine), Kept(0, 0, 0))
        for part, among in overload.split(scenario, at_s, end_s).items()
    }


def _counted(record: Record) -> Kept:
    """One request's part of the counts."""
    let_in = record.status != 429
    return Kept(1, int(let_in), int(let_in and _late(record) == (False, False)))


def _late(record: Record) -> tuple[bool | None, bool | None]:
    """Whether the first token and the others came later than the targets of the request's class; None: none came."""
    if record.error or record.first_token_s is None or record.last_token_s is None:
        return None, None
    goal, tokens = overload.PROMISES[str(record.slo_class)], record.completion_tokens or record.chunks
    tpot_ms = (record.last_token_s - record.first_token_s) * 1000 / max(1, tokens - 1)
    return (record.first_token_s - record.at_s) * 1000 > goal.ttft_ms, tpot_ms > goal.tpot_ms


# --- what it comes to -------------------------------------------------------------------------------------------------


def row_on_mocks(found: OnMocks, scenario: Overload, rules: str) -> list[str]:
    """The table's row of a run on mocks."""
    kept, void = found.kept, " (void)" if found.void() else ""
    counts = [str(kept.arrived), str(kept.admitted), f"{kept.kept:.3f}{void}", f"{kept.attained:.3f}"]
    return [f"{scenario.name}, mocks", rules, *counts, f"{found.overall.attained:.3f}"]


def around_row(found: OnMocks, rules: str) -> list[str]:
    """The row of the table of a slow instance."""
    void = " (void)" if found.void() else ""
    return [f"{rules}, mocks", *(f"{each.kept:.3f}{void}" for each in found.around.values())]


def targets_on_mocks(found: Mapping[str, OnMocks], scenario: Overload) -> dict[str, Any]:
    """The targets of one scenario's runs on mocks, by rules. A target that needs a void run has no value, and is not
    met.
    """
    mine, before = found[NOW], found[NEITHER]
    void, either = mine.void(), mine.void() or before.void()
    kept = target(None if void else mine.promised.kept, KEPT, at_most=False)
    less = target(None if either else mine.overall.attained - before.overall.attained, NO_LOWER, at_most=False)
    name = "mocks" if scenario.name == FIRST else f"mocks, {scenario.name}"
    return {
        f"{name}: {kept_name(scenario)}": kept | ({"void": void} if void else {}),
        f"{name}: {LESS_BEFORE}": less | ({"void": either} if either else {}),
    }


def kept_name(scenario: Overload) -> str:
    """The name of the target of what is kept, simulated and on mocks."""
    return "kept of what was let in" + (", 5 s after the middle and later" if scenario.slow else "")
