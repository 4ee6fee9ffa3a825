"""Checks `pod_template` and `router_template`: the parts that the operator itself reads or merges. Pure.

A patch is free in all other parts: whether Kubernetes takes the pod, the API server says when the object is applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from cluster.spec.problems import FieldPath
from cluster.spec.reader import shown_node
from cluster.spec.tree import Scalar, tree_of
from k8s.crd.names import LIST_KEYS


class TemplateFault(NamedTuple):
    """One thing that is wrong with a patch."""

    path: FieldPath
    message: str
    fix: str
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What a field of a pod has to be."""

    is_list: bool = False
    fields: Mapping[str, _Form] = field(default_factory=dict)
    """Of the mapping, or of each entry of the list: the fields that are checked."""
    key: str = ""
    """The field by which the list's entries are merged: each entry needs it. Empty: no field has to be there."""
    words: tuple[str, ...] = ()
    """Fields of an entry that may tell entries apart: no lists and no mappings."""
    kept: bool = False
    """Whether null cannot remove it: the operator has entries of its own in it."""


def _merged(name: str, fields: Mapping[str, _Form] | None = None) -> _Form:
    """A list that the operator merges its own entries into, by the key of Kubernetes' strategic merge."""
    return _Form(is_list=True, key=LIST_KEYS[name][0][0], kept=True, fields=fields or {})


_CONTAINER: Final = {
    "env": _merged("env"),
    "ports": _Form(is_list=True, words=("containerPort", "protocol", "name")),
    "volumeMounts": _merged("volumeMounts"),
}
_POD: Final = _Form(
    fields={
        "metadata": _Form(kept=True, fields={"labels": _Form(kept=True)}),
        "spec": _Form(
            kept=True,
            fields={
                "containers": _merged("containers", _CONTAINER),
                "readinessGates": _Form(is_list=True),
                "topologySpreadConstraints": _Form(is_list=True, words=("topologyKey", "whenUnsatisfiable")),
                "volumes": _merged("volumes"),
            },
        ),
    }
)


def template_faults(template: Mapping[str, Any], container: str) -> Iterator[TemplateFault]:
    """What is wrong with a patch of pods. `container`: name of the operator's own container in them."""
    yield from _fields(template, _POD, (), container)


def _value(value: Any, form: _Form, path: FieldPath, container: str) -> Iterator[TemplateFault]:
    name = str(path[-1])
    if value is None:
        if form.kept:
            yield TemplateFault(path, "cannot be removed", "leave it out")
    elif form.is_list:
        if isinstance(value, list | tuple):
            yield from _entries(value, form, path, container)
        else:
            entry = f"{{{form.key}: …}}" if form.key else "…"
            yield TemplateFault(
                path, "must be a list", f"write `{name}: [{entry}]`, or leave it out", _shown(value, path)
            )
    elif isinstance(value, Mapping):
        yield from _fields(value, form, path, container)
    else:
        yield TemplateFault(path, "must be a mapping", f"write `{name}: {{…}}`, or leave it out", _shown(value, path))


def _fields(given: Mapping[str, Any], form: _Form, path: FieldPath, container: str) -> Iterator[TemplateFault]:
    for name, inner in form.fields.items():
        if name in given:
            yield from _value(given[name], inner, (*path, name), container)


def _entries(items: list[Any] | tuple[Any, ...], form: _Form, path: FieldPath, own: str) -> Iterator[TemplateFault]:
    seen = set[str]()
    for at, each in enumerate(items):
        here = (*path, at)
        if not form.key and not form.words:
            continue
        if not isinstance(each, Mapping):
            yield TemplateFault(
                here, "must be a mapping", f"write `{{{form.key or form.words[0]}: …}}`", _shown(each, here)
            )
            continue
        yield from _words(each, form, here)
        if form.key:
            yield from _identity(each, form.key, here, seen)
        of_own = own == each.get("name")
        inner = {name: one for name, one in form.fields.items() if of_own or each.get(name) is not None}
        yield from _fields(each, _Form(fields=inner), here, own)


def _words(entry: Mapping[str, Any], form: _Form, path: FieldPath) -> Iterator[TemplateFault]:
    for name in form.words:
        if isinstance(entry.get(name), Mapping | list | tuple):
            shown = _shown(entry[name], path)
            yield TemplateFault((*path, name), "must be a number or a text", f"write `{name}: …` with one value", shown)


def _identity(entry: Mapping[str, Any], key: str, path: FieldPath, seen: set[str]) -> Iterator[TemplateFault]:
    """Whether the entry has the key by which it is merged, and no entry before it has the same."""
    value = entry.get(key)
    if value is None:
        yield TemplateFault((*path, key), "missing", f"write `{key}: …`: entries are merged by it")
    elif not isinstance(value, str):
        yield TemplateFault((*path, key), "must be a text", f'write `{key}: "…"`', _shown(value, (*path, key)))
    elif value in seen:
        yield TemplateFault((*path, key), "given twice", "make one entry of the two", _shown(value, (*path, key)))
    else:
        seen.add(value)


def _shown(value: Any, path: FieldPath) -> str:
    """The value, shortened. Of an environment only names are shown: the rest may be secret."""
    node = tree_of(value)
    hidden = "env" in path and path[-1] != "name" and isinstance(node, Scalar)
    return "***" if hidden else shown_node(node)
