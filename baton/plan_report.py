"""`baton plan --html` and `--plot`: a page that loads nothing, and a picture of the fleets that were tried."""

from __future__ import annotations

import html
import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton import page as pages
from baton.plan_steps import Step
from baton.plan_view import cost_line, doubts, figures, headline, load_line, step_rows
from baton.planning import Point, SearchResult, Task, counted, price_per_hour
from cluster.errors import UsageError

TRIED_MAX = 200
"""Most rows of the table of tried fleets: first those that hold, cheapest first; then others, dearest first."""


def picture(outcome: SearchResult, task: Task, kind: str = "svg") -> bytes:
    """Draw price against attainment and against TTFT, for every fleet that was tried on the whole load.

    Args:
        outcome: the fleets that were tried.
        task: the targets.
        kind: `svg`, `png` or `pdf`.
    """
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    with matplotlib.rc_context({"svg.hashsalt": "baton", "font.size": 9}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
        _attainments(left, outcome, task)
        _first_tokens(right, outcome, task)
        figure.tight_layout()
        written = io.BytesIO()
        figure.savefig(written, format=kind, dpi=130, metadata={"Date": None} if kind == "svg" else None)
        pyplot.close(figure)
    return written.getvalue()


def _attainments(axes: Any, outcome: SearchResult, task: Task) -> None:
    for told, colour, mark, chosen in (
        ("holds", "tab:green", "o", [each for each in outcome.points if each.holds]),
        ("does not hold", "tab:red", "x", [each for each in outcome.points if not each.holds and each.whole]),
        (
            "does not hold (ended early: at most this share)",
            "0.6",
            "v",
            [each for each in outcome.points if not each.whole],
        ),
    ):
        if chosen:
            shares = [each.attained * 100 for each in chosen]
            axes.scatter(list(map(_price, chosen)), shares, c=colour, marker=mark, s=22, label=told, zorder=3)
    front = _front(outcome.points)
    if len(front) > 1:
        prices, shares = [price for price, _ in front], [share * 100 for _, share in front]
        axes.step(prices, shares, where="post", color="tab:green", linewidth=0.8, label="most for the price")
    _best(axes, outcome, lambda best: best.seen.attained * 100)
    for name, goal in task.goals.items():
        _promised(axes, name, goal.attainment * 100)
    axes.set(xlabel="price of the fleet, per hour", ylabel="attainment of the class worst off, %")
    _legend(axes, outcome)


def _front(points: Sequence[Point]) -> list[tuple[float, float]]:
    """The Pareto front, cheapest first: price and attainment of each fleet that no cheaper fleet equals."""
    front: list[tuple[float, float]] = []
    for price, share in sorted((_price(each), each.attained) for each in points if each.whole):
        if not front or share > front[-1][1]:
            front.append((price, share))
    return front


def _first_tokens(axes: Any, outcome: SearchResult, task: Task) -> None:
    known = [each for each in outcome.points if each.ttft_p95_ms is not None]
    for told, colour, mark, holds in (("holds", "tab:green", "o", True), ("does not hold", "tab:red", "x", False)):
        chosen = [each for each in known if each.holds is holds]
        if chosen:
            firsts = [each.ttft_p95_ms for each in chosen]
            axes.scatter(list(map(_price, chosen)), firsts, c=colour, marker=mark, s=22, label=told, zorder=3)
    _best(axes, outcome, lambda best: best.seen.ttft_p95_ms or 0.0)
    for name, goal in task.goals.items():
        first = goal.targets.ttft_ms
        if first is not None:
            _promised(axes, name, first)
    axes.set(xlabel="price of the fleet, per hour", ylabel="TTFT of served requests, p95, ms", yscale="log")
    for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatted(importlib.import_module("matplotlib.ticker").LogFormatter(minor_thresholds=(2, 0.5)))
    _legend(axes, outcome)


def _promised(axes: Any, name: str, value: float) -> None:
    """A line at a class's target, its name above it."""
    axes.axhline(value, color="0.4", linewidth=0.8, linestyle="--")
    where: Any = {"xycoords": ("axes fraction", "data"), "xytext": (3, 2), "textcoords": "offset points"}
    axes.annotate(f"promised to {name}", (0.0, value), size=7, **where)


def _best(axes: Any, outcome: SearchResult, value: Any) -> None:
    best = outcome.best
    if best is not None:
        at = (best.price_per_hour, value(best))
        axes.scatter([at[0]], [at[1]], s=120, facecolors="none", edgecolors="black", label="the plan", zorder=4)


def _legend(axes: Any, outcome: SearchResult) -> None:
    if outcome.points:
        axes.legend(fontsize=7)
    else:
        axes.text(0.5, 0.5, "no fleet was tried", ha="center", transform=axes.transAxes)


def _price(point: Point) -> float:
    return price_per_hour(point.arrangement, point.counts)


def page(outcome: SearchResult, steps: Sequence[Step], task: Task, took_s: float) -> str:
    """The whole page, as HTML. `took_s`: seconds that planning took."""
    parts = [pages.lines([_asked(task)])]
    if outcome.best is not None:
        bound = [("nearest bound", outcome.scarcest)] if outcome.scarcest else []
        rows = [("fleet", str(outcome.best)), *figures(outcome.best), *bound]
        parts.append(pages.section("The plan", pages.table((), rows, words=None)))
    alt = "Price against attainment and against time to first token, by fleet"
    parts.append(pages.section("What was tried on the whole load", pages.picture(alt, picture(outcome, task))))
    columns = ("promise", "cheapest fleet found for it", "price")
    told = pages.table(columns, step_rows(outcome, steps), words=None)
    parts.append(pages.section("What the next step of the promise would take", told))
    parts += [
        pages.section(f"Another way: {each}", pages.table((), figures(each), words=None)) for each in outcome.others
    ]
    parts.append(pages.section("What this rests on", "".join(pages.lines([each]) for each in doubts(outcome))))
    parts.append(pages.section("Fleets that were tried", pages.table(_COLUMNS, _tried(outcome), words=(4,))))
    parts.append(f'<p class="faint">{html.escape(cost_line(outcome, task, took_s))}</p>')
    return pages.page(headline(outcome, task), parts, "baton plan", _NOTE)


_NOTE = "Simulated; prices are those of the cluster file, or of costs/hardware.py where it names none."

_COLUMNS = ("fleet", "price an hour", "attainment", "TTFT p95, ms", "result")


def _tried(outcome: SearchResult) -> list[tuple[str, ...]]:
    ordered = sorted(outcome.points, key=lambda each: (not each.holds, _price(each) if each.holds else -_price(each)))
    return [
        (
            counted(each.arrangement, each.counts),
            f"{_price(each):,.2f}",
            f"{'' if each.whole else 'at most '}{each.attained:.2%}",
            "–" if each.ttft_p95_ms is None else f"{each.ttft_p95_ms:,.0f}",
            "holds" if each.holds else "does not hold" if each.whole else "does not hold, ended early",
        )
        for each in ordered[:TRIED_MAX]
    ]


def _asked(task: Task) -> str:
    promises = "; ".join(
        f"{name}: "
        + ", ".join(
            f"{target.upper()} {getattr(goal.targets, target + '_ms'):g} ms"
            for target in ("ttft", "tt2t", "tpot", "e2e")
            if getattr(goal.targets, target + "_ms") is not None
        )
        + f" for {goal.attainment:.4g} of its requests"
        for name, goal in task.goals.items()
    )
    lost = ", also with any one instance lost" if task.survive else ""
    return f"{task.model.api_name}; {load_line(task)}. Promised to {promises}{lost}."


def write(path: Path, content: str | bytes, flag: str) -> None:
    """Write a file that does not exist yet.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        with path.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror or error}") from None
