"""`--workload FILE`: several classes of requests at once, each with its own rate and lengths, as one load.

    duration_s: 600
    parts:
      interactive: {rate: 6, arrivals: gamma, cv: 2, input_tokens: "lognormal:p50=900,p90=4000", output_tokens: 200}
      batch: {rate: 0.5, input_tokens: 8000, output_tokens: "uniform:200-800", prefix_tokens: 2000, prefix_groups: 4}

A part is named after its SLO class; its settings are the flags of `baton load` that make load up. The file is read by
the rules of the cluster file (`cluster.spec.tree`), so that both have the same names.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from baton.load_arrivals import ARRIVALS_MAX, lengths_from
from baton.load_flags import WHOLE_MAX
from baton.output import say
from cluster.errors import UsageError
from cluster.spec.reader import value_in
from cluster.text_file import text_in
from loadgen import arrivals as processes
from loadgen.arrival import SPAN_MAX_S, Arrival
from loadgen.lengths import Lengths
from loadgen.made import made
from loadgen.shaping import window

KEYS = ("rate", "arrivals", "cv", "input_tokens", "output_tokens", "prefix_tokens", "prefix_groups", "class")
DURATION_S = 300.0
"""Seconds of the load if the file does not say it."""
PROCESSES: Mapping[str, Callable[[float, float, np.random.Generator], Iterator[float]]] = {
    "poisson": lambda rate, _, rng: processes.poisson(rate, rng),
    "constant": lambda rate, _, __: processes.constant(rate),
    "gamma": processes.gamma,
    "weibull": processes.weibull,
}


def workload(path: Path, seed: int, *, strict: bool = False) -> list[Arrival]:
    """All requests of a workload file, in the order of time. `strict`: no row of a trace of lengths may be bad. `seed`
    goes before the file's own; 0: the file's.

    Raises:
        UsageError: the file cannot be read, or a setting cannot be used; the message names the part and the field.
    """
    tree = value_in(text_in(path, "--workload", "give a file of parts (docs/plan.md)"), f"--workload {path}")
    if not isinstance(tree, dict) or not isinstance(tree.get("parts"), dict) or not tree["parts"]:
        raise UsageError(f"--workload {path}: write `parts: {{CLASS: {{rate: 5, input_tokens: 1000}}}}`")
    for name in tree:
        if name not in {"parts", "duration_s", "seed"}:
            raise UsageError(f"--workload {path}: {name}: unknown; there is duration_s, seed, parts")
    duration_s = _number(path, "duration_s", tree.get("duration_s", DURATION_S))
    if duration_s > SPAN_MAX_S:
        raise UsageError(f"--workload {path}: duration_s is {duration_s:g}: a load lasts up to {SPAN_MAX_S:g} s")
    chosen: Any = tree.get("seed", 0)
    if isinstance(chosen, bool) or not isinstance(chosen, int) or chosen < 0:
        raise UsageError(f"--workload {path}: seed is {chosen!r}: must be a whole number of 0 at least")
    rng = np.random.default_rng(seed or chosen)
    streams = [
        _part(path, name, part, duration_s, rng.spawn(1)[0], strict=strict) for name, part in tree["parts"].items()
    ]
    return list(heapq.merge(*streams, key=lambda each: each.at_s))


def _part(
    path: Path, name: str, part: Any, duration_s: float, rng: np.random.Generator, *, strict: bool
) -> list[Arrival]:
    where = f"--workload {path}: parts.{name}"
    if not isinstance(part, Mapping):
        raise UsageError(f"{where}: must be a mapping, like {{rate: 5, input_tokens: 1000}}")
    for key in part:
        if key not in KEYS:
            raise UsageError(f"{where}.{key}: unknown; there is {', '.join(KEYS)}")
    rate = _number(path, f"parts.{name}.rate", part.get("rate", 1.0))
    if rate * duration_s > ARRIVALS_MAX:
        raise UsageError(f"{where}.rate {rate:g}: more than {ARRIVALS_MAX:,} requests in {duration_s:g} s")
    kind = str(part.get("arrivals", "poisson"))
    if kind not in PROCESSES:
        raise UsageError(f"{where}.arrivals {kind}: there is {', '.join(PROCESSES)}")
    cv = _number(path, f"parts.{name}.cv", part.get("cv", 2.0))
    if "cv" in part and kind not in processes.CV_MAX:
        raise UsageError(
            f"{where}.cv is {cv:g}: shapes {' and '.join(processes.CV_MAX)} arrivals, and these are {kind}: "
            "write arrivals: gamma, or leave it out"
        )
    if fault := processes.cv_fault(kind, cv):
        raise UsageError(f"{where}.cv {cv:g}: {fault}")
    prefix_tokens, prefix_groups = _prefixes(where, part)
    found = made(
        PROCESSES[kind](rate, cv, rng),
        _lengths(where, "input_tokens", part.get("input_tokens", 512), strict=strict),
        _lengths(where, "output_tokens", part.get("output_tokens", 128), strict=strict),
        rng.spawn(1)[0],
        prefix_tokens=prefix_tokens,
        prefix_groups=prefix_groups,
        slo_class=str(part.get("class", name)),
    )
    return list(window(found, 0.0, duration_s))


def _prefixes(where: str, part: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of the prefixes that prompts share (0: they share none), and how many prefixes there are."""
    tokens = _whole(f"{where}.prefix_tokens", part.get("prefix_tokens", 0), 0)
    groups = _whole(f"{where}.prefix_groups", part.get("prefix_groups", 1), 1)
    if "prefix_groups" in part and not tokens:
        raise UsageError(
            f"{where}.prefix_groups is {groups}: says how many prefixes there are, and prompts have none: "
            "write prefix_tokens beside it, or leave it out"
        )
    return tokens, groups


def _whole(where: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= WHOLE_MAX:
        raise UsageError(f"{where} is {value!r}: must be a whole number of {least} at least, and {WHOLE_MAX:,} at most")
    return value


def _lengths(where: str, name: str, value: Any, *, strict: bool) -> Lengths:
    def tell(line: str) -> None:
        say(f"{where}: {line}")

    try:
        return lengths_from(str(value), f"--{name.replace('_', '-')}", strict=strict, tell=tell)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UsageError(f"--workload {path}: {name} is {value!r}: must be a number above 0")
    return float(value)
