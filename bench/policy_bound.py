"""The bound of `bench.policy` for a load that lasts, beside the published cells of that benchmark. No simulation.

    BATON_DATA=/path/to/data make bench-bound                     all cells of docs/benchmarks/policy.json: minutes
    make bench-bound ARGS="--only 'ServeGen' --only '5 ×'"        cells that have all of these in their names
    make bench-bound ARGS=--publish                               writes docs/benchmarks/policy-bound.json and its table

What the bound is, and why the first one is loose, says `bench.policy_sustained`. Goodputs and the first bound are read
from docs/benchmarks/policy.json as they are, whatever sources made them: run this again when that file is new (bounds
that are known stay valid, so that takes seconds). Finished cells are kept in .bench/policy-bound.jsonl with the state
of the sources that made them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench import inputs, policy, published
from bench import policy_grid as grid
from bench import policy_tables as tables_of
from bench.policy_cell import case_of
from bench.policy_sustained import BOUNDS, LIVES, SHARE, of_window
from bench.published import Table, target
from bench.sources import digest_of, reached
from costs import shipped
from sim.experiments.systems import Shelf

NAME: Final = "policy-bound"
KEPT: Final = policy.ROOT / ".bench" / "policy-bound.jsonl"
SOURCES: Final = ("bench/policy_sustained.py",)
AGAINST: Final = ("ours", "rival_admitted")


def digest() -> str:
    """The digest of what decides a bound."""
    tables = {each for each in (policy.ROOT / "costs").rglob("*") if each.suffix in (".json", ".csv")}
    return digest_of(reached((policy.ROOT / name for name in SOURCES), policy.ROOT) | tables, policy.ROOT)


def kept(sources: str) -> dict[str, dict[str, Any]]:
    """Bounds of earlier runs by cell; those of other sources, and a last line cut off, are left out."""
    rows: dict[str, dict[str, Any]] = {}
    for line in KEPT.read_text().splitlines() if KEPT.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["sources"] == sources:
            rows[row["cell"]] = row
    return rows


def one(name: str, asked: Mapping[str, Sequence[int]], data: Path, sources: str) -> dict[str, Any]:
    """The bounds of a cell's windows, in a process of its own."""
    began_s, shelf = time.process_time(), Shelf(shipped.models(), shipped.profiles())
    cell = next(each for each in grid.cells() if each.name == name)
    told = [{"number": each, **of_window(cell, case_of(cell, data, each), shelf)} for each in asked[name]]
    cpu_s = round(time.process_time() - began_s, 1)
    return {"cell": name, "sources": sources, "windows": told, "cpu_s": cpu_s}


# --- figures ----------------------------------------------------------------------------------------------------------


