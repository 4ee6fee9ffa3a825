"""What a setting says about itself: meaning, reason of its default, bounds. The reader checks it, the docs print it."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.spec.units import shown

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Names of tenants, classes and GPUs: they stand in headers, metrics and file names."""

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """One setting, as its author explains it."""

    text: str
    """What it is, in one sentence."""
    why: str
    """Why the default is what it is; for a required one, why it has none."""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    keys: re.Pattern[str] | None = None
    """The form of a mapping's keys."""
    form: re.Pattern[str] | None = None
    """The form of a text, if not every text will do."""
    not_empty: str = ""
    """Empty: the setting may be an empty list. Else what to write instead, for a list that seems to mean "nothing" when
    empty, and means "everything"."""
    aka: tuple[str, ...] = ()
    """Other names of the setting in this spelling, such as ``replicas`` for `start`. Used to guess an intended key."""
    coming: str = ""
    """The part of Baton that will act on the setting, if no part does yet; empty: the setting is in effect."""


def flag_of(name: str) -> str:
    """The command line flag of a setting: ``--body-bytes-max`` of `body_bytes_max`."""
    return f"--{name.replace('_', '-')}"


def broken_bound(said: About, number: float) -> str | None:
    """The bound of a setting that a number breaks, as in ``at least 1``; None: it breaks none."""
    if not abs(number) < math.inf:  # `nan` is not below a bound either
        return "a finite number"
    if said.at_least is not None and not number >= said.at_least:
        return f"at least {shown(said.at_least)}"
    if said.above is not None and not number > said.above:
        return f"above {shown(said.above)}"
    if said.at_most is not None and not number <= said.at_most:
        return f"at most {shown(said.at_most)}"
    return None


def about(**said: Any) -> dict[str, About]:
    """The `metadata` of a dataclass field."""
    return {"about": About(**said)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of a section, ready to be read, checked and printed."""

    name: str
    kind: Any
    """Its type, without None."""
    optional: bool
    """Whether None is one of its values."""
    required: bool
    default: Any
    about: About


@functools.cache
def settings_of(section: type) -> Mapping[str, Setting]:
    """The settings of a section (a dataclass), by name, in the order they are written down."""
    hints = typing.get_type_hints(section)
    return {each.name: _setting(each, hints[each.name]) for each in dataclasses.fields(section)}


def _setting(field: dataclasses.Field[Any], hint: Any) -> Setting:
    kinds = [hint]
    if isinstance(hint, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    missing = dataclasses.MISSING
    default = field.default if field.default_factory is missing else field.default_factory()
    return Setting(
        name=field.name,
        kind=kinds[0],
        optional=isinstance(hint, types.UnionType),
        required=default is missing,
        default=None if default is missing else default,
        about=field.metadata["about"],
    )


def is_section(kind: Any) -> bool:
    """Whether a type is a section with settings of its own."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def shown_default(setting: Setting) -> str:
    """The default as written in the file; empty if the default is empty or follows from the context."""
    value = setting.default
    if setting.required or value is None or is_section(type(value)) or value in ((), {}):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return shown(value) if isinstance(value, int | float) else str(value)
