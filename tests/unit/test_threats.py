"""The threat table of docs/security.md: each row names its tests or says that it is not held, and the tests exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TEXT = (TESTS.parent / "docs" / "security.md").read_text()


def rows(text: str) -> list[list[str]]:
    """The cells of the threat table's rows, without its heading."""
    table = text.partition("## Threat model")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def faults(row: list[str], tests: Path = TESTS) -> list[str]:
    """The mistakes of a row: no test, prose in place of a test, or a test that does not exist."""
    if len(row) != 4:
        return [f"{len(row)} cells: {row}"]
    _, threat, outcome, cell = row
    if "*not held*" in outcome and not cell:
        return []
    found = (
        [] if re.fullmatch(r"(`[^`]+`, )*`[^`]+`", cell) else [f"{threat}: not a list of tests in backticks: {cell}"]
    )
    paths: list[Path] = []
    for name in re.findall(r"`([^`]+)`", cell):
        file, _, function = name.partition("::")
        if file:
            paths = [path for path in tests.rglob(Path(file).name) if path.as_posix().endswith(f"/{file}")]
        told = [re.search(rf"def {re.escape(function)}\(", path.read_text()) for path in paths]
        if not (any(told) if function else paths):
            found.append(f"{threat}: no test {name}")
    return found


def test_each_row_names_tests_that_exist() -> None:
    table = rows(TEXT)
    assert len(table) > 30
    assert [fault for row in table for fault in faults(row)] == []


@pytest.mark.parametrize(
    ("outcome", "cell", "fault"),
    [
        ("403", "", "not a list"),
        ("403", "`test_tools.py`; more", "not a list"),
        ("403", "`test_nowhere.py`", "no test"),
        ("403", "`test_tools.py::test_nowhere`", "no test"),
        ("403", "`test_tools.py`, `::test_nowhere`", "no test"),
    ],
)
def test_a_row_with_a_mistake_is_named(outcome: str, cell: str, fault: str) -> None:
    assert fault in faults(["", "a threat", outcome, cell])[0]
