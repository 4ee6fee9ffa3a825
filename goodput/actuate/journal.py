"""The controller's kept log: what it was told and what it decided, one JSON object a line. A shell.

A line is one event with its effects (`goodput.decisionlog`), its Unix time, and the model whose controller had it. A
line with `began` has the settings of a new controller; from there on the same events give the same decisions (`baton
plan --replay-decisions`), up to a line with `lost`: it stands where lines are missing. Earlier versions wrote `began`
after edits of the targets, too. A full file becomes ``NAME.1``; a full disk loses lines, never a decision.
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
"""Most bytes of one file; two files are kept. A look at ten instances takes 3 KB: a file holds 30 hours at one look in
5 s."""

_UNIX_TIME: Final = time.time  # noqa: TID251 - people read the log beside others


class Line(NamedTuple):
    """One line of a log."""

    at: float
    """Unix time."""
    model: str
    raw: bytes
    began: Mapping[str, Any] | None
    """Settings of a new controller; None: the line is an event."""
    effects: tuple[tuple[str, dict[str, Any]], ...]
    """Effects of the event: kind and fields of each."""
    lost: int = 0
    """How many events are missing here; 0: the line is something else."""
    event: str = ""
    """The event's kind; empty: the line is something else."""


class Journal:
    """Writes the log of one controller process."""

    def __init__(self, path: Path, made_with: Mapping[str, Any]) -> None:
        """`made_with`: the controller's settings for the first line, as JSON values."""
        self.path: Final = path
        self._made_with: Final = made_with
        self._begun = False
        """Whether the file has the controller's `began` line."""
        self._lost = 0
        """Events since the last line that was written."""

    def add(self, model: str, now: float, event: Event, effects: tuple[Effect, ...]) -> None:
        """Write one event of the controller of `model` and its effects. `now`: seconds of the controller's clock."""
        head = msgspec.json.encode({"at": round(_UNIX_TIME(), 3), "model": model})
        try:
            self._write(head[:-1] + b"," + encode(now, event, effects)[1:])
        except (OSError, TypeError, ValueError) as error:  # a line that cannot be written must not stop scaling
            self._lost += 1
            if self._lost == 1:
                logger.warning("the scaling log %s cannot be written (%s); scaling goes on", self.path, error)
            return
        if self._lost:
            logger.warning("the scaling log %s is written again; %d events are missing in it", self.path, self._lost)
        self._begun, self._lost = True, 0

    def _write(self, line: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > BYTES_MAX:
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        at = round(_UNIX_TIME(), 3)
        before = [b""] if self._lost else []  # the last line may be cut off
        before += [] if self._begun else [msgspec.json.encode({"at": at, "began": self._made_with})]
        before += [msgspec.json.encode({"at": at, "lost": self._lost})] if self._lost else []
        with self.path.open("ab") as file:
            file.write(b"\n".join([*before, line, b""]))


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
        at, began, lost = float(found["at"]), found.get("began"), int(found.get("lost", 0))
        if lost:
            return Line(at, "", raw, None, (), lost)
        if began is not None:
            return Line(at, "", raw, dict(began), ())
        effects = tuple((kind, dict(said)) for kind, said in found["effects"])
        return Line(at, str(found["model"]), raw, None, effects, event=str(found.get("event", "")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
