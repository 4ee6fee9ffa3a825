"""Baton's own JSONL: what `baton load --out` writes, or hand-made lines with `at_s`, `input_tokens`, `output_tokens`.

Optional: `prefix` with `block_tokens`, `session`, `turn`, `tenant`, `kind`, `slo_class`. Other keys (the measurements
of a record) are skipped. Records stand in the order in which requests *ended*, so only this reader sorts; it reads all
lines before it yields the first arrival. Ties keep their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from loadgen.arrival import SPAN_MAX_S, Arrival, BadRow, Row
from loadgen.traces.fields import RowFault, blocks, count, json_row, number, numbered, text
from loadgen.traces.leaps import TOO_LATE
from loadgen.traces.ordered import spread


def read(lines: Iterable[str], rng: np.random.Generator, tick_s: float | None = None) -> Iterator[Row]:
    """Arrivals of our own record, bad rows first. Times stay as written: a record's zero is the start of its load."""
    found: list[tuple[int, Arrival]] = []
    for at, line in numbered(lines):
        try:
            found.append((at, _parse(line)))
        except RowFault as fault:
            yield BadRow(at, str(fault))
    found.sort(key=lambda row: row[1].at_s)
    far = [(at, ahead_s) for at, row in found if (ahead_s := row.at_s - found[0][1].at_s) > SPAN_MAX_S]
    if len(far) * 2 > len(found):
        far = []  # the first row is wrong rather than most of them: the load is refused as a whole
    yield from (BadRow(at, f"{ahead_s:.6g} s {TOO_LATE}") for at, ahead_s in far)
    yield from spread([row for _, row in found[: len(found) - len(far)]], tick_s or 0.0, rng)


def _parse(line: str) -> Arrival:
    row = json_row(line)
    tokens = count(row.get("input_tokens"), "input_tokens")
    prefix, block_tokens = _prefix(row.get("prefix"), row.get("block_tokens"), tokens)
    return Arrival(
        at_s=number(row.get("at_s"), "at_s"),
        input_tokens=tokens,
        output_tokens=count(row.get("output_tokens"), "output_tokens"),
        prefix=prefix,
        block_tokens=block_tokens,
        session=text(row.get("session"), "session"),
        turn=None if row.get("turn") is None else count(row["turn"], "turn"),
        tenant=text(row.get("tenant"), "tenant"),
        kind=text(row.get("kind"), "kind"),
        slo_class=text(row.get("slo_class"), "slo_class"),
    )


def _prefix(found: Any, width: Any, tokens: int) -> tuple[tuple[int, ...], int]:
    if not found:
        return (), 0
    block_tokens = count(width, "block_tokens")
    if not block_tokens:
        raise RowFault("block_tokens 0: `prefix` needs to know how many tokens stand behind an id")
    return blocks(found, "prefix", tokens, block_tokens), block_tokens
