"""Ratios, intervals, the gap to the bound, and tables of `bench.policy`'s cells."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from bench import policy_grid as grid
from bench.published import Table, target
from sim.experiments.ceiling import NAME as BOUND

T_95: Final = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262}
"""Student's t, two-sided 95 %, by degrees of freedom."""
FIRST: Final = str(grid.SHARES[0])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval; of one value the width is unknown (infinite)."""
    count = len(values)
    if count == 1:
        return values[0], math.inf
    assert count - 1 in T_95, f"no quantile for {count} values"
    return float(np.mean(values)), T_95[count - 1] * float(np.std(values, ddof=1)) / math.sqrt(count)


def ratio(row: dict[str, Any], ours: str, theirs: str, share: str = FIRST) -> dict[str, Any] | None:
    """One's goodput over another's, window by window; None if the other serves nothing in one of them."""
    mine, others = rates(row, ours, share), rates(row, theirs, share)
    if not others or not all(others):
        return None
    each = [one / other for one, other in zip(mine, others, strict=True)]
    mean, half = interval(each)
    return {
        "blind": round(float(np.mean(blind(row, each))), 3),
        "mean": round(mean, 3),
        "half": round(half, 3) if math.isfinite(half) else None,
        "each": [round(one, 3) for one in each],
    }


def blind(row: dict[str, Any], each: Sequence[float]) -> list[float]:
    """Of values by window: those of the windows that are kept for reporting (`bench.policy_grid.BLIND`)."""
    return [value for value, window in zip(each, row["windows"], strict=True) if window["number"] in grid.BLIND]


def rates(row: dict[str, Any], name: str, share: str = FIRST) -> list[float]:
    """Goodput of a class (or the bound) in each window."""
    return [float(window[name]["rates"][share]) if name in window else 0.0 for window in row["windows"]]


def figures(rows: Sequence[dict[str, Any]], plan: str) -> dict[str, Any]:
    """Everything that is published."""
    cells = [_with_ratios(row) for row in rows]
    counted = [cell for cell in cells if any(rates(cell, "ours")) or any(rates(cell, "rival_admitted"))]
    over = [cell["over_admitted"]["blind"] for cell in counted if cell["over_admitted"]]
    everywhere = [cell["over_admitted"]["mean"] for cell in counted if cell["over_admitted"]]
    closed = [cell["gap_closed"] for cell in counted if cell["gap_closed"] is not None]
    least = [_least(cell) for cell in counted]
    return {
        "plan": plan,
        "cells": cells,
        "counted": len(counted),
        "share_half_closed": _share(each >= grid.GOAL_CLOSED for each in closed),
        "geometric_mean_over_admitted": round(math.exp(float(np.mean(np.log(over)))), 3)
        if over and min(over)
        else None,
        "geometric_mean_all_windows": round(math.exp(float(np.mean(np.log(everywhere)))), 3)
        if everywhere and min(everywhere)
        else None,
        "share_ahead_of_admitted": _share(each >= 1 for each in over),
        "least_ratio": round(min(least), 3) if least else None,
        "below_gate": [cell["cell"] for cell in counted if _least(cell) < grid.GATE_RATIO],
        "lost_to_admitted": [cell["cell"] for cell in counted if _blind(cell, "over_admitted") < 1],
        "lives_least": min((each for cell in cells for each in _lives(cell)), default=None),
    }


def _share(each: Iterator[bool]) -> float | None:
    values = list(each)
    return round(sum(values) / len(values), 3) if values else None


def _lives(cell: dict[str, Any]) -> Iterator[float]:
    """How many mean answers the compared runs lasted."""
    for window in cell["windows"]:
        for name in ("rival_admitted", "ours"):
            lasted = window.get(name, {}).get("there", {}).get("lives")
            if lasted:
                yield lasted


def _with_ratios(row: dict[str, Any]) -> dict[str, Any]:
    ours, admitted, bound = (
        float(np.mean(blind(row, rates(row, name)))) for name in ("ours", "rival_admitted", "bound")
    )
    gap = bound - admitted
    return {
        **row,
        "over_admitted": ratio(row, "ours", "rival_admitted"),
        "over_rival": ratio(row, "ours", "rival"),
        "bound_over_admitted": ratio(row, "bound", "rival_admitted"),
        "gap_closed": round((ours - admitted) / gap, 3) if gap > 0 else None,
        "by_admission": ratio(row, "rival_admitted", "rival"),
        "by_policy": ratio(row, "ours_like_rival", "rival_admitted"),
        "by_arrangement": ratio(row, "ours", "ours_like_rival"),
        "at_shares": {
            share: ratio(row, "ours", "rival_admitted", share) for share in row["windows"][0]["bound"]["rates"]
        },
    }


def _blind(cell: dict[str, Any], over: str) -> float:
    """A ratio over blind windows. If a rival serves nothing in some window there is none: the cell is won if Baton
    serves anything.
    """
    if cell[over] is not None:
        return float(cell[over]["blind"])
    return math.inf if sum(rates(cell, "ours")) else 0.0


def _least(cell: dict[str, Any]) -> float:
    return min(_blind(cell, "over_admitted"), _blind(cell, "over_rival"))


def targets(told: dict[str, Any]) -> dict[str, Any]:
    """The aim and the gate."""
    least = told["least_ratio"]
    return {
        "share_of_cells_with_half_the_gap_closed": target(told["share_half_closed"], grid.GOAL_SHARE, at_most=False),
        "least_ratio_over_any_rival": target(
            least if least is None or math.isfinite(least) else None, grid.GATE_RATIO, at_most=False
        ),
    }


def line(row: dict[str, Any]) -> str:
    """A finished cell, short."""
    cell = _with_ratios(row)
    theirs = row["classes"]["rival_admitted"]
    over = f"{_each(cell, 'over_admitted')}, all windows {_ratio(cell['over_admitted'])}"
    return (
        f"{row['cell']}: {over}, over {theirs['policy']} with our admission, {theirs['arrangement']}; "
        f"ours {row['classes']['ours']['arrangement']}; gap closed {_part(cell['gap_closed'])}"
    )


def said(told: dict[str, Any]) -> str:
    """The headline in words; README.md and docs/benchmarks.md have it as it is."""
    over = [cell["over_admitted"]["blind"] for cell in told["cells"] if cell["over_admitted"]]
    if told["geometric_mean_over_admitted"] is None or told["share_half_closed"] is None:
        return "no cell can be compared"
    return (
        f"{told['geometric_mean_over_admitted']:.2f} × the goodput of the best rival with the same admission and "
        f"arrangements (geometric mean of {len(over)} of {len(list(grid.cells()))} cells, {min(over):.2f} to "
        f"{max(over):.2f} ×, on windows that are kept for reporting); half of the gap to a bound on any policy "
        f"closed in {told['share_half_closed']:.0%} of them"
    )


def how(told: dict[str, Any]) -> str:
    """Seeds, sizes and sources, for the note above the tables."""
    lives = told["lives_least"]
    return (
        f"{told['plan']}: {told['counted']} of {len(list(grid.cells()))} cells, {len(_plan(told).rivals)} of "
        f"{len(grid.RIVALS)} rivals; tuned on one or two windows of each trace, reported on others; "
        f"runs last {'–' if lives is None else f'{lives:g}'} mean answers or more; sources {told['sources']}"
    )


def _plan(told: dict[str, Any]) -> grid.Plan:
    return grid.QUICK if told["plan"] == grid.QUICK.name else grid.FULL


def tables(told: dict[str, Any]) -> list[Table]:
    """The comparison with the best admitted rival and the bound first, then what makes it up."""
    cells = told["cells"]
    made = [_cells(cells), _summary(told), _ablation(cells), _shares(cells), _lengths(cells)]
    off = [cell for cell in cells if any(window.get("costs_off") for window in cell["windows"])]
    harder = [cell for cell in cells if any(window.get("harder") for window in cell["windows"])]
    return [*made, *([_sensitivity(off)] if off else []), *([_harder(harder)] if harder else [])]


def _cells(cells: Sequence[dict[str, Any]]) -> Table:
    columns = (
        "trace, targets over unloaded, fleet",
        "TTFT/TPOT ms",
        "best rival, our admission",
        "ours",
        f"bound ({BOUND})",
        "ours / rival with admission, blind",
        "gap closed, blind",
        "ours / best rival as it is, blind",
        "ours / rival with admission, all windows",
    )
    return Table(
        "Goodput at 90 % in requests a second and GPU, mean of all windows. Blind: on windows 2 and 4, which are "
        "kept for reporting; over all windows with 95 % intervals",
        columns,
        [
            [
                cell["cell"],
                f"{cell['targets']['ttft_ms']:g} / {cell['targets']['tpot_ms']:g}",
                *(_system(cell, name) for name in ("rival_admitted", "ours")),
                f"{float(np.mean(rates(cell, 'bound'))) / cell['gpus']:.2f}",
                _each(cell, "over_admitted"),
                _part(cell["gap_closed"]),
                _each(cell, "over_rival"),
                _ratio(cell["over_admitted"]),
            ]
            for cell in cells
        ],
    )


def _system(cell: dict[str, Any], name: str) -> str:
    found = cell["classes"][name]
    rate = float(np.mean(rates(cell, name))) / cell["gpus"]
    policy = "" if name == "ours" else f"{found['policy']}, "
    return f"{rate:.2f} ({policy}{found['arrangement']})" if rate else "0"


def _ratio(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    return f"{found['mean']:.2f}" + ("" if found["half"] is None else f" ± {found['half']:.2f}")


def _each(cell: dict[str, Any], over: str) -> str:
    """The ratio over blind windows, and that of each of them."""
    found = cell[over]
    if found is None:
        return "–"
    return f"{found['blind']:.2f} ({', '.join(f'{one:.2f}' for one in blind(cell, found['each']))})"


def _part(closed: float | None) -> str:
    return "–" if closed is None else f"{closed:.0%}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _summary(told: dict[str, Any]) -> Table:
    rows = [
        [
            "cells with half of the gap to the bound closed, or more",
            _number(told["share_half_closed"], "{:.0%}"),
            f"≥ {grid.GOAL_SHARE:.0%}",
        ],
        ["least ratio to any rival, admitted or not", _number(told["least_ratio"], "{:.2f}"), f"≥ {grid.GATE_RATIO}"],
        [
            "ours over the best rival with our admission, geometric mean",
            _number(told["geometric_mean_over_admitted"], "{:.2f}"),
            "",
        ],
        ["the same on all windows", _number(told["geometric_mean_all_windows"], "{:.2f}"), ""],
        ["cells where ours serves as much as it or more", _number(told["share_ahead_of_admitted"], "{:.0%}"), ""],
        ["cells lost to it", _names(told["lost_to_admitted"]), ""],
        [f"cells below {grid.GATE_RATIO} × some rival", _names(told["below_gate"]), ""],
        *([["cells that have not run", _names(told["missing"]), ""]] if told.get("missing") else []),
    ]
    return Table("All cells, on blind windows unless said", ("what", "value", "target"), rows)


def _names(names: Sequence[str]) -> str:
    return "; ".join(names) or "none"


def _ablation(cells: Sequence[dict[str, Any]]) -> Table:
    steps = ("by_admission", "by_policy", "by_arrangement")
    return Table(
        "Parts of the gain over the best rival without admission: factors; their product is about the gain",
        ("cell", "admission", "policy", "arrangement", "best rival as it is"),
        [
            [
                cell["cell"],
                *(_ratio(cell[step]) for step in steps),
                f"{cell['classes']['rival']['policy']}, {cell['classes']['rival']['arrangement']}",
            ]
            for cell in cells
        ],
    )


def _shares(cells: Sequence[dict[str, Any]]) -> Table:
    shares = list(cells[0]["at_shares"])
    return Table(
        "Ours over the best rival with our admission, by the attainment that goodput asks for",
        ("cell", *(f"{float(share):.0%}" for share in shares)),
        [[cell["cell"], *(_ratio(cell["at_shares"][share]) for share in shares)] for cell in cells],
    )


def _lengths(cells: Sequence[dict[str, Any]]) -> Table:
    """At one rate for both."""
    rows = [
        [cell["cell"], "rival" if name == "rival_admitted" else "ours", *_there(cell, name)]
        for cell in cells
        for name in ("rival_admitted", "ours")
    ]
    return Table(
        "At the goodput of the best rival with our admission: attainment by tenth of the prompts' lengths, first "
        "tokens of what is served, requests dropped",
        ("cell", "system", "all", "shortest tenth", "fifth tenth", "longest tenth", "TTFT p50 / p99 ms", "dropped"),
        rows,
    )


def _there(cell: dict[str, Any], name: str) -> list[str]:
    runs = [window[name]["there"] for window in cell["windows"] if "there" in window.get(name, {})]
    if not runs:
        return ["–"] * 6

    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values))

    by_length = [mean([run["by_length"][at] for run in runs]) for at in (0, 4, 9)]
    ttft = [mean([run["ttft_ms"][p] for run in runs if run["ttft_ms"]]) for p in ("50", "99")]
    return [
        f"{mean([run['attained'] for run in runs]):.3f}",
        *(f"{each:.2f}" for each in by_length),
        f"{ttft[0]:.0f} / {ttft[1]:.0f}",
        f"{mean([run['dropped'] for run in runs]):.1%}",
    ]


def _harder(cells: Sequence[dict[str, Any]]) -> Table:
    share, rows = str(grid.SHARES[0]), list[list[str]]()
    for cell in cells:
        windows = [each for each in cell["windows"] if each.get("harder")]
        for world in windows[0]["harder"]:
            both = [each for each in windows if len(each["harder"][world]) > 1]
            easy = {name: [each[name]["rates"][share] for each in both] for name in grid.WITH_ADMISSION}
            hard = {name: [each["harder"][world][name] for each in both] for name in grid.WITH_ADMISSION}
            if both:
                kept = [float(np.mean(hard[name]) / np.mean(easy[name])) for name in grid.WITH_ADMISSION]
                over = [float(np.mean(np.divide(each["ours"], each["rival_admitted"]))) for each in (easy, hard)]
                rows.append([cell["cell"], world, *(f"{each:.2f}" for each in (*kept, *over))])
    return Table(
        "Less obliging worlds (docs/simulator.md). Rough: engines waver, stall, have busy front ends; transfers wait; "
        "tokens are estimated from bytes. Goodput there over goodput without, and ours over the best admitted rival's",
        ("cell", "world", "rival keeps", "ours keeps", "ours / rival without", "ours / rival there"),
        rows,
    )


def _sensitivity(cells: Sequence[dict[str, Any]]) -> Table:
    factors = ("1", *(f"{off:g}" for off in grid.COSTS_OFF))

    def attained(cell: dict[str, Any], off: str) -> str:
        found = [window["costs_off"][off] for window in cell["windows"] if window.get("costs_off")]
        return f"{float(np.mean(found)):.3f}"

    return Table(
        "Ours where the router takes every step to last so many times what it does: attainment at its goodput with the "
        "true costs",
        ("cell", *(f"× {off}" for off in factors)),
        [[cell["cell"], *(attained(cell, off) for off in factors)] for cell in cells],
    )
