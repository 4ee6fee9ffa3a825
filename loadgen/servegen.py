"""Reads ServeGen's folders (alibaba/ServeGen): each client's rates and distributions. Makes arrivals from them. Pure.

`NAME-trace.csv`, no header: window start s, rate req/s, CV, `Gamma` | `Weibull` | nothing, shape, scale.
`NAME-dataset.json`: window start s -> field -> a text `{tokens: probability, ...}`.

The rate is the measured quantity and is kept exactly. Of the fitted family only the shape is used (its own scale gives
means that miss the rate by up to half). An empty window of lengths uses the client's nearest filled one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from loadgen.arrival import Arrival, BadRow
from loadgen.arrivals import Window, mixed, windows
from loadgen.lengths import Empirical
from loadgen.traces.fields import RowFault, cells, count, number, numbered, shown

TRACE_END, DATASET_END = "-trace.csv", "-dataset.json"
FAMILIES = ("Gamma", "Weibull")
SHAPE_MIN = 0.02
"""Below this shape, gaps of a Gamma underflow to zero; the burstiest client of the released pools has 0.03."""


@dataclass(frozen=True, slots=True)
class ServeGenClient:
    """One client of a pool."""

    name: str
    schedule: tuple[Window, ...]
    inputs: tuple[tuple[float, Empirical], ...]
    """(start of the window in seconds, prompt lengths from then on), ascending; never empty."""
    outputs: tuple[tuple[float, Empirical], ...]


@dataclass(frozen=True, slots=True)
class ServeGenPool:
    """The clients of a folder, and the faults in it."""

    clients: tuple[ServeGenClient, ...] = ()
    bad: tuple[BadRow, ...] = ()
    silent: tuple[str, ...] = field(default=())
    """Clients whose rate is always 0: they send nothing, so nothing is lost."""


def read(files: Mapping[str, Iterable[str]]) -> ServeGenPool:
    """The clients in these files (name -> lines). A client with a rate and no lengths is reported in `bad`."""
    clients, bad, silent = [], [], []
    for file in sorted(files):
        if not file.endswith(TRACE_END):
            continue
        name = file.removesuffix(TRACE_END)
        schedule, faults = _schedule(file, files[file])
        bad += faults
        if not any(window.rate > 0 for window in schedule):
            silent.append(name)
            continue
        dataset = f"{name}{DATASET_END}"
        if dataset not in files:
            bad.append(BadRow(0, f"there is no {dataset} beside it, so its lengths are unknown", file))
            continue
        try:
            inputs, outputs = _lengths("".join(files[dataset]))
        except RowFault as fault:
            bad.append(BadRow(0, str(fault), dataset))
            continue
        clients.append(ServeGenClient(name, schedule, inputs, outputs))
    if not clients and not silent and not bad:
        bad.append(BadRow(0, f"no *{TRACE_END} in this folder"))
    return ServeGenPool(tuple(clients), tuple(bad), tuple(silent))


def arrivals(pool: ServeGenPool, rng: np.random.Generator, from_s: float = 0.0) -> Iterator[Arrival]:
    """The pool's arrivals from second `from_s` of its day on, counted from there, in order of time.

    Each client has a generator of its own, spawned from `rng`, so that a missing client does not change the others'
    gaps. Each client's process starts one window before `from_s`, so that `from_s` is no special moment of its bursts.
    """
    draws = rng.spawn(len(pool.clients))
    streams = [
        windows([w for w in client.schedule if w.end_s > from_s - (w.end_s - w.start_s)], own)
        for client, own in zip(pool.clients, draws, strict=True)
    ]
    for at_s, which in mixed(streams):
        if at_s < from_s:
            continue
        client, own = pool.clients[which], draws[which]
        yield Arrival(
            at_s=at_s - from_s,
            input_tokens=_at(client.inputs, at_s).draw(own),
            output_tokens=_at(client.outputs, at_s).draw(own),
            tenant=client.name,
        )


def _at(found: tuple[tuple[float, Empirical], ...], at_s: float) -> Empirical:
    """The lengths of this moment's window, or of the nearest filled one before it, or else after it."""
    best = found[0][1]
    for start_s, lengths in found:
        if start_s > at_s:
            break
        best = lengths
    return best


def _schedule(file: str, lines: Iterable[str]) -> tuple[tuple[Window, ...], list[BadRow]]:
    """The windows of a trace file. Each lasts until the next begins, the last as long as the one before it."""
    found: list[Window] = []
    bad: list[BadRow] = []
    for at, line in numbered(lines):
        try:
            window = _window(cells(line))
        except RowFault as fault:
            bad.append(BadRow(at, str(fault), file))
            continue
        if found and window.start_s <= found[-1].start_s:
            bad.append(BadRow(at, f"not sorted: window {window.start_s:g} after {found[-1].start_s:g}", file))
            continue
        found.append(window)
    ended = [one._replace(end_s=following.start_s) for one, following in pairwise(found)]
    if found:
        last = ended[-1].end_s - ended[-1].start_s if ended else 600.0
        ended.append(found[-1]._replace(end_s=found[-1].start_s + last))
    return tuple(ended), bad


def _window(found: list[str]) -> Window:
    if len(found) != 6:
        raise RowFault(f"{len(found)} cells, where there are 6: start, rate, CV, family, shape, scale")
    start_s, rate = number(found[0], "window start"), number(found[1], "rate")
    number(found[2], "CV")
    family = found[3]
    if rate == 0:
        return Window(start_s, start_s, 0.0, "Gamma", 1.0)
    if not family:
        return Window(start_s, start_s, rate, "Gamma", 1.0)  # too few requests to fit: Poisson
    if family not in FAMILIES:
        raise RowFault(f"family {shown(family)} is neither Gamma nor Weibull")
    shape = number(found[4], "shape")
    number(found[5], "scale")
    if shape == 0:
        raise RowFault("shape 0: gaps need one above 0")
    return Window(start_s, start_s, rate, family, max(shape, SHAPE_MIN))


def _lengths(text: str) -> tuple[tuple[tuple[float, Empirical], ...], tuple[tuple[float, Empirical], ...]]:
    """Prompt and answer lengths by window, the empty windows left out."""
    try:
        read_windows = msgspec.json.decode(text.encode(errors="surrogateescape"), type=dict[str, dict[str, Any]])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RowFault(f"not JSON of windows and fields: {error}") from None
    both = []
    for name in ("input_tokens", "output_tokens"):
        filled = []
        for start, fields in read_windows.items():
            weights = _weights(fields.get(name), f"window {shown(start)}: {name}")
            if weights:
                filled.append((number(start, "window start"), Empirical(weights)))
        if not filled:
            raise RowFault(f"{name} is empty in every window")
        both.append(tuple(sorted(filled, key=lambda each: each[0])))
    return both[0], both[1]


def _weights(value: Any, name: str) -> dict[int, float]:
    """`{113: 0.01, 125: 0.02}` as a mapping; empty where there is nothing."""
    if not isinstance(value, str) or not (value.startswith("{") and value.endswith("}")):
        raise RowFault(f"{name} {shown(value)} is not a text like {{113: 0.01}}")
    weights: dict[int, float] = {}
    for pair in value[1:-1].split(","):
        if not pair.strip():
            continue
        tokens, _, share = pair.partition(":")
        weights[count(tokens, f"{name}: length")] = number(share, f"{name}: probability")
    return weights if sum(weights.values()) > 0 else {}
