"""Any text is a valid cluster file or has problems; no text raises an error or takes longer than 5 s."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.errors import UsageError
from cluster.spec import as_text, explain, instances, parse
from cluster.spec.about import settings_of
from cluster.spec.example import EXAMPLE
from cluster.spec.page import SECTIONS
from cluster.spec.reader import PROBLEMS_MAX
from cluster.spec.tree import Items, Malformed, Node, Scalar, compose, tree_of
from cluster.spec.writer import written

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
FILES = [path.read_bytes().decode() for path in sorted(CORPUS.glob("*/*.yaml"))] + [EXAMPLE]
WORDS = sorted({name for _, section in SECTIONS for name in settings_of(section)})

PIECES = [
    *"{}[]:,-?&*!|>'\"%@`#<=~ \n\t",
    "\r\n",
    "---",
    "...",
    "<<",
    ": ",
    "- ",
    "&a",
    "*a",
    "\\x",
    "\u2028",
    "\ufeff",
]
YAMLISH = st.lists(st.sampled_from([*PIECES, *WORDS, "1", "0.5", "true", "null", "x-a"]), max_size=60).map("".join)

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["500ms", "95%", "a/b"])
)
KEYS = st.sampled_from(WORDS) | st.text(max_size=6)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=30
)

WORDLIKE = [
    "no",
    "on",
    "y",
    "0123",
    "0189",
    "0o17",
    "1_000",
    "1e5",
    "1.0e5",
    "-.5",
    "2026-11-26",
    "1:30",
    "=",
    "<<",
    "~",
]
"""Texts that some YAML readers take for a number, a boolean, a date or null."""


def check(text: str) -> None:
    """Assert what holds for every text."""
    parsed = parse(text, "f")
    lines = text.count("\n") + text.count("\r") + text.count("\u2028") + text.count("\u2029") + text.count("\x85") + 1
    assert len(parsed.problems) <= PROBLEMS_MAX
    for problem in parsed.problems:
        assert 1 <= problem.line <= lines + 1
        assert problem.column >= 1
        assert problem.message
        assert problem.fix
        assert len(str(problem).splitlines()) == 1
    assert (parsed.spec is None) == bool(parsed.errors)
    if parsed.spec is None:
        with pytest.raises(UsageError):
            parsed.usable()
    else:
        assert len({each.name for each in instances(parsed.spec)}) == len(instances(parsed.spec))
        assert as_text(explain(parsed))


@given(st.text() | YAMLISH)
@settings(max_examples=400, deadline=timedelta(seconds=5))
def test_any_text(text: str) -> None:
    check(text)


@given(TREES)
@settings(max_examples=300, deadline=timedelta(seconds=5), suppress_health_check=[HealthCheck.too_slow])
def test_any_tree_of_values(tree: Any) -> None:
    check(json.dumps(tree))
    check(json.dumps({"models": [{"name": "m", "pools": tree}], "slo": tree, "tenants": tree, "registry": tree}))


@given(
    st.sampled_from(FILES),
    st.integers(min_value=0, max_value=5000),
    st.integers(min_value=0, max_value=40),
    st.text(max_size=6) | YAMLISH,
)
@settings(max_examples=400, deadline=timedelta(seconds=5))
def test_any_edit_of_a_file(text: str, at: int, length: int, instead: str) -> None:
    at %= len(text) + 1
    check(text[:at] + instead + text[at + length :])


def meant(node: Node | None) -> Any:
    """The meaning of a tree, for comparison. A text may have quotes or not."""
    if node is None:
        return None
    if isinstance(node, Scalar):
        return node.value if isinstance(node.value, str) else (node.value, node.text or "null")
    if isinstance(node, Items):
        return [meant(each) for each in node.nodes]
    return [(key.text, key.plain and key.text == "<<", meant(inner)) for key, inner in node.entries]


@given(st.text() | YAMLISH | st.sampled_from(FILES))
@settings(max_examples=400, deadline=timedelta(seconds=5))
def test_a_written_file_means_the_same_as_its_source(text: str) -> None:
    try:
        node = compose(text)
    except Malformed:
        return
    if node is not None:
        assert meant(compose(written(node))) == meant(node)


@given(TREES | st.sampled_from(WORDLIKE))
@settings(max_examples=400, deadline=timedelta(seconds=5), suppress_health_check=[HealthCheck.too_slow])
def test_a_written_value_means_the_same(value: Any) -> None:
    """The meaning is the same to PyYAML, too, which reads YAML 1.1: a text stays a text."""
    try:
        node = tree_of({"a": value})
    except Malformed:
        return
    text = written(node)
    assert meant(compose(text)) == meant(node)
    if isinstance(value, str):
        assert yaml.safe_load(text) == {"a": value}
