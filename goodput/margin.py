"""Errors of the cost model, learned from attainment: a factor on the load. Pure.

Needs are computed from costs, attainment is measured. If a fleet that should suffice misses its targets, the load is
taken to be heavier than computed. The misses of a stretch must exceed the allowed ones by more than chance explains
(Wilson's interval), so one late request changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from goodput.observation import ClassCounts

STEP: Final = 1.08
"""The factor grows by this with each stretch that misses too often."""
MOST: Final = 2.0
ENDED_MIN: Final = 50
"""Least requests of a stretch."""
STRETCH_S: Final = 60.0
Z: Final = 3.0
"""Standard deviations by which misses must exceed the allowed ones."""
SETTLED_S: Final = 180.0
"""Seconds after a shortage in which nothing is learned: requests that came during it still end late."""
FADES_S: Final = 86_400.0
"""Half-life in seconds of what is learned: engines, their versions and their neighbours change."""


@dataclass(slots=True)
class Margin:
    """The factor of one role, and the requests of the present stretch."""

    factor: float = 1.0
    """On the rate of arrivals, 1 to `MOST`."""
    _ended: int = 0
    _missed: int = 0
    _since_s: float | None = None
    _faded_s: float | None = field(default=None)
    _fair_s: float | None = None
    """Since when the fleet has been large enough."""

    def add(self, ended: int, missed: int) -> None:
        """Count requests that are over, and those that missed a target which this role decides about."""
        self._ended += ended
        self._missed += missed

    def look(self, allowed: float, now: float, *, fair: bool) -> str:
        """Learn from the stretch, if it is long enough. Returns what changed, as a sentence; empty: nothing.

        `allowed`: share of requests that may miss. `fair`: the fleet is large enough now and has not just changed.
        """
        if self._faded_s is not None:
            self.factor = 1 + (self.factor - 1) * 0.5 ** ((now - self._faded_s) / FADES_S)
        self._faded_s = now
        if not fair:
            self._fair_s = None
        elif self._fair_s is None:
            self._fair_s = now
        if self._fair_s is None or self._since_s is None or now - self._fair_s < SETTLED_S:
            self._ended = self._missed = 0
            self._since_s = now
            return ""
        if now - self._since_s < STRETCH_S or self._ended < ENDED_MIN:
            return ""
        share, least = self._missed / self._ended, _least(self._missed, self._ended)
        told = ""
        if least > allowed and self.factor < MOST:
            self.factor = min(MOST, self.factor * STEP)
            missed = f"{share:.1%} of {self._ended} requests missed with a fleet that should do"
            told = f"{missed}: load taken × {self.factor:.2f}"
        self._ended = self._missed = 0
        self._since_s = now
        return told


def _least(missed: int, ended: int) -> float:
    """Lower end of Wilson's interval for the share that misses."""
    share, square = missed / ended, Z * Z
    middle = share + square / (2 * ended)
    half = Z * math.sqrt(share * (1 - share) / ended + square / (4 * ended * ended))
    return (middle - half) / (1 + square / ended)


def missed_first(counts: ClassCounts) -> int:
    """Requests whose first token was late: prefill decides about these."""
    return counts.late_first


def missed_later(counts: ClassCounts) -> int:
    """Requests that missed a later target: decode decides about these."""
    return max(0, counts.ended - counts.met - counts.late_first)
