"""Requests that are let in although a prediction would refuse them, so that predictions stay true. Pure.

A request that is refused teaches nothing. A prediction that refuses all requests would refuse them for ever: engines
that were slow for a while, or first tokens that were late for a while, would keep a class out for good. So once no
request with a TTFT target was let in for `TRY_S`, one request is a *try*. Tries that come late become rarer; a try that
comes in time is followed by the next one as soon as at first, so that a handful of them shows that all is well again.
"""

from __future__ import annotations

import math
from typing import Final

TRY_S: Final = 2.0
"""The time without a request let in after which one is tried. Chosen: a handful of tries show a change within 12 s."""

TRIES: Final = 6
"""So many tries show a change (`router.predict.level_shift`); each later one is twice as long after the one before."""

TRY_S_MAX: Final = 300.0
"""The longest time between two tries. After twice that without one, former tries say nothing any more."""


class _Target:
    """One TTFT target."""

    __slots__ = ("late", "let_in_s", "tried_s")

    def __init__(self) -> None:
        self.let_in_s: float = -math.inf
        """When the last request was let in, in seconds."""
        self.tried_s: float = -math.inf
        """When the last try was let in, in seconds."""
        self.late = 0
        """Tries since the last one that came in time."""

    def late_by(self, now: float) -> int:
        """The number of late tries in a row, unless the last one was too long ago to count."""
        return self.late if now - self.tried_s < 2 * TRY_S_MAX else 0


class Tries:
    """The tries of one router, by TTFT target in milliseconds."""

    __slots__ = ("_targets",)

    def __init__(self) -> None:
        self._targets: Final[dict[float, _Target]] = {}

    def due(self, target_ms: float, now: float) -> bool:
        """Whether a request that would be refused may be a try."""
        target = self._targets.get(target_ms)
        if target is None:
            return True
        more = min(10, max(0, target.late_by(now) - TRIES))
        return now - target.let_in_s >= min(TRY_S_MAX, TRY_S * 2.0**more)

    def let_in(self, target_ms: float, now: float, *, tried: bool) -> None:
        """A request is let in."""
        target = self._targets.get(target_ms)
        if target is None:
            target = self._targets[target_ms] = _Target()
        target.let_in_s = now
        if tried:
            target.late = target.late_by(now) + 1
            target.tried_s = now

    def in_time(self, target_ms: float) -> None:
        """The first token of a try came in time."""
        target = self._targets.get(target_ms)
        if target is not None:
            target.late = 0
