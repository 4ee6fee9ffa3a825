"""Whether handing over loses, by class of requests; while it does, requests of that class are served whole. Pure.

Prices compare one request's ways with each other, on what is foretold. Two things they cannot see: that a network, or
the instances at its ends, are not what was told; and that those who compute prompts could as well answer them, if
nobody handed over. So what came is compared with what was told:

1. Whether the pauses of those handed over are `SLOWER` times what was told, and in prices
   (`router.scheduler.scoring.budget`) by more than the first tokens of those served whole come late: what slows the
   whole fleet slows both. How long P takes is no business of this: a first token is as late on P as it would be
   elsewhere, and queues are known exactly.
2. Where they were: whether each, with its pause, was dearer than it would have been whole on the best instance there
   was, whatever that one's role is, and as late as those were. Only those count that were handed over knowingly.

Handing over is turned off once both are sure (`SIGMAS`). While it is off one of `TRIES` is handed over still, where the
policy wants it; once `FEW` of these have come as told, or no dearer than whole, it is turned on again. A network that
is slow under load alone is quick as soon as nobody uses it: each time that it has to be turned off again, twice as many
have to be tried first.
"""

from __future__ import annotations

import math
from typing import Final

from router.scheduler.scoring.budget import OWN, OWN_MISSED
from router.scheduler.scoring.prices import Prices

FEW: Final = 30
"""Requests that say something: their mean's error can be told from their own scatter."""

SIGMAS: Final = 3.0
"""Standard errors of a mean's distance, that it is sure."""

SLOWER: Final = 3.0
"""Of what was told, on average: then the prices are not to be believed. Where all is as told, but every target on edge,
averages of 1.1 to 1.8 were seen (Azure's code trace on 3 P and 1 D at its goodput), and handing over was right."""

KNOWN: Final = 2.0
"""Times of what was told that the policy has to expect itself. Else what is wrong is about to be learned
(`router.predict.transfer_model`), and may be one instance's network alone."""

SLOWEST: Final = 8.0
"""No request counts for more of that."""

KEPT: Final = 240
"""Requests that are remembered: beyond that the older ones count half."""

TRIES: Final = 20
"""Of so many one is handed over while it is off."""

TRIED_MOST: Final = 32 * FEW
"""More than so many need not be tried."""

FORGIVEN: Final = 40 * FEW
"""After so many handed over in peace, the next failure is a first one."""

WORST: Final = 60.0
"""No request counts for more: two missed targets."""

OVERDUE_S: Final = 2.0
"""An answer that should have begun so long ago counts as if it began now: where a network has choked, none begins."""


class Foretold:
    """What was told of one request when it was placed for the first time."""

    __slots__ = (
        "_first", "_gains", "_known", "_late", "_pause_ms", "_per_tpot", "_per_ttft", "_second", "_tokens", "_tpot_ms",
        "_ttft_ms", "_used", "arrived", "computed_s", "handed", "slo_class",
    )  # fmt: skip

    def __init__(self, prices: Prices, prefill: int, decode: int, gains: float | None = None) -> None:
        """Placed on these rows, equal for a single instance. `gains`: how much cheaper they were told to be than any
        single instance, where somebody has asked.
        """
        self.handed: Final = prefill != decode
        self.arrived: Final = prices.wanted.arrived
        self.computed_s = -1.0
        """When its prompt was."""
        self.slo_class: Final = prices.wanted.slo_class
        self._gains: Final = gains
        self._tpot_ms: Final = prices.tpot_at(decode)
        self._used: Final = prices.used_at(decode)
        self._per_ttft: Final = 1.0 / prices.ttft_unit
        self._per_tpot: Final = 1.0 / prices.tpot_unit
        self._first: Final = OWN_MISSED if prices.ttft_ms else OWN
        self._second: Final = OWN_MISSED if prices.tpot_ms else OWN
        self._tokens: Final = prices.middle - 1.0
        self._pause_ms = prices.told_pause_ms(prefill, decode) if self.handed else 0.0
        self._late: Final = not self.handed or prices.waits(decode)
        """Its client has nothing before its answer begins."""
        self._ttft_ms: Final = prices.ttft_at(prefill) + (self._pause_ms if self._late else 0.0)
        self._known = gains is not None and (
            not prices.learns(decode) or prices.pause_ms(prefill, decode) >= KNOWN * self._pause_ms
        )
        """The policy knew better than what was told, or has no way to know."""

    def _paused(self, ms: float) -> float:
        """What an answer in the middle costs with such a pause."""
        return self._second.of(self._used + max(0.0, ms) * self._per_tpot / self._tokens)

    def dearer(self, began_s: float) -> float:
        """By how much it came dearer than told, where its answer began then."""
        if not self._late:
            found = self._paused((began_s - self.computed_s) * 1000.0) - self._paused(self._pause_ms)
        else:
            found = self._first.of(max(0.0, began_s - self.arrived) * 1000.0 * self._per_ttft)
            found -= self._first.of(self._ttft_ms * self._per_ttft)
        return min(WORST, max(-WORST, found))

    def slower(self, began_s: float) -> float:
        """How many times longer than told its pause was."""
        return min(SLOWEST, (began_s - self.computed_s) * 1000.0 / self._pause_ms)

    @property
    def due_s(self) -> float:
        """When it is overdue, its prompt being computed."""
        return self.computed_s + self._pause_ms / 1000.0 + OVERDUE_S

    def lost(self, dearer: float) -> float | None:
        """By how much it was dearer than whole; None: it says nothing, as pulls will teach better."""
        return max(-WORST, dearer - self._gains) if self._known and self._gains is not None else None

    def began_s(self, ended_s: float, tokens: int) -> float:
        """When an answer in one piece of so many tokens probably began."""
        return max(self.arrived, self.computed_s, ended_s - max(0, tokens - 1) * self._tpot_ms / 1000.0)


