"""Reads files of entries that happen at given times: a JSON list of objects, or one object a line. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, TypeVar

from cluster.errors import UsageError

Entry = TypeVar("Entry")

SECONDS_MAX: Final = 1e9
"""The longest time in a file, about 30 years: nanoseconds of a run fit into 64 bits."""

_LISTED_MAX: Final = 12
"""The largest number of allowed values that an error names."""


def read_entries(text: str, what: str, read: Callable[[Mapping[str, Any]], Entry]) -> list[Entry]:
    """The entries in the order of the file; blank lines are none.

    Args:
        text: the file.
        what: the name of one entry, for errors.
        read: makes an entry of its fields; raises ValueError, which names the field, its value and what fits.

    Raises:
        UsageError: the text is no JSON, or an entry is wrong; names the entry and the reason.
    """
    try:
        listed = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else list(map(json.loads, filter(str.strip, text.splitlines())))
        )
    except ValueError as error:
        raise UsageError(f"not JSON: {error}") from None
    except RecursionError:
        raise UsageError(f"not a list of {what}s: nested too deep") from None
    found = []
    for number, fields in enumerate(listed, 1):
        if not isinstance(fields, dict):
            raise UsageError(f"{what} {number}: {fields!r:.60} is no object")
        try:
            found.append(read(fields))
        except ValueError as error:
            raise UsageError(f"{what} {number}: {error}") from None
    return found


def known_only(fields: Iterable[str], known: Collection[str], what: str) -> None:
    """Raises ValueError: there is a field that `what` does not have."""
    for name in fields:
        if name not in known:
            raise ValueError(f"{name!r:.60} is no field of a {what}: it has {', '.join(sorted(known))}")


def seconds(name: str, value: object, *, above_0: bool = False) -> float:
    """This field's seconds. Raises ValueError."""
    number = _number(value)
    if number is None or not (number > 0 if above_0 else number >= 0) or number > SECONDS_MAX:
        least = "above 0" if above_0 else "0 or more"
        raise ValueError(f"{name} is {value!r:.60}: must be a number of seconds, {least} and up to {SECONDS_MAX:,.0f}")
    return number


def share(name: str, value: object) -> float:
    """This field's share of a whole, above 0. Raises ValueError."""
    number = _number(value)
    if number is None or not 0 < number <= 1:
        raise ValueError(f"{name} is {value!r:.60}: must be a number above 0 and up to 1")
    return number


def count(name: str, value: object, most: int) -> int:
    """This field's whole number from 1 on. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name} is {value!r:.60}: must be a whole number from 1 to {most:,}")
    return value


def one_of(name: str, value: object, known: Collection[str]) -> str:
    """This field's value, one of these. Raises ValueError."""
    if not isinstance(value, str) or value not in known:
        listed = list(known)
        more = ", …" if len(listed) > _LISTED_MAX else ""
        raise ValueError(f"{name} is {value!r:.60}: must be one of {', '.join(listed[:_LISTED_MAX])}{more}")
    return value


def _number(value: object) -> float | None:
    """The value as a finite number; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
