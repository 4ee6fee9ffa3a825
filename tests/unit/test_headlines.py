"""The first table of docs/benchmarks.md says what the published files say, and no more."""

from __future__ import annotations

import json
import re
from pathlib import Path

from bench import headlines

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_opens_with_what_the_files_say() -> None:
    page = headlines.PAGE.read_text()
    assert headlines.renewed(page) == page, "run: .venv/bin/python -m bench.headlines"
    assert page.index(headlines.BEGIN) < page.index("\n## "), "the table stands before the first section"


def test_each_line_finds_its_targets_and_its_command() -> None:
    makefile = (ROOT / "Makefile").read_text()
    shown = list(headlines.lines())[2:]
    published = {path.stem for path in (ROOT / "docs" / "benchmarks").glob("*.json")}
    assert len(shown) == sum(each.bench in published for each in headlines.HEADLINES)
    for each in headlines.HEADLINES:
        assert re.search(rf"^{each.command}:", makefile, re.MULTILINE), each.command


def test_every_missed_target_has_a_line() -> None:
    """A reader of the table alone misses none of them."""
    for path in (ROOT / "docs" / "benchmarks").glob("*.json"):
        lines = [each for each in headlines.HEADLINES if each.bench == path.stem]
        for name, target in json.loads(path.read_text()).get("targets", {}).items():
            shown = any(re.fullmatch(each.targets, name) for each in lines)
            assert target["met"] or shown, f"{path.stem}: {name}"


def test_what_is_missed_is_shown_as_missed() -> None:
    one = headlines.Headline("a", "b", ".*", "c", "{:.1f} ms")
    assert headlines._line(one, [{"value": 2.0, "target": 1.0, "met": False}]) == (
        "| a | 2.0 ms | ≤ 1.0 ms | **no** | `make c` |"
    )
    several = [{"value": 0.5, "target": 1.0, "met": True}, {"value": 1.5, "target": 1.0, "met": False}]
    assert "| 1.5 ms | ≤ 1.0 ms | **1 of 2** |" in headlines._line(one, several)
    least = headlines.Headline("a", "b", ".*", "c", "{:.1f}", at_least=True)
    assert "| 0.5 | ≥ 1.0 | **1 of 2** |" in headlines._line(least, several)
