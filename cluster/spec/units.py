"""Units at the end of names, and the intended name for a wrong unit: ``ttft_s: 0.5`` -> ``ttft_ms: 500``. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_TIME = {
    **dict.fromkeys(("us", "usec", "microseconds"), 1e-6),
    **dict.fromkeys(("ms", "msec", "millis", "milliseconds"), 1e-3),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3600.0),
}
_BYTES = {
    **dict.fromkeys(("b", "byte", "bytes"), 1.0),
    **{f"{prefix}b": 1000.0**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024.0**power for power, prefix in enumerate("kmgt", 1)},
}
_POWER = {**dict.fromkeys(("w", "watt", "watts"), 1.0), "kw": 1000.0, "mw": 1e6}
_KINDS = (_TIME, _BYTES, _POWER)

SPELLED_OUT = {
    "us": "microseconds",
    "ms": "milliseconds",
    "s": "seconds",
    "bytes": "bytes",
    "gib": "GiB",
    "w": "watts",
    "hour": "hour",
}
"""The units that Baton's own names end in."""

_QUANTITY = re.compile(r"\s*([-+]?[0-9_]{1,18}(?:\.[0-9]{1,18})?(?:[eE][-+]?[0-9]{1,2})?)\s*([A-Za-z%]*)\s*")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_NO_UNIT = ("per", "hour")


@dataclass(frozen=True, slots=True)
class Spelling:
    """A name taken apart: ``body_bytes_max`` is ``("body", "max")`` in ``bytes``."""

    stem: tuple[str, ...]
    unit: str


def normal(key: str) -> str:
    """``ttftMs``, ``ttft-ms``, ``TTFT_MS`` -> ``ttft_ms``."""
    return _HUMP.sub("_", key).replace("-", "_").replace(" ", "_").lower()


def spelling(name: str) -> Spelling:
    """The stem and the unit of a normal name; the unit is empty if the name has none."""
    words = [word for word in name.split("_") if word]
    if tuple(words[-2:]) == _NO_UNIT:  # a price per hour is no time
        return Spelling(tuple(words), "")
    for at in range(len(words) - 1, 0, -1):
        if words[at] == "min" and at == len(words) - 1:  # `x_min` is a least value more often than minutes
            continue
        if any(words[at] in units for units in _KINDS):
            return Spelling((*words[:at], *words[at + 1 :]), words[at])
    return Spelling(tuple(words), "")


def unit_of(name: str) -> str:
    """The unit in one of Baton's own names, spelled out; empty for a count or a share."""
    return SPELLED_OUT.get(spelling(name).unit, "")


def meant(key: str, known: Iterable[str]) -> str | None:
    """The known name that differs from `key` only in its unit."""
    said = spelling(normal(key))
    for name in known:
        ours = spelling(name)
        if ours.unit and ours.stem == said.stem and (not said.unit or _same_kind(said.unit, ours.unit)):
            return name
    return None


def _same_kind(one: str, other: str) -> bool:
    return any(one in units and other in units for units in _KINDS)


def converted(value: str, name: str, key: str = "") -> str | None:
    """`value` as it should be written for the field `name`; None if it is no quantity of that kind.

    The unit is the value's own (``500ms``), else the one in the wrong `key` (``ttft_s``), else that of `name`.
    """
    found = _QUANTITY.fullmatch(value)
    ours = spelling(name).unit
    if found is None:
        return None
    number = float(found[1].replace("_", ""))
    unit = found[2].lower() or spelling(normal(key)).unit or ours
    if unit == "%":
        return shown(number / 100)
    if not unit or not ours:
        return shown(number) if not found[2] else None
    for units in _KINDS:
        if unit in units and ours in units:
            return shown(number * units[unit] / units[ours], whole=ours == "bytes")
    return None


def shown(number: float, *, whole: bool = False) -> str:
    """A number as people write it: no exponent, no trailing zeros; three decimals from 1 on, six below, none from 1e6.

    `whole`: round to a whole number.
    """
    if whole or abs(number - round(number)) < 1e-9 * max(1.0, abs(number)):
        return str(round(number))
    if abs(number) >= 1e6:
        return str(round(number))
    return f"{number:.{3 if abs(number) >= 1 else 6}f}".rstrip("0").rstrip(".")
