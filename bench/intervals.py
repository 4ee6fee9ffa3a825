"""Medians of repeats with their intervals, for the tables of benchmarks in which contestants take turns. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from loadgen.search import interval


def middle(values: Sequence[float]) -> dict[str, Any] | None:
    """Median of repeats, and its interval by order statistics (None with fewer than six); None without values."""
    if not values:
        return None
    low, high, confidence = interval(tuple((each, each) for each in values))
    return {
        "median": round(statistics.median(values), 4),
        "low": None if low is None else round(low, 4),
        "high": None if high is None else round(high, 4),
        "confidence": confidence,
        "repeats": len(values),
    }


def times(found: dict[str, Any] | None) -> str:
    """A ratio as `middle` has it, for people."""
    if found is None:
        return "–"
    width = "" if found["low"] is None else f" ({found['low']:.2f} to {found['high']:.2f})"
    return f"{found['median']:.2f}{width}"
