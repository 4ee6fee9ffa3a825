"""The terminal output of `baton validate`: a table for each run, then the errors of all runs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sim.validate.figures import Figure, RunComparison, Total, told, totals
from sim.validate.tables import OTHERS, number, percent, steady_totals

FAR = 0.25
"""Relative error beyond which a figure is shown in red."""


def show(found: Sequence[RunComparison]) -> None:
    """Print each run, then the errors of all runs, then those published by others."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140  # a file has no edge to fold at
    for comparison in found:
        _heading(console, comparison)
        console.print(_figures(comparison.figures))
        if comparison.one_by_one:
            errors = ", ".join(f"{name} {percent(error, sign=False)}" for name, error in comparison.one_by_one.items())
            console.print(f"each request by itself, median error: {errors}", soft_wrap=True)
        console.print()
    console.print(_totals(told(totals(found))))
    steady = [each for each in found if not each.one_by_one]
    if steady:
        console.print(_totals(steady_totals(steady), "absolute errors of the steady runs alone"))
        others = "; ".join(f"{one.name} {one.e2e:.0%} / {one.itl:.0%} / {one.ttft:.0%}" for one in OTHERS)
        console.print(
            f"published by others for such runs, mean error of E2E / ITL / TTFT means: {others}", soft_wrap=True
        )


def _heading(console: Console, comparison: RunComparison) -> None:
    preempted = f", {comparison.preemptions} preemptions" if comparison.preemptions else ""
    head = f"{comparison.name}: {comparison.model}, {comparison.requests:,} requests{preempted}"
    console.print(f"[bold]{escape(head)}[/]", soft_wrap=True)
    for line in (comparison.engine, comparison.because, *comparison.notes):
        console.print(f"  {escape(line)}", style="dim", soft_wrap=True)


def _figures(figures: Sequence[Figure]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for column in ("predicted", "measured", "error", "seeds ±"):
        table.add_column(column, justify="right")
    for figure in figures:
        error = percent(figure.error)
        if figure.error is not None and abs(figure.error) > FAR:
            error = f"[red]{error}[/]"
        spread = number(figure.spread) if figure.spread else ""
        name = f"{figure.name}, {figure.unit}"
        table.add_row(name, number(figure.predicted), number(figure.measured), error, spread)
    return table


def _totals(found: Sequence[Total], title: str = "absolute errors") -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", title=title, title_justify="left")
    for column in ("", "runs", "median", "mean", "worst", "of", "aim"):
        table.add_column(column, justify="left" if column in {"", "of", "aim"} else "right")
    for each in found:
        aim = "" if each.aim is None else f"median ≤ {each.aim:.0%}: {'met' if each.met else 'missed'}"
        shown = (percent(value, sign=False) for value in (each.median, each.mean, each.worst))
        table.add_row(each.name, str(each.runs), *shown, escape(each.worst_run), aim)
    return table
