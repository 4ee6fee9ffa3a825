"""Settings of the cluster file as command line flags: their names, units, bounds and words come from `cluster.spec`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from cluster.spec.about import Setting, flag_of, settings_of, shown_default
from cluster.spec.units import unit_of


def add_settings(parser: argparse.ArgumentParser, section: type, names: Iterable[str], **more: Any) -> None:
    """Add a flag for each named setting of a section. A flag that is not given is None: the file or the default wins.

    Args:
        parser: gets the flags.
        section: a dataclass of `cluster.spec.settings`.
        names: settings whose values are numbers or texts.
        more: for `add_argument`, such as `choices`.
    """
    settings = settings_of(section)
    for name in names:
        setting = settings[name]
        number = setting.kind in {int, float}
        shape: dict[str, Any] = {"type": setting.kind} if number else {}
        if "choices" not in more:
            shape["metavar"] = "N" if number else name.rpartition("_")[2].upper()
        repeatable = " (repeatable)" if more.get("action") == "append" else ""
        parser.add_argument(flag_of(name), help=help_of(setting) + repeatable, **shape, **more)


def help_of(setting: Setting) -> str:
    """The setting's own words, with its unit and its default: ``largest request body (bytes; default 33554432)``."""
    text, default = setting.about.text.rstrip("."), shown_default(setting)
    said = "; ".join(part for part in (unit_of(setting.name), f"default {default}" if default else "") if part)
    return f"{text[0].lower()}{text[1:]}{f' ({said})' if said else ''}".replace("%", "%%")
