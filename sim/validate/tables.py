"""Comparisons as Markdown, for docs/validation.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from sim.validate.figures import Figure, RunComparison, SeriesRow, Total, told, totals, without_its_own_run
from sim.validate.steady import BUSY_STEPS


class Published(NamedTuple):
    """Mean absolute errors that others published for their simulators, on the means of the steady runs' set."""

    name: str
    e2e: float
    itl: float
    ttft: float


OTHERS: Final = (
    Published("vidur (few cases)", 0.089, 0.10, 0.18),
    Published("BLIS", 0.23, 0.22, 0.24),
    Published("LLMServingSim", 0.38, 0.32, 16.29),
    Published("aiconfigurator", 0.17, 0.21, 8.09),
)
"""Source: inference-sim's evaluation of 49 runs of vLLM 0.15.1, of which the steady table holds nine."""

STEADY_COLUMNS: Final = ("TTFT mean", "TTFT p90", "TTFT p99", "TPOT mean", "ITL mean", "E2E mean", "E2E p90", "E2E p99")


def number(value: float) -> str:
    """A number for a table: no decimals from 1,000 on, one from 10 on, else two."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def percent(value: float | None, *, sign: bool = True) -> str:
    """A share in percent; a dash for None."""
    if value is None:
        return "–"
    return f"{value:+.1%}" if sign else f"{value:.1%}"


def markdown(comparisons: Sequence[RunComparison]) -> Iterator[str]:
    """All tables, line by line."""
    stamped = [each for each in comparisons if each.one_by_one]
    steady = [each for each in comparisons if not each.one_by_one]
    if steady:
        yield from _steady(steady)
    for each in stamped:
        yield from _stamped(each)
    yield from _totals(told(totals(comparisons)))
    if steady and stamped:
        yield f"Of the {len(steady)} steady runs alone:"
        yield ""
        yield from _totals(steady_totals(steady))
    if steady:
        yield from _others(steady)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _header(*names: str) -> Iterator[str]:
    yield _row(names)
    yield _row("---" for _ in names)


def _steady(runs: Sequence[RunComparison]) -> Iterator[str]:
    yield from _header("run", *STEADY_COLUMNS)
    for run in runs:
        found = [run.figure(name) for name in STEADY_COLUMNS]
        yield _row((f"{run.name}: {run.model}, {run.engine.partition(', vLLM')[0]}", *map(_cell, found)))
    yield ""
    for run in runs:
        yield f"- {run.name}: {run.engine}. {run.because}. {' '.join(f'{note}.' for note in run.notes)}".rstrip()
    yield ""


def _cell(figure: Figure | None) -> str:
    """Predicted (± spread) over measured, error."""
    if figure is None:
        return "–"
    spread = f" ± {number(figure.spread)}" if figure.spread >= 0.005 * figure.predicted else ""
    return f"{number(figure.predicted)}{spread} / {number(figure.measured)}<br>{percent(figure.error)}"


def _stamped(run: RunComparison) -> Iterator[str]:
    counts = f"{run.requests} requests, {run.preemptions} preemptions predicted"
    yield f"**{run.name}**: {counts}. {run.engine}. {run.because}."
    yield from (f"{note[0].upper()}{note[1:]}." for note in run.notes)
    yield ""
    yield from _header("", "predicted", "measured", "error")
    for figure in run.figures:
        cells = (number(figure.predicted), number(figure.measured), percent(figure.error))
        yield _row((f"{figure.name}, {figure.unit}", *cells))
    yield ""
    errors = ", ".join(f"{name} {percent(error, sign=False)}" for name, error in run.one_by_one.items())
    yield f"Each request by itself, median error: {errors}."
    yield ""
    yield from _series(run.series)


ROWS_MAX: Final = 16
"""The most rows of a time series in a page."""


def _series(series: Sequence[SeriesRow]) -> Iterator[str]:
    if not series:
        return
    yield from _header("at s", "running", "waiting", "KV %")
    step = -(-len(series) // ROWS_MAX)
    for row in series[::step]:
        kv = "–" if row.kv_percent is None else f"{row.kv_percent:.0f}"
        yield _row(
            (
                f"{row.at_s:.0f}",
                f"{row.running_predicted} / {row.running}",
                f"{row.waiting_predicted} / {row.waiting}",
                f"{row.kv_percent_predicted:.0f} / {kv}",
            )
        )
    yield ""


def steady_totals(steady: Sequence[RunComparison]) -> list[Total]:
    """The errors of the steady runs alone, those of mean TTFT and E2E also with each run left out of the fit."""
    return [*told(totals(steady)), *without_its_own_run(steady, BUSY_STEPS)]


def _totals(found: Sequence[Total]) -> Iterator[str]:
    yield from _header("absolute error of", "runs", "median", "mean", "worst", "aim (median)")
    for each in found:
        aim = "" if each.aim is None else f"≤ {each.aim:.0%}: {'met' if each.met else '**missed**'}"
        worst = f"{percent(each.worst, sign=False)} ({each.worst_run})"
        values = (percent(each.median, sign=False), percent(each.mean, sign=False))
        yield _row((each.name, str(each.runs), *values, worst, aim))
    yield ""


def _others(runs: Sequence[RunComparison]) -> Iterator[str]:
    yield from _header("mean absolute error on the means", "E2E", "ITL", "TTFT")
    ours = {each.name: each.mean for each in totals(runs)}
    rows = (Published(f"this twin, {len(runs)} runs", ours["E2E mean"], ours["ITL mean"], ours["TTFT mean"]), *OTHERS)
    for name, *errors in rows:
        yield _row((name, *(percent(each, sign=False) for each in errors)))
    yield ""
