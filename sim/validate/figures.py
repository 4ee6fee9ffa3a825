"""Predicted beside measured, and the error: the figures of a comparison."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from sim.validate.times import Array, RequestTimes

AIMS: Final = {"TTFT mean": 0.20, "TPOT mean": 0.08, "E2E mean": 0.08}
"""The largest median error over all runs that we aim at, as a share of what was measured; mixtures included."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One published number and our prediction of it."""

    name: str
    unit: str
    measured: float
    predicted: float
    spread: float = 0.0
    """Half the distance between the lowest and the highest prediction, over several seeds."""

    @property
    def error(self) -> float | None:
        """The error as a share of what was measured; None if that is 0."""
        return self.predicted / self.measured - 1 if self.measured else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """One run: what was replayed, with which costs, and the figures."""

    name: str
    model: str
    engine: str
    """vLLM's version and settings that matter, for people."""
    because: str
    """Where the costs come from."""
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()
    requests: int
    preemptions: int
    one_by_one: Mapping[str, float] = field(default_factory=dict)
    """By quantity, the median over requests of each request's own error; stamped runs only."""
    series: tuple[SeriesRow, ...] = ()

    def figure(self, name: str) -> Figure | None:
        """The figure of this name, where the run has it."""
        return next((each for each in self.figures if each.name == name), None)


@dataclass(frozen=True, slots=True)
class SeriesRow:
    """The engine's load at one time, measured and predicted; None: KV usage was not recorded."""

    at_s: float
    running: int
    running_predicted: int
    waiting: int
    waiting_predicted: int
    kv_percent: float | None
    kv_percent_predicted: float


STATISTICS: Final[Mapping[str, Callable[[Array], float]]] = {
    "mean": lambda values: float(values.mean()),
    "p50": lambda values: float(np.percentile(values, 50)),
    "p90": lambda values: float(np.percentile(values, 90)),
    "p99": lambda values: float(np.percentile(values, 99)),
}


def statistics_of(name: str, unit: str, measured: Array, predicted: Array) -> Iterator[Figure]:
    """Mean and percentiles of the same quantity, request by request measured and predicted."""
    for word, statistic in STATISTICS.items():
        yield Figure(f"{name} {word}", unit, statistic(measured), statistic(predicted))


def times_figures(measured: RequestTimes, predicted: RequestTimes) -> Iterator[Figure]:
    """All figures that follow from the stamps of both sides."""
    yield from statistics_of("TTFT", "ms", measured.ttft, predicted.ttft)
    if len(measured.tpot):  # else all answers have one token
        yield from statistics_of("TPOT", "ms", measured.tpot, predicted.tpot)
    yield from statistics_of("E2E", "ms", measured.e2e, predicted.e2e)
    yield from statistics_of("queue", "ms", measured.queue, predicted.queue)
    yield Figure("duration", "s", measured.duration_s, predicted.duration_s)


def one_by_one(measured: RequestTimes, predicted: RequestTimes) -> dict[str, float]:
    """Each request against itself: the median over requests of its own absolute error."""
    both = {
        "TTFT": (measured.ttft, predicted.ttft),
        "TPOT": (measured.tpot, predicted.tpot),
        "E2E": (measured.e2e, predicted.e2e),
    }
    return {name: float(np.median(np.abs(ours / theirs - 1))) for name, (theirs, ours) in both.items() if len(theirs)}


def over_seeds(name: str, unit: str, measured: float, predictions: Sequence[float]) -> Figure:
    """A figure predicted several times: the mean, and how far the predictions lie apart."""
    spread = (max(predictions) - min(predictions)) / 2
    return Figure(name, unit, measured, statistics.fmean(predictions), spread)


@dataclass(frozen=True, slots=True)
class Total:
    """One figure's error over all runs that have it."""

    name: str
    runs: int
    median: float
    mean: float
    worst: float
    worst_run: str
    aim: float | None

    @property
    def met(self) -> bool | None:
        """Whether the median is within the aim; None: there is no aim."""
        return None if self.aim is None else self.median <= self.aim


_RunError = tuple[str, float]
"""A run's name, which other runs may have too, and its absolute error as a share of what was measured."""


def totals(comparisons: Sequence[RunComparison]) -> list[Total]:
    """The errors of each figure that several runs have, in order of first appearance."""
    found: dict[str, list[_RunError]] = {}
    for comparison in comparisons:
        for figure in comparison.figures:
            if figure.error is not None and math.isfinite(figure.error):
                found.setdefault(figure.name, []).append((comparison.name, abs(figure.error)))
    return [_total(name, errors) for name, errors in found.items()]


def without_its_own_run(steady: Sequence[RunComparison], busy_steps: float) -> list[Total]:
    """The errors of mean TTFT and E2E if the steps of a busy server are fitted to all *other* steady runs.

    The steps are added to both, and are fitted to TTFT.

    Args:
        steady: runs with mean TTFT, TPOT and E2E, predicted with `busy_steps`.
        busy_steps: `sim.validate.steady.BUSY_STEPS`.

    Returns:
        The errors over all runs; none for fewer than three, which leave nothing to fit to.
    """
    runs: list[tuple[str, Figure, Figure, Figure]] = []
    for run in steady:
        ttft, step, e2e = (run.figure(name) for name in ("TTFT mean", "TPOT mean", "E2E mean"))
        if ttft is not None and step is not None and e2e is not None:
            runs.append((run.name, ttft, step, e2e))
    if len(runs) < LEFT_OUT_MIN:
        return []
    needed = [busy_steps + (ttft.measured - ttft.predicted) / step.predicted for _, ttft, step, _ in runs]
    errors: dict[str, list[_RunError]] = {"TTFT mean": [], "E2E mean": []}
    for at, (name, ttft, step, e2e) in enumerate(runs):
        fitted = statistics.median([*needed[:at], *needed[at + 1 :]])
        later = (fitted - busy_steps) * step.predicted
        for figure in (ttft, e2e):
            errors[figure.name].append((name, abs((figure.predicted + later) / figure.measured - 1)))
    return [_total(name, of, ", its run left out of the fit") for name, of in errors.items()]


LEFT_OUT_MIN: Final = 3
"""The fewest runs of which one can be left out."""


def told(found: Sequence[Total]) -> list[Total]:
    """The totals of figures that at least half as many runs have as the most frequent one: few runs say too little."""
    most = max((each.runs for each in found), default=0)
    return [each for each in found if 2 * each.runs >= most]


def _total(name: str, errors: Sequence[_RunError], how: str = "") -> Total:
    """The errors of a figure; `how`: words after its name."""
    worst_run, worst = max(errors, key=lambda each: each[1])
    values = [value for _, value in errors]
    return Total(
        name=f"{name}{how}",
        runs=len(values),
        median=statistics.median(values),
        mean=statistics.fmean(values),
        worst=worst,
        worst_run=worst_run,
        aim=AIMS.get(name),
    )
