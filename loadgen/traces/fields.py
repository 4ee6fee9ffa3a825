"""Checks the values of one row. Whatever a row holds, the result is a value or a `RowFault` with the reason."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from loadgen.lengths import TOKENS_MAX

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
_SHOWN = 60


class RowFault(Exception):
    """A row cannot be used; the message is for people. Readers turn it into a `BadRow`."""


def shown(value: object) -> str:
    """The value for people: short, on one line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def number(value: Any, name: str) -> float:
    """A finite number, 0 or more, from JSON or from text."""
    written = value
    if isinstance(value, str):
        text = value.strip()
        if not text:
            raise RowFault(f"{name} is missing")
        if not _NUMBER.fullmatch(text):
            raise RowFault(f"{name} {shown(text)} is not a number")
        value = float(text)
    if value is None:
        raise RowFault(f"{name} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowFault(f"{name} {shown(value)} is not a number")
    try:
        found = float(value)
    except OverflowError:
        raise RowFault(f"{name} {shown(value)} is too large") from None
    if not math.isfinite(found):
        raise RowFault(f"{name} {shown(value)} is not finite")
    if found < 0:
        raise RowFault(f"{name} {shown(written)} is negative")
    return found


def count(value: Any, name: str) -> int:
    """A whole number of tokens, 0 to `TOKENS_MAX`: a larger one is a mark for a missing value, or another column's
    (`12.0` passes: some exports write counts so).
    """
    found = number(value, name)
    if found != int(found):
        raise RowFault(f"{name} {shown(value)} is not a whole number")
    if found > TOKENS_MAX:
        raise RowFault(f"{name} {shown(value)} is too large for a count of tokens (at most {TOKENS_MAX})")
    return int(found)


def ids(value: Any, name: str) -> tuple[int, ...]:
    """A list of block ids: whole numbers, 0 or more."""
    if not isinstance(value, list):
        raise RowFault(f"{name} is missing" if value is None else f"{name} {shown(value)} is not a list")
    if not all(type(each) is int and 0 <= each < 1 << 63 for each in value):
        wrong = next(each for each in value if not (type(each) is int and 0 <= each < 1 << 63))
        raise RowFault(f"{name} holds {shown(wrong)}, which is not an id (a whole number, 0 or more)")
    return tuple(value)


def blocks(value: Any, name: str, input_tokens: int, block_tokens: int) -> tuple[int, ...]:
    """Block ids that fit the prompt: at most as many as it has blocks of `block_tokens`; the last may be partial."""
    found = ids(value, name)
    room = -(-input_tokens // block_tokens)
    if len(found) > room:
        raise RowFault(f"{name} holds {len(found)} blocks, but {input_tokens} tokens make {room} of {block_tokens}")
    return found


def text(value: Any, name: str) -> str | None:
    """A name, or None if it is missing. Numbers become their text: traces write ids both ways.

    Printable characters only: names are shown, and one of them is sent as a header.
    """
    if value is None or value == "":
        return None
    if isinstance(value, str | int) and not isinstance(value, bool):
        if isinstance(value, str) and not value.isprintable():
            raise RowFault(f"{name} {shown(value)} holds characters that cannot be printed")
        return str(value)
    raise RowFault(f"{name} {shown(value)} is neither text nor a whole number")


def json_row(line: str) -> Mapping[str, Any]:
    """One line of JSONL as a mapping."""
    try:
        row = msgspec.json.decode(line.encode(errors="surrogateescape"))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RowFault(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise RowFault(f"{shown(row)} is not a JSON object")
    return row


def numbered(lines: Iterator[str] | Any) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1, without line ends and byte order mark; empty ones are left out."""
    for at, line in enumerate(lines, start=1):
        bare = line.strip("\r\n \t")
        if at == 1:
            bare = bare.removeprefix("\ufeff")
        if bare:
            yield at, bare


def cells(line: str) -> list[str]:
    """The cells of one CSV line. None of the formats quotes commas; quotes around a cell are taken off."""
    return [cell.strip().strip('"') for cell in line.split(",")]
