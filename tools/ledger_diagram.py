"""Draw docs/ledger.md's diagrams and tables from the rules: `.venv/bin/python tools/ledger_diagram.py`.

Everything between the two marks is made here; the words around it are written by hand. A test compares.
"""

from __future__ import annotations

from pathlib import Path

from kvtransfer.table import ENDS, FIRST, TABLE, Cause, Row, Side, State

PAGE = Path(__file__).resolve().parents[1] / "docs" / "ledger.md"
BEGIN = "<!-- made by tools/ledger_diagram.py: begin -->"
END = "<!-- made by tools/ledger_diagram.py: end -->"


def diagram(side: Side) -> str:
    """One side as a Mermaid state diagram: an edge for each pair of states, with all its causes."""
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    [*] --> {state}" for state in FIRST[side]]
    ends: dict[State, None] = {}
    for state, rows in TABLE[side].items():
        edges: dict[State, list[Cause]] = {}
        for cause, row in rows.items():
            edges.setdefault(row.state, []).append(cause)
        for target, causes in edges.items():
            if target is not state:
                lines.append(f"    {state} --> {target}: {', '.join(causes)}")
                ends.update({target: None} if target in ENDS else {})
    lines += [f"    {state} --> [*]" for state in ends]
    return "\n".join([*lines, "```"])


def table(side: Side) -> str:
    """One side as a Markdown table: every row there is, and what is done."""
    lines = ["| state | cause | next | done on the way |", "| --- | --- | --- | --- |"]
    for state, acts in FIRST[side].items():
        lines.append(_line("", "", Row(state, acts)))
    for state, rows in TABLE[side].items():
        lines += [_line(state, cause, row) for cause, row in rows.items()]
    return "\n".join(lines)


def _line(state: str, cause: str, row: Row) -> str:
    target = "(stays)" if row.state == state else row.state
    return f"| {state} | {cause} | {target} | {', '.join(row.acts)} |"


def made() -> str:
    """All that stands between the marks."""
    parts = [BEGIN]
    for side in Side:
        parts += [f"### The {side}'s side", diagram(side), table(side)]
    return "\n\n".join([*parts, END])


def renew(page: str) -> str:
    """The page with the made part made again."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{made()}{after}"


if __name__ == "__main__":
    PAGE.write_text(renew(PAGE.read_text()))
    print(f"{PAGE.name}: {sum(len(rows) for states in TABLE.values() for rows in states.values())} rows")
