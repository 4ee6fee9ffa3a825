"""Problems of a cluster file, as data: place, field, value, reason, and what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

FieldPath = tuple[str | int, ...]
"""Where a value stands: ``("models", 0, "pools", "prefill", "min")``."""

VALUE_CHARS_MAX = 60
"""Longest piece of a value that a message shows: enough to recognise the value."""

_WORD = re.compile(r"[A-Za-z0-9_-]+")


class Severity(StrEnum):
    """An error keeps the cluster from starting; a warning does not."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rule has found: a problem that has no line number yet."""

    path: FieldPath
    message: str
    fix: str
    uses: tuple[FieldPath, ...] = ()
    """Other values that the finding depends on. If one of them could not be read, the finding is dropped."""
    severity: Severity = Severity.ERROR
    if_written: bool = False
    """Whether the finding counts only if the file itself has the value: a default is no problem then."""
    value: str | None = None
    """The value to show instead of the file's own text, which is a secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing in the file that is wrong, or looks wrong."""

    file: str
    line: int
    """Counted from 1."""
    column: int
    """Counted from 1."""
    field: str
    """As written in code: ``models[0].pools.prefill.min``; empty for the file as a whole."""
    value: str
    """As written in the file, shortened; ``***`` for a secret; empty if there is no value."""
    message: str
    fix: str
    severity: Severity = Severity.ERROR

    def __str__(self) -> str:
        field = f"{self.field}: " if self.field else ""
        value = f" ({self.value})" if self.value else ""
        return f"{self.file}:{self.line}:{self.column}: {self.severity}: {field}{self.message}{value} → {self.fix}"

    def as_json(self) -> dict[str, Any]:
        """The problem for programs."""
        return {
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "severity": self.severity.value,
            "field": self.field,
            "value": self.value,
            "message": self.message,
            "fix": self.fix,
        }


def shown_path(path: FieldPath) -> str:
    """``("slo", "a b", 0)`` -> ``slo["a b"][0]``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _WORD.fullmatch(part):
            text += f".{part}" if text else part
        else:
            text += f'["{printable(part)}"]'
    return text


def printable(text: str) -> str:
    """A text of the file on one line: short, and without characters that move a terminal's cursor."""
    clean = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[: VALUE_CHARS_MAX + 1])
    return clean if len(text) <= VALUE_CHARS_MAX else clean[: VALUE_CHARS_MAX - 1] + "…"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant; None if no known word is near."""
    choices = {each.lower(): each for each in known}
    found = difflib.get_close_matches(word.lower()[:VALUE_CHARS_MAX], choices, n=1, cutoff=0.6)
    return choices[found[0]] if found else None


def quoted(words: Iterable[str]) -> str:
    """The words joined by commas, each as code."""
    return ", ".join(f"`{word}`" for word in words)