class _Mean:
    """Of what came of the last requests of one kind."""

    __slots__ = ("_squares", "count", "value")

    def __init__(self) -> None:
        self.count = self.value = self._squares = 0.0

    def add(self, value: float) -> None:
        """One more."""
        if self.count >= KEPT:
            self.count /= 2
            self._squares /= 2
        self.count += 1.0
        apart = value - self.value
        self.value += apart / self.count
        self._squares += apart * (value - self.value)

    @property
    def error(self) -> float:
        """Of the mean, squared."""
        return self._squares / (self.count - 1.0) / self.count if self.count > 1.0 else math.inf

    def above(self, other: _Mean) -> bool:
        """Surely."""
        return self.value - other.value > SIGMAS * math.sqrt(self.error + other.error)


_NOTHING: Final = _Mean()
_NOTHING.add(0.0)
_NOTHING.add(0.0)
"""Surely zero."""


class _Class:
    """One class of requests."""

    __slots__ = ("handed", "lost", "off", "peace", "slower", "tried", "tries", "turn", "whole")

    def __init__(self) -> None:
        self.handed = _Mean()
        """By how much those came dearer than told."""
        self.whole = _Mean()
        self.slower = _Mean()
        """How many times longer than told the pauses were."""
        self.lost = _Mean()
        """By how much those handed over were dearer than whole."""
        self.off = False
        self.turn = 0
        """Counts those that could be handed over while it is off."""
        self.tries = FEW
        """So many have to be tried before it is turned on again."""
        self.tried = 0
        """So many have been."""
        self.peace = 0
        """Handed over since it was."""

    @property
    def later(self) -> bool:
        """Those handed over come later than told, and it is not the fleet."""
        if self.handed.count < FEW or self.slower.value < SLOWER:
            return False
        return self.handed.above(_NOTHING) and (self.whole.count < FEW or self.handed.above(self.whole))

    def came(self, foretold: Foretold, began_s: float) -> None:
        """One has begun to be answered."""
        dearer = foretold.dearer(began_s)
        if not foretold.handed:
            self.whole.add(dearer)
            return
        self.handed.add(dearer)
        self.slower.add(foretold.slower(began_s))
        lost = foretold.lost(dearer)
        if lost is not None:
            self.lost.add(lost)
        if self.off:
            self._try_again()
        else:
            self._look()

    def _look(self) -> None:
        """Should it be turned off?"""
        self.peace += 1
        if self.peace >= FORGIVEN:
            self.tries = FEW
        if not self.later:
            self.lost = _Mean()
        elif self.lost.count >= FEW and self.lost.above(_NOTHING) and self.lost.value > self.whole.value:
            self.off, self.turn = True, 0
            self._begin_again()

    def _try_again(self) -> None:
        """Should it be turned on?"""
        self.tried += 1
        if self.tried < self.tries:
            return
        if not self.later or self.lost.value <= 0.0:
            self.off, self.peace, self.tries = False, 0, min(TRIED_MOST, 2 * self.tries)
        self._begin_again()

    def _begin_again(self) -> None:
        self.tried, self.handed, self.slower, self.lost = 0, _Mean(), _Mean(), _Mean()


class HandoffGuard:
    """Of one router."""

    def __init__(self) -> None:
        self._classes: Final[dict[str, _Class]] = {}
        self._open: Final[dict[Foretold, None]] = {}
        """Handed over, computed, and not begun to be answered; the first to be computed first."""

    def allows(self, slo_class: str, now: float) -> bool:
        """Whether one more request of this class may be handed over."""
        while self._open and (first := next(iter(self._open))).due_s < now:
            self.came(first, now)
        one = self._classes.get(slo_class)
        if one is None or not one.off:
            return True
        one.turn += 1
        return one.turn % TRIES == 0

    def wonders(self, slo_class: str) -> bool:
        """Whether it wants to know what a pair gains: it costs some time to find out."""
        one = self._classes.get(slo_class)
        return one is not None and (one.off or one.later)

    def computed(self, foretold: Foretold, now: float) -> None:
        """Its prompt has been, on P."""
        if foretold.handed:
            foretold.computed_s = now
            self._open[foretold] = None

    def gone(self, foretold: Foretold) -> None:
        """Its answer will not begin, for no fault of ours."""
        self._open.pop(foretold, None)

    def came(self, foretold: Foretold, began_s: float) -> None:
        """Its answer has begun, if that was not taken to have happened before."""
        if foretold.handed and self._open.pop(foretold, self) is self:
            return
        one = self._classes.get(foretold.slo_class)
        if one is None:
            one = self._classes[foretold.slo_class] = _Class()
        one.came(foretold, began_s)

    def off(self) -> dict[str, bool]:
        """By class that it has seen: whether it is served whole now."""
        return {name: one.off for name, one in self._classes.items()}

    def served_whole(self) -> list[str]:
        """Classes that are now, in order."""
        return sorted(name for name, off in self.off().items() if off)
