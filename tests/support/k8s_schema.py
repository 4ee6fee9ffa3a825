"""Applies a custom resource's schema as an API server does: prune, set defaults, validate, evaluate CEL rules.

Follows "Extend the Kubernetes API with CustomResourceDefinitions" (kubernetes.io). Not done: `format`, `oneOf` and the
like, the cost of rules, Kubernetes' own CEL functions (docs/decisions/0010-kubernetes.md).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from support.k8s_json import copied

TYPES = {"string": str, "boolean": bool, "object": dict, "array": list}


def pruned(value: Any, schema: Mapping[str, Any], *, root: bool = True) -> Any:
    """A copy without the fields that are not in the schema."""
    if isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties")
        if schema.get("x-kubernetes-preserve-unknown-fields"):
            return copied(value)
        kept = {}
        for name, inner in value.items():
            if root and name in {"apiVersion", "kind", "metadata"}:
                kept[name] = copied(inner)
            elif name in known:
                kept[name] = pruned(inner, known[name], root=False)
            elif isinstance(rest, Mapping):
                kept[name] = pruned(inner, rest, root=False)
        return kept
    if isinstance(value, list):
        return [pruned(inner, schema.get("items", {}), root=False) for inner in value]
    return value


def defaulted(value: Any, schema: Mapping[str, Any]) -> Any:
    """The value, with the schema's defaults for missing fields. Changes mappings in place."""
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if name not in value and "default" in inner:
                value[name] = copied(inner["default"])
            if name in value:
                value[name] = defaulted(value[name], inner)
        rest = schema.get("additionalProperties")
        if isinstance(rest, Mapping):
            for name in value.keys() - schema.get("properties", {}).keys():
                value[name] = defaulted(value[name], rest)
    elif isinstance(value, list):
        return [defaulted(inner, schema.get("items", {})) for inner in value]
    return value


def faults(value: Any, schema: Mapping[str, Any], old: Any = None) -> list[str]:
    """All errors by the schema, as ``path: message``. CEL rules are evaluated only if types and bounds are right."""
    found = list(_shape_faults(value, schema, ""))
    if found or (isinstance(old, dict) and old.get("spec") == value.get("spec")):  # no rule is about status
        return found
    return list(_rule_faults(value, schema, old, ""))


def _shape_faults(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    where = path or "<root>"
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield f"{where}: must be an integer or a string"
        return
    kind = schema.get("type")
    if not _is_a(value, kind):
        yield f"{where}: must be of type {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: Unsupported value {value!r}: supported values {schema['enum']}"
    yield from _bounds(value, schema, where)
    for at, inner, known, _ in _inside(value, schema, None, path):
        yield from _shape_faults(inner, known, at)


def _rule_faults(value: Any, schema: Mapping[str, Any], old: Any, path: str) -> Iterator[str]:
    for at, inner, known, before in _inside(value, schema, old, path):
        yield from _rule_faults(inner, known, before, at)
    yield from _rules(value, schema, old, path or "<root>")


def _is_a(value: Any, kind: str | None) -> bool:
    if kind is None:
        return True
    if kind in {"integer", "number"}:
        allowed = (int,) if kind == "integer" else (int, float)
        return isinstance(value, allowed) and not isinstance(value, bool)
    return isinstance(value, TYPES[kind])


def _bounds(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        least, most = schema.get("minimum"), schema.get("maximum")
        if least is not None and (value < least or (value == least and schema.get("exclusiveMinimum"))):
            yield f"{where}: should be greater than {least}"
        if most is not None and value > most:
            yield f"{where}: should be less than or equal to {most}"
    elif isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1 << 20):
            yield f"{where}: length {len(value)} is out of bounds"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{where}: should match {schema['pattern']}"
    elif isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 1 << 20):
            yield f"{where}: {len(value)} items are out of bounds"
    elif isinstance(value, dict):
        if len(value) > schema.get("maxProperties", 1 << 20):
            yield f"{where}: must have at most {schema['maxProperties']} items"
        yield from (f"{where}.{name}: Required value" for name in schema.get("required", ()) if name not in value)


def _inside(
    value: Any, schema: Mapping[str, Any], old: Any, path: str
) -> Iterator[tuple[str, Any, Mapping[str, Any], Any]]:
    """The values inside a value: the path, the inner value, its schema, and its value before."""
    if isinstance(value, dict):
        rest = schema.get("additionalProperties")
        before = old if isinstance(old, dict) else {}
        for name, inner in value.items():
            known = schema.get("properties", {}).get(name, rest)
            if isinstance(known, Mapping):
                yield f"{path}.{name}".lstrip("."), inner, known, before.get(name)
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield f"{path}[{at}]", inner, schema.get("items", {}), None


@functools.cache
def _program(rule: str) -> Any:
    celpy = pytest.importorskip("celpy", reason="cel-python is not installed: pip install cel-python==0.5.0")
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def _rules(value: Any, schema: Mapping[str, Any], old: Any, where: str) -> Iterator[str]:
    for each in schema.get("x-kubernetes-validations", ()):
        rule = each["rule"]
        if re.search(r"\boldSelf\b", rule) and old is None:  # a transition rule needs a value before
            continue
        given = {"self": cel(value, schema)} | ({} if old is None else {"oldSelf": cel(old, schema)})
        if not holds(rule, given):
            yield f"{where}: Invalid value: {each['message']}"


def holds(rule: str, given: Mapping[str, Any]) -> bool:
    """Whether a rule is true; a rule that cannot be evaluated is false."""
    return _program(rule).evaluate(dict(given)) == True  # noqa: E712 - celpy's own type of bool


def cel(value: Any, schema: Mapping[str, Any]) -> Any:
    """A value as a CEL value of the schema's type: a `number` is a double, also if it has no decimal point."""
    from celpy import celtypes, json_to_cel

    if isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties") or {}
        pairs = {celtypes.StringType(name): cel(inner, known.get(name, rest)) for name, inner in value.items()}
        return celtypes.MapType(pairs)
    if isinstance(value, list):
        return celtypes.ListType([cel(inner, schema.get("items", {})) for inner in value])
    if schema.get("type") == "number":
        return celtypes.DoubleType(value)
    return json_to_cel(value)
