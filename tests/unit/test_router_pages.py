"""Pages that are generated from code are up to date with that code."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.mark.parametrize(
    "name", ["api_table", "exact_table", pytest.param("journey_diagram", marks=pytest.mark.interpreted)]
)
def test_generated_pages_are_up_to_date(name: str) -> None:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
    assert spec and spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = tool.PAGE.read_text()
    assert tool.renew(page) == page, f"make it again: .venv/bin/python tools/{name}.py"
