"""The figure of `bench.policy`: an SVG file, made from its JSON alone. Without matplotlib it reports what is
missing.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from bench.compare_figures import MISSING


def draw(figures: dict[str, Any], folder: Path, date: str) -> str | None:
    """Write docs/figures/policy-ratio.svg; what is missing, if anything."""
    if importlib.util.find_spec("matplotlib") is None:
        return MISSING
    import matplotlib as mpl  # noqa: PLC0415 - heavy, and may be absent

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "baton", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    folder.mkdir(exist_ok=True)
    _ratios(figures["cells"], folder / "policy-ratio.svg", f"simulated, make bench-policy, {date}")
    return None


def _ratios(cells: list[dict[str, Any]], path: Path, note: str) -> None:
    """Baton over the best rival and over the best rival with Baton's admission, by cell, with 95 % intervals."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    shown = [cell for cell in cells if cell["over_rival"] or cell["over_admitted"]]
    figure = Figure(figsize=(8, 0.3 * len(shown) + 1.4), layout="constrained")
    axes = figure.subplots()
    for key, label, colour, offset in (
        ("over_rival", "over the best rival", "tab:blue", 0.12),
        ("over_admitted", "over the best rival with our admission", "tab:orange", -0.12),
    ):
        mine = [(len(shown) - at, cell[key]) for at, cell in enumerate(shown) if cell[key]]
        axes.errorbar(
            [found["mean"] for _, found in mine],
            [place + offset for place, _ in mine],
            xerr=[found["half"] for _, found in mine],
            fmt="o",
            markersize=4,
            linewidth=1,
            color=colour,
            label=label,
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.axvline(1.3, color="gray", linewidth=0.6, linestyle="--")
    axes.set_yticks(range(len(shown), 0, -1), [cell["cell"] for cell in shown])
    axes.set_xlabel("goodput, ours / theirs (95 % interval over windows; dashed: 1.3)")
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    axes.set_title(note, fontsize=8, loc="right")
    figure.savefig(path, metadata={"Date": None})
