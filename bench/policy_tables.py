"""Ratios, intervals and tables of `bench.policy`'s cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from bench import policy_grid as grid
from bench.published import Table, target

T_95: Final = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262}
"""Student's t, two-sided 95 %, by degrees of freedom."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval."""
    count = len(values)
    assert count - 1 in T_95, f"no quantile for {count} values"
    return float(np.mean(values)), T_95[count - 1] * float(np.std(values, ddof=1)) / math.sqrt(count)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any] | None:
    """Baton's goodput over a rival's, window by window; None if the rival serves nothing in one of them."""
    if not all(theirs):
        return None
    each = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    mean, half = interval(each)
    return {"mean": round(mean, 3), "half": round(half, 3), "each": [round(one, 3) for one in each]}


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Everything that is published."""
    cells = [_with_ratios(row) for row in rows]
    counted = [cell for cell in cells if any(any(found["rates"]) for found in cell["classes"].values())]
    ratios = [_mean(cell, "over_rival") for cell in counted]
    return {
        "cells": cells,
        "counted": len(counted),
        "share_at_goal": sum(each >= grid.GOAL_RATIO for each in ratios) / len(counted) if counted else None,
        "least_ratio": round(min(ratios), 3) if ratios and min(ratios) < math.inf else None,
        "below_gate": [cell["cell"] for cell in counted if _mean(cell, "over_rival") < grid.GATE_RATIO],
        "lost": [cell["cell"] for cell in counted if _mean(cell, "over_rival") < 1],
        "lost_to_admitted": [cell["cell"] for cell in counted if _mean(cell, "over_admitted") < 1],
    }


def _with_ratios(row: dict[str, Any]) -> dict[str, Any]:
    rates = {name: found["rates"] for name, found in row["classes"].items()}
    return {
        **row,
        "over_rival": ratio(rates["ours"], rates["rival"]),
        "over_admitted": ratio(rates["ours"], rates["rival_admitted"]),
    }


def _mean(cell: dict[str, Any], over: str) -> float:
    """A mean ratio. If a rival serves nothing in some window there is none: the cell is won if Baton serves
    anything.
    """
    if cell[over] is not None:
        return float(cell[over]["mean"])
    return math.inf if sum(cell["classes"]["ours"]["rates"]) else 0.0


def targets(told: dict[str, Any]) -> dict[str, Any]:
    """The aim and the gate."""
    return {
        "share_of_cells_at_1.3": target(told["share_at_goal"], grid.GOAL_SHARE, at_most=False),
        "least_ratio": target(told["least_ratio"], grid.GATE_RATIO, at_most=False),
    }


def line(row: dict[str, Any]) -> str:
    """A finished cell, short."""
    cell = _with_ratios(row)
    ours, rival = row["classes"]["ours"], row["classes"]["rival"]
    over, admitted = _ratio(cell["over_rival"]), _ratio(cell["over_admitted"])
    theirs = f"{rival['policy']}, {rival['arrangement']}"
    return f"{row['cell']}: {over} over {theirs}; {admitted} with our admission; ours {ours['arrangement']}"


def how(told: dict[str, Any]) -> str:
    """For the note above the tables."""
    windows = len(grid.WINDOWS)
    fewest = min((each for cell in told["cells"] for each in cell.get("lives", {}).values() if each), default=0.0)
    return (
        f"{told['counted']} cells, tuned on one window of each trace, reported on {windows} others, "
        f"searches end within {grid.TOLERANCE:.0%}, runs last {fewest:g} mean answers or more; "
        f"sources {told['sources']}"
    )


def tables(told: dict[str, Any]) -> list[Table]:
    """Tables of all cells, their sum, and the sensitivity to the costs."""
    made = [_cells(told), _summary(told)]
    off = [cell for cell in told["cells"] if cell["costs_off"]]
    return [*made, _sensitivity(off)] if off else made


def _cells(told: dict[str, Any]) -> Table:
    columns = (
        "trace, targets over unloaded, fleet",
        "TTFT/TPOT ms",
        "best rival",
        "best rival, our admission",
        "ours",
        "ours / rival",
        "ours / rival with admission",
    )
    return Table(
        "Goodput in requests a second and GPU, mean of the windows, and its ratio with 95 % intervals",
        columns,
        [
            [
                cell["cell"],
                f"{cell['targets']['ttft_ms']:g} / {cell['targets']['tpot_ms']:g}",
                *(_system(cell, name) for name in ("rival", "rival_admitted", "ours")),
                _ratio(cell["over_rival"]),
                _ratio(cell["over_admitted"]),
            ]
            for cell in told["cells"]
        ],
    )


def _system(cell: dict[str, Any], name: str) -> str:
    found = cell["classes"][name]
    rate = float(np.mean(found["rates"])) / cell["gpus"]
    policy = "" if name == "ours" else f"{found['policy']}, "
    return f"{rate:.2f} ({policy}{found['arrangement']})" if rate else "0"


def _ratio(found: dict[str, Any] | None) -> str:
    return "–" if found is None else f"{found['mean']:.2f} ± {found['half']:.2f}"


def _summary(told: dict[str, Any]) -> Table:
    share, least = told["share_at_goal"], told["least_ratio"]
    rows = [
        [f"cells at {grid.GOAL_RATIO} × or more", "–" if share is None else f"{share:.0%}", f"≥ {grid.GOAL_SHARE:.0%}"],
        ["least ratio", "–" if least is None else f"{least:.2f}", f"≥ {grid.GATE_RATIO}"],
        ["cells lost to a rival", _names(told["lost"]), ""],
        ["cells lost to a rival with our admission", _names(told["lost_to_admitted"]), ""],
    ]
    return Table("All cells", ("what", "value", "target"), rows)


def _names(names: Sequence[str]) -> str:
    return "; ".join(names) or "none"


def _sensitivity(cells: Sequence[dict[str, Any]]) -> Table:
    def kept(cell: dict[str, Any], off: str) -> str:
        at = [grid.WINDOWS.index(window) for window in grid.SENSITIVITY_WINDOWS]
        true = [cell["classes"]["ours"]["rates"][each] for each in at]
        return _ratio(ratio(cell["costs_off"][off], true))

    return Table(
        "Ours where the router takes every step to last so many times what it does, over ours with the true costs",
        ("cell", *(f"× {off:g}" for off in grid.COSTS_OFF)),
        [[cell["cell"], *(kept(cell, str(off)) for off in grid.COSTS_OFF)] for cell in cells],
    )
