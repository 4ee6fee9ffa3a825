"""Instances of one make: whose legs were timed, and how long ago by the legs of the others. Pure.

An engine that looks slow gets no legs, so nothing would ever show that it is as fast as the others by now: its first
legs were timed while it started, or while other work took its CPU. An instance is believed for as many legs as it was
timed itself. Once each of the others has had so many since its last one, it is taken to be like them, step by step,
until a leg of its own says otherwise. So an instance that *is* slower is tried again in ever longer intervals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

BELIEVED_MIN, BELIEVED_MAX = 4, 200
"""Bounds of how many legs of others an instance's own ones are believed for. Chosen: fewer than the lower one are
chance; with the upper one a slow instance gets at most every two-hundredth of the others' legs in order to be tried."""

LEVEL_RATE: Final = 0.05
"""The weight of one leg in the level of a make, once there are more than twenty."""

NEARER: Final = 0.25
"""The part of its way to the others' level that an instance goes with each leg of theirs."""


class _Make:
    """The rows of one make."""

    __slots__ = ("cursor", "legs", "level", "rows")

    def __init__(self, rows: list[int], level: float, legs: int) -> None:
        self.rows: Final = rows
        self.level: float = level
        """The logarithm of their factor: a mean over the last legs, each with the factor of its instance."""
        self.legs: int = legs
        self.cursor: int = 0


class Siblings:
    """Of one kind of work: prompts, or decode steps."""

    __slots__ = ("_idle", "_make_of", "_makes")

    def __init__(self) -> None:
        self._makes: Final[dict[int, _Make]] = {}
        self._make_of: Final[dict[int, int]] = {}
        self._idle: Final[dict[int, int]] = {}
        """By row: legs that each of the others has had on average since the row's last one."""

    def look(self, rows: Mapping[int, Sequence[int]]) -> None:
        """The rows of all present instances, by make."""
        self._make_of.clear()
        for make in [each for each in self._makes if each not in rows]:
            del self._makes[make]
        for make, found in rows.items():
            known = self._makes.get(make)
            level, legs = (0.0, 0) if known is None else (known.level, known.legs)
            self._makes[make] = _Make(list(found), level, legs)
            for row in found:
                self._make_of[row] = make
        for row in [each for each in self._idle if each not in self._make_of]:
            del self._idle[row]

    def begin(self, row: int) -> None:
        """The row has another instance."""
        self._idle.pop(row, None)

    def timed(self, row: int, level: float) -> int:
        """A leg of this row was timed; `level`: the logarithm of the row's factor by now. Gives another row of its make
        to look at (`strays`), one after the other; -1: there is none.
        """
        self._idle[row] = 0
        make = self._makes.get(self._make_of.get(row, -1))
        if make is None or len(make.rows) < 2:
            return -1
        make.legs += 1
        make.level += max(LEVEL_RATE, 1.0 / make.legs) * (level - make.level)
        other = make.rows[make.cursor % len(make.rows)]
        make.cursor += 1
        if other == row:
            other = make.rows[make.cursor % len(make.rows)]
            make.cursor += 1
        self._idle[other] = self._idle.get(other, 0) + 1
        return other

    def strays(self, row: int, level: float, legs: float) -> float:
        """By what to multiply the row's factor, whose logarithm is `level`, after so many legs of its own; 1: it is
        believed as it is.
        """
        believed = min(BELIEVED_MAX, max(BELIEVED_MIN, legs))
        make = self._makes.get(self._make_of.get(row, -1))
        if make is None or self._idle.get(row, 0) <= believed:
            return 1.0
        return math.exp(NEARER * (make.level - level))
