"""Tables and goodput of `bench.real`, made from its JSON alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from bench.published import Table, target

GOAL: Final = 0.9
"""Share of all arrivals within both targets at which a rate counts as served (DistServe's)."""
SHOWN_FACTOR: Final = 5
"""Latencies are shown for the runs under these targets; all others are in the JSON."""
WHOLE: Final = "both-"
"""Beginning of the names of contestants that hand nothing over."""


def goodput(runs: Sequence[tuple[float, float]], goal: float = GOAL) -> tuple[float, str]:
    """The rate at which attainment falls below `goal`, between two rates by a straight line.

    Args:
        runs: (requests a second, attainment), by rising rate.
        goal: share of arrivals.

    Returns:
        The rate, and ``""``, ``"≥"`` where even the highest rate attains, ``"<"`` where the lowest does not.
    """
    before: tuple[float, float] | None = None
    for rate, attained in runs:
        if attained < goal:
            if before is None:
                return rate, "<"
            low, above = before
            return low + (rate - low) * (above - goal) / (above - attained), ""
        before = rate, attained
    assert before is not None
    return before[0], "≥"


def served(cells: Sequence[dict[str, Any]], name: str, factor: int) -> tuple[float, str]:
    """Goodput of a contestant under one class's targets."""
    mine = sorted((cell["rate"], cell["attainment"]) for cell in _of(cells, name, factor))
    return goodput(mine)


def _of(cells: Sequence[dict[str, Any]], name: str, factor: int) -> list[dict[str, Any]]:
    return [cell for cell in cells if cell["contestant"] == name and cell["factor"] == factor]


def tables(found: dict[str, Any], model: str) -> list[Table]:
    """Goodput and attainment, then latencies, of one model."""
    return [_goodputs(found, model), _attained(found, model), _latencies(found, model)]


def _names(found: dict[str, Any]) -> dict[str, str]:
    names: dict[str, str] = found["contestants"]
    return {name: told for name, told in names.items() if any(cell["contestant"] == name for cell in found["cells"])}


def _goodputs(found: dict[str, Any], model: str) -> Table:
    rows = []
    for name, told in _names(found).items():
        mine = [served(found["cells"], name, factor) for factor in found["factors"]]
        rows.append([told, *(f"{sign} {rate:.2f}".strip() for rate, sign in mine)])
    promised = {factor: found["targets"][str(factor)] for factor in found["factors"]}
    titles = [f"{factor} × ({each['ttft_ms']:.0f} and {each['tpot_ms']:.0f} ms)" for factor, each in promised.items()]
    goal = f"{GOAL:.0%} of arrivals within both targets"
    return Table(f"{model}, goodput: requests a second with {goal}", ["two engines", *titles], rows)


def _attained(found: dict[str, Any], model: str) -> Table:
    rows = []
    for factor in found["factors"]:
        for name, told in _names(found).items():
            mine = sorted(_of(found["cells"], name, factor), key=lambda cell: cell["rate"])
            cells = [f"{cell['attainment']:.1%}" for cell in mine]
            rows.append([f"{factor} ×", told, *cells, f"{_handed(mine):.0%}", f"{sum(c['failed'] for c in mine)}"])
    titles = [f"{rate:.2f}/s" for rate in found["rates"]]
    return Table(f"{model}, attainment", ["targets", "two engines", *titles, "handed over", "failed or refused"], rows)


def _handed(cells: Sequence[dict[str, Any]]) -> float:
    return float(sum(cell["handed_over"] for cell in cells) / max(1, sum(cell["requests"] for cell in cells)))


def _latencies(found: dict[str, Any], model: str) -> Table:
    rows = []
    for cell in sorted(found["cells"], key=lambda cell: cell["rate"]):
        if cell["factor"] == SHOWN_FACTOR:
            pairs = [
                f"{cell[what]['p50']:.0f} / {cell[what]['p99']:.0f}" if cell[what]["p50"] is not None else "–"
                for what in ("ttft_ms", "tt2t_ms")
            ]
            tpot = cell["tpot_ms"]
            pairs.append(f"{tpot['p50']:.1f} / {tpot['p99']:.1f}" if tpot["p50"] is not None else "–")
            rows.append([f"{cell['rate']:.2f}/s", found["contestants"][cell["contestant"]], *pairs])
    return Table(
        f"{model}, milliseconds p50 / p99 under {SHOWN_FACTOR} ×",
        ["offered", "two engines", "TTFT", "TT2T", "TPOT"],
        rows,
    )


def targets(figures: dict[str, Any]) -> dict[str, Any]:
    """Goodput of each contestant over the best of those that hand nothing over, whichever budget that has.

    The design requires that `free` is no worse: handing over is a choice. The others' ratio depends on this machine,
    load and model.
    """
    told: dict[str, Any] = {}
    for model, found in figures.items():
        names = _names(found)
        whole = [name for name in names if name.startswith(WHOLE)]
        for factor in found["factors"]:
            best = max((served(found["cells"], name, factor)[0] for name in whole), default=None)
            for name in names:
                if name not in whole and best is not None:
                    rate, sign = served(found["cells"], name, factor)
                    ratio = 0.0 if sign == "<" else rate / best
                    told[f"{model}_{factor}x_{name}_over_both"] = target(ratio, 1.0, at_most=False)
    return told


def note(figures: dict[str, Any]) -> str:
    """Load and factors, for the line above the tables."""
    parts = []
    for model, found in figures.items():
        load = found["load"]
        speeds = ", ".join(f"{each:.2f}" for each in load["speeds"])
        parts.append(
            f"{model}: {load['requests']} requests of Azure's conversation trace from second {load['from_s']:g}, "
            f"lengths × {load['shorter']:g} (mean {load['prompt_mean']:.0f} in, {load['answer_mean']:.0f} out; "
            f"{load['cut']} cut), rate of the trace × {speeds}; saturated, two engines that do both answer "
            f"{found['capacity']:.2f} a second"
        )
    return "; ".join(["vLLM 0.32 on CPU, one core an engine", *parts])
