"""Turns the file's tree into values, by what the settings say about themselves. Collects every problem; raises none.

A wrong value is replaced by its default, and its path is remembered as broken. So everything else is still read, and
the rules between fields (rules.py) report nothing that follows from a mistake already reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, get_args, get_origin

from cluster.errors import UsageError
from cluster.spec import flags, guess, units
from cluster.spec.about import Setting, broken_bound, is_section, settings_of
from cluster.spec.problems import FieldPath, Problem, Severity, nearest, printable, quoted, shown_path
from cluster.spec.settings import Spec
from cluster.spec.tree import MERGE_KEY, Items, Malformed, MappingNode, Mark, Node, Scalar, compose

PROBLEMS_MAX = 100
"""Most problems reported of one file; a file with more is probably no cluster file."""


class FilePlace(NamedTuple):
    """Where a value stands in the file, and its text there, shortened."""

    mark: Mark
    shown: str


@dataclass(frozen=True, slots=True)
class _Wrong:
    """Stands for a value that could not be read."""


WRONG = _Wrong()

_KEYS = ("sk-", "hf_")
"""Beginnings of Baton's keys and of others' tokens: such values are never repeated, wherever they stand."""

_SECRET_PARENTS: frozenset[str | int] = frozenset({"env", "registry", "tenants"})
"""Sections where secrets are written, rightly or not."""


def shown_node(node: Node) -> str:
    """A value as the file has it, shortened."""
    if isinstance(node, Scalar):
        text = "***" if node.text.startswith(_KEYS) else printable(node.text)
        return text if node.plain else f'"{text}"'
    return "[…]" if isinstance(node, Items) else "{…}"


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.value is None


def entries_of(node: Node | None) -> dict[str, Node]:
    """The entries of a mapping, with `<<` resolved as in reading; none for null or a missing node."""
    reader = Reader("")
    reader.places[()] = FilePlace(Mark(1, 1), "")
    return {key.text: inner for key, inner in reader.entries(node, ())} if isinstance(node, MappingNode) else {}


def nodes_of(node: Node | None) -> list[Node]:
    """The nodes of a list; none for null or a missing node."""
    return node.nodes if isinstance(node, Items) else []


def value_in(text: str, file: str) -> Any:
    """The value of another YAML file than a cluster file, by the same rules, as JSON would have it; None: it is empty.

    Raises:
        UsageError: the text is no YAML, or gives a key twice; the message has the place.
    """
    reader = Reader(file)
    reader.places[()] = FilePlace(Mark(1, 1), "")
    try:
        node = compose(text)
    except Malformed as fault:
        raise UsageError(f"{file}:{fault.mark.line}:{fault.mark.column}: {fault.message} → {fault.fix}") from None
    value = None if node is None else reader.free(node, ())
    if reader.problems:
        raise UsageError(str(reader.problems[0]))
    return value


def _stand_in(kind: Any) -> Any:
    """A value in place of one that is required and wrong or missing, so that later list entries keep their index."""
    if get_origin(kind) is tuple:
        return ()
    if is_section(kind):
        return kind(**{name: _stand_in(each.kind) for name, each in settings_of(kind).items() if each.required})
    return next(iter(kind)) if issubclass(kind, StrEnum) else ""


def is_secret(path: FieldPath) -> bool:
    """Whether the value at `path` is a secret by its name, which no output may show."""
    name = str(path[-1]) if path else ""
    if "engine_args" in path[:-1]:
        return flags.is_secret_flag(name)
    return bool(_SECRET_PARENTS & set(path[:-1])) and flags.is_secret_name(name)


class Reader:
    """Reads one file."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self.places: dict[FieldPath, FilePlace] = {}
        self.broken: set[FieldPath] = set()

    def read(self, root: Node | None) -> Spec:
        """Read the whole file. Check `problems` before you use the result."""
        node = MappingNode(Mark(1, 1)) if root is None else root
        self.places[()] = FilePlace(node.mark, "")
        if isinstance(node, MappingNode):
            node.entries = [(key, value) for key, value in node.entries if not key.text.startswith("x-")]
        spec = self._section(Spec, node, ())
        return Spec(models=()) if isinstance(spec, _Wrong) else spec

    def section(self, section: type, node: Node, path: FieldPath) -> Any:
        """Read and check one section that is not in a cluster file. Check `problems` before you use the result."""
        read = self._section(section, node, path)
        return _stand_in(section) if isinstance(read, _Wrong) else read

    # -- reporting --

    @property
    def full(self) -> bool:
        """Whether more problems were found than are reported."""
        return len(self.problems) > PROBLEMS_MAX

    def tell(
        self,
        path: FieldPath,
        message: str,
        fix: str,
        *,
        mark: Mark | None = None,
        value: str | None = None,
        severity: Severity = Severity.ERROR,
    ) -> None:
        """Note a problem at `path`, or at the nearest place above it that the file has."""
        place = self._place(path)
        shown = (place.shown if path in self.places else "") if value is None else value
        self.problems.append(
            Problem(
                file=self.file,
                line=(mark or place.mark).line,
                column=(mark or place.mark).column,
                field=shown_path(path),
                value="***" if shown and is_secret(path) else shown,
                message=message,
                fix=fix,
                severity=severity,
            )
        )

    def _place(self, path: FieldPath) -> FilePlace:
        while path not in self.places:
            path = path[:-1]
        return self.places[path]

    def _wrong(self, path: FieldPath, message: str, fix: str, **more: Any) -> _Wrong:
        if not self.full:
            self.tell(path, message, fix, **more)
            self.broken.add(path)
        return WRONG

    def is_broken(self, path: FieldPath) -> bool:
        """Whether a value at, in or above `path` was wrong."""
        return any(bad[: len(path)] == path or path[: len(bad)] == bad for bad in self.broken)

    # -- containers --

    def _section(self, section: type, node: Node, path: FieldPath) -> Any:
        if _is_null(node):
            node = MappingNode(node.mark)
        if not isinstance(node, MappingNode):
            return self._wrong(path, "must be a mapping", guess.as_mapping(section, path, shown_node(node)))
        known = settings_of(section)
        values = {}
        for key, inner in self.entries(node, path):
            if key.text not in known:
                self._unknown(section, key, inner, path)
                continue
            at = (*path, key.text)
            value = self._value(known[key.text], known[key.text].kind, inner, at)
            if not isinstance(value, _Wrong):
                values[key.text] = value
        for name, setting in known.items():
            if setting.required and name not in values:
                if not self.is_broken((*path, name)):
                    self._wrong((*path, name), "missing", guess.example(name), mark=node.mark)
                values[name] = _stand_in(setting.kind)
        return section(**values)

    def entries(self, table: MappingNode, path: FieldPath) -> Iterator[tuple[Scalar, Node]]:
        """The entries of a mapping with `<<` resolved, each key once; a key that is given twice is reported."""
        seen: dict[str, Mark] = {}
        merged: list[MappingNode] = []
        for key, node in table.entries:
            if key.plain and key.text == MERGE_KEY:
                merged += self._merged(node, (*path, MERGE_KEY))
                continue
            at = (*path, key.text)
            if key.text in seen:
                shown = shown_node(node)
                first = f"first on line {seen[key.text].line}"
                self._wrong(at, f"given twice, {first}", "remove one of the two", mark=key.mark, value=shown)
                continue
            seen[key.text] = key.mark
            self.places.setdefault(at, FilePlace(node.mark, shown_node(node)))
            yield key, node
        for inner in merged:
            for key, node in self.entries(inner, path):
                if key.text not in seen:
                    seen[key.text] = key.mark
                    yield key, node

    def _merged(self, node: Node, path: FieldPath) -> list[MappingNode]:
        nodes = node.nodes if isinstance(node, Items) else [node]
        if all(isinstance(each, MappingNode) for each in nodes):
            return [each for each in nodes if isinstance(each, MappingNode)]
        self.tell(path, "`<<` takes a mapping", "write `<<: *name` with an anchor at a mapping", mark=node.mark)
        return []

    def _unknown(self, section: type, key: Scalar, node: Node, path: FieldPath) -> None:
        if self.full:  # guessing is the one slow step
            return
        shown = shown_node(node) if isinstance(node, Scalar) and not is_secret((*path, key.text)) else "…"
        found = guess.unknown_key(section, key.text, shown)
        if found.meant is not None:
            self.broken.add((*path, found.meant))
        self.tell((*path, key.text), found.message, found.fix, mark=key.mark)

    # -- values --

    def _value(self, setting: Setting, kind: Any, node: Node, path: FieldPath) -> Any:
        self.places.setdefault(path, FilePlace(node.mark, shown_node(node)))
        origin = get_origin(kind)
        if is_section(kind):
            return self._section(kind, node, path)
        if origin is tuple:
            return self._list(setting, get_args(kind)[0], node, path)
        if origin is not None:
            return self._mapping(setting, get_args(kind)[1], node, path)
        if kind is Any:
            return self.free(node, path)
        if not isinstance(node, Scalar):
            return self._wrong(path, f"must be {guess.a_kind(kind)}", guess.example_value(setting))
        if node.value is None and path[-1] == setting.name:
            return None if setting.optional else self._wrong(path, "has no value", guess.example_value(setting))
        return self._scalar(setting, kind, node, path)

    def _list(self, setting: Setting, kind: Any, node: Node, path: FieldPath) -> Any:
        if _is_null(node) or (isinstance(node, Items) and not node.nodes):
            if setting.required or setting.about.not_empty:
                return self._wrong(path, "is empty", setting.about.not_empty or guess.as_list(setting, ""))
            return ()
        if not isinstance(node, Items):
            return self._wrong(path, "must be a list", guess.as_list(setting, shown_node(node)))
        values = [self._value(setting, kind, each, (*path, at)) for at, each in enumerate(node.nodes)]
        return tuple(_stand_in(kind) if isinstance(value, _Wrong) else value for value in values)

    def _mapping(self, setting: Setting, kind: Any, node: Node, path: FieldPath) -> Any:
        if _is_null(node):
            return {}
        if not isinstance(node, MappingNode):
            return self._wrong(path, "must be a mapping", f"write `{setting.name}: {{NAME: …}}`")
        values = {}
        for key, inner in self.entries(node, path):
            at = (*path, key.text)
            if setting.about.keys and not setting.about.keys.fullmatch(key.text):
                self._wrong(at, "cannot be a name", guess.as_name(setting.about.keys, key.text), mark=key.mark)
                continue
            value = self._text_of(inner, at) if kind is str else self._value(setting, kind, inner, at)
            if not isinstance(value, _Wrong):
                values[key.text] = value
        return values

    def _text_of(self, node: Node, path: FieldPath) -> Any:
        """A value of `env`: its text, be it a number or a word."""
        if isinstance(node, Scalar) and (node.text or not node.plain):
            return node.text
        return self._wrong(path, "must be a text", 'write a text, `""` for an empty one')

    def free(self, node: Node, path: FieldPath) -> Any:
        """A value of `engine_args`, as JSON would have it."""
        if isinstance(node, Scalar):
            return node.value
        if isinstance(node, Items):
            return [self.free(each, (*path, at)) for at, each in enumerate(node.nodes)]
        return {key.text: self.free(inner, (*path, key.text)) for key, inner in self.entries(node, path)}

    def _scalar(self, setting: Setting, kind: Any, node: Scalar, path: FieldPath) -> Any:
        if kind is str:
            return self._str(setting, node, path)
        if issubclass(kind, StrEnum):
            return self._choice(kind, node, path)
        if kind is bool:
            return self._bool(setting, node, path)
        number = node.value
        if isinstance(number, bool) or not isinstance(number, int | float):
            return self._wrong(path, f"must be {guess.a_kind(kind)}", guess.as_number(setting, node.text))
        if kind is int and not isinstance(number, int):
            return self._wrong(path, "must be a whole number", guess.as_whole(setting, number))
        return self._bounded(setting, kind(number), path)

    def _str(self, setting: Setting, node: Scalar, path: FieldPath) -> Any:
        if not isinstance(node.value, str):
            return self._wrong(path, "must be a text", f'put it in quotes: `"{printable(node.text)}"`')
        if not node.text.strip():
            return self._wrong(path, "is empty", guess.example_value(setting))
        if not node.text.isprintable() or node.text != node.text.strip():
            return self._wrong(path, "must be a text on one line", "remove spaces and breaks around it")
        if setting.about.form and not setting.about.form.fullmatch(node.text):
            return self._wrong(path, "cannot be a name", guess.as_name(setting.about.form, node.text))
        return node.text

    def _bool(self, setting: Setting, node: Scalar, path: FieldPath) -> Any:
        if isinstance(node.value, bool):
            return node.value
        meant = "false" if node.text.strip().lower() in {"no", "off", "n", "0", "false", "never"} else "true"
        return self._wrong(path, f"must be {guess.a_kind(bool)}", f"write `{setting.name}: {meant}`")

    def _choice(self, kind: type[StrEnum], node: Scalar, path: FieldPath) -> Any:
        choices = [each.value for each in kind]
        if node.value in choices:
            return kind(node.value)
        near = nearest(node.text, choices)
        fix = f"write `{near}`; one of {quoted(choices)}" if near else f"write one of {quoted(choices)}"
        return self._wrong(path, "is not a choice here", fix)

    def _bounded(self, setting: Setting, number: float, path: FieldPath) -> Any:
        said = setting.about
        if said.at_most == 1 and 1 < number <= 100:
            fix = f"write `{setting.name}: {units.shown(number / 100)}`"
            return self._wrong(path, "is a share, from 0 to 1", fix)
        bound = broken_bound(said, number)
        if bound is not None:
            return self._wrong(path, f"must be {bound}", f"write a number that is {bound}, or leave it out")
        return number


def sorted_problems(problems: list[Problem]) -> tuple[Problem, ...]:
    """The problems in the order of the file, each once, at most `PROBLEMS_MAX`."""
    unique = sorted(dict.fromkeys(problems), key=lambda each: (each.line, each.column, each.severity.value))
    if len(unique) <= PROBLEMS_MAX:
        return tuple(unique)
    told, rest = unique[: PROBLEMS_MAX - 1], unique[PROBLEMS_MAX - 1 :]
    worst = min(rest, key=lambda each: each.severity.value)  # "error" comes before "warning"
    message, fix = "and more problems from here on", "correct the ones above first"
    return (*told, dataclasses.replace(worst, field="", value="", message=message, fix=fix))
