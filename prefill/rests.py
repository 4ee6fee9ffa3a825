"""How often an engine that only holds blocks checks whether consumers have read them. Pure.

A connector inside vLLM learns of events only in steps, and vLLM steps an engine that holds blocks once a millisecond.
After each step the engine's workers spin for a second, so steps in quick succession cost a fifth of a core.
"""

from __future__ import annotations

from typing import Final

STEP_S: Final = 0.02
"""The pause while news arrives. Any event ends a pause at once."""

QUIET_S: Final = 1.0
"""No news for this long is normal: a busy consumer reads in its next step."""

LATE_SHARE: Final = 0.5
"""After that, a pause is this share of the time without news: blocks are free late by at most that share of the time
for which they were held."""

LONG_S: Final = 5.0
"""The longest pause."""


class Rest:
    """The pauses of one engine. `now` in monotonic seconds."""

    __slots__ = ("_news",)

    def __init__(self) -> None:
        self._news = 0.0

    def news(self, now: float) -> None:
        """An event was handled, or a hold has ended."""
        self._news = now

    def pause_s(self, now: float) -> float:
        """The seconds until the next look, if no event arrives."""
        quiet_s = now - self._news
        return STEP_S if quiet_s < QUIET_S else min(LONG_S, LATE_SHARE * quiet_s)
