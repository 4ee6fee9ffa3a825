"""Requests that are let in although a prediction would refuse them, so that predictions stay true. Pure.

A request that is refused teaches nothing. A prediction that refuses all requests would refuse them for ever: engines
that were slow for a while, or first tokens that were late for a while, would keep a class out for good. So once nothing
of a TTFT target was let in for `TRY_S`, one request is a *try*. Tries that come late become rarer; one that comes in
time is followed by the next one as soon as at first, so that a handful of them shows that all is well again.
"""

from __future__ import annotations

import math
from typing import Final

TRY_S: Final = 2.0
"""The time without a request let in after which one is tried. Chosen: a handful of tries show a change within 12 s."""

TRIES: Final = 6
"""So many tries show a change (`router.predict.level_shift`); each later one is twice as long after the one before."""

TRY_S_MAX: Final = 300.0
"""The longest time between two tries."""


class Tries:
    """Of one router, by TTFT target in milliseconds."""

    __slots__ = ("_late", "_let_in_s")

    def __init__(self) -> None:
        self._let_in_s: Final[dict[float, float]] = {}
        """When the last request was let in."""
        self._late: Final[dict[float, int]] = {}
        """Tries since the last one that came in time."""

    def due(self, target_ms: float, now: float) -> bool:
        """Whether a request that would be refused may be a try."""
        more = max(0, self._late.get(target_ms, 0) - TRIES)
        wait_s = TRY_S_MAX if more > 10 else min(TRY_S_MAX, TRY_S * 2.0**more)
        return now - self._let_in_s.get(target_ms, -math.inf) >= wait_s

    def let_in(self, target_ms: float, now: float, *, tried: bool) -> None:
        """A request is let in."""
        self._let_in_s[target_ms] = now
        if tried:
            self._late[target_ms] = self._late.get(target_ms, 0) + 1

    def in_time(self, target_ms: float) -> None:
        """The first token of a try came in time."""
        self._late[target_ms] = 0
