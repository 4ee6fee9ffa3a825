"""Level shifts: when observations in a row show that an instance has become faster or slower. Pure."""

from __future__ import annotations

import math
from typing import Final

FAR: Final = math.log(2.0)
"""The logarithm of observed over predicted from which on an observation may tell of a shift."""

CONFIRMED: Final = 4
"""Observations that confirm the first one. At the usual rate of learning an instance that was four times slower for
half a minute took another half minute to be trusted again, with one answer at a time."""


class LevelShift:
    """Observations in a row that are all far longer than predicted, or all far shorter: a shift, not chance.

    Answers that were open at one moment tell of one pause together, however many they are. So only those count that
    began after the first of the row had ended.
    """

    __slots__ = ("_begun_s", "_count", "_side", "_total")

    def __init__(self) -> None:
        self._side = 0
        self._count = 0
        self._total = 0.0
        """Of the logarithms of those that confirm."""
        self._begun_s = 0.0
        """When the first of the row had ended."""

    @property
    def times(self) -> float:
        """How many times longer than predicted those took that confirmed the last shift."""
        return math.exp(self._total / CONFIRMED)

    def seen(self, off: float, began_s: float = 0.0, ended_s: float = 0.0) -> bool:
        """Take one observation; whether a shift is certain by it.

        Args:
            off: the logarithm of observed over predicted.
            began_s: when what was observed began, and
            ended_s: when it ended; seconds of one clock. Both left out: observations come one after the other.
        """
        side = 1 if off > FAR else -1 if off < -FAR else 0
        if not side or side != self._side:
            self._side, self._count, self._total, self._begun_s = side, 0, 0.0, ended_s
            return False
        if began_s < self._begun_s:
            return False
        self._count += 1
        self._total += off
        if self._count < CONFIRMED:
            return False
        self._side = 0
        return True
