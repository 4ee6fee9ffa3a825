"""A field that is too large to parse: its raw JSON, and the sort of its value. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec


class Sort(StrEnum):
    """The sorts of values that are distinguished."""

    TEXT = "a text"
    IDS = "a list of whole numbers"
    LIST = "another list"
    OTHER = "an object, a number or a word"


class Unread:
    """A field of a large body that is not parsed. It is true in a condition, as no neutral value is so large."""

    __slots__ = ("count", "raw", "sort", "values")

    def __init__(self, raw: memoryview, sort: Sort, values: int, count: int = 0) -> None:
        """Keep a field unparsed.

        Args:
            raw: the field's JSON.
            sort: the sort of the value. For `IDS`, `raw` is the list of numbers itself, also if the client wrapped it
                in a list of one.
            values: the number of objects, arrays, texts and commas in the whole body: an upper limit for this field.
            count: for `IDS`, the number of ids.
        """
        self.raw: Final = raw
        self.sort: Final = sort
        self.values: Final = values
        self.count: Final = count


def beginning(raw: memoryview, limit: int) -> bytes:
    """The first bytes of a JSON text as UTF-8: at most `limit`, fewer if it has escapes.

    `raw` begins with the text's quote. The decoded text begins with exactly these bytes: a character or an escape that
    the limit cuts is left out.
    """
    if len(raw) <= limit:
        return _said(bytes(raw))
    cut = bytes(raw[:limit])
    for fewer in range(_CUT_BYTES_MAX):
        try:
            return _said(cut[: limit - fewer] + b'"')
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue  # the cut is within a character, an escape or a pair of escapes
    return b""


_CUT_BYTES_MAX: Final = 12
"""The length of a pair of escapes."""


def _said(text: bytes) -> bytes:
    return msgspec.json.decode(text, type=str).encode(errors="surrogatepass")
