"""How many waiting requests a delay is expected to make late, by what they wait for. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

_NOTHING: Final = 1e-9
"""Less than any request's part: one over a target of eleven days in milliseconds."""


class Urgency:
    """A sum for each kind of place. A waiting request may have any part of its target left, so a delay makes it late
    with a probability of the delay over the target: its part of the sum is one over its target in milliseconds.
    """

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: Final[dict[Hashable, float]] = {}

    def add(self, place: Hashable, part: float) -> None:
        """A request waits for such a place. `part`: 0 if no delay makes it late."""
        if part:
            self._sums[place] = self._sums.get(place, 0.0) + part

    def remove(self, place: Hashable, part: float) -> None:
        """It waits no more."""
        if part:
            self._sums[place] -= part
            if self._sums[place] < _NOTHING:  # the last of them has left, but for rounding
                del self._sums[place]

    def of(self, place: Hashable) -> float:
        """The number of requests that a delay of a millisecond is expected to make late."""
        return self._sums.get(place, 0.0)
