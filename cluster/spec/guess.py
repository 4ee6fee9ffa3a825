"""Guesses the intended key or value for a wrong one, and how to write it. Pure; it only makes messages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, get_args, get_origin

from cluster.spec import units
from cluster.spec.about import ENV_NAME, Setting, is_section, settings_of
from cluster.spec.problems import FieldPath, nearest, printable, quoted
from cluster.spec.settings import Model, Pool, Shape, SloClass, Spec

_KINDS = {bool: "`true` or `false`", int: "a whole number", float: "a number", str: "a text"}

_SHORT = {Pool: "start", Shape: "tp", Model: "name", SloClass: "ttft_ms"}
"""The setting that is meant when a section is given as one plain value."""

_EXAMPLES = {
    "models": "models: [{name: Qwen/Qwen3-0.6B}]",
    "name": "name: Qwen/Qwen3-0.6B",
    "role": "role: decode",
}
"""How to write required settings."""

_KUBERNETES = frozenset({"apiVersion", "kind", "metadata", "spec", "status"})
_WORKLOADS = frozenset({"parts", "seed"})
"""Keys of the file of `baton plan --workload`."""

_UNDER_SPEC = "this is a Kubernetes resource: lint what stands under its `spec:`"


_FILES = {
    "key_file": "write `key_file: FILE`; a key that has stood here is known: replace it with `baton key new`",
    "password_file": "write `password_file: FILE`; a password that has stood here is known: replace it",
}
"""What to write where a secret stands in place of the file that holds it."""


@dataclass(frozen=True, slots=True)
class Guess:
    """The message for an unknown key."""

    message: str
    fix: str
    meant: str | None = None
    """The known key that was meant, if it is certain."""


def unknown_key(section: type, key: str, value: str) -> Guess:
    """The message for `key`, which `section` does not know. `value` is as the file shows it, ``…`` for a container."""
    known = settings_of(section)
    if section is Spec and key in _KUBERNETES:
        return Guess("no key of a cluster file", _UNDER_SPEC, "models")
    if section is Spec and key in _WORKLOADS:
        return Guess("no key of a cluster file", "this is a workload file: give it to `baton plan --workload`")
    if (right := units.meant(key, known)) is not None:
        return _wrong_unit(key, right, value, known[right])
    word = units.normal(key)
    for name, setting in known.items():
        if word == name or word in setting.about.aka:
            return Guess("unknown key", _FILES.get(name, f"write `{name}`"), name)
        if (right := units.meant(key, [other for other in setting.about.aka if units.unit_of(other)])) is not None:
            return _wrong_unit(key, name, value, setting)
    for name, setting in known.items():
        inner = _below(setting, word)
        if inner is not None:
            shown = "{…}" if is_section(inner.kind) else value
            fix = f"write `{name}: {{{inner.name}: {shown}}}`"
            return Guess(f"unknown key here; it belongs into `{name}`", fix)
    for name, setting in known.items():
        for outer in settings_of(setting.kind).values() if is_section(setting.kind) else ():
            if (inner := _below(outer, word)) is not None:
                fix = f"write `{name}: {{{outer.name}: {{{inner.name}: …}}}}`"
                return Guess(f"unknown key here; it belongs into a section of `{name}`", fix)
    for name, setting in known.items():
        if (entry := _in_entries(setting, word)) is not None:
            shown = "{…}" if is_section(entry.kind) else value
            fix = f"write `{name}: [{{name: …, {entry.name}: {shown}}}]`"
            return Guess(f"unknown key here; it belongs into an entry of `{name}`", fix)
    meant = {
        **{other: name for name, each in known.items() for other in each.about.aka},
        **{name: name for name in known},
    }
    near = nearest(word, meant)
    if near is not None:
        return Guess("unknown key", f"did you mean `{meant[near]}`?", meant[near])
    return Guess("unknown key", f"remove it; known here: {quoted(known)}")


def _wrong_unit(key: str, right: str, value: str, setting: Setting) -> Guess:
    unit = units.unit_of(right)
    number = units.converted(value.strip('"'), right, key)
    said = units.spelling(units.normal(key)).unit
    message = f"wrong unit, `{right}` is in {unit}" if said and said != unit else f"no unit, `{right}` is in {unit}"
    if units.spelling(right).unit == said:  # the key is right but for its spelling, or is another word for the setting
        message = "unknown key"
    return Guess(message, f"write `{right}: {number or '…'}`", setting.name)


def _below(setting: Setting, word: str) -> Setting | None:
    """The setting named `word`, or with that alias, inside the section `setting`; None: there is none."""
    if not is_section(setting.kind):
        return None
    return next((each for name, each in settings_of(setting.kind).items() if word in (name, *each.about.aka)), None)


def _in_entries(setting: Setting, word: str) -> Setting | None:
    """The optional setting named `word` inside the sections of the list `setting`; None: there is none."""
    if get_origin(setting.kind) is not tuple or not is_section(section := get_args(setting.kind)[0]):
        return None
    found = settings_of(section).get(word)
    return None if found is None or found.required else found


def a_kind(kind: Any) -> str:
    """``int`` -> ``a whole number``."""
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return f"one of {quoted(each.value for each in kind)}"
    return _KINDS.get(kind, "a text")


def as_number(setting: Setting, text: str) -> str:
    """How to write a number that was written with a unit, in quotes, or with separators."""
    number = units.converted(text, setting.name)
    if number is not None and setting.about.at_most == 1 and "%" not in text and float(number) > 1:
        number = units.converted(f"{text}%", setting.name)
    if number is None:
        return example_value(setting)
    return as_whole(setting, float(number)) if setting.kind is int else f"write `{setting.name}: {number}`"


def as_whole(setting: Setting, number: float) -> str:
    """How to write a number that must be a whole one, and within the setting's bounds."""
    said = setting.about
    number = number if said.at_most is None else min(number, said.at_most)
    number = number if said.at_least is None else max(number, said.at_least)
    return f"write `{setting.name}: {units.shown(number, whole=True)}`"


