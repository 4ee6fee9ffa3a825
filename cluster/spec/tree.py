"""Turns YAML text into a tree whose every node knows its line and column. Pure, bounded; it raises only `Malformed`.

PyYAML reads the text as far as events, and this module builds the tree. PyYAML's own loader forgets positions, takes
the last of two equal keys, reads ``no`` as false and ``1:30`` as ninety, and follows anchors into any number of copies.

Plain words are read as YAML 1.2 and JSON do: ``true`` and ``false``, ``null``, decimal integers without leading zeros,
decimals with a point. Everything else is text: a git revision such as ``0123456`` or ``12e4`` stays unchanged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import yaml

Value = None | bool | int | float | str

TEXT_CHARS_MAX = 256 << 10
"""A file of a thousand models stays below it; PyYAML takes a second for it."""

VALUES_MAX = 20_000
"""Values in a file, each counted as often as aliases repeat it: nine lines of anchors can blow up to billions."""

DEPTH_MAX = 32
"""Deepest nesting. The file's own fields stay below 8; vLLM's JSON flags add a few."""

MERGE_KEY = "<<"
"""A plain key whose value's entries are merged into the mapping (YAML's merge key)."""

_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?[0-9]{0,30}\.[0-9]{1,30}([eE][-+]?[0-9]{1,3})?")
_WORDS: Mapping[str, Value] = {
    word: value
    for name, value in {"null": None, "true": True, "false": False}.items()
    for word in (name, name.title(), name.upper())
} | {"": None, "~": None}

_NOT_TEXT = re.compile("[\0\ud800-\udfff]")
"""Characters that an escape in quotes can write, but that no argument, environment or output can hold."""


class Mark(NamedTuple):
    """A place in the file, both counted from 1."""

    line: int
    column: int


class Malformed(Exception):
    """The text is no YAML, or YAML that Baton does not accept. No tree is made."""

    def __init__(self, mark: Mark, message: str, fix: str) -> None:
        super().__init__(message)
        self.mark = mark
        self.message = message
        self.fix = fix


@dataclass(slots=True, eq=False)
class Scalar:
    """One word, number or text."""

    mark: Mark
    text: str
    plain: bool
    """Whether it is written without quotes."""
    size: int = 1
    """As in `Items`, and so is `height`."""
    height: int = 0

    @property
    def value(self) -> Value:
        """The value that the text stands for; always a text if it was quoted."""
        if not self.plain:
            return self.text
        if self.text in _WORDS:
            return _WORDS[self.text]
        if _INT.fullmatch(self.text):
            return int(self.text)
        if _FLOAT.fullmatch(self.text) and math.isfinite(number := float(self.text)):
            return number
        return self.text


@dataclass(slots=True, eq=False)
class Items:
    """A list."""

    mark: Mark
    nodes: list[Node] = field(default_factory=list)
    size: int = 1
    """Values in the list, itself included; aliases count as often as they stand there."""
    height: int = 0
    """Levels of nesting below it."""


@dataclass(slots=True, eq=False)
class MappingNode:
    """A mapping, in the order of the file and with its repeated keys."""

    mark: Mark
    entries: list[tuple[Scalar, Node]] = field(default_factory=list)
    size: int = 1
    height: int = 0
    key: Scalar | None = None
    """While the mapping is being read: the key whose value comes next."""


Node = Scalar | Items | MappingNode


def compose(text: str) -> Node | None:
    """The tree of one document; None for a text that holds nothing but comments.

    Raises:
        Malformed: the text is no YAML, has two documents, or breaks a limit.
    """
    if len(text) > TEXT_CHARS_MAX:
        raise Malformed(
            Mark(1, 1), f"the file is larger than {TEXT_CHARS_MAX >> 10} KiB", "split it, or repeat less with anchors"
        )
    composer = _Composer()
    for event in _events(text):
        composer.take(event)
    return composer.root


def tree_of(value: object) -> Node:
    """The tree of a JSON value, such as the `spec` of a Kubernetes resource: every mark is line 1, column 1.

    A text counts as unquoted if it reads back as the same text, so that problems show it as a file would. Nodes in the
    value stay as they are.

    Raises:
        Malformed: the value breaks a limit, or holds a character that no text can hold (a NUL, half a surrogate pair).
    """
    node = _grown(value, 0)
    if node.size > VALUES_MAX:
        raise Malformed(Mark(1, 1), f"more than {VALUES_MAX} values", "repeat less")
    return node


def _grown(value: object, depth: int) -> Node:
    mark = Mark(1, 1)
    if depth > DEPTH_MAX:
        raise Malformed(mark, f"nested more than {DEPTH_MAX} levels deep", "nest less")
    if isinstance(value, Scalar | Items | MappingNode):
        return value
    if isinstance(value, Mapping):
        entries = [(_word(str(key)), _grown(inner, depth + 1)) for key, inner in value.items()]
        return MappingNode(mark, entries, size=1 + sum(node.size for _, node in entries))
    if isinstance(value, list | tuple):
        nodes = [_grown(inner, depth + 1) for inner in value]
        return Items(mark, nodes, size=1 + sum(node.size for node in nodes))
    if isinstance(value, str):
        return _word(value)
    return Scalar(mark, _as_plain(value), plain=True)


def _as_plain(value: object) -> str:
    """A number, truth value or null as the file would have it."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "true", False: "false"}[value]
    if isinstance(value, float):
        text = str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
        return text if "e" not in text or "." in text else text.replace("e", ".0e")
    return str(value)


def _word(text: str) -> Scalar:
    if _NOT_TEXT.search(text):
        raise Malformed(Mark(1, 1), "a text holds a character that is none", "remove the `\\0` or `\\ud800` escape")
    plain = Scalar(Mark(1, 1), text, plain=True)
    return plain if plain.value == text else Scalar(Mark(1, 1), text, plain=False)


