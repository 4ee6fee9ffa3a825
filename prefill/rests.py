"""How often an engine that only holds blocks looks whether somebody has read them. Pure.

vLLM tells a connector nothing but by steps, and steps an engine that holds blocks once a millisecond. After each step
its workers spin for a second, so that steps in quick succession cost a fifth of a core.
"""

from __future__ import annotations

from typing import Final

STEP_S: Final = 0.02
"""While there is news. Whatever arrives ends the pause at once."""

QUIET_S: Final = 1.0
"""So long without news is nothing special: a consumer that is busy reads with its next step."""

LATE_SHARE: Final = 0.5
"""Later on, a pause is this part of the time without news: blocks are free late by at most that part of the time for
which they had been held."""

LONG_S: Final = 5.0
"""The longest pause."""


class Rest:
    """Of one engine. `now` in monotonic seconds."""

    __slots__ = ("_news",)

    def __init__(self) -> None:
        self._news = 0.0

    def news(self, now: float) -> None:
        """There was something to do, or a hold has ended."""
        self._news = now

    def pause_s(self, now: float) -> float:
        """Until the next look, if nothing arrives."""
        quiet_s = now - self._news
        return STEP_S if quiet_s < QUIET_S else min(LONG_S, LATE_SHARE * quiet_s)
