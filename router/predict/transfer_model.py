"""The transfer model: an instance's pulls from others, and how long its network has taken for them. Pure.

A network is modelled as one server: overlapping pulls share it, and the measure is the time from the end of one pull to
the end of the next. The cost profile states the time of a move on the GPU's own network; the real network may be
another one (TCP, a busy switch). The model needs no setting for that: it learns the difference from a few pulls.
"""

from __future__ import annotations

import math
from typing import Final

from router.predict.fitted import TOGETHER_S, Fitted

FADES_S: Final = 300.0
"""The time over which learned pulls lose weight. Without this, a network that once was too slow for any hand-over would
stay unused, and the router would never see that it works again."""

CLIP: Final = 3.0
CLIP_MS: Final = 500.0
"""A pull counts for at most `CLIP` times its expected pause, or `CLIP_MS` if that is more: an engine that stopped for
half a minute says nothing about its network."""

RATE: Final = 0.03
"""The weight of one pull, once there are more than thirty."""

LEAST_MS: Final = 5.0
"""Smaller delays do not make a network count as slow."""


class ExpectedTransfer:
    """The expected transfer of one answer."""

    __slots__ = ("computed_s", "moving_ms", "near", "pause_ms", "told_ms", "unmoved_ms")

    def __init__(self, *, told_ms: float, moving_ms: float, unmoved_ms: float, pause_ms: float, near: bool) -> None:
        self.told_ms = told_ms
        """The time of the move by the cost profile alone."""
        self.moving_ms = moving_ms
        """The time of the move by the pulls learned here."""
        self.unmoved_ms = unmoved_ms
        """The time that a hand-over takes besides the move."""
        self.pause_ms = pause_ms
        """The whole expected pause, with the pulls before this one."""
        self.near = near
        """Whether both instances are on one machine."""
        self.computed_s = 0.0
        """The time at which the prompt was computed."""


class TransferModel:
    """The transfer model of one instance."""

    __slots__ = ("_far", "_near", "_observed_ms", "_told_ms", "_under_way", "_was_near", "moving_ms", "since_s")

    def __init__(self) -> None:
        self._far: Final = _Network()
        self._near: Final = _Network()
        self._under_way: Final[dict[ExpectedTransfer, None]] = {}
        """Pulls under way, in the order in which their prompts were computed."""
        self.moving_ms = 0.0
        """The sum of their expected times."""
        self.since_s = 0.0
        """The time at which the first of them began to move, or the last one ended."""
        self._told_ms = self._observed_ms = 0.0
        """Sums over the pulls that ended together last."""
        self._was_near = False

    @property
    def seen(self) -> int:
        """The number of pulls learned from; pulls that ended together count as one."""
        return int(self._near.seen + self._far.seen)

    def expects_ms(self, told_ms: float, now: float, *, near: bool) -> float:
        """The predicted time, in ms, of a move that takes `told_ms` by the cost profile."""
        return (self._near if near else self._far).expects_ms(told_ms, now)

    def slower(self, now: float) -> float:
        """The factor by which the network is slower than expected at least, as no pull has ended for so long; 1: it is
        not known to be slower.

        All pulls under way have moved alike: none has moved more than the first one needs, or the first would have
        ended.
        """
        first = next(iter(self._under_way), None)
        if first is None:
            return 1.0
        waited_ms = (now - max(self.since_s, first.computed_s + first.unmoved_ms / 1000.0)) * 1000.0
        moved_ms = min(self.moving_ms, len(self._under_way) * first.moving_ms)
        return max(1.0, waited_ms / max(moved_ms, LEAST_MS))

    def ends_ms(self, now: float) -> float:
        """The time, in ms, at which all pulls under way will have ended; minus infinity: there are none."""
        return self.since_s * 1000.0 + self.moving_ms * self.slower(now) if self._under_way else -math.inf

    def begin(self, pull: ExpectedTransfer, now: float) -> None:
        """The pull's prompt is computed."""
        pull.computed_s = now
        if not self._under_way:
            self.since_s, self.moving_ms = now + pull.unmoved_ms / 1000.0, 0.0
        self._under_way[pull] = None
        self.moving_ms += pull.moving_ms

    def end(self, pull: ExpectedTransfer, now: float, *, done: bool) -> None:
        """The pull's answer has begun, or will not (`done` false)."""
        if pull not in self._under_way:
            return
        del self._under_way[pull]
        self.moving_ms = max(0.0, self.moving_ms - pull.moving_ms)
        if done:
            self._time(pull, now)
            self.since_s = now

    def _time(self, pull: ExpectedTransfer, now: float) -> None:
        """Learn from the time since the pull before. Pulls that end together are one observation."""
        began_s = max(self.since_s, pull.computed_s + pull.unmoved_ms / 1000.0)
        if self._told_ms > 0.0 and now - self.since_s < TOGETHER_S and pull.near == self._was_near:
            self._told_ms += pull.told_ms
            return
        if self._told_ms > 0.0:
            (self._near if self._was_near else self._far).took(self._told_ms, self._observed_ms, self.since_s)
        self._told_ms, self._was_near = pull.told_ms, pull.near
        self._observed_ms = min(max(0.0, (now - began_s) * 1000.0), max(CLIP_MS, CLIP * pull.pause_ms))


class _Network:
    """The times of moves on one network (to other machines, or within one), by their times in the cost profile."""

    __slots__ = ("_last_s", "_line", "_rest_ms", "_slope")

    def __init__(self) -> None:
        self._line: Final = Fitted(RATE)
        self._slope, self._rest_ms, self._last_s = 1.0, 0.0, 0.0

    @property
    def seen(self) -> float:
        """The number of observations."""
        return self._line.count

    def took(self, told_ms: float, observed_ms: float, now: float) -> None:
        """Take one observation."""
        self._line.add(told_ms, observed_ms)
        self._slope, self._rest_ms = self._line.fit()
        self._last_s = now

    def expects_ms(self, told_ms: float, now: float) -> float:
        """The predicted time of one move."""
        if not self._line.count:
            return told_ms
        held = math.exp(min(0.0, self._last_s - now) / FADES_S)
        return told_ms + held * (self._rest_ms + self._slope * told_ms - told_ms)
