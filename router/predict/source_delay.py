"""The delay of source legs (`router.request.sourcing`): how much later than priced they are answered. Pure."""

from __future__ import annotations

from typing import Final

SEEN_MAX: Final = 20
"""The expected delay is the mean over about so many source legs."""
PRICED: Final = 2
"""The price counts as so many legs that were on time: after one slow leg, perhaps the first, others are tried."""
LATE_MS_MAX: Final = 500.0
"""One leg counts for at most this much: an engine that stood still says little."""
FADES_S: Final = 60.0
"""In so many seconds without source legs half of the learned delay is forgotten. Otherwise no source would be tried
again after slow ones."""


class SourceDelay:
    """The mean delay that one router has seen, over all instances: their front ends cause it, and are alike."""

    __slots__ = ("_learned_s", "_mean_ms", "_seen")

    def __init__(self) -> None:
        self._mean_ms: float = 0.0
        self._learned_s: float = 0.0
        """When the mean was last updated, in seconds."""
        self._seen = PRICED

    def took(self, late_ms: float, now: float) -> None:
        """A source leg was answered `late_ms` later than its price says, at `now` seconds."""
        self._seen = min(self._seen + 1, SEEN_MAX)
        known_ms, late_ms = self.ms(now), min(max(late_ms, -LATE_MS_MAX), LATE_MS_MAX)
        self._mean_ms = max(0.0, known_ms + (late_ms - known_ms) / self._seen)
        self._learned_s = now

    def ms(self, now: float) -> float:
        """The expected delay of the next leg, in milliseconds, at least 0."""
        if not self._mean_ms:
            return 0.0
        return self._mean_ms * float(0.5 ** (max(0.0, now - self._learned_s) / FADES_S))
