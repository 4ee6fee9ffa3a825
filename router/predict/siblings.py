"""Instances of one make: one that has had no legs for long is taken to be like the others, step by step. Pure.

An engine that looks slow gets no legs, so nothing would ever show that it is as fast as the others by now. (Its first
legs may have been timed while it started, or while other work took its CPU.) So the n timed legs of an instance are
believed until each of the others has had n legs since its last one. From then on the instance is taken, step by step,
to be like the others, until a leg of its own shows otherwise. An instance that *is* slower is thus tried again at ever
longer intervals. An instance that was never timed is like the others from their first leg on.

Instances get work of different sizes: one computes short suffixes, another one whole prompts. So a make's level is a
factor and a rest that does not grow with size, and an instance is compared with it at the size of its own legs.

An instance without costs that was never timed begins with what was learned last of another one without costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

BELIEVED_MIN, BELIEVED_MAX = 4, 200
"""Bounds of the number of legs of each other instance for which an instance's own legs are believed. Chosen: fewer than
the lower bound are chance; with the upper one a slow instance is tried once in two hundred legs of each other one."""

LEVEL_RATE: Final = 0.05
"""The weight of one leg in the level of a make, once there are more than twenty."""

NEARER: Final = 0.25
"""The share of its distance to the others' level by which an instance moves at a time (`strays`)."""


class _Make:
    """The rows of one make."""

    __slots__ = ("cursor", "legs", "level", "rest", "rows")

    def __init__(self, rows: list[int], level: float, rest: float, legs: int) -> None:
        self.rows: Final = rows
        self.level: float = level
        """The logarithm of their factor: a mean over the last legs, each with the factor of its row."""
        self.rest: float = rest
        """The rest, in ms, that a leg takes whatever its size; the same mean."""
        self.legs: int = legs
        self.cursor: int = 0


class Siblings:
    """The makes of a fleet, for one kind of work: prompts, or decode steps."""

    __slots__ = ("_idle", "_make_of", "_makes", "_untimed", "lately")

    def __init__(self) -> None:
        self._makes: Final[dict[int, _Make]] = {}
        self._make_of: Final[dict[int, int]] = {}
        self._idle: Final[dict[int, int]] = {}
        """By row: legs that each of the others has had on average since the row's last one."""
        self._untimed: Final[set[int]] = set()
        """Rows without costs and without legs of their own that were timed."""
        self.lately: tuple[float, float] = (1.0, 0.0)
        """The factor and the rest (ms) that were learned last of a row without costs."""

    def look(self, rows: Mapping[int, Sequence[int]]) -> None:
        """The rows of all present instances, by make."""
        self._make_of.clear()
        for make in [each for each in self._makes if each not in rows]:
            del self._makes[make]
        for make, found in rows.items():
            known = self._makes.get(make)
            level, rest, legs = (0.0, 0.0, 0) if known is None else (known.level, known.rest, known.legs)
            self._makes[make] = _Make(list(found), level, rest, legs)
            for row in found:
                self._make_of[row] = make
        for row in [each for each in self._idle if each not in self._make_of]:
            del self._idle[row]

    def begin(self, row: int, *, unknown: bool) -> None:
        """The row has another instance; `unknown`: without costs."""
        self._idle.pop(row, None)
        self._untimed.discard(row)
        if unknown:
            self._untimed.add(row)

    def timed(self, row: int, level: float, rest: float = 0.0) -> int:
        """A leg of this row was timed. Returns another row of its make to look at, each in turn; -1: there is none.

        Args:
            row: the leg's row.
            level: the logarithm of the row's factor by now.
            rest: the row's rest by now, in ms.
        """
        self._idle[row] = 0
        make = self._makes.get(self._make_of.get(row, -1))
        if make is None or len(make.rows) < 2:
            return -1
        make.legs += 1
        rate = max(LEVEL_RATE, 1.0 / make.legs)
        make.level += rate * (level - make.level)
        make.rest += rate * (rest - make.rest)
        other = make.rows[make.cursor % len(make.rows)]
        make.cursor += 1
        if other == row:
            other = make.rows[make.cursor % len(make.rows)]
            make.cursor += 1
        self._idle[other] = self._idle.get(other, 0) + 1
        return other

    def unknown_timed(self, row: int, factor: float, rest: float, *, first: bool) -> Sequence[int]:
        """A leg of a row without costs was timed: its factor and its rest by now. Returns the rows to which the same
        applies from now on.

        Args:
            row: the leg's row.
            factor: the row's factor.
            rest: the row's rest, in ms.
            first: whether it is one of the row's first legs. After later ones, another row without costs begins with
                the mean of the make.
        """
        self._untimed.discard(row)
        if not first:
            self.lately = self.others(row) or self.lately
            return ()
        self.lately = factor, rest
        return sorted(self._untimed)

    def legs(self, row: int) -> float:
        """How many legs of each instance of the row's make were timed, on average."""
        make = self._makes.get(self._make_of.get(row, -1))
        return 0.0 if make is None else make.legs / len(make.rows)

    def others(self, row: int) -> tuple[float, float] | None:
        """The factor and the rest of the row's make; None: no leg was timed."""
        make = self._makes.get(self._make_of.get(row, -1))
        return None if make is None or not make.legs else (math.exp(make.level), make.rest)

    def base(self, row: int) -> float:
        """The rest over the factor, in the row's make, in ms. It does not depend on speed, so slow and fast instances
        share it. 0: no leg was timed.
        """
        make = self._makes.get(self._make_of.get(row, -1))
        return 0.0 if make is None else make.rest / math.exp(make.level)

    def strays(self, row: int, level: float, legs: float, size: float = 0.0) -> float:
        """The number by which to multiply the row's factor; 1: the factor is believed as it is.

        Args:
            row: the instance's row.
            level: the logarithm of the time of its legs over their size.
            legs: how many of its own legs were timed.
            size: the size of its own legs, as their time in ms by the costs; 0: this kind of work has no rest.
        """
        believed = min(BELIEVED_MAX, max(BELIEVED_MIN, legs))
        make = self._makes.get(self._make_of.get(row, -1))
        if make is None or self._idle.get(row, 0) <= believed:
            return 1.0
        others = math.log(math.exp(make.level) + make.rest / size) if size > 0 else make.level
        return math.exp(NEARER * (others - level))
