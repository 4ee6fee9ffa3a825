"""The figure of `bench.real`: the share in time of every repeat, one panel for each rate, one file for each model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from bench.compare_figures import MISSING
from bench.intervals import middle
from bench.real_tables import counted, share


def draw(figures: dict[str, Any], folder: Path, date: str) -> str | None:
    """Write docs/figures/real-MODEL.svg; what is missing, if anything."""
    if importlib.util.find_spec("matplotlib") is None:
        return MISSING
    import matplotlib as mpl  # noqa: PLC0415 - heavy, and may be absent

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "baton", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    folder.mkdir(exist_ok=True)
    for model, found in figures.items():
        _shares(found, folder / f"real-{model}.svg", f"{model}, real engines, make bench-real, {date}")
    return None


def _shares(found: dict[str, Any], path: Path, title: str) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415

    rates, names, factor = found["rates"], found["contestants"], str(found["admitted"])
    figure = Figure(figsize=(7, 0.35 * len(names) * len(rates) + 1.6), layout="constrained")
    panels = figure.subplots(len(rates), 1, sharex=True, squeeze=False)[:, 0]
    for axes, rate in zip(panels, rates, strict=True):
        for at, name in enumerate(names):
            values = [share(cell, factor) for cell in counted(found, name, rate)]
            axes.plot(values, [at] * len(values), "o", color="gray", markersize=3, alpha=0.6)
            told = middle(values)
            if told is not None:
                axes.plot([told["median"]], [at], "|", color="black", markersize=14)
            if told is not None and told["low"] is not None:
                axes.plot([told["low"], told["high"]], [at, at], color="black", linewidth=1.2)
        axes.set_yticks(range(len(names)), list(names.values()))
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_title(f"{rate:.2f} requests a second", fontsize=9, loc="left")
    panels[-1].set_xlabel(f"share of arrivals within both targets ({factor} × unloaded): repeats, median, interval")
    figure.suptitle(title, fontsize=8, x=0.99, ha="right")
    figure.savefig(path, metadata={"Date": None})
