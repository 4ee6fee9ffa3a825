"""BurstGPT's CSV (HPMLL/BurstGPT): `Timestamp` s, `Session ID`, `Elapsed time`, `Model`, `Request tokens`,
`Response tokens`, `Total tokens`, `Log Type`. The header decides where columns stand; the first release has no session.

A failed request has response 0 and stays an arrival with `output_tokens` 0. Many stamps are whole seconds: `tick_s=1`
spreads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from loadgen.arrival import Arrival, Row
from loadgen.traces.fields import RowFault, cells, count, number, text
from loadgen.traces.ordered import from_zero, rows, spread

NEEDED = ("Timestamp", "Request tokens", "Response tokens")


def read(lines: Iterable[str], rng: np.random.Generator, tick_s: float | None = None) -> Iterator[Row]:
    """Arrivals of a BurstGPT trace. `tick_s`: as for Mooncake, None spreads nothing."""
    return spread(from_zero(rows(lines, _Columns().parse)), tick_s or 0.0, rng)


class _Columns:
    """Which column stands where, learned from the header."""

    def __init__(self) -> None:
        self._names: list[str] | None = None

    def parse(self, line: str) -> Arrival | None:
        found = cells(line)
        if self._names is None:
            lacking = [name for name in NEEDED if name not in found]
            if lacking:
                raise RowFault(f"no header with {', '.join(lacking)} before this row")
            self._names = found
            return None
        if len(found) != len(self._names):
            raise RowFault(f"{len(found)} cells, where the header has {len(self._names)}")
        row = dict(zip(self._names, found, strict=True))
        asked = count(row["Request tokens"], "Request tokens")
        answered = count(row["Response tokens"], "Response tokens")
        if row.get("Total tokens") and count(row["Total tokens"], "Total tokens") != asked + answered:
            raise RowFault(f"Total tokens {row['Total tokens']} is not {asked} + {answered}")
        return Arrival(
            at_s=number(row["Timestamp"], "Timestamp"),
            input_tokens=asked,
            output_tokens=answered,
            session=text(row.get("Session ID"), "Session ID"),
            tenant=text(row.get("Model"), "Model"),
            kind=text(row.get("Log Type"), "Log Type"),
        )
