"""The part of the sources that decides whether the kept rows of a resumed benchmark are still valid."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any


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


def reached(starts: Iterable[Path], root: Path) -> set[Path]:
    """These Python files, and all below `root` that they import, anywhere in a file. What a simulation cannot reach
    decides nothing: a router's HTTP may change, and the rows stay valid.
    """
    found: set[Path] = set()
    left = list(starts)
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += _imported(path, root)
    return found


def elsewhere(kept: Mapping[str, Any], sources: str, facts: Mapping[str, Any]) -> str:
    """Why a kept result with `sources` and `machine` cannot be continued; empty: it can.

    Args:
        kept: the result.
        sources: the digest of the sources now.
        facts: this machine (`bench.published.machine`).
    """
    there = kept.get("machine", {})
    if kept.get("sources") != sources:
        return "other sources"
    if any(there.get(name) != facts[name] for name in ("cpu", "cores")):
        return f"another machine ({there.get('cores')} cores of {there.get('cpu')})"
    return ""


def _imported(path: Path, root: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{each.name}" for each in node.names]  # a module, or what is in one
        else:
            continue
        for name in names:
            parts = name.split(".")
            for count in range(1, len(parts) + 1):  # packages' own code runs, too
                at = root.joinpath(*parts[:count])
                yield from (file for file in (at.with_name(f"{at.name}.py"), at / "__init__.py") if file.exists())


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
