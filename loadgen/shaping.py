"""Makes a load faster or denser, or cuts a part of it. Arrivals sorted by time come in, and go out. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from loadgen.arrival import Arrival

COPY_ID = 1 << 48
"""Added to a copy's block ids: copies share prefixes among themselves as the originals do, but not with originals."""

AGAIN_ID = 1 << 56
"""Added to the block ids of a load that is sent again, for each time: caches may hold the texts that were sent before.
Above all copies' ids."""

ID_END = 1 << 63
"""Block ids are below this. After 128 times the ids of a load that is sent again begin anew."""


def faster(arrivals: Iterable[Arrival], speed: float) -> Iterator[Arrival]:
    """Time runs `speed` times faster: rate × speed, duration ÷ speed, the shape of bursts kept."""
    assert speed > 0
    for arrival in arrivals:
        yield msgspec.structs.replace(arrival, at_s=arrival.at_s / speed)


def denser(
    arrivals: Iterable[Arrival], factor: float, rng: np.random.Generator, spread_s: float = 1.0
) -> Iterator[Arrival]:
    """The mean rate times `factor` over the same time: above 1 with copies of arrivals, below 1 with a part of them.

    A copy comes uniformly up to `spread_s` seconds after its original, and has prefixes and a session of its own. So
    the load looks like more users of the same kind. On average each arrival becomes `factor` arrivals.
    """
    assert factor >= 0
    whole = math.floor(factor)
    waiting: list[tuple[float, int, Arrival]] = []
    order = 0
    for arrival in arrivals:
        while waiting and waiting[0][0] <= arrival.at_s:
            yield heapq.heappop(waiting)[2]
        number = whole + (1 if rng.random() < factor - whole else 0)
        if number:
            yield arrival
        for copy in range(1, number):
            order += 1
            later = _copy(arrival, copy, arrival.at_s + float(rng.random()) * spread_s)
            heapq.heappush(waiting, (later.at_s, order, later))
    while waiting:
        yield heapq.heappop(waiting)[2]


def _copy(arrival: Arrival, copy: int, at_s: float) -> Arrival:
    return msgspec.structs.replace(
        arrival,
        at_s=at_s,
        prefix=tuple(each + copy * COPY_ID for each in arrival.prefix),
        session=None if arrival.session is None else f"{arrival.session}#{copy}",
    )


def again(arrivals: Iterable[Arrival], times: int) -> list[Arrival]:
    """The load with other block ids than it had the other `times`, so that its prompts share prefixes among themselves
    alone.
    """
    shift = times * AGAIN_ID
    return [
        msgspec.structs.replace(each, prefix=tuple((block + shift) % ID_END for block in each.prefix))
        if each.prefix
        else each
        for each in arrivals
    ]


def window(arrivals: Iterable[Arrival], from_s: float = 0.0, until_s: float = math.inf) -> Iterator[Arrival]:
    """The arrivals from second `from_s` on and before `until_s`, with `from_s` as the new second 0."""
    for arrival in arrivals:
        if arrival.at_s >= until_s:
            return
        if arrival.at_s >= from_s:
            yield msgspec.structs.replace(arrival, at_s=arrival.at_s - from_s)
