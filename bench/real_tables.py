"""Tables, ratios and targets of `bench.real`, made from its JSON alone. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench.intervals import middle, times
from bench.published import Table, target
from bench.real_contestants import OURS

Cell = dict[str, Any]


def counted(found: dict[str, Any], name: str, rate: float) -> list[Cell]:
    """The runs of a contestant at a rate that say something, by repeat."""
    mine = (
        cell for cell in found["cells"] if cell["contestant"] == name and cell["rate"] == rate and "void" not in cell
    )
    return sorted(mine, key=lambda cell: cell["repeat"])


def share(cell: Cell, factor: str) -> float:
    """Of all arrivals of a run, those within both targets."""
    return float(cell["in_time"][factor] / cell["requests"])


def ratio(found: dict[str, Any], name: str, rate: float, factor: str) -> dict[str, Any] | None:
    """Requests in time of Baton's choice over a contestant's, repeat by repeat: both got the same requests."""
    ours = {cell["repeat"]: cell for cell in counted(found, OURS, rate)}
    theirs = [cell for cell in counted(found, name, rate) if cell["repeat"] in ours]
    return middle([_over(ours[cell["repeat"]], cell, factor) for cell in theirs])


def _over(ours: Cell, theirs: Cell, factor: str) -> float:
    """The ratio of one repeat. A contestant without a request in time counts as if it had one: no repeat is dropped.
    Where neither has any, they are even.
    """
    mine, other = share(ours, factor), share(theirs, factor)
    return 1.0 if mine == other else mine / max(other, 1 / theirs["requests"])


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """The result with medians and ratios beside its runs."""
    rows = [
        {
            "contestant": name,
            "rate": rate,
            "in_time": {
                factor: middle([share(cell, factor) for cell in counted(found, name, rate)])
                for factor in found["targets"]
            },
            "completed_rate": middle([cell["completed_rate"] for cell in counted(found, name, rate)]),
            "ours_over": None
            if name == OURS
            else {factor: ratio(found, name, rate, factor) for factor in found["targets"]},
        }
        for rate in found["rates"]
        for name in found["contestants"]
    ]
    return {**found, "rows": rows}


def tables(found: dict[str, Any], model: str) -> list[Table]:
    """Requests in time with ratios, then latencies, of one model."""
    return [_in_time(found, model), _latencies(found, model)]


def _in_time(found: dict[str, Any], model: str) -> Table:
    rows = []
    for row in figures(found)["rows"]:
        name, rate = row["contestant"], row["rate"]
        ratios = row["ours_over"] or dict.fromkeys(found["targets"])
        rows.append(
            [
                f"{rate:.2f}/s",
                found["contestants"][name],
                *(_percent(row["in_time"][factor]) for factor in found["targets"]),
                "–" if name == OURS else times(ratios[str(found["admitted"])]),
                _of(counted(found, name, rate), lambda cell: cell["completed_rate"], "{:.2f}"),
                _of(counted(found, name, rate), lambda cell: cell["handed_over"] / cell["requests"], "{:.0%}"),
                f"{sum(cell['failed'] for cell in counted(found, name, rate))}",
                f"{len(counted(found, name, rate))} of {sum(_is(cell, name, rate) for cell in found['cells'])}",
            ]
        )
    promised = [
        f"{factor} × ({each['ttft_ms']:.0f} and {each['tpot_ms']:.0f} ms)" for factor, each in found["targets"].items()
    ]
    columns = ["offered", "two engines", *promised, f"Baton's choice over it, {found['admitted']} ×",
               "answered a second", "handed over", "failed or refused", "runs that count"]  # fmt: skip
    return Table(f"{model}: share of all arrivals within both targets, median of repeats", columns, rows)


def _is(cell: Cell, name: str, rate: float) -> bool:
    return bool(cell["contestant"] == name and cell["rate"] == rate)


def _percent(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    width = "" if found["low"] is None else f" ({found['low']:.1%} to {found['high']:.1%})"
    return f"{found['median']:.1%}{width}"


def _of(cells: Sequence[Cell], what: Callable[[Cell], float], form: str) -> str:
    return form.format(statistics.median(map(what, cells))) if cells else "–"


def _latencies(found: dict[str, Any], model: str) -> Table:
    rows = [
        [
            f"{rate:.2f}/s",
            told,
            *(_both(counted(found, name, rate), what, form)
              for what, form in (("ttft_ms", "{:.0f}"), ("tt2t_ms", "{:.0f}"), ("tpot_ms", "{:.1f}"))),
        ]
        for rate in found["rates"]
        for name, told in found["contestants"].items()
    ]  # fmt: skip
    return Table(f"{model}: milliseconds p50 / p99, medians of repeats",
                 ["offered", "two engines", "TTFT", "TT2T", "TPOT"], rows)  # fmt: skip


def _both(cells: Sequence[Cell], what: str, form: str) -> str:
    answered = [cell for cell in cells if cell[what]["p50"] is not None]
    return " / ".join(_of(answered, lambda cell, p=part: cell[what][p], form) for part in ("p50", "p99"))  # type: ignore[misc]


def targets(figures_of: dict[str, Any]) -> dict[str, Any]:
    """Requests in time of Baton's choice over each other contestant's, within the targets that admission keeps to.

    Handing over is a choice: Baton's choice is to be no worse than the best contestant that serves whole.
    """
    told: dict[str, Any] = {}
    for model, found in figures_of.items():
        for rate in found["rates"]:
            for name in found["contestants"]:
                if name != OURS:
                    over = ratio(found, name, rate, str(found["admitted"]))
                    value = None if over is None else over["median"]
                    told[f"{model}_{rate:g}_over_{name}"] = target(value, 1.0, at_most=False)
    return told


def note(figures_of: dict[str, Any]) -> str:
    """Load and rates, for the line above the tables."""
    parts = []
    for model, found in figures_of.items():
        sent = found["load"]
        shared = f" (neighbours share {sent['shared']:.0%} of their requests)" if sent["shared"] else ""
        parts.append(
            f"{model}: {found['repeats']} repeats of {found['seconds']:g} s, each a stretch of Azure's conversation "
            f"trace from second {sent['from_s']:g} on{shared}, lengths × {sent['shorter']:g} "
            f"(mean {sent['prompt_mean']:.0f} in, {sent['answer_mean']:.0f} out; {sent['cut']} cut); "
            f"saturated, the two that serve whole answer {found['capacity']:.2f} a second"
        )
    return "; ".join(["vLLM 0.32 on CPU, one core an engine", *parts])
