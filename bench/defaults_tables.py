"""The tables, figures and targets of `bench.defaults`, made from its samples. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.defaults_rows import (
    FLEETS,
    GAIN,
    GAIN_P99,
    NO_WORSE,
    OURS,
    PLAIN,
    RIVALS,
    Compared,
    Phase,
    Rounds,
    Row,
    compared,
)
from bench.published import Table, target

Rows = Mapping[tuple[str, str], Row]
"""By names of fleet and phase."""


def figures_of(rows: Rows) -> dict[str, Any]:
    """The figures of the published file."""
    return {
        name: {contestant: rounds.as_json() for contestant, rounds in row.items()} | _ratios(phase, row)
        for name, phase, row in in_order(rows)
    }


def in_order(rows: Rows) -> Iterator[tuple[str, Phase, Row]]:
    """The measured rows, each with its name."""
    for fleet in FLEETS:
        for phase in fleet.phases:
            if (fleet.name, phase.name) in rows:
                yield f"{fleet.name}, {phase.name}", phase, rows[fleet.name, phase.name]


def _ratios(phase: Phase, row: Row) -> dict[str, Any]:
    return {
        f"over_the_best_{name}": {"best": found.best, "ratio": round(found.ratio, 3), "by_round": found.by_round}
        for name, found in (("mean", _mean(phase, row)), ("p99", compared(row, RIVALS, "p99_ms")))
        if found is not None
    }


def _mean(phase: Phase, row: Row) -> Compared | None:
    """Where nothing is to be gained, our own plain rule is a rival as well."""
    return compared(row, RIVALS if phase.gains else (*RIVALS, PLAIN))


def targets_of(rows: Rows) -> dict[str, Any]:
    """The targets of the measured rows. A void row has no value, is not met, and says `void`."""
    found = {}
    for name, phase, row in in_order(rows):
        if not any(contestant in row for contestant in RIVALS):
            continue  # vllm-router could not be installed
        found[f"{name}: mean TTFT over the best"] = _target(_mean(phase, row), GAIN if phase.gains else NO_WORSE)
        if phase.gains:
            found[f"{name}: p99 of TTFT over the best"] = _target(compared(row, RIVALS, "p99_ms"), GAIN_P99)
    return found


def _target(found: Compared | None, limit: float) -> dict[str, Any]:
    return target(None, limit) | {"void": True} if found is None else target(found.ratio, limit)


def tables_of(rows: Rows) -> list[Table]:
    """One for each row, and one of all rows in front."""
    ordered = list(in_order(rows))
    columns = ["row", "baton's mean", "the best's", "by", "ratio", "p99's ratio"]
    whole = Table("TTFT of Baton as it starts, over the best simple rule", columns, [_line(*each) for each in ordered])
    return [whole, *(_table(name, row) for name, _, row in ordered)]


def _line(name: str, phase: Phase, row: Row) -> list[str]:
    mean, p99 = _mean(phase, row), compared(row, RIVALS, "p99_ms")
    if mean is None:
        return [name, "void", "", "", "", ""]
    ours, best = row[OURS].as_json()["ttft_mean_ms"], row[mean.best].as_json()["ttft_mean_ms"]
    last = "" if p99 is None else f"{p99.ratio:.2f}"
    return [name, f"{ours:.1f}", f"{best:.1f}", mean.best, f"{mean.ratio:.3f}", last]


def _table(name: str, row: Row) -> Table:
    columns = ["", "TTFT mean, ms", "by round", "p99, ms", "tokens not computed", "failed", "void rounds"]
    return Table(name, columns, [_shown(contestant, rounds) for contestant, rounds in row.items()])


def _shown(contestant: str, rounds: Rounds) -> list[str]:
    told = rounds.as_json()
    by_round = told["ttft_mean_ms_by_round"]
    return [
        f"vllm-router, {contestant}" if contestant in RIVALS else contestant,
        f"{told['ttft_mean_ms']:.1f}" if by_round else "",
        f"{min(by_round):.1f} to {max(by_round):.1f}" if by_round else "",
        f"{told['ttft_p99_ms']:.0f}" if by_round else "",
        f"{1 - told['computed_share']:.2f}",
        f"{told['failed']}",
        f"{len(told['void'])}" if told["void"] else "",
    ]
