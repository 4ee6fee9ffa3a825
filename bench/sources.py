"""What of the sources counts when a benchmark that can be resumed asks whether its kept rows are still true."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def text_of(path: Path) -> str:
    """The text that counts for a digest, read once: a long run executes the code that it has read at first."""
    text = path.read_text()
    return code(text) if path.suffix == ".py" else text


def code(source: str) -> str:
    """A module's code without comments, layout and docstrings, so that rows outlive a mended sentence."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
