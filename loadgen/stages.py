"""The breakdown of time by the router's own parts, over all requests of a load: means that add up, and percentiles.
Pure.

The router gives two sums for each stream (docs/timing.md); the parts and the residual of a sum add up to its total. So
do the means here, over the same requests; a part that a request lacks counts as 0. Percentiles are of the requests that
have the part, and do not add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from loadgen.record import Record

SUMS: Final = ("ttft", "tt2t")
RESIDUAL: Final = "residual"
PARTS_MAX: Final = 32
"""Most entries of one sum, its total included; a sum with more is not read."""


class StagePart(msgspec.Struct, frozen=True):
    """One part of a sum, in milliseconds."""

    name: str
    mean: float
    """Mean over all requests of the sum. The parts' means add up to the total's."""
    count: int
    """Requests that have it."""
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Stages(msgspec.Struct, frozen=True, kw_only=True):
    """One sum, over requests that were served in one way."""

    way: str
    """How the requests were served: seeded, plain (handed over without a seed) or aggregated."""
    sum: str
    """`ttft`, from the request's arrival at the router to its first token; `tt2t`, from there to the second."""
    count: int
    total: StagePart
    parts: tuple[StagePart, ...]
    """In the order of the sum, the residual last; parts that took no time in any request are left out."""


def stages_of(records: Iterable[Record]) -> tuple[Stages, ...]:
    """The breakdown of whole answers whose router gave parts; empty without such answers."""
    grouped: dict[tuple[str, str], list[Mapping[str, float | None]]] = {}
    for record in records:
        if record.error is not None or record.timing is None:
            continue
        for name in SUMS:
            parts = _parts(record.timing.get(f"{name}_ms"))
            if parts is not None:
                grouped.setdefault((str(record.timing.get("way", ""))[:20], name), []).append(parts)
    return tuple(_stages(way, name, rows) for (way, name), rows in sorted(grouped.items(), key=_by_size))


def _by_size(item: tuple[tuple[str, str], list[Any]]) -> tuple[int, str, int]:
    (way, name), rows = item
    return -len(rows), way, SUMS.index(name)


def _parts(found: object) -> Mapping[str, float | None] | None:
    """One sum as the router wrote it; None if it has no total, or too many entries."""
    if not isinstance(found, dict) or not isinstance(found.get("total"), int | float):
        return None
    right = {str(name): value for name, value in found.items() if value is None or isinstance(value, int | float)}
    return right if len(right) <= PARTS_MAX else None


def _stages(way: str, name: str, rows: Sequence[Mapping[str, float | None]]) -> Stages:
    names = dict.fromkeys(part for row in rows for part in row if part not in {"total", RESIDUAL})
    parts = [_part(each, rows) for each in (*names, RESIDUAL)]
    kept = tuple(each for each in parts if each.mean or each.p99 or each.name == RESIDUAL)
    return Stages(way=way, sum=name, count=len(rows), total=_part("total", rows), parts=kept)


def _part(name: str, rows: Sequence[Mapping[str, float | None]]) -> StagePart:
    values = np.array([value for row in rows if (value := row.get(name)) is not None], dtype=np.float64)
    if not len(values):
        return StagePart(name, 0.0, 0)
    p50, p90, p99 = (round(float(each), 3) for each in np.percentile(values, (50, 90, 99)))
    return StagePart(name, round(float(values.sum()) / len(rows), 4), len(values), p50, p90, p99)
