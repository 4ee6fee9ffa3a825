"""`make serve` compiles in the background: never twice at once, and only sources that do not change meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypyc.build")

from baton import compiled
from tools import compile as compiling


def test_only_make_serve_compiles_in_the_background() -> None:
    recipes = (compiled.ROOT / "Makefile").read_text().splitlines()
    lines = [line for line in recipes if "--beside" in line]
    assert len(lines) == 1
    assert "tools.compile --beside & exec" in lines[0] and "baton up" in lines[0]


def test_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FOLDER", tmp_path / "compiled")
    with compiling._alone(waits=False) as first, compiling._alone(waits=False) as second:
        assert first and not second
    with compiling._alone(waits=False) as again:
        assert again


def test_sources_that_were_edited_meanwhile_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([{"a": "before"}, {"a": "after"}])
    monkeypatch.setattr(compiling, "sources", lambda: next(told))
    monkeypatch.setattr(compiling, "mypycify", lambda *_, **__: [])
    monkeypatch.setattr(compiling, "MODULES", ())
    with pytest.raises(SystemExit, match="edited meanwhile"):
        compiling.build(tmp_path / "compiled", tmp_path, ["cc"])


def test_the_next_run_removes_what_a_killed_run_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FOLDER", tmp_path / "compiled")
    (tmp_path / f"{compiling.DRAFT}old").mkdir()
    monkeypatch.setattr(compiling, "build", lambda folder, *_: folder.mkdir())
    compiling.compile_to(["cc"])
    assert [each.name for each in tmp_path.iterdir()] == ["compiled"]


SECOND = """
import sys
import os
import subprocess
import sys
from pathlib import Path
from baton import compiled
from tools import compile as compiling
compiled.FOLDER, compiling.LOG = Path(sys.argv[1]) / "compiled", Path(sys.argv[1]) / "compile.log"
compiling.up_to_date = lambda: False
sys.argv[1:] = ["--beside"]
compiling.main()
"""


def test_a_second_run_leaves_the_log_of_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FOLDER", tmp_path / "compiled")
    (tmp_path / "compile.log").write_text("the first one's")
    with compiling._alone(waits=False):
        argv = (sys.executable, "-c", SECOND, str(tmp_path))
        subprocess.run(argv, cwd=compiled.ROOT, env={**os.environ, "CC": sys.executable}, check=True, timeout=150)
    assert (tmp_path / "compile.log").read_text() == "the first one's"
