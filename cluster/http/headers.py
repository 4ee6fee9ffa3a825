"""Heads of messages: names found by any case, and lines written so that nothing in them can end a line. Pure."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from typing import Final

VALUE_CHARS_MAX: Final = 256
"""Of what an engine says about an answer's type: vLLM's longest has 33."""

LINE_ENDS: Final = frozenset("\r\n\0")


class Headers(Mapping[str, str]):
    """A request's headers: names in lower case, found by any. Of several with one name the first counts."""

    __slots__ = ("_found", "onward")

    def __init__(self) -> None:
        self._found: Final[dict[str, str]] = {}
        self.onward: tuple[dict[str, str], bytes] | None = None
        """What of them goes on to engines, also as lines, once known. A client's next requests have the same."""

    def add(self, name: bytes, value: bytes) -> None:
        """One line of a head."""
        self._found.setdefault(name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape").strip())

    def drop(self, name: str) -> None:
        """Without this one (in lower case)."""
        self._found.pop(name, None)

    def __getitem__(self, name: str) -> str:
        return self._found[name.lower()]

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        """Its value."""
        return self._found.get(name.lower(), default)

    def items(self) -> ItemsView[str, str]:
        """All of them."""
        return self._found.items()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def printable(value: str) -> str:
    """A peer's word as it may stand in a header of ours: empty, where it is too long or not plain ASCII."""
    return value if len(value) <= VALUE_CHARS_MAX and value.isascii() and value.isprintable() else ""


def lines(headers: Mapping[str, str]) -> bytes:
    """These headers as lines of a head.

    Raises:
        ValueError: one of them would end its line.
    """
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if text.count("\n") != len(headers) or text.count("\r") != len(headers) or "\0" in text:
        raise ValueError("a header with a line end in it")
    return text.encode("utf-8", "surrogateescape")
