"""Headers of messages: found by name in any case, and written so that no value can end its line. Pure."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from typing import Final

VALUE_CHARS_MAX: Final = 256
"""Limit for the value of a header that is passed on, such as an answer's type: vLLM's longest has 33 characters."""


class Headers(Mapping[str, str]):
    """The headers of a request, found by name in any case. Of several headers with one name the first counts."""

    __slots__ = ("_found", "onward")

    def __init__(self) -> None:
        self._found: Final[dict[str, str]] = {}
        self.onward: tuple[dict[str, str], bytes] | None = None
        """The headers that go on to engines, and the same as lines of a head; None: not computed yet. The client's next
        requests with the same head use both again."""

    def add(self, name: bytes, value: bytes) -> None:
        """Add one header."""
        self._found.setdefault(name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape").strip())

    def drop(self, name: str) -> None:
        """Remove this header (in lower case)."""
        self._found.pop(name, None)

    def __getitem__(self, name: str) -> str:
        return self._found[name.lower()]

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        """The value of a header."""
        return self._found.get(name.lower(), default)

    def items(self) -> ItemsView[str, str]:
        """All headers, by lower-case name."""
        return self._found.items()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def printable(value: str, chars_max: int = VALUE_CHARS_MAX) -> str:
    """A peer's text, safe for a header of ours; empty: it is too long or not plain ASCII."""
    return value if len(value) <= chars_max and value.isascii() and value.isprintable() else ""


def encoding(value: str) -> str:
    """The encodings that a Content-Encoding header names besides ``identity``; empty: the answer is plain."""
    return ", ".join(
        word for word in (each.strip() for each in value.split(",")) if word.lower() not in {"", "identity"}
    )


def lines(headers: Mapping[str, str]) -> bytes:
    """Write these headers as lines of a head.

    Raises:
        ValueError: a name or value has a line end in it.
    """
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if text.count("\n") != len(headers) or text.count("\r") != len(headers) or "\0" in text:
        raise ValueError("a header with a line end in it")
    return text.encode("utf-8", "surrogateescape")
