"""The properties of a load before it is sent: rate, burstiness, lengths, possible prefix-cache hits. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from loadgen.arrival import Arrival


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A load in a few numbers. Lengths are in tokens. A number is None if there are too few arrivals for it."""

    requests: int
    span_s: float
    """Seconds from the first arrival to the last."""
    rate: float | None
    """Requests per second."""
    gap_cv: float | None
    """Standard deviation of the gaps over their mean: 0 constant, 1 Poisson, more is bursty."""
    input_mean: float | None = None
    input_p50_p90_p99: tuple[float, float, float] | None = None
    output_mean: float | None = None
    output_p50_p90_p99: tuple[float, float, float] | None = None
    shared: float | None = None
    """Share of prompt tokens that were in a block of an earlier prompt: the hits of an endless prefix cache."""
    without_output: int = 0
    """Requests that generated nothing (failed ones, in BurstGPT); one token is asked for instead."""


def summary_of(arrivals: Sequence[Arrival]) -> Summary:
    """Summarise a whole load."""
    if not arrivals:
        return Summary(requests=0, span_s=0.0, rate=None, gap_cv=None)
    times = np.array([each.at_s for each in arrivals])
    gaps = np.diff(times)
    span_s = float(times[-1] - times[0])
    mean = float(gaps.mean()) if len(gaps) else 0.0
    inputs = np.array([each.input_tokens for each in arrivals], dtype=np.float64)
    outputs = np.array([each.output_tokens for each in arrivals], dtype=np.float64)
    return Summary(
        requests=len(arrivals),
        span_s=span_s,
        rate=len(gaps) / span_s if span_s > 0 else None,
        gap_cv=float(gaps.std()) / mean if len(gaps) > 1 and mean > 0 else None,
        input_mean=float(inputs.mean()),
        input_p50_p90_p99=_percentiles(inputs),
        output_mean=float(outputs.mean()),
        output_p50_p90_p99=_percentiles(outputs),
        shared=_shared(arrivals),
        without_output=int((outputs == 0).sum()),
    )


def _percentiles(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float, float]:
    p50, p90, p99 = (float(each) for each in np.percentile(values, (50, 90, 99)))
    return p50, p90, p99


def _shared(arrivals: Sequence[Arrival]) -> float | None:
    """`Summary.shared`. Only full blocks count, and only those behind blocks that were all seen before."""
    if not any(each.prefix for each in arrivals):
        return None
    seen: set[tuple[int, int]] = set()
    hit = total = 0
    for each in arrivals:
        total += each.input_tokens
        known = True
        for block in each.prefix[: each.input_tokens // each.block_tokens if each.block_tokens else 0]:
            name = (each.block_tokens, block)
            known = known and name in seen
            hit += each.block_tokens if known else 0
            seen.add(name)
    return hit / total if total else None
