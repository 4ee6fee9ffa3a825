"""The figures of `bench.compare`: SVG files, made from its JSON alone. Without matplotlib it reports what is
missing.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

MISSING = "no figures: matplotlib is missing; .venv/bin/pip install matplotlib"


def draw(figures: dict[str, Any], folder: Path, date: str) -> str | None:
    """Write them; what is missing, if anything."""
    if importlib.util.find_spec("matplotlib") is None:
        return MISSING
    import matplotlib as mpl  # noqa: PLC0415 - heavy, and may be absent

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "baton", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    folder.mkdir(exist_ok=True)
    requests = f"{figures['requests_min']} to {figures['requests_max']} requests a run"
    note = f"simulated, seed {figures['seed']}, {requests}, make bench-compare, {date}"
    if figures.get("scenarios"):
        _where(figures, folder / "compare-where.svg", note)
    if figures.get("distserve"):
        _tightening(figures["distserve"], folder / "compare-distserve.svg", note)
    return None


def _where(figures: dict[str, Any], path: Path, note: str) -> None:
    """Disaggregated over aggregated: Baton's ratios and the published ones."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows = [row for row in [*figures["scenarios"], *figures.get("traces", [])] if row["ratio"] > 0]
    figure = Figure(figsize=(8, 0.34 * len(rows) + 1.4), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows), 0, -1)
    ratios = [row["ratio"] for row in rows]
    colours = ["tab:blue" if ratio > 1 else "tab:orange" for ratio in ratios]
    axes.barh(places, [ratio - 1 for ratio in ratios], left=1, color=colours, height=0.6)
    for place, row in zip(places, rows, strict=True):
        if row["published"]:
            theirs = row["published"][1] / row["published"][0]
            label = "aiconfigurator 0.12 (averages)" if place == len(rows) else None
            axes.plot(theirs, place, "kD", markersize=4, label=label)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    ticks = [0.5, 0.7, 1, 1.4, 2]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(list(places), [row["scenario"] for row in rows])
    axes.set_xlabel("goodput per GPU: disaggregated / aggregated (chunked, tuned)")
    axes.legend(loc="lower right", frameon=False)
    axes.set_title(note, fontsize=8, loc="right")
    figure.savefig(path, metadata={"Date": None})


def _tightening(rows: list[dict[str, Any]], path: Path, note: str) -> None:
    """DistServe's applications: goodput per GPU against the scale of the targets."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    names = list(dict.fromkeys(row["application"] for row in rows))
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    panels = figure.subplots(1, len(names))
    systems = {
        "colocated_2023": ("vLLM 2023", "tab:gray"),
        "colocated_same_engine": ("same engine", "tab:brown"),
        "colocated_chunked": ("chunked, tuned", "tab:orange"),
        "disaggregated": ("disaggregated", "tab:blue"),
    }
    for axes, name in zip(panels, names, strict=True):
        mine = [row for row in rows if row["application"] == name]
        for key, (label, colour) in systems.items():
            axes.plot(
                [row["scale"] for row in mine], [row[key]["per_gpu"] for row in mine], "o-", ms=3, c=colour, label=label
            )
        axes.invert_xaxis()
        axes.set_ylim(bottom=0)
        axes.set_title(name, fontsize=8)
        axes.set_xlabel("scale of targets")
    panels[0].set_ylabel("requests/s/GPU")
    panels[0].legend(frameon=False, fontsize=7)
    figure.suptitle(note, fontsize=7, x=0.99, ha="right")
    figure.savefig(path, metadata={"Date": None})
