"""The figures of `bench.policy`: SVG files, made from its JSON alone. Without matplotlib it reports what is
missing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bench.compare_figures import MISSING
from bench.policy_tables import FIRST, interval
from sim.experiments.curves import falling

RATES: Final = np.linspace(0.6, 1.6, 41)
"""Rates at which curves are averaged, over the goodput of the best admitted rival on the same window."""

Numbers = npt.NDArray[np.float64]


def draw(figures: dict[str, Any], folder: Path, date: str) -> str | None:
    """Write docs/figures/policy-ratio.svg and policy-curves.svg; what is missing, if anything."""
    if importlib.util.find_spec("matplotlib") is None:
        return MISSING
    import matplotlib as mpl  # noqa: PLC0415 - heavy, and may be absent

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "baton", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    folder.mkdir(exist_ok=True)
    note = f"simulated, make bench-policy, {date}"
    _ratios(figures["cells"], folder / "policy-ratio.svg", note)
    _curves(figures["cells"], folder / "policy-curves.svg", note)
    return None


def _ratios(cells: list[dict[str, Any]], path: Path, note: str) -> None:
    """Baton over the best rival as it is and with Baton's admission, by cell, with 95 % intervals; and the bound."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    shown = [cell for cell in cells if cell["over_rival"] or cell["over_admitted"]]
    figure = Figure(figsize=(8, 0.3 * len(shown) + 1.4), layout="constrained")
    axes = figure.subplots()
    for key, label, colour, marker, offset in (
        ("over_admitted", "ours / best rival with our admission", "tab:blue", "o", 0.12),
        ("bound_over_admitted", "bound / best rival with our admission", "black", "|", 0.12),
        ("over_rival", "ours / best rival as it is", "tab:orange", "o", -0.12),
    ):
        mine = [(len(shown) - at, cell[key]) for at, cell in enumerate(shown) if cell[key]]
        axes.errorbar(
            [found["mean"] for _, found in mine],
            [place + offset for place, _ in mine],
            xerr=[found["half"] or 0.0 for _, found in mine] if marker == "o" else None,
            fmt=marker,
            markersize=4 if marker == "o" else 9,
            linewidth=1,
            color=colour,
            label=label,
        )
    axes.axvline(1, color="gray", linewidth=0.8)
    axes.set_yticks(range(len(shown), 0, -1), [cell["cell"] for cell in shown])
    axes.set_xlabel("goodput over another's (95 % interval over windows)")
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    axes.set_title(note, fontsize=8, loc="right")
    figure.savefig(path, metadata={"Date": None})


def _curves(cells: list[dict[str, Any]], path: Path, note: str) -> None:
    """Attainment over rate by cell: the windows' mean with its 95 % interval, and each window's runs; rates over the
    best admitted rival's goodput there.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415

    columns = 4
    height = -(-len(cells) // columns)
    figure = Figure(figsize=(10, 2.1 * height + 0.5), layout="constrained")
    grid = figure.subplots(height, columns, squeeze=False, sharey=True)
    for axes in grid.flat[len(cells) :]:
        axes.set_visible(False)
    for axes, cell in zip(grid.flat, cells, strict=False):
        axes.set_title(cell["cell"], fontsize=7)
        axes.axhline(0.9, color="gray", linewidth=0.5)
        axes.set_ylim(0.6, 1.01)
        for name, colour in (("rival_admitted", "tab:orange"), ("ours", "tab:blue")):
            runs = _runs(cell["windows"], name)
            for rates, attained in runs:
                axes.plot(rates, attained, ".", color=colour, markersize=2, alpha=0.5)
            at, mean, half = averaged(runs)
            axes.plot(at, mean, color=colour, linewidth=1)
            axes.fill_between(at, mean - half, mean + half, color=colour, alpha=0.2, linewidth=0)
    figure.suptitle(
        f"blue: ours, orange: best rival with our admission; mean of windows, 95 % interval; {note}", fontsize=8
    )
    figure.savefig(path, metadata={"Date": None})


def _runs(windows: Sequence[dict[str, Any]], name: str) -> list[tuple[Numbers, Numbers]]:
    """Relative rates and attainments of one class, window by window, rates rising."""
    found = []
    for window in windows:
        whole = window.get("rival_admitted", {}).get("rates", {}).get(FIRST)
        if name in window and whole:
            rates, attained = np.array(window[name]["curve"], dtype=float).T
            found.append((rates / whole, attained))
    return found


def averaged(runs: Sequence[tuple[Numbers, Numbers]]) -> tuple[Numbers, Numbers, Numbers]:
    """At the rates of `RATES` that all windows reach: the mean of their fitted curves, and half of its 95 % interval
    (Student's t; 0 for one window).
    """
    if not runs:
        return np.empty(0), np.empty(0), np.empty(0)
    low, high = max(rates[0] for rates, _ in runs), min(rates[-1] for rates, _ in runs)
    at = RATES[(low <= RATES) & (high >= RATES)]
    curves = np.array([np.interp(at, rates, falling(attained.tolist())) for rates, attained in runs])
    told = [interval(each.tolist()) for each in curves.T]
    halves = np.array([half if np.isfinite(half) else 0.0 for _, half in told])
    return at, np.array([mean for mean, _ in told]), halves
