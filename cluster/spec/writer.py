"""Turns a tree (`tree.compose`, `tree.tree_of`) into YAML text that reads back as the same tree. Pure.

Scalars keep their text, and quotes where they have some: ``1.50`` stays ``1.50``. A text that some reader of YAML takes
for a number, a truth value or a date (``no``, ``0123``, ``1e5``, ``2026-11-26``) is written in quotes, so that it means
the same to all of them. A tree has no comments and no anchors: aliases are written out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import yaml
from yaml.resolver import Resolver

from cluster.spec.tree import MERGE_KEY, Items, MappingNode, Node, Scalar

_TEXT: Final = "tag:yaml.org,2002:str"
_AMBIGUOUS: Final = re.compile(
    r"[yYnN]|[-+]?0([oObB][0-9]+|[xX][0-9a-fA-F]+)|[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
)
"""Texts that PyYAML's resolver leaves as texts, and that other readers (YAML 1.2, Go's) do not."""

_BREAKS: Final = frozenset("\x85\u2028\u2029")
"""Line breaks that PyYAML folds into spaces unless they are escaped."""


def written(node: Node, *, width: int = 80, sort_keys: bool = False) -> str:
    """The text of one document. `width`: longer lines are folded at spaces."""
    events = [yaml.StreamStartEvent(), yaml.DocumentStartEvent(explicit=False), *_events(node, sort_keys=sort_keys)]
    events += [yaml.DocumentEndEvent(explicit=False), yaml.StreamEndEvent()]
    text: str = yaml.emit(events, Dumper=yaml.SafeDumper, width=width, allow_unicode=True)
    return text.removesuffix("...\n")


def _events(node: Node, *, sort_keys: bool) -> Iterator[yaml.Event]:
    if isinstance(node, Scalar):
        is_null = node.plain and not node.text
        yield _scalar("null" if is_null else node.text, plain=node.plain and not _is_misread(node))
    elif isinstance(node, Items):
        yield yaml.SequenceStartEvent(anchor=None, tag=None, implicit=True, flow_style=not node.nodes)
        for each in node.nodes:
            yield from _events(each, sort_keys=sort_keys)
        yield yaml.SequenceEndEvent()
    else:
        yield from _mapping(node, sort_keys=sort_keys)


def _mapping(node: MappingNode, *, sort_keys: bool) -> Iterator[yaml.Event]:
    yield yaml.MappingStartEvent(anchor=None, tag=None, implicit=True, flow_style=not node.entries)
    for key, inner in sorted(node.entries, key=lambda entry: entry[0].text) if sort_keys else node.entries:
        yield _scalar(key.text, plain=key.plain and (key.text == MERGE_KEY or not _is_misread(key)))
        yield from _events(inner, sort_keys=sort_keys)
    yield yaml.MappingEndEvent()


def _scalar(text: str, *, plain: bool) -> yaml.Event:
    """A scalar, in quotes unless `plain`. PyYAML quotes a plain one, too, where it cannot stand without."""
    style = '"' if _BREAKS & {*text} else None if plain else "'"
    return yaml.ScalarEvent(anchor=None, tag=None, implicit=(plain, True), value=text, style=style)


def _is_misread(node: Scalar) -> bool:
    """Whether some reader of YAML takes this text, without quotes, for something else."""
    if not isinstance(node.value, str):
        return False
    read = _RESOLVER.resolve(yaml.ScalarNode, node.text, (True, False))
    return read != _TEXT or bool(_AMBIGUOUS.fullmatch(node.text.replace("_", "")))


_RESOLVER: Final = Resolver()
