"""Readers of real traces: text lines in, arrivals in order of time out. Pure, streaming and total.

A reader yields either an `Arrival` or a `BadRow` with line and fault for every row: it drops nothing, and no input
makes it raise. The caller opens the files. `loadgen.servegen` reads ServeGen's folders, which describe clients rather
than list requests.

Adding a format is one module with `read(lines, rng, tick_s)`, one line in `FORMATS` and one in `detect`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from loadgen.arrival import Row
from loadgen.traces import azure, bailian, burstgpt, mooncake, own
from loadgen.traces.fields import RowFault, cells, json_row, numbered

Reader = Callable[[Iterable[str], np.random.Generator, float | None], Iterator[Row]]

FORMATS: dict[str, Reader] = {
    "mooncake": mooncake.read,
    "azure": azure.read,
    "burstgpt": burstgpt.read,
    "bailian": bailian.read,
    "baton": own.read,
}
"""Formats of one file by the name used on the command line."""

LOOK_LINES = 20
"""Lines that `detect` looks at."""


def detect(head: Iterable[str]) -> str | None:
    """The format of these first lines, by their content; None if none of the first 20 lines tells."""
    for at, (_, line) in enumerate(numbered(head)):
        if at >= LOOK_LINES:
            return None
        found = _csv(cells(line)) if not line.startswith("{") else _jsonl(line)
        if found:
            return found
    return None


def _csv(found: list[str]) -> str | None:
    if set(burstgpt.NEEDED) <= set(found):
        return "burstgpt"
    if found[: len(azure.HEADER)] == list(azure.HEADER):
        return "azure"
    try:
        azure.seconds(found[0])
    except RowFault:
        return None
    return "azure"


def _jsonl(line: str) -> str | None:
    try:
        keys = set(json_row(line))
    except RowFault:
        return None
    if {"at_s", "input_tokens"} <= keys:
        return "baton"
    if {"timestamp", "input_length"} <= keys:
        return "bailian" if "chat_id" in keys else "mooncake"
    return None
