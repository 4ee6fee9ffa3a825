"""The figures of `bench.policy`: SVG files, made from its JSON alone. Without matplotlib it reports what is
missing.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from bench.compare_figures import MISSING


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
    """Attainment over rate, each window a line, by cell; rates over the best admitted rival's goodput there."""
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
            for window in cell["windows"]:
                whole = window.get("rival_admitted", {}).get("rates", {}).get("0.9")
                if name in window and whole:
                    rates, attained = zip(*window[name]["curve"], strict=True)
                    axes.plot([rate / whole for rate in rates], attained, color=colour, linewidth=0.8, alpha=0.8)
    figure.suptitle(f"blue: ours, orange: best rival with our admission; {note}", fontsize=8)
    figure.savefig(path, metadata={"Date": None})
