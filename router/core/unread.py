"""What is known of a field that is too large to be built: its JSON as it came, and what sort of value it is. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec


class Sort(StrEnum):
    """Sorts of values that are told apart."""

    TEXT = "a text"
    IDS = "a list of whole numbers"
    LIST = "another list"
    OTHER = "an object, a number or a word"


class Unread:
    """A field of a large body that is not built. True in a condition: it is larger than any neutral value."""

    __slots__ = ("count", "raw", "sort", "values")

    def __init__(self, raw: memoryview, sort: Sort, values: int, count: int = 0) -> None:
        """A field that stays as it came.

        Args:
            raw: its JSON.
            sort: of `IDS`, `raw` is the list of numbers itself, also where the client put it into a list of one.
            values: objects, arrays, texts and commas of the whole body: no more are in here.
            count: of `IDS`, how many.
        """
        self.raw: Final = raw
        self.sort: Final = sort
        self.values: Final = values
        self.count: Final = count


def beginning(raw: memoryview, limit: int) -> bytes:
    """The first bytes of what a JSON text says, as UTF-8: `limit` at most, fewer where it has escapes.

    Exact as far as it goes: a text begins with the same bytes whichever way it is read. `raw` begins with its quote.
    """
    if len(raw) <= limit:
        return _said(bytes(raw))
    cut = bytes(raw[:limit])
    for fewer in range(_CUT_BYTES_MAX):
        try:
            return _said(cut[: limit - fewer] + b'"')
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue  # within a character, an escape or a pair of them
    return b""


_CUT_BYTES_MAX: Final = 12
"""A pair of escapes has as many bytes."""


def _said(text: bytes) -> bytes:
    return msgspec.json.decode(text, type=str).encode(errors="surrogatepass")
