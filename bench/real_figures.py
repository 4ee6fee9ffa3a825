"""The figure of `bench.real`: attainment by rate, one panel for each class of targets, one file for each model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from bench.compare_figures import MISSING
from bench.real_tables import GOAL, WHOLE


def draw(figures: dict[str, Any], folder: Path, date: str) -> str | None:
    """Write docs/figures/real-MODEL.svg; what is missing, if anything."""
    if importlib.util.find_spec("matplotlib") is None:
        return MISSING
    import matplotlib as mpl  # noqa: PLC0415 - heavy, and may be absent

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "baton", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    folder.mkdir(exist_ok=True)
    for model, found in figures.items():
        _attainment(found, folder / f"real-{model}.svg", f"{model}, real engines, make bench-real, {date}")
    return None


def _attainment(found: dict[str, Any], path: Path, title: str) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415

    factors = found["factors"]
    figure = Figure(figsize=(3 * len(factors) + 1, 3.4), layout="constrained")
    panels = figure.subplots(1, len(factors), sharey=True, squeeze=False)[0]
    for axes, factor in zip(panels, factors, strict=True):
        for name, told in found["contestants"].items():
            mine = sorted(
                (cell["rate"], cell["attainment"])
                for cell in found["cells"]
                if cell["contestant"] == name and cell["factor"] == factor
            )
            if mine:
                style = "--" if name.startswith(WHOLE) else "-"
                axes.plot(*zip(*mine, strict=True), style, marker="o", markersize=3, linewidth=1.2, label=told)
        axes.axhline(GOAL, color="gray", linewidth=0.6, linestyle=":")
        axes.set_title(f"targets {factor} × the unloaded latency", fontsize=9)
        axes.set_xlabel("requests a second")
        axes.set_ylim(0, 1.02)
    panels[0].set_ylabel("within both targets")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
    figure.suptitle(title, fontsize=8, x=0.99, ha="right")
    figure.savefig(path, metadata={"Date": None})
