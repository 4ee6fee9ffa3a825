"""A benchmark's result: a table, a last line of JSON, and for a whole run the pages in docs/.

Every benchmark ends with one line `{"bench": NAME, "figures": {…}, "targets": {NAME: {"value", "target", "met"}}}`.
With `--publish` that line, with the machine it ran on, becomes docs/benchmarks/NAME.json, and its tables replace the
text in docs/benchmarks.md between `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from baton import compiled
from bench import headlines

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "benchmarks.md"


@dataclass(frozen=True, slots=True)
class Table:
    """Figures for people: the same on a terminal and on the page."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """As GitHub shows it."""
        head = f"| {' | '.join(self.columns)} |\n|{' --- |' * len(self.columns)}"
        return "\n".join([f"{self.title}:", "", head, *(f"| {' | '.join(row)} |" for row in self.rows)])


def machine() -> dict[str, Any]:
    """The machine of the figures. Load is how many processes of any program wanted a core in the last minute."""
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def target(value: float | None, limit: float, *, at_most: bool = True, digits: int = 3) -> dict[str, Any]:
    """One target. A target that could not be measured is not met."""
    met = value is not None and (value <= limit if at_most else value >= limit)
    return {"value": None if value is None else round(value, digits), "target": limit, "met": met}


def say(line: str) -> None:
    """Progress, on stderr."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def save(path: Path, text: str) -> None:
    """Write a file whole or not at all: an interrupt or a full disk leaves what the file had."""
    draft = path.with_name(f"{path.name}.part")
    try:
        draft.write_text(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def show(tables: Sequence[Table]) -> None:
    """The tables on a terminal."""
    from rich.console import Console  # noqa: PLC0415 - the measuring part has no use for it
    from rich.table import Table as Shown  # noqa: PLC0415

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    for table in tables:
        shown = Shown(title=table.title, title_justify="left", box=None, pad_edge=False, header_style="dim")
        for at, column in enumerate(table.columns):
            shown.add_column(column, justify="right" if at else "left")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
        console.print()


def result(name: str, figures: dict[str, Any], targets: dict[str, Any]) -> dict[str, Any]:
    """Print the last line; it is also returned."""
    told = {"bench": name, "figures": figures, "targets": targets}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    return told


def publish(told: dict[str, Any], tables: Sequence[Table], facts: dict[str, Any], note: str) -> None:
    """Write docs/benchmarks/NAME.json and the tables of docs/benchmarks.md."""
    name = told["bench"]
    path = DOCS / "benchmarks" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**told, "machine": facts}, indent=1) + "\n")
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    page = PAGE.read_text()
    assert begin in page and end in page, f"{PAGE.name} has no place for {name}"
    before, _, rest = page.partition(begin)
    after = rest.partition(end)[2]
    made = "\n\n".join([note, *(table.markdown() for table in tables)])
    PAGE.write_text(headlines.renewed(f"{before}{begin}\n\n{made}\n\n{end}{after}"))


def note_of(facts: dict[str, Any], more: str = "") -> str:
    """One line on the origin of the figures."""
    how = ", compiled" if compiled.in_use() else ""
    return (
        f"*{facts['date']}, {facts['cores']} cores of {facts['cpu']}, Linux {facts['kernel']}, "
        f"Python {facts['python']}{how}, load {facts['load_before']} before the run{'; ' + more if more else ''}.*"
    )
