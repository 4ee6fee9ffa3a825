"""Headers of messages: found by a name of any case, and written so that no value can end a line. Pure."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from typing import Final

VALUE_CHARS_MAX: Final = 256
"""The limit of an engine's content type: vLLM's longest has 33."""

LINE_ENDS: Final = frozenset("\r\n\0")


class Headers(Mapping[str, str]):
    """A request's headers: names in lower case, found by any case. Of several with one name the first counts."""

    __slots__ = ("_found", "onward")

    def __init__(self) -> None:
        self._found: Final[dict[str, str]] = {}
        self.onward: tuple[dict[str, str], bytes] | None = None
        """The headers that go on to engines, also as lines, once computed. A client's next requests have the same."""

    def add(self, name: bytes, value: bytes) -> None:
        """Add one line of a head."""
        self._found.setdefault(name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape").strip())

    def drop(self, name: str) -> None:
        """Remove the header of this name (in lower case)."""
        self._found.pop(name, None)

    def __getitem__(self, name: str) -> str:
        return self._found[name.lower()]

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        """The header's value."""
        return self._found.get(name.lower(), default)

    def items(self) -> ItemsView[str, str]:
        """All headers."""
        return self._found.items()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def printable(value: str) -> str:
    """A peer's text as it may stand in a header of ours; empty if it is too long or not plain ASCII."""
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
