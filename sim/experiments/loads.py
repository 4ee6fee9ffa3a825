"""The same requests at any rate: one sequence of sizes and gaps, its time stretched. Common random numbers make two
systems, or two rates, differ by what they do and not by what they were sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import msgspec
import numpy as np

from loadgen.arrival import Arrival
from loadgen.arrivals import poisson
from loadgen.lengths import Lengths
from loadgen.made import made


@dataclass(frozen=True, slots=True)
class UnitLoad:
    """Requests whose mean rate is 1 per second."""

    name: str
    arrivals: Sequence[Arrival]

    def mean_input(self) -> float:
        """Mean tokens of a prompt."""
        return float(np.mean([each.input_tokens for each in self.arrivals]))

    def mean_output(self) -> float:
        """Mean tokens of an answer."""
        return float(np.mean([each.output_tokens for each in self.arrivals]))

    def at_rate(self, rate: float, count: int) -> list[Arrival]:
        """The first `count` requests, `rate` of them a second on average; all requests, if there are fewer."""
        first_s = self.arrivals[0].at_s
        return [msgspec.structs.replace(each, at_s=(each.at_s - first_s) / rate) for each in self.arrivals[:count]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How many requests a run is given. Too few, and queues have no time to grow: goodput comes out too high."""

    fewest: int
    most: int
    lives: float
    """Arrivals last so many times as long as a request that just meets its targets, within the two bounds."""

    def count(self, rate: float, life_s: float) -> int:
        """The number of requests for a run at this rate."""
        return max(self.fewest, min(self.most, round(rate * life_s * self.lives)))


FULL: Final = Size(fewest=500, most=3500, lives=4.0)
QUICK: Final = Size(fewest=200, most=1000, lives=3.0)


def made_up(
    name: str, inputs: Lengths, outputs: Lengths, seed: int, count: int, length_max: int | None = None
) -> UnitLoad:
    """Poisson arrivals, lengths from two distributions; prompts are cut so that prompt and answer fit into a model."""
    rng = np.random.default_rng(seed)
    times = poisson(1.0, rng)
    drawn = islice(made(times, inputs, outputs, rng.spawn(1)[0]), count)
    return UnitLoad(name, [each if length_max is None else fitting(each, length_max) for each in drawn])


def fitting(arrival: Arrival, length_max: int) -> Arrival:
    """The same, cut to a model's length: first the answer to half of it, then the prompt to what is left."""
    output = min(arrival.output_tokens, length_max // 2)
    return msgspec.structs.replace(
        arrival, input_tokens=min(arrival.input_tokens, length_max - output), output_tokens=output
    )


def traced(name: str, arrivals: Iterable[Arrival], count: int, length_max: int) -> UnitLoad:
    """The first `count` requests of a trace that have an answer, at a mean rate of 1."""
    kept = [fitting(each, length_max) for each in islice((one for one in arrivals if one.output_tokens), count)]
    span_s = kept[-1].at_s - kept[0].at_s
    rate = (len(kept) - 1) / span_s
    return UnitLoad(name, [msgspec.structs.replace(each, at_s=(each.at_s - kept[0].at_s) * rate) for each in kept])
