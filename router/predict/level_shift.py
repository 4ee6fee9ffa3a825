"""Level shifts: when observations in a row show that an instance has become faster or slower. Pure."""

from __future__ import annotations

import math
from typing import Final

FAR: Final = math.log(2.0)
"""An observation may show a shift if the logarithm of observed over predicted is beyond this (or minus this): a factor
of two."""

CONFIRMED: Final = 4
"""Observations that confirm the first one. At the usual rate of learning an instance that was four times slower for
half a minute took another half minute to be trusted again, with one answer at a time."""


class LevelShift:
    """Observations in a row that are all far longer than predicted, or all far shorter: a shift, not chance.

    Answers that were under way at one moment show one pause together, however many they are. So only observations
    count that began after the first one in the row had ended.
    """

    __slots__ = ("_begun_s", "_count", "_side", "_total")

    def __init__(self) -> None:
        self._side = 0
        self._count = 0
        self._total = 0.0
        """The sum of `off` over the observations that confirm."""
        self._begun_s = 0.0
        """The time at which the first observation in the row had ended, in seconds."""

    @property
    def times(self) -> float:
        """The factor by which the observations that confirmed the last shift took longer than predicted (geometric
        mean). Valid right after `seen` has returned True.
        """
        return math.exp(self._total / CONFIRMED)

    def seen(self, off: float, began_s: float = 0.0, ended_s: float = 0.0) -> bool:
        """Take one observation; returns whether a shift is certain by it.

        Args:
            off: the logarithm of observed over predicted.
            began_s: when the observed work began, in seconds.
            ended_s: when it ended, on the same clock. Both left out: observations come one after the other.
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
