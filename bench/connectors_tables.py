"""Tables, ratios and targets of `bench.connectors`, made from its figures alone. Pure.

Connectors that are measured by turns are compared turn by turn: the machine gets faster and slower by the minute, and
two turns of one number are seconds apart. Figures of different calls (`--into`), figures kept without their turns, and
those of fewer than six turns have a ratio of medians and no interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bench.connectors_models import LENGTHS
from bench.intervals import middle, times
from bench.published import Table, target

WAYS: Final = ("alone", "busy", "eight", "loop")
TITLES: Final = ("alone", "alone, P busy", "eight at once", "eight in a loop")
RIVALS: Final = {"tuned": "pull", "push": "push"}
"""vLLM's connectors that Baton's choice is compared with, and their short names."""

Figures = Mapping[str, Any]
"""Of one connector with one model."""


def ratio(ours: Figures, theirs: Figures, length: int, way: str, part: str = "first") -> dict[str, Any]:
    """Ours over theirs: the median of turns with its interval, as `middle` has it; else one of medians.

    `part`: `first`, from P's answer to D's first token, which is the hand-over with its step (a hand-over alone may be
    small beside the step, and a ratio of two small numbers is noise); `sent`, from sending to D's first token;
    `hand_over`, without the step.
    """
    mine, other = (figures["lengths"][str(length)][way] for figures in (ours, theirs))
    if ours.get("begun") is not None and ours.get("begun") == theirs.get("begun"):
        pairs = list(zip(_turns(mine, part), _turns(other, part), strict=True))
        found = middle([one / each for one, each in pairs]) if all(each > 0 for _, each in pairs) else None
        if found is not None and found["low"] is not None:
            return found
    bare = _whole(mine, part) / _whole(other, part)
    return {"median": bare, "low": None, "high": None, "confidence": None, "repeats": 0}


def _turns(cell: Mapping[str, Any], part: str) -> list[float]:
    if part == "hand_over":
        return [each - cell["step_ms"] for each in cell["first_ms_by_turn"]]
    return list(cell[f"{part}_ms_by_turn"])


def _whole(cell: Mapping[str, Any], part: str) -> float:
    before, after = (cell["prefill_ms"] if part == "sent" else 0.0), (0.0 if part == "hand_over" else cell["step_ms"])
    return float(before + cell["hand_over_ms"] + after)


def over_best(by_name: Mapping[str, Figures], length: int, way: str, part: str = "first") -> tuple[dict[str, Any], str]:
    """What a router chooses with Baton's connector over the better of vLLM's tuned pull and push, and which that is:
    the one over which the ratio is higher. Eight at once begin with holds, so no leg is early there.
    """
    ours = by_name["early" if way != "eight" else "ours"]
    found = {name: ratio(ours, by_name[name], length, way, part) for name in RIVALS}
    best = max(found, key=lambda name: float(found[name]["median"]))
    return found[best], RIVALS[best]


def tables(figures: Mapping[str, Mapping[str, Figures]], names: Mapping[str, str]) -> list[Table]:
    """All tables, a row for each connector and model, then for each ratio; `names`: what the connectors are called."""
    rows = []
    for model, by_name in figures.items():
        for length in LENGTHS:
            for name, mine in by_name.items():
                ways = mine["lengths"][str(length)]
                cells = [
                    f"{ways[way]['hand_over_ms']:.0f} ({ways[way]['low_ms']:.0f}–{ways[way]['high_ms']:.0f}) + "
                    f"{ways[way]['step_ms']:.0f}"
                    for way in WAYS
                ]
                rows.append([model, f"{length}", names[name], *cells])
    return [
        Table("Hand-over in milliseconds: median (10th–90th percentile) + one decode step",
              ["model", "prompt tokens", "connector", *TITLES], rows),
        _ratios(figures),
        _besides(figures, names),
    ]  # fmt: skip


def _ratios(figures: Mapping[str, Mapping[str, Figures]]) -> Table:
    rows = []
    for model, by_name in figures.items():
        for length in LENGTHS:
            rows += [[model, f"{length}", *row] for row in _compared(by_name, length)]
    return Table("Times over each other, from P's answer to D's first token: median of turns (its interval by order "
                 "statistics; without one: a ratio of medians)",
                 ["model", "prompt tokens", "ratio", *TITLES], rows)  # fmt: skip


def _compared(by_name: Mapping[str, Figures], length: int) -> list[list[str]]:
    """The rows of one model and length, as far as their connectors were measured."""
    rows = []
    if {"early", "ours", *RIVALS} <= set(by_name):
        for said, part in (("", "first"), (", from sending", "sent")):
            best = (over_best(by_name, length, way, part) for way in WAYS)
            rows.append([f"as Baton starts / vLLM pull or push, the better{said}",
                         *(f"{times(found)} {rival}" for found, rival in best)])  # fmt: skip
    rows += [
        [f"Baton pull / vLLM {rival}", *(times(ratio(by_name["ours"], by_name[name], length, way)) for way in WAYS)]
        for name, rival in RIVALS.items()
        if {"ours", name} <= set(by_name)
    ]
    if {"early", "ours"} <= set(by_name):
        early = ratio(by_name["early"], by_name["ours"], length, "alone", "hand_over")
        rows.append(["early leg / Baton pull, less the step", times(early), *["–"] * (len(WAYS) - 1)])
    return rows


def _besides(figures: Mapping[str, Mapping[str, Figures]], names: Mapping[str, str]) -> Table:
    rows = [
        [model, names[name], f"{mine['bytes_per_s'] / 1e9:.2f}", f"{mine['idle_cores'] * 100:.0f} %",
         f"{mine['holding_cores'] * 100:.0f} %", f"{mine['free_after_s']:.2f}", f"{mine['left_after_s']:.2f}",
         f"{mine['storm_held_blocks']} after {mine['storm']}",
         f"{mine['storm_free_after_s']:.1f}" if mine["storm_held_blocks"] else "≤ 1", f"{mine['held_at_the_end']}"]
        for model, by_name in figures.items() for name, mine in by_name.items()
    ]  # fmt: skip
    return Table("Bytes a second, cores of P, and seconds until what was given up is free",
                 ["model", "connector", "GB/s", "P idle", "P holding", "a hold given up, s", "left while P computes, s",
                  "blocks held 1 s after an abort storm", "free after, s", "blocks held at the end"], rows)  # fmt: skip


def targets(figures: Mapping[str, Mapping[str, Figures]]) -> dict[str, Any]:
    """Baton's against vLLM's tuned, if both were run."""
    told: dict[str, Any] = {}
    for model, by_name in figures.items():
        if not {"ours", "tuned"} <= set(by_name):
            continue
        for length in LENGTHS:
            for way in WAYS:
                limit = 0.7 if model != "tiny" and way in {"eight", "loop"} else 1.0
                over = ratio(by_name["ours"], by_name["tuned"], length, way)
                told[f"{model}_{length}_{way}_over_tuned"] = _target(over, limit)
        told |= _choice(model, by_name)
        told[f"{model}_idle_cores"] = target(by_name["ours"]["idle_cores"], 0.05)
        told[f"{model}_free_after_s"] = target(by_name["ours"]["free_after_s"], 1.0)
        told[f"{model}_left_after_s"] = target(by_name["ours"]["left_after_s"], 1.0)
        told[f"{model}_held_at_the_end"] = target(by_name["ours"]["held_at_the_end"], 0.0)
    return told


def _choice(model: str, by_name: Mapping[str, Figures]) -> dict[str, Any]:
    """What a router chooses against the better of vLLM's two, and an early leg against Baton's pull."""
    if not {"early", *RIVALS} <= set(by_name):
        return {}
    told: dict[str, Any] = {}
    for length in LENGTHS:
        for way in WAYS:
            told[f"{model}_{length}_{way}_choice_over_best"] = _target(over_best(by_name, length, way)[0], 1.05)
        early = ratio(by_name["early"], by_name["ours"], length, "alone", "hand_over")
        told[f"{model}_{length}_early_over_pull_alone"] = _target(early, 0.6)
    return told


def _target(over: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """A target on a median, with the interval beside it where there is one."""
    width = {} if over["low"] is None else {"low": over["low"], "high": over["high"]}
    return target(over["median"], limit) | width


def dates(figures: Mapping[str, Mapping[str, Figures]]) -> str:
    """What was measured on which day, if not all on one; part of the line above the tables."""
    days = sorted({_day(each) for by_name in figures.values() for each in by_name.values()})
    if len(days) < 2:
        return ""
    told = []
    for day in days:
        parts = []
        for model, by_name in figures.items():
            names = [name for name, each in by_name.items() if _day(each) == day]
            if names:
                parts.append(model if len(names) == len(by_name) else f"{', '.join(names)} of {model}")
        told.append(f"{'; '.join(parts)} on {day or 'an earlier day'}")
    return f"; measured: {'; '.join(told)}"


def _day(figures: Figures) -> str:
    return str(figures.get("begun", ""))[:10]
