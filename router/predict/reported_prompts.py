"""Times of prompts as an engine reports them with answers in one piece, which show no first token to the router. Pure.

Each prompt is reported with the whole time from the step that began it to the one that ended it. Prompts that were
computed together are each reported with the time of all of them: taken one by one, eight prompts that clients send at
once make an engine look up to eight times slower than it is.
"""

from __future__ import annotations


class ReportedPrompts:
    """Those of one instance, one step at a time."""

    __slots__ = ("_ended_ms", "_observed_ms", "_plain_ms", "_took_ms")

    def __init__(self) -> None:
        self._plain_ms: float = 0.0
        """Of the step that ended last: what its prompts take by the costs alone;"""
        self._observed_ms: float = 0.0
        """what they took;"""
        self._took_ms: float = 0.0
        """the longest of their reported times;"""
        self._ended_ms: float = 0.0
        """and when it ended."""

    def add(self, plain_ms: float, took_ms: float, ended_ms: float) -> tuple[float, float] | None:
        """One report. Gives what the step before it was to take and took, once it is certain that no other prompt
        belongs to that one; else None.

        Args:
            plain_ms: what the prompt takes by the costs alone.
            took_ms: what the engine says that it took.
            ended_ms: about when it ended: the engine's front end, and the way there, take a while that differs.
        """
        apart_ms = ended_ms - self._ended_ms
        if self._plain_ms and abs(apart_ms) < 0.5 * min(took_ms, self._took_ms):
            self._plain_ms += plain_ms
            self._took_ms = max(self._took_ms, took_ms)
            self._observed_ms = max(self._observed_ms, took_ms)
            return None
        if self._plain_ms and apart_ms < 0:
            return None  # its answer was longer than that of a later prompt, whose time says what both took
        seen = (self._plain_ms, self._observed_ms) if self._plain_ms else None
        self._observed_ms = min(took_ms, apart_ms) if seen else took_ms
        self._plain_ms, self._took_ms, self._ended_ms = plain_ms, took_ms, ended_ms
        return seen