def figures(cells: Sequence[dict[str, Any]], bounds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Published cells of `bench.policy` with their bounds; cells without bounds are left out."""
    made = [_cell(each, bounds[each["cell"]]) for each in cells if each["cell"] in bounds]
    counted = [each for each in made if each["counted"]]
    closed = [each[BOUNDS[0]]["gap_closed"] for each in counted if each[BOUNDS[0]]["gap_closed"] is not None]
    return {
        "cells": made,
        "counted": len(counted),
        "share_half_closed": round(float(np.mean([each >= grid.GOAL_CLOSED for each in closed])), 3)
        if closed
        else None,
        "exceeded": [each["cell"] for each in made if each["exceeded"]],
        "missing": [each["cell"] for each in cells if each["cell"] not in bounds],
    }


def _cell(row: dict[str, Any], bound: dict[str, Any]) -> dict[str, Any]:
    windows = [{**one, **other} for one, other in zip(row["windows"], bound["windows"], strict=True)]
    joined = {**row, "windows": windows}
    served = [max(tables_of.rates({"windows": [each]}, name)[0] for name in AGAINST) for each in windows]
    return {
        "cell": row["cell"],
        "gpus": row["gpus"],
        "counted": any(served),
        "first": {**_beside(joined, "bound"), "lives_least": _first_lives(joined)},
        **{name: _beside(joined, name) for name in BOUNDS},
        "exceeded": any(each > one[BOUNDS[0]]["rates"][str(SHARE)] for each, one in zip(served, windows, strict=True)),
        "goodput": {name: tables_of.rates(joined, name) for name in AGAINST},
        "windows": bound["windows"],
    }


def _beside(row: dict[str, Any], name: str) -> dict[str, Any]:
    """A bound beside the goodputs, on windows that are kept for reporting."""
    ours, admitted, bound = (
        float(np.mean(tables_of.blind(row, tables_of.rates(row, each)))) for each in (*AGAINST, name)
    )
    gap = bound - admitted
    return {
        "rates": tables_of.rates(row, name),
        "over_admitted": round(bound / admitted, 3) if admitted else None,
        "gap_closed": round((ours - admitted) / gap, 3) if gap > 0 else None,
    }


def _first_lives(row: dict[str, Any]) -> float | None:
    """How many lives a window lasts at the first bound's rate, at the least."""
    rates = tables_of.rates(row, "bound")
    lasted = [row["requests"] / rate / each["life_s"] for rate, each in zip(rates, row["windows"], strict=True) if rate]
    return round(min(lasted), 2) if lasted else None


def targets(told: dict[str, Any]) -> dict[str, Any]:
    """The aim of `bench.policy`, with this bound."""
    share = told["share_half_closed"]
    return {"share_of_cells_with_half_the_gap_closed": target(share, grid.GOAL_SHARE, at_most=False)}


def how(told: dict[str, Any]) -> str:
    """What the figures say, for the note above the table."""
    short = [each["first"]["lives_least"] for each in told["cells"] if each["first"]["lives_least"] is not None]
    first, last = (_range(told, name) for name in ("first", BOUNDS[0]))
    return (
        f"{len(told['cells'])} cells; goodputs of the cells of sources {told['policy_sources']}. At the first bound's "
        f"rate a window lasts less than {LIVES[0]:g} lives in {sum(each < LIVES[0] for each in short)} of the cells. "
        f"The first bound is {first} the best rival with our admission, the sustained one {last}. "
        f"Cells with a window in which a run exceeds the sustained bound: {'; '.join(told['exceeded']) or 'none'}"
    )


def _range(told: dict[str, Any], name: str) -> str:
    over = [each[name]["over_admitted"] for each in told["cells"] if each[name]["over_admitted"] is not None]
    if not over:
        return "not comparable with"
    middle = math.exp(float(np.mean(np.log(over))))
    return f"{min(over):.1f} to {max(over):.1f} times (geometric mean {middle:.1f})"


def tables(told: dict[str, Any]) -> list[Table]:
    """Both bounds beside the goodputs."""
    first, longer = (f"{lives:g} lives" for lives in LIVES)
    columns = (
        "trace, targets over unloaded, fleet",
        "a window at the first bound's rate lasts",
        "requests of the sustained bound",
        "best rival, our admission",
        "ours",
        "first bound",
        f"sustained, {first}",
        f"sustained, {longer}",
        "sustained / rival, blind",
        "gap closed, blind: first bound",
        f"sustained, {first}",
        f"sustained, {longer}",
    )
    rows = [list(_row(each)) for each in told["cells"]]
    return [Table("Goodput and bounds at 90 % in requests a second and GPU, mean of all windows", columns, rows)]


def _row(cell: dict[str, Any]) -> Iterator[str]:
    lives, over = cell["first"]["lives_least"], cell[BOUNDS[0]]["over_admitted"]
    yield cell["cell"]
    yield "–" if lives is None else f"{lives:.2f} lives"
    yield f"{max(each[BOUNDS[0]]['requests'] for each in cell['windows']):,}"
    bounds = [cell[name] for name in ("first", *BOUNDS)]
    for rates in (cell["goodput"]["rival_admitted"], cell["goodput"]["ours"], *(each["rates"] for each in bounds)):
        yield f"{float(np.mean(rates)) / cell['gpus']:.2f}"
    yield "–" if over is None else f"{over:.2f}"
    for each in bounds:
        yield "–" if each["gap_closed"] is None else f"{each['gap_closed']:.0%}"


# --- command ----------------------------------------------------------------------------------------------------------


def parsed(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    return policy.of_cells(parser, words)


def main(words: list[str]) -> int:
    """Bound the published cells, report, publish."""
    arguments = parsed(words)
    data, facts, sources = inputs.required(NAME), published.machine(), digest()
    compared = json.loads(policy.PUBLISHED.read_text())
    cells = [
        each for each in compared["figures"]["cells"] if all(word in each["cell"] for word in arguments.only or ())
    ]
    if arguments.fresh:
        KEPT.unlink(missing_ok=True)
    asked = {each["cell"]: tuple(window["number"] for window in each["windows"]) for each in cells}
    rows = {name: row for name, row in kept(sources).items() if _windows(row) == asked.get(name)}
    run = partial(one, asked=asked, data=data, sources=sources)
    missing = [name for name in asked if name not in rows]
    for row in policy.rows_of(missing, run, max(1, arguments.processes), math.inf):
        KEPT.parent.mkdir(exist_ok=True)
        with KEPT.open("a") as out:
            out.write(json.dumps(row) + "\n")
        rows[row["cell"]] = row
        published.say(f"{NAME}: {row['cell']} ({row['cpu_s']:.0f} s of CPU; {len(asked) - len(rows)} cells left)")
    if not cells:
        published.say(f"{NAME}: no such cell is published")
        return 1
    told = {**figures(cells, rows), "sources": sources, "policy_sources": compared["figures"]["sources"]}
    made = tables(told)
    if not arguments.json:
        published.show(made)
    result = published.result(NAME, told, targets(told))
    if arguments.publish:
        published.publish(result, made, facts, published.note_of(facts, how(told)))
    return 0


def _windows(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(window["number"] for window in row["windows"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
