"""docs/architecture.md against the repository: each path that it names exists, and each folder has its row."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEXT = (ROOT / "docs" / "architecture.md").read_text()
CODE_MAP = TEXT.partition("## Code map")[2].partition("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in CODE_MAP.splitlines() if line.startswith("| `")
]
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]


def in_backticks(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def test_the_map_is_read() -> None:
    assert len(ROWS) > 30


def test_every_path_that_the_page_names_is_there() -> None:
    """Paths with a folder. A bare file name belongs to the folder of its row: the next test checks it."""
    named = {each for each in in_backticks(TEXT) if re.fullmatch(r"[\w.-]+/[\w./-]*", each)}
    named -= {each for row in ROWS for each in in_backticks(row[2])}  # relative to their row's folder: see below
    gone = [each for each in named if not (ROOT / each).exists()]
    assert len(named) > 60
    assert gone == []


def test_every_file_that_a_row_names_is_in_its_folder() -> None:
    for row in ROWS:
        homes = [ROOT / each for each in in_backticks(row[0])]
        for name in in_backticks(row[1]):
            if re.fullmatch(r"\w+\.py", name):
                assert any((home / name).exists() or (home.parent / name).exists() for home in homes), (row[0], name)


def test_every_folder_of_the_project_has_its_row() -> None:
    named = {each.rstrip("/") for row in ROWS for each in in_backticks(row[0])}
    folders = [package.replace(".", "/") for package in PACKAGES]
    missing = [
        folder
        for folder in folders
        if folder not in named and (folder.startswith("router/") or "/" not in folder) and folder != "router"
        and not any(each.startswith(f"{folder}/") for each in named)
    ]  # fmt: skip
    assert missing == []


def test_what_a_row_says_to_read_first_is_there() -> None:
    for row in ROWS:
        homes = [ROOT / each for each in in_backticks(row[0])]
        for name in in_backticks(row[2]):
            places = [ROOT / name, *(home / name for home in homes), *(home.parent / name for home in homes)]
            assert any(place.exists() for place in places), (row[0], name)


def test_the_rooms_are_drawn_as_the_contract_has_them() -> None:
    drawn = re.findall(
        r"^(\w+) {2,}\S", TEXT.partition("## The rooms of the router")[2].partition("| hop |")[0], re.MULTILINE
    )
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["name"].startswith("inside router:"))
    assert [f"router.{room}" for room in drawn] == layers
    assert {path.parent.name for path in (ROOT / "router").glob("*/__init__.py")} == set(drawn)
