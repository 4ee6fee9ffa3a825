"""The controller's kept log: what it was told and what it decided, one JSON object a line. A shell.

A line is one event with what came of it (`goodput.decisionlog`), when in Unix time, and whose controller's it is. One
with `began` says what a new controller was made with; from there on the same events give the same decisions (`baton
plan --replay-decisions`). A file that is full becomes ``NAME.1``; a disk that is full costs lines, never a decision.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from goodput.decision import Effect, Event
from goodput.decisionlog import encode

logger = logging.getLogger("baton.controller")

BYTES_MAX: Final = 64 << 20
"""Of one file; two are kept. A look at ten instances has 3 KB: some 30 hours at one look in 5 s."""

_UNIX_TIME: Final = time.time  # noqa: TID251 - people read the log beside others


class Line(NamedTuple):
    """One line of a log."""

    at: float
    """Unix time."""
    model: str
    raw: bytes
    began: Mapping[str, Any] | None
    """What a new controller was made with; None: the line is an event."""
    effects: tuple[tuple[str, dict[str, Any]], ...]
    """What came of the event: kind and fields of each."""


class Journal:
    """Of one controller process."""

    def __init__(self, path: Path, made_with: Mapping[str, Any]) -> None:
        """`made_with`: what its first line says, as JSON would have it."""
        self.path: Final = path
        self._made_with = made_with
        self._dropped = 0
        self._begun = False

    def begin(self, made_with: Mapping[str, Any]) -> None:
        """The controller goes by other things from now on: another line says which."""
        self._made_with, self._begun = made_with, False

    def add(self, model: str, now: float, event: Event, effects: tuple[Effect, ...]) -> None:
        """One event of the controller of `model`, and what came of it. `now` on the controller's clock."""
        head = msgspec.json.encode({"at": round(_UNIX_TIME(), 3), "model": model})
        try:
            self._write(head[:-1] + b"," + encode(now, event, effects)[1:])
        except (OSError, TypeError, ValueError) as error:  # whatever is wrong with a line, the fleet needs its size
            self._dropped += 1
            if self._dropped == 1:
                logger.warning("the scaling log %s cannot be written (%s); scaling goes on", self.path, error)

    def _write(self, line: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > BYTES_MAX:
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        first = b""
        if not self._begun:
            first = msgspec.json.encode({"at": round(_UNIX_TIME(), 3), "began": self._made_with}) + b"\n"
            self._begun = True
        with self.path.open("ab") as file:
            file.write(first + line + b"\n")


def lines(path: Path) -> Iterator[Line]:
    """The lines of a log, the older file first; a line that is cut off, or that no controller wrote, is left out.

    Raises:
        OSError: the file cannot be read.
    """
    older = path.with_name(f"{path.name}.1")
    for each in (older, path) if older.exists() else (path,):
        with each.open("rb") as file:
            yield from filter(None, map(_line, file))


def _line(raw: bytes) -> Line | None:
    try:
        found = msgspec.json.decode(raw)
        at, began = float(found["at"]), found.get("began")
        if began is not None:
            return Line(at, "", raw, dict(began), ())
        return Line(at, str(found["model"]), raw, None, tuple((kind, dict(said)) for kind, said in found["effects"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
