"""Draw docs/handoff.md's tables from the rules: `.venv/bin/python tools/handover_page.py`.

Everything between the two marks is made here; the words around it are written by hand. A test compares.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from decode import push as decode_push
from decode.early import EARLY_ROWS, EarlyState
from decode.table import READINGS, WANTS, Reading, Want
from kvtransfer.rows import Table, TransitionRow, rows
from prefill import push as prefill_push
from prefill.table import LEASES, LEGS, LegState, RankHold

PAGE = Path(__file__).resolve().parents[1] / "docs" / "handoff.md"
BEGIN = "<!-- made by tools/handover_page.py: begin -->"
END = "<!-- made by tools/handover_page.py: end -->"

TABLES: tuple[tuple[str, Any, StrEnum], ...] = (
    ("A hold, at the producer's scheduler", LEGS, LegState.COMPUTING),
    ("A hold, at each rank of the producer", LEASES, RankHold.MARKED),
    ("A pull, at each rank of the consumer", READINGS, Reading.READING),
    ("A pull, at the consumer's scheduler", WANTS, Want.PULLING),
    ("An early leg, at the consumer's scheduler", EARLY_ROWS, EarlyState.WAITING),
    ("A push, at the producer (not spoken yet)", prefill_push.ROWS, prefill_push.PushHoldState.COMPUTING),
    ("A push, at the consumer (not spoken yet)", decode_push.ROWS, decode_push.PushPullState.RESERVED),
)


def diagram(table: Table[Any, Any, Any], first: StrEnum) -> str:
    """A table as a Mermaid state diagram: an edge for each pair of states, with all its causes."""
    states = {*table, *(row.state for _, _, row in rows(table))}
    names = {state: state.replace(" ", "_") for state in states}
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {names[first]}"]
    ends: dict[str, None] = {}
    for state, causes in table.items():
        edges: dict[Any, list[str]] = {}
        for cause, row in causes.items():
            edges.setdefault(row.state, []).append(cause)
        for target, named in edges.items():
            if target is not state:
                lines.append(f"    {names[state]} --> {names[target]}: {', '.join(named)}")
            if target not in table:
                ends[names[target]] = None
    return "\n".join([*lines, *(f"    {state} --> [*]" for state in ends), "```"])


def listing(table: Table[Any, Any, Any]) -> str:
    """A table as a Markdown table: every row there is, and what is done."""
    lines = ["| state | cause | next | done on the way |", "| --- | --- | --- | --- |"]
    for state, causes in table.items():
        lines += [_line(state, cause, row) for cause, row in causes.items()]
    return "\n".join(lines)


def _line(state: StrEnum, cause: StrEnum, row: TransitionRow[Any, Any]) -> str:
    target = "(stays)" if row.state == state else row.state
    return f"| {state} | {cause} | {target} | {', '.join(row.acts)} |"


def made() -> str:
    """All that stands between the marks."""
    parts = [BEGIN]
    for title, table, first in TABLES:
        parts += [f"### {title}", diagram(table, first), listing(table)]
    return "\n\n".join([*parts, END])


def renew(page: str) -> str:
    """The page with the made part made again."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{made()}{after}"


if __name__ == "__main__":
    PAGE.write_text(renew(PAGE.read_text()))
    print(f"{PAGE.name}: {sum(len(causes) for _, table, _ in TABLES for causes in table.values())} rows")
