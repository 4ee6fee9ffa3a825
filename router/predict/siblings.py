"""Instances of one make: how many legs of each were timed, and how many of the others since. Pure.

An engine that looks slow gets no legs, so nothing would ever show that it is as fast as the others by now: its first
legs were timed while it started, or while other work took its CPU. An instance is believed for as many legs as it was
timed itself. Once each of the others has had so many since its last one, it is taken to be like them, step by step,
until a leg of its own says otherwise. So an instance that *is* slower is tried again in ever longer intervals. An
instance that was never timed is like the others from their first leg on.

Instances get work of different sizes: one computes short suffixes, another one whole prompts. So a make's level is a
factor and a rest that does not grow with size, and an instance is compared with it at its own size.

An instance without costs that was never timed begins with what was learned last of another one without costs.
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

    __slots__ = ("cursor", "legs", "level", "rest", "rows")

    def __init__(self, rows: list[int], level: float, rest: float, legs: int) -> None:
        self.rows: Final = rows
        self.level: float = level
        """The logarithm of their factor: a mean over the last legs, each with the factor of its instance."""
        self.rest: float = rest
        """What a leg takes besides; the same mean."""
        self.legs: int = legs
        self.cursor: int = 0


class Siblings:
    """Of one kind of work: prompts, or decode steps."""

    __slots__ = ("_idle", "_make_of", "_makes", "_untimed", "lately")

    def __init__(self) -> None:
        self._makes: Final[dict[int, _Make]] = {}
        self._make_of: Final[dict[int, int]] = {}
        self._idle: Final[dict[int, int]] = {}
        """By row: legs that each of the others has had on average since the row's last one."""
        self._untimed: Final[set[int]] = set()
        """Rows without costs and without legs of their own that were timed."""
        self.lately: tuple[float, float] = (1.0, 0.0)
        """The factor and the rest that were learned last of a row without costs."""

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
        """A leg of this row was timed. Gives another row of its make to look at, one after the other; -1: there is
        none.

        Args:
            row: where it was.
            level: the logarithm of the row's factor by now.
            rest: what each of its legs takes besides.
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
            row: where it was.
            factor: of the row.
            rest: what each of its legs takes besides.
            first: it is one of the row's first legs. From later ones on, what all rows of its make have in common is
                what another one begins with.
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
        """What a leg takes besides, over the factor, in the row's make: its speed apart, so that slow instances and
        quick ones have one. 0: no leg was timed.
        """
        make = self._makes.get(self._make_of.get(row, -1))
        return 0.0 if make is None else make.rest / math.exp(make.level)

    def strays(self, row: int, level: float, legs: float, size: float = 0.0) -> float:
        """By what to multiply the row's factor; 1: it is believed as it is.

        Args:
            row: the instance's row.
            level: the logarithm of what its legs take, over their size.
            legs: how many of its own were timed.
            size: of its own legs; 0: there is no rest.
        """
        believed = min(BELIEVED_MAX, max(BELIEVED_MIN, legs))
        make = self._makes.get(self._make_of.get(row, -1))
        if make is None or self._idle.get(row, 0) <= believed:
            return 1.0
        others = math.log(math.exp(make.level) + make.rest / size) if size > 0 else make.level
        return math.exp(NEARER * (others - level))