class _Composer:
    """Events in, tree out. It uses a stack instead of recursion, so that the depth is a number that can be compared."""

    def __init__(self) -> None:
        self.root: Node | None = None
        self._open: list[Items | MappingNode] = []
        self._names: list[str | None] = []
        self._anchors: dict[str, Node] = {}
        self._documents = 0

    def take(self, event: yaml.Event) -> None:
        mark = _mark(event.start_mark)
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise Malformed(mark, "a second document begins here", "keep one document a file, without `---`")
        elif isinstance(event, yaml.ScalarEvent):
            _refuse_tag(event.tag, mark)
            self._place(self._scalar(event, mark), event.anchor)
        elif isinstance(event, yaml.AliasEvent):
            self._place(self._aliased(event.anchor, mark), None, mark)
        elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            _refuse_tag(event.tag, mark)
            self._begin(Items(mark) if isinstance(event, yaml.SequenceStartEvent) else MappingNode(mark), event.anchor)
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            self._place(self._open.pop(), self._names.pop())

    @staticmethod
    def _scalar(event: yaml.ScalarEvent, mark: Mark) -> Scalar:
        if _NOT_TEXT.search(event.value):
            raise Malformed(mark, "this text holds a character that is none", "remove the `\\0` or `\\ud800` escape")
        return Scalar(mark, event.value, plain=event.style is None)

    def _begin(self, node: Items | MappingNode, anchor: str | None) -> None:
        if len(self._open) >= DEPTH_MAX:
            raise Malformed(node.mark, f"nested more than {DEPTH_MAX} levels deep", "nest less")
        self._open.append(node)
        self._names.append(anchor)

    def _aliased(self, name: str, mark: Mark) -> Node:
        """The node of an anchor. An anchor is known once its value is complete, so one that contains itself is
        unknown.
        """
        if name not in self._anchors:
            raise Malformed(mark, f"`*{name}` refers to nothing above", f"write `&{name}` before the value meant")
        return self._anchors[name]

    def _place(self, node: Node, anchor: str | None, mark: Mark | None = None) -> None:
        """Put a complete node into its parent, and check the limits."""
        if anchor is not None:
            self._anchors[anchor] = node
        if not self._open:
            self.root = node
            return
        parent = self._open[-1]
        parent.size += node.size
        parent.height = max(parent.height, node.height + 1)
        if parent.size > VALUES_MAX:
            raise Malformed(mark or node.mark, f"more than {VALUES_MAX} values up to here", "repeat less with anchors")
        if len(self._open) + node.height > DEPTH_MAX:
            raise Malformed(mark or node.mark, f"nested more than {DEPTH_MAX} levels deep", "nest less")
        if isinstance(parent, Items):
            parent.nodes.append(node)
        elif parent.key is not None:
            parent.entries.append((parent.key, node))
            parent.key = None
        elif isinstance(node, Scalar):
            parent.key = node
        else:
            raise Malformed(mark or node.mark, "a key must be a word", "write `key: value`")


def _refuse_tag(tag: str | None, mark: Mark) -> None:
    if tag is not None:
        raise Malformed(mark, f"the tag `{tag[:40]}` is not taken", "remove it; quotes make a text of a number")


def _mark(mark: yaml.Mark | None) -> Mark:
    return Mark(1, 1) if mark is None else Mark(mark.line + 1, mark.column + 1)


def _events(text: str) -> Iterator[yaml.Event]:
    """PyYAML's events, with its errors in Baton's words."""
    try:
        yield from yaml.parse(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise _translated(error) from error
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        mark = Mark(before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)
        raise Malformed(mark, f"character U+{ord(text[error.position]):04X} cannot stand here", "remove it") from error
    except (ValueError, OverflowError) as error:  # PyYAML on escapes such as "\UFFFFFFFF" and %YAML with a long number
        raise Malformed(Mark(1, 1), f"no YAML: {error}", "remove the escape or directive") from error


_WORDINGS = (
    # (PyYAML's text of the problem, and of the context, our message, our fix, whether the context's mark is meant)
    ("found character '\\t'", "", "a tab where YAML wants spaces", "indent with spaces", False),
    ("cannot start any token", "", "a text cannot begin with this character", "put the text in quotes", False),
    ("mapping values are not allowed", "", "a `:` where no key can be", "quote the text, or check the indent", False),
    ("could not find expected ':'", "", "a line with no `key: value`", "add the `:`, or quote the text", True),
    ("unexpected end of stream", "quoted scalar", "this quote is never closed", "close it", True),
    ("<stream end>", "flow sequence", "this `[` is never closed", "close it with `]`", True),
    ("<stream end>", "flow mapping", "this `{` is never closed", "close it with `}`", True),
    (
        "expected ',' or",
        "",
        "a comma is missing before this, or the bracket of line {line} is not closed",
        "add it",
        False,
    ),
    ("expected <block end>", "", "the indent fits nothing above", "line it up with its neighbours", False),
    ("but found '", "", "something is missing before this", "check commas, brackets and indent above", False),
)


def _translated(error: yaml.MarkedYAMLError) -> Malformed:
    problem, context = str(error.problem or ""), str(error.context or "")
    for said, within, message, fix, at_context in _WORDINGS:
        if said in problem and within in context:
            where = error.context_mark if at_context and error.context_mark else error.problem_mark
            return Malformed(_mark(where), message.replace("{line}", str(_mark(error.context_mark).line)), fix)
    return Malformed(_mark(error.problem_mark or error.context_mark), f"no YAML: {problem}", "correct the syntax here")
