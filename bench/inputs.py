"""The folder of real traces and measured profiles, which BATON_DATA names. The repository has none of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench import published

VARIABLE: Final = "BATON_DATA"


def folder(needed: Sequence[str] = ("traces",)) -> Path | None:
    """The folder, if it is named and everything `needed` (paths below it) is there."""
    return None if missing(needed) else Path(os.environ[VARIABLE])


def missing(needed: Sequence[str] = ("traces",)) -> list[str]:
    """Which of `needed` is not there."""
    root = os.environ.get(VARIABLE)
    return [path for path in needed if not root or not (Path(root) / path).exists()]


def required(bench: str, needed: Sequence[str] = ("traces",), *, told_in: str = "docs/benchmarks.md") -> Path:
    """The folder; SystemExit 2, with what to set, if it is missing."""
    found = folder(needed)
    if found is None:
        lacking = missing(needed)[0]
        published.say(f"{bench}: set {VARIABLE} to a folder that holds {lacking} ({told_in} says where from)")
        raise SystemExit(2)
    return found
