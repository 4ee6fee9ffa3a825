"""Mooncake's JSONL (kvcache-ai/Mooncake): `timestamp` ms, `input_length`, `output_length`, `hash_ids` of 512 tokens.

The stamps of the two real traces are quantised to 3,000 ms, those of the synthetic one are not. Without `tick_s` the
reader looks at the first rows and spreads requests inside their tick only if stamps are shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from loadgen.arrival import Arrival, Row
from loadgen.traces.fields import blocks, count, json_row, number
from loadgen.traces.ordered import from_zero, looks_quantised, rows, spread

TICK_S = 3.0
"""Width of the real traces' stamps, in seconds."""
BLOCK_TOKENS = 512


def read(lines: Iterable[str], rng: np.random.Generator, tick_s: float | None = None) -> Iterator[Row]:
    """Arrivals of a Mooncake trace. `tick_s`: width of a stamp in seconds, 0 = as written, None = look."""
    found: Iterable[Row] = from_zero(rows(lines, _parse))
    if tick_s is None:
        quantised, found = looks_quantised(found)
        tick_s = TICK_S if quantised else 0.0
    return spread(found, tick_s, rng)


def _parse(line: str) -> Arrival:
    row = json_row(line)
    tokens = count(row.get("input_length"), "input_length")
    return Arrival(
        at_s=number(row.get("timestamp"), "timestamp") / 1000,
        input_tokens=tokens,
        output_tokens=count(row.get("output_length"), "output_length"),
        prefix=blocks(row.get("hash_ids"), "hash_ids", tokens, BLOCK_TOKENS),
        block_tokens=BLOCK_TOKENS,
    )
