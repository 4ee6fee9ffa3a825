"""The part of the sources that decides whether the kept rows of a resumed benchmark are still valid."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path


def digest_of(files: Iterable[Path], root: Path) -> str:
    """The digest of these sources, by their names below `root`: rows of other sources are not used."""
    found = hashlib.sha256()
    for each in sorted(files):
        found.update(f"{each.relative_to(root)}\0{text_of(each)}".encode())
    return found.hexdigest()[:16]


def below(names: Iterable[str], root: Path) -> set[Path]:
    """Python files below `root` by these names: files, or folders with all that is in them."""
    listed = [root / name for name in names]
    return {each for one in listed for each in (one.rglob("*.py") if one.is_dir() else [one])}


@cache
def text_of(path: Path) -> str:
    """The text that counts for a digest, read once in a process: a long run executes the code that it read at first."""
    text = path.read_text()
    return code(text) if path.suffix == ".py" else text


def code(source: str) -> str:
    """A module's code without comments, layout and docstrings: rows stay valid when only such a text changes.

    Raises:
        SyntaxError: `source` is no Python.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