def example_value(setting: Setting) -> str:
    """An example value of this setting."""
    kind = setting.kind
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return f"write one of {quoted(each.value for each in kind)}"
    unit = units.unit_of(setting.name)
    what = f"{_KINDS.get(kind, 'a text')}{f' of {unit}' if unit else ''}"
    return f"write {what}" if setting.required else f"write {what}, or leave it out"


def example(name: str) -> str:
    """How to write a required setting."""
    return f"write `{_EXAMPLES.get(name, f'{name}: …')}`"


def as_mapping(section: type, path: FieldPath, value: str) -> str:
    """How to write a section that was given as another kind of value."""
    if not path:
        return f"begin with `{_EXAMPLES['models']}`"
    short, known = _SHORT.get(section), settings_of(section)
    first = next((name for name, each in known.items() if each.required), next(iter(known)))
    inner = f"{short}: {value}" if short and not value.startswith(("[", "{")) else _EXAMPLES.get(first, f"{first}: …")
    return f"write `- {inner}`" if isinstance(path[-1], int) else f"write `{path[-1]}: {{{inner}}}`"


def as_list(setting: Setting, value: str) -> str:
    """How to write a list that was given as another kind of value."""
    if setting.name != "models":
        return f"write `{setting.name}: [{value.strip('{}[]…') or 'NAME'}]`"
    if value.startswith("{"):
        return "write each model as `- name: NAME`"
    return f"write `models: [{{name: {value}}}]`" if value else example("models")


def as_name(pattern: re.Pattern[str], key: str) -> str:
    """An allowed name that is close to `key`."""
    if pattern is ENV_NAME:
        return "write letters, digits and `_`, no digit first"
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", printable(key)).strip("-._")[:63]
    return f"write `{clean}`" if pattern.fullmatch(clean) else "write letters, digits, `.`, `_`, `-`, up to 63"
