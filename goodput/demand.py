"""What is to be served: every request of a trace or workload with its size, class and reusable tokens. Pure.

Lengths stay distributions: one row a request, as columns. Nothing is averaged before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.arrival import Arrival

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassPromise:
    """What one class of requests is promised; at least one target."""

    ttft_ms: float | None = None
    tt2t_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    attainment: float = 0.95
    """Share of all arrivals that must meet every target."""

    def __str__(self) -> str:
        """`TTFT 500 ms, TPOT 40 ms for 0.95 of 1`; `nothing` without a target."""
        named = {"TTFT": self.ttft_ms, "TT2T": self.tt2t_ms, "TPOT": self.tpot_ms, "E2E": self.e2e_ms}
        told = ", ".join(f"{name} {value:g} ms" for name, value in named.items() if value is not None)
        return f"{told} for {self.attainment:.4g} of 1" if told else "nothing"


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests in the order of their arrival, as columns of one length."""

    at_s: Floats
    """Arrival times, in seconds."""
    inputs: Floats
    """Prompt tokens."""
    outputs: Floats
    """Tokens of the answer, one at least."""
    cached: Floats
    """Prompt tokens that an unbounded prefix cache would have: the most that prefix caching can save."""
    classes: NDArray[np.int64]
    """Number of each request's class in `promises`."""
    promises: tuple[ClassPromise, ...]

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.at_s[-1] - self.at_s[0]) if len(self) else 0.0

    def target_ms(self, name: str) -> Floats:
        """The target `name` of each request's class, in ms; infinite without one."""
        values = [getattr(each, name) for each in self.promises]
        found = np.array([np.inf if value is None else value for value in values])
        return found[self.classes]

    def may_miss(self) -> int:
        """How many requests may miss their targets in all."""
        counts = np.bincount(self.classes, minlength=len(self.promises))
        shares = [1 - each.attainment for each in self.promises]
        return int(sum(np.floor(count * share + _ROUND) for count, share in zip(counts, shares, strict=True)))


_ROUND: Final = 1e-9


def demand_of(arrivals: Sequence[Arrival], promises: Mapping[str, ClassPromise], usual: str = "") -> Demand:
    """The columns of these requests.

    Args:
        arrivals: in the order of time, at least one.
        promises: by class.
        usual: the class of requests that name no class, or a class without promises.

    Raises:
        ValueError: there is no request, or no class `usual`.
    """
    if not arrivals:
        raise ValueError("there is no request to plan for")
    if usual not in promises:
        raise ValueError(f"there is no class {usual!r}; there is {', '.join(promises)}")
    numbers = {name: number for number, name in enumerate(promises)}
    return Demand(
        at_s=_column(each.at_s for each in arrivals),
        inputs=_column(max(1, each.input_tokens) for each in arrivals),
        outputs=_column(max(1, each.output_tokens) for each in arrivals),
        cached=_column(_reusable(arrivals)),
        classes=np.array([numbers.get(each.slo_class or usual, numbers[usual]) for each in arrivals], dtype=np.int64),
        promises=tuple(promises.values()),
    )


def _column(values: Iterable[Any]) -> Floats:
    return np.fromiter(values, dtype=np.float64)


def _reusable(arrivals: Sequence[Arrival]) -> Iterable[int]:
    """Of each prompt, the tokens of its longest prefix that an earlier prompt had, too; never its last token, which is
    always computed.
    """
    seen: set[tuple[int, int]] = set()
    """Prefixes, as (number of the prefix without its last block, last block)."""
    names: dict[tuple[int, int], int] = {}
    for each in arrivals:
        node, length, new = 0, 0, False
        for block in each.prefix:
            step = (node, block)
            if step not in seen:
                seen.add(step)
                names[step] = len(names) + 1
                new = True
            node = names[step]
            length += 0 if new else each.block_tokens
        yield min(length, max(0, each.input_tokens - 1))


def sampled(arrivals: Sequence[Arrival], requests: int, parts: int, gap_s: float) -> list[Arrival]:
    """A shorter load of the same kind: stretches of it, evenly spread over the whole, put one after the other.

    Args:
        arrivals: in the order of time.
        requests: how many at most.
        parts: how many stretches.
        gap_s: between the last arrival of a stretch and the first of the next.
    """
    if len(arrivals) <= requests:
        return list(arrivals)
    size = max(1, requests // parts)
    found: list[Arrival] = []
    begin_s = 0.0
    for part in range(parts):
        first = round(part * (len(arrivals) - size) / max(1, parts - 1))
        rows = arrivals[first : first + size]
        found += [replace(each, at_s=begin_s + each.at_s - rows[0].at_s) for each in rows]
        begin_s = found[-1].at_s + gap_s
    return found
