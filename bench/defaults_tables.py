"""The tables, figures and targets of `bench.defaults`, made from its samples. Pure.

TTFT is that of answered turns: a contestant that fails turns has a lower one. So a target is not met if turns of ours
failed in any round, and a rival's rounds with failed turns are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    Sample,
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
        for name, found in (("mean", _mean(phase, row)), ("p99", _p99(row)))
        if found is not None
    }


def _mean(phase: Phase, row: Row) -> Compared | None:
    """Where nothing is to be gained, our own plain rule is a rival as well."""
    return compared(_answered(row), RIVALS if phase.gains else (*RIVALS, PLAIN))


def _p99(row: Row) -> Compared | None:
    return compared(_answered(row), RIVALS, "p99_ms")


def _answered(row: Row) -> Row:
    """The row without the rounds in which a rival failed turns. Ours are all there: `_target` sees to them."""
    return {
        name: rounds
        if name == OURS
        else Rounds({number: each for number, each in rounds.samples.items() if not each.failed})
        for name, rounds in row.items()
    }


def _failed(row: Row) -> int:
    """Turns of ours that failed, void rounds included: a round in which all failed is void."""
    return sum(each.failed for each in row[OURS].samples.values()) if OURS in row else 0


def targets_of(rows: Rows) -> dict[str, Any]:
    """The targets of the measured rows. A void row has no value, is not met, and says `void`; a row in which turns of
    ours failed is not met, and says how many `failed`.
    """
    found = {}
    for name, phase, row in in_order(rows):
        if not any(contestant in row for contestant in RIVALS):
            continue  # vllm-router could not be installed
        found[f"{name}: mean TTFT over the best"] = _target(row, _mean(phase, row), GAIN if phase.gains else NO_WORSE)
        if phase.gains:
            found[f"{name}: p99 of TTFT over the best"] = _target(row, _p99(row), GAIN_P99)
    return found


def _target(row: Row, found: Compared | None, limit: float) -> dict[str, Any]:
    made = target(None, limit) | {"void": True} if found is None else target(found.ratio, limit)
    return made | {"met": False, "failed": failed} if (failed := _failed(row)) else made


def tables_of(rows: Rows) -> list[Table]:
    """One for each row, and one of all rows in front."""
    ordered = list(in_order(rows))
    columns = ["row", "baton's mean", "the best's", "by", "ratio", "p99's ratio"]
    whole = Table("TTFT of Baton as it starts, over the best simple rule", columns, [_line(*each) for each in ordered])
    return [whole, *(_table(name, row) for name, _, row in ordered)]


def _line(name: str, phase: Phase, row: Row) -> list[str]:
    mean, p99, failed = _mean(phase, row), _p99(row), _failed(row)
    if mean is None:
        return [name, "void", "", "", "", ""]
    ours, best = row[OURS].as_json()["ttft_mean_ms"], _answered(row)[mean.best].as_json()["ttft_mean_ms"]
    ratio = f"{mean.ratio:.3f}" + (f", not met: {failed} turn{'s'[: failed - 1]} failed" if failed else "")
    return [name, f"{ours:.1f}", f"{best:.1f}", mean.best, ratio, "" if p99 is None else f"{p99.ratio:.2f}"]


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
        f"{told['failed']}{_left_out(contestant, list(rounds.samples.values()))}",
        f"{len(told['void'])}" if told["void"] else "",
    ]


def _left_out(contestant: str, samples: Sequence[Sample]) -> str:
    """In how many rounds a rival is not compared, as turns failed there."""
    count = sum(each.failed > 0 for each in samples) if contestant != OURS else 0
    return f"; not compared in {count} round{'s'[: count - 1]}" if count else ""
