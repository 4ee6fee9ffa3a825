"""The load of `bench.real`: requests of Azure's conversation trace, shorter, at the rate that is asked for.

One factor shortens prompts and answers alike, so that what prefill and decode have to do keeps its proportion. The
arrivals keep the trace's own gaps; `baton load --speed` runs them faster or slower, so that every rate sends the very
same requests in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from loadgen.arrival import Arrival
from loadgen.shaping import window
from loadgen.summary import Summary, summary_of
from loadgen.traces import azure

TRACE: Final = "traces/azure2023/AzureLLMInferenceTrace_conv.csv"
FROM_S: Final = 600.0
"""Where the requests begin in the trace: after its first ten minutes, an arbitrary choice."""
SHORTER: Final = 0.4
"""Tokens here for each of the trace's. Its prompts have 1,155 in the mean and 4,142 at p99; so all but one in two
hundred fit the 2,048 tokens of the models here, and those are cut."""
CONTEXT: Final = 2048
"""Tokens of prompt and answer together."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The requests of a load, and its figures."""

    arrivals: tuple[Arrival, ...]
    cuts: tuple[bool, ...]
    """Which requests were longer than the context even after shortening, and were cut."""

    @property
    def cut(self) -> int:
        """How many requests were cut."""
        return sum(self.cuts)

    def part(self, begin: int, count: int) -> Shape:
        """`count` of the requests, from number `begin` on; the first is due at once.

        Raises:
            ValueError: there are fewer.
        """
        if begin + count > len(self.arrivals):
            raise ValueError(f"{len(self.arrivals)} requests are there, and {begin + count} are wanted")
        chosen, cuts = self.arrivals[begin : begin + count], self.cuts[begin : begin + count]
        from_s = chosen[0].at_s
        return Shape(tuple(msgspec.structs.replace(each, at_s=each.at_s - from_s) for each in chosen), cuts)

    @property
    def rate(self) -> float:
        """Requests a second at the trace's own speed: gaps over their time."""
        return (len(self.arrivals) - 1) / (self.arrivals[-1].at_s - self.arrivals[0].at_s)

    @property
    def summary(self) -> Summary:
        """The load in a few numbers."""
        return summary_of(self.arrivals)

    @property
    def long_prompt(self) -> int:
        """The 90th percentile of prompts, tokens: the TTFT target is made from it."""
        return round(float(np.percentile([each.input_tokens for each in self.arrivals], 90)))

    @property
    def answer(self) -> int:
        """The mean answer, tokens."""
        return round(float(np.mean([each.output_tokens for each in self.arrivals])))

    def speed(self, rate: float) -> float:
        """How many times as fast as in the trace time runs for this rate."""
        return rate / self.rate


def shaped(lines: Iterable[str], count: int | None, *, shorter: float = SHORTER, from_s: float = FROM_S) -> Shape:
    """`count` requests of a trace from `from_s` on; None: all of them.

    Raises:
        ValueError: the trace has bad rows there, or too few requests.
    """
    rows = azure.read(lines, np.random.default_rng(0))
    found = list(islice(window((_good(row) for row in rows), from_s), count))
    if len(found) < max(2, count or 0):
        raise ValueError(
            f"the trace has {len(found)} requests from second {from_s:g} on, and {max(2, count or 0)} are wanted"
        )
    made = [_shorter(each, shorter) for each in found]
    return Shape(tuple(each for each, _ in made), tuple(cut for _, cut in made))


def _good(row: object) -> Arrival:
    if not isinstance(row, Arrival):
        raise ValueError(str(row))  # noqa: TRY004 - a bad row, not a wrong call
    return row


def _shorter(arrival: Arrival, factor: float) -> tuple[Arrival, bool]:
    """A shorter arrival, with at least two tokens each way: an answer of one is never handed over, and has no time per
    token.
    """
    answer = max(2, round(arrival.output_tokens * factor))
    prompt = max(2, round(arrival.input_tokens * factor))
    fits = min(prompt, CONTEXT - answer)
    return msgspec.structs.replace(arrival, input_tokens=fits, output_tokens=answer), fits < prompt


def write(arrivals: Sequence[Arrival], path: Path) -> None:
    """Write the arrivals in the form that `baton load --trace` reads."""
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in arrivals))
