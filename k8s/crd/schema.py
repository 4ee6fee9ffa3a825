"""Sections of settings as structural OpenAPI schemas: types, bounds, choices and texts, all from `cluster/spec`. Pure.

No field is nullable and none has a default. A setting that is left out stays left out, so a later default of Baton's
applies to old resources too, and `has()` in a rule is true only for settings that the user wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, get_args, get_origin

from cluster.spec.about import Setting, is_section, settings_of
from k8s.crd.rules import RULES

MAP_MAX: Final = 256
"""Most tenants, classes, types of GPU and variables in one resource: API objects are small (etcd takes 1.5 MiB)."""
LIST_MAX: Final = 64
"""Most models, aliases, tenants of a model, classes of a tenant."""
TEXT_MAX: Final = 1024
"""Characters of one text."""
ROOT_MAPS: Final = {"slo": 32, "hardware": 32, "pools": 192}
"""Smaller bounds for mappings that rules iterate over, or that are never long; 192: three pools of `LIST_MAX`
models."""


def section_schema(section: type) -> dict[str, Any]:
    """The schema of one section and the sections in it."""
    settings = settings_of(section)
    schema: dict[str, Any] = {
        "type": "object",
        "description": _summary(section),
        "properties": {name: _setting(setting) for name, setting in settings.items()},
    }
    if required := [name for name, setting in settings.items() if setting.required]:
        schema["required"] = required
    if rules := RULES.get(section):
        schema["x-kubernetes-validations"] = [rule.as_schema() for rule in rules]
    return schema


def _summary(section: type) -> str:
    return " ".join((section.__doc__ or "").partition("\n\n")[0].split())


def _setting(setting: Setting) -> dict[str, Any]:
    text = setting.about.text
    why = "" if setting.required else f" Default: {setting.about.why}."
    return _value(setting, setting.kind) | {"description": f"{text}{why}"}


def _value(setting: Setting, kind: Any) -> dict[str, Any]:
    origin = get_origin(kind)
    if is_section(kind):
        return section_schema(kind)
    if origin is tuple:
        items = _value(setting, get_args(kind)[0])
        return {"type": "array", "maxItems": LIST_MAX, "items": items} | _least(setting)
    if origin is not None:
        return _mapping(setting, get_args(kind)[1])
    if issubclass(kind, StrEnum):
        return {"type": "string", "enum": [each.value for each in kind]}
    if kind is bool:
        return {"type": "boolean"}
    return _text(setting) if kind is str else _number(setting, kind)


def _least(setting: Setting) -> dict[str, Any]:
    return {"minItems": 1} if setting.required or setting.about.not_empty else {}


def _mapping(setting: Setting, kind: Any) -> dict[str, Any]:
    if kind is Any or kind is str:  # `env: {RATIO: 1.5, FLAG: true}` is right in a file: lint decides
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    most = ROOT_MAPS.get(setting.name, MAP_MAX)
    return {"type": "object", "maxProperties": most, "additionalProperties": _value(setting, kind)}


def _text(setting: Setting) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": TEXT_MAX}
    if setting.about.form:
        schema["pattern"] = f"^({setting.about.form.pattern})$"
    return schema


def _number(setting: Setting, kind: Any) -> dict[str, Any]:
    said = setting.about
    schema: dict[str, Any] = {"type": "integer", "format": "int64"} if kind is int else {"type": "number"}
    if said.at_least is not None:
        schema["minimum"] = kind(said.at_least)
    if said.above is not None:
        schema |= {"minimum": kind(said.above), "exclusiveMinimum": True}
    if said.at_most is not None:
        schema["maximum"] = kind(said.at_most)
    return schema


def described(kind: str, text: str, **more: Any) -> dict[str, Any]:
    """A schema of one plain type, for fields that are not settings, such as those of a status."""
    return {"type": kind, "description": text, **more}


def properties(fields: Mapping[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    """An object with these fields."""
    return {"type": "object", "properties": dict(fields), **more}
