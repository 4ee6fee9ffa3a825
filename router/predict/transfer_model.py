"""What one instance pulls from others, and what its network has been seen to take for it. Pure.

A network is taken as one server: pulls that overlap share it, and what counts is the time from the end of one to the
end of the next. Costs tell how long a move takes on the GPU's own network; what is there may be another one (TCP, a
busy switch), and nobody has to tell: a few pulls do.
"""

from __future__ import annotations

import math
from typing import Final

from router.predict.fitted import TOGETHER_S, Fitted

FADES_S: Final = 300.0
"""What pulls have taught counts for less, the longer ago that was: where it has kept everybody from handing over,
nobody would find out that the network is well again."""

CLIP: Final = 3.0
CLIP_MS: Final = 500.0
"""A pull counts as if it had taken so many times what was expected, or so long, at most: an engine that stood still for
half a minute says nothing about its network."""

RATE: Final = 0.03
"""Weight of one pull, once there are more than thirty."""

LEAST_MS: Final = 5.0
"""Nobody's network is called slow for less."""


class ExpectedTransfer:
    """One answer's."""

    __slots__ = ("computed_s", "moving_ms", "near", "pause_ms", "told_ms", "unmoved_ms")

    def __init__(self, *, told_ms: float, moving_ms: float, unmoved_ms: float, pause_ms: float, near: bool) -> None:
        self.told_ms = told_ms
        """What moving it takes by the costs alone."""
        self.moving_ms = moving_ms
        """And by what pulls have taken here."""
        self.unmoved_ms = unmoved_ms
        """What a handoff waits for beside it."""
        self.pause_ms = pause_ms
        """All that was expected, together with what was pulled before it."""
        self.near = near
        """From the same machine."""
        self.computed_s = 0.0
        """When its prompt was."""


class TransferModel:
    """One instance's."""

    __slots__ = ("_far", "_near", "_observed_ms", "_told_ms", "_under_way", "_was_near", "moving_ms", "since_s")

    def __init__(self) -> None:
        self._far: Final = _Network()
        self._near: Final = _Network()
        self._under_way: Final[dict[ExpectedTransfer, None]] = {}
        """The first to be computed first."""
        self.moving_ms = 0.0
        """Of all of them."""
        self.since_s = 0.0
        """When the first of them began to move, or the last one ended."""
        self._told_ms = self._observed_ms = 0.0
        """Of those that ended last, together."""
        self._was_near = False

    def expects_ms(self, told_ms: float, now: float, *, near: bool) -> float:
        """What a move will take that the costs tell to take so long."""
        return (self._near if near else self._far).expects_ms(told_ms, now)

    def slower(self, now: float) -> float:
        """So many times slower than expected it is at least, as nothing has come for so long; 1: not that one knows.

        All that is under way has moved alike: no more of any than the first one needs, or that would be here.
        """
        first = next(iter(self._under_way), None)
        if first is None:
            return 1.0
        waited_ms = (now - max(self.since_s, first.computed_s + first.unmoved_ms / 1000.0)) * 1000.0
        moved_ms = min(self.moving_ms, len(self._under_way) * first.moving_ms)
        return max(1.0, waited_ms / max(moved_ms, LEAST_MS))

    def ends_ms(self, now: float) -> float:
        """When all that is under way will be here; minus infinity: nothing is."""
        return self.since_s * 1000.0 + self.moving_ms * self.slower(now) if self._under_way else -math.inf

    def begin(self, pull: ExpectedTransfer, now: float) -> None:
        """Its prompt is computed."""
        pull.computed_s = now
        if not self._under_way:
            self.since_s, self.moving_ms = now + pull.unmoved_ms / 1000.0, 0.0
        self._under_way[pull] = None
        self.moving_ms += pull.moving_ms

    def end(self, pull: ExpectedTransfer, now: float, *, done: bool) -> None:
        """Its answer has begun, or will not (`done` false)."""
        if pull not in self._under_way:
            return
        del self._under_way[pull]
        self.moving_ms = max(0.0, self.moving_ms - pull.moving_ms)
        if done:
            self._time(pull, now)
            self.since_s = now

    def _time(self, pull: ExpectedTransfer, now: float) -> None:
        """Learn from the time since the one before. Those that end together are one observation."""
        began_s = max(self.since_s, pull.computed_s + pull.unmoved_ms / 1000.0)
        if self._told_ms > 0.0 and now - self.since_s < TOGETHER_S and pull.near == self._was_near:
            self._told_ms += pull.told_ms
            return
        if self._told_ms > 0.0:
            (self._near if self._was_near else self._far).took(self._told_ms, self._observed_ms, self.since_s)
        self._told_ms, self._was_near = pull.told_ms, pull.near
        self._observed_ms = min(max(0.0, (now - began_s) * 1000.0), max(CLIP_MS, CLIP * pull.pause_ms))


class _Network:
    """What moves take on it, by what they are told to take."""

    __slots__ = ("_last_s", "_line", "_rest_ms", "_slope")

    def __init__(self) -> None:
        self._line: Final = Fitted(RATE)
        self._slope, self._rest_ms, self._last_s = 1.0, 0.0, 0.0

    def took(self, told_ms: float, observed_ms: float, now: float) -> None:
        """One more."""
        self._line.add(told_ms, observed_ms)
        self._slope, self._rest_ms = self._line.fit()
        self._last_s = now

    def expects_ms(self, told_ms: float, now: float) -> float:
        """What one will take."""
        if not self._line.count:
            return told_ms
        held = math.exp(min(0.0, self._last_s - now) / FADES_S)
        return told_ms + held * (self._rest_ms + self._slope * told_ms - told_ms)
