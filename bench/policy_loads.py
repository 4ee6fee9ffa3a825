"""The windows of `bench.policy_grid`'s traces as loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from bench.policy_grid import LENGTH_MAX, TUNING_WINDOW, WINDOWS, Trace
from loadgen import servegen
from loadgen.arrival import Arrival
from loadgen.traces import azure, mooncake
from sim.experiments.loads import UnitLoad, traced

SEED = 1
"""Of a reader that spreads stamps; ServeGen's window w has the seed SEED + w."""


def load(data: Path, trace: Trace, window: int) -> UnitLoad:
    """One window of a trace below `data`/traces, at a mean rate of 1."""
    assert window in (TUNING_WINDOW, *WINDOWS)
    rows = islice(_rows(data / "traces" / trace.file, trace, window), trace.requests)
    return traced(f"{trace.name}, window {window}", rows, trace.requests, LENGTH_MAX)


def joined(loads: Sequence[UnitLoad]) -> UnitLoad:
    """Loads of a mean rate of 1, one after the other."""
    arrivals: list[Arrival] = []
    for each in loads:
        begins_s = float(len(arrivals))
        arrivals += [msgspec.structs.replace(one, at_s=begins_s + one.at_s) for one in each.arrivals]
    return UnitLoad(", then ".join(each.name for each in loads), arrivals)


def _rows(path: Path, trace: Trace, window: int) -> Iterator[Arrival]:
    """Answered requests from the window's first one on."""
    if path.is_dir():
        for each in servegen.arrivals(_pool(path), np.random.default_rng(SEED + window), trace.from_s):
            if each.output_tokens:
                yield _cut(each, trace.answer_max)
        return
    read = azure.read if path.suffix == ".csv" else mooncake.read
    with path.open() as lines:
        rows = read(lines, np.random.default_rng(SEED), None)
        answered = (_cut(row, trace.answer_max) for row in rows if isinstance(row, Arrival) and row.output_tokens)
        yield from islice(answered, window * trace.requests, None)


@cache
def _pool(path: Path) -> servegen.ServeGenPool:
    return servegen.read({each.name: each.read_text().splitlines() for each in path.iterdir() if "-" in each.name})


def _cut(arrival: Arrival, answer_max: int | None) -> Arrival:
    if answer_max is None or arrival.output_tokens <= answer_max:
        return arrival
    return msgspec.structs.replace(arrival, output_tokens=answer_max)
