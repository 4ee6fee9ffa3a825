"""The hand-over guard: whether handing over loses, by class of requests. While it does, requests of that class are
served aggregated. Pure.

Prices compare one request's options with each other, on predictions. They cannot see two things: that a network, or the
instances at its ends, are not as described; and that instances which compute prompts could also serve the answers, if
no request were handed over. So the guard compares results with predictions:

1. Whether the pauses of handed-over requests are `SLOWER` times the prediction, and in prices
   (`router.scheduler.scoring.budget`) by more than the delay of first tokens of aggregated requests: what slows the
   whole fleet slows both. P's own time does not count: a first token is as late on P as it would be elsewhere, and
   queues are known exactly.
2. If so: whether the requests, with their pauses, were more expensive than each would have been if it were served
   aggregated, on the best instance of any role and with the delay of the aggregated ones. Only requests that were
   handed over knowingly count (`KNOWN`).

Hand-overs are turned off once both are certain (`SIGMAS`). While they are off, one of `TRIES` is still handed over if
the policy wants it; once `FEW` of these have come as predicted, or no more expensive than aggregated, hand-overs are
turned on again. A network that is slow only under load is quick as soon as it is not used: each time that hand-overs
have to be turned off again, twice as many must be tried first.
"""

from __future__ import annotations

import math
from typing import Final

from router.scheduler.scoring.budget import OWN, OWN_MISSED
from router.scheduler.scoring.prices import Prices

FEW: Final = 30
"""The number of requests that is meaningful: their mean's error can be computed from their own scatter."""

SIGMAS: Final = 3.0
"""The distance in standard errors at which a difference of means counts as certain."""

SLOWER: Final = 3.0
"""The mean ratio to the prediction from which prices are not trusted. With correct predictions, but every target at its
limit, means of 1.1 to 1.8 were seen (Azure's code trace on 3 P and 1 D at its goodput), and handing over was right."""

KNOWN: Final = 2.0
"""A request was handed over knowingly if the policy itself expected a pause of so many times the prediction. Otherwise
the error is about to be learned (`router.predict.transfer_model`), and may be one instance's network alone."""

SLOWEST: Final = 8.0
"""The largest ratio that one request counts for."""

KEPT: Final = 240
"""The number of remembered requests: above it the older ones count half."""

TRIES: Final = 20
"""While hand-overs are off, one of so many requests is handed over."""

TRIED_MOST: Final = 32 * FEW
"""The largest number of trials that is needed."""

FORGIVEN: Final = 40 * FEW
"""After so many good hand-overs, the next failure counts as the first."""

WORST: Final = 60.0
"""The largest loss that one request counts for: two missed targets."""

OVERDUE_S: Final = 2.0
"""An answer that is overdue by this counts as if it began now: behind a stalled network, none begins."""


class Foretold:
    """The predictions for one request when it was first placed: an attribute for each number that is measured later."""

    __slots__ = (
        "_first", "_gains", "_known", "_late", "_pause_ms", "_per_tpot", "_per_ttft", "_second", "_tokens", "_ttft_ms",
        "_used", "arrived", "computed_s", "handed", "slo_class", "streamed",
    )  # fmt: skip

    def __init__(self, prices: Prices, prefill: int, decode: int, gains: float | None = None) -> None:
        """Placed on these rows, equal for a single instance. `gains`: how much cheaper they were predicted to be than
        any single instance, if that was computed.
        """
        self.handed: Final = prefill != decode
        self.arrived: Final = prices.wanted.arrived
        self.streamed: Final = prices.wanted.streamed
        """The beginning of its answer is seen; else it is known only from the answer's end."""
        self.computed_s = -1.0
        """The time at which its prompt was computed."""
        self.slo_class: Final = prices.wanted.slo_class
        self._gains: Final = gains
        self._used: Final = prices.used_at(decode)
        self._per_ttft: Final = 1.0 / prices.ttft_unit
        self._per_tpot: Final = 1.0 / prices.tpot_unit
        self._first: Final = OWN_MISSED if prices.ttft_ms else OWN
        self._second: Final = OWN_MISSED if prices.tpot_ms else OWN
        self._tokens: Final = prices.middle - 1.0
        self._pause_ms = prices.told_pause_ms(prefill, decode) if self.handed else 0.0
        self._late: Final = not self.handed or prices.waits(decode)
        """The client has nothing before the answer begins."""
        self._ttft_ms: Final = prices.ttft_at(prefill) + (self._pause_ms if self._late else 0.0)
        self._known = gains is not None and (
            not prices.learns(decode) or prices.pause_ms(prefill, decode) >= KNOWN * self._pause_ms
        )
        """The policy expected more than the prediction, or has no way to know."""

    def _paused(self, ms: float) -> float:
        """The cost of a median answer with such a pause."""
        return self._second.of(self._used + max(0.0, ms) * self._per_tpot / self._tokens)

    def dearer(self, began_s: float) -> float:
        """By how much the request was more expensive than predicted, if its answer began at `began_s`."""
        if not self._late:
            found = self._paused((began_s - self.computed_s) * 1000.0) - self._paused(self._pause_ms)
        else:
            found = self._first.of(max(0.0, began_s - self.arrived) * 1000.0 * self._per_ttft)
            found -= self._first.of(self._ttft_ms * self._per_ttft)
        return min(WORST, max(-WORST, found))

    def slower(self, began_s: float) -> float:
        """The ratio of the real pause to the predicted one."""
        return min(SLOWEST, (began_s - self.computed_s) * 1000.0 / self._pause_ms)

    @property
    def due_s(self) -> float:
        """The time from which it is overdue, once its prompt is computed."""
        return self.computed_s + self._pause_ms / 1000.0 + OVERDUE_S

    def lost(self, dearer: float) -> float | None:
        """By how much the request was more expensive than aggregated. None: it says nothing, as the transfer model will
        learn the difference.
        """
        return max(-WORST, dearer - self._gains) if self._known and self._gains is not None else None

    def began_s(self, ended_s: float, tokens: int, token_ms: float) -> float:
        """When an answer in one piece began, in seconds: it has `tokens` tokens, each of which took `token_ms` by its
        engine's report. With the predicted time instead, an error of a tenth would be longer than most pauses.
        """
        return max(self.arrived, self.computed_s, ended_s - max(0, tokens - 1) * token_ms / 1000.0)


class _Mean:
    """The mean of the last requests' results of one kind."""

    __slots__ = ("_squares", "count", "value")

    def __init__(self) -> None:
        self.count = self.value = self._squares = 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        if self.count >= KEPT:
            self.count /= 2
            self._squares /= 2
        self.count += 1.0
        apart = value - self.value
        self.value += apart / self.count
        self._squares += apart * (value - self.value)

    @property
    def error(self) -> float:
        """The squared error of the mean."""
        return self._squares / (self.count - 1.0) / self.count if self.count > 1.0 else math.inf

    def above(self, other: _Mean) -> bool:
        """Whether this mean is certainly larger."""
        return self.value - other.value > SIGMAS * math.sqrt(self.error + other.error)


_NOTHING: Final = _Mean()
_NOTHING.add(0.0)
_NOTHING.add(0.0)
"""Certainly zero."""


class _Class:
    """One class of requests."""

    __slots__ = ("handed", "lost", "off", "peace", "slower", "tried", "tries", "turn", "whole")

    def __init__(self) -> None:
        self.handed = _Mean()
        """How much more expensive than predicted the handed-over requests were."""
        self.whole = _Mean()
        """How much more expensive than predicted the aggregated requests were."""
        self.slower = _Mean()
        """The ratio of real to predicted pauses."""
        self.lost = _Mean()
        """How much more expensive than aggregated the handed-over requests were."""
        self.off = False
        self.turn = 0
        """Counts the requests that could be handed over while it is off."""
        self.tries = FEW
        """The number of trials needed before it is turned on again."""
        self.tried = 0
        """The number of trials so far."""
        self.peace = 0
        """The number of hand-overs since it was turned on."""

    @property
    def later(self) -> bool:
        """Whether handed-over requests come later than predicted, and aggregated ones do not."""
        if self.handed.count < FEW or self.slower.value < SLOWER:
            return False
        return self.handed.above(_NOTHING) and (self.whole.count < FEW or self.handed.above(self.whole))

    def came(self, foretold: Foretold, began_s: float) -> None:
        """A request's answer has begun."""
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
        """Decide whether to turn hand-overs off."""
        self.peace += 1
        if self.peace >= FORGIVEN:
            self.tries = FEW
        if not self.later:
            self.lost = _Mean()
        elif self.lost.count >= FEW and self.lost.above(_NOTHING) and self.lost.value > self.whole.value:
            self.off, self.turn = True, 0
            self._begin_again()

    def _try_again(self) -> None:
        """Decide whether to turn hand-overs on."""
        self.tried += 1
        if self.tried < self.tries:
            return
        if not self.later or self.lost.value <= 0.0:
            self.off, self.peace, self.tries = False, 0, min(TRIED_MOST, 2 * self.tries)
        self._begin_again()

    def _begin_again(self) -> None:
        self.tried, self.handed, self.slower, self.lost = 0, _Mean(), _Mean(), _Mean()


class HandoffGuard:
    """The guard of one router."""

    def __init__(self) -> None:
        self._classes: Final[dict[str, _Class]] = {}
        self._open: Final[dict[Foretold, None]] = {}
        """Requests that are handed over and computed, and whose answers have not begun; the first to be computed comes
        first."""

    def allows(self, slo_class: str, now: float) -> bool:
        """Whether one more request of this class may be handed over. Overdue answers count as begun from now on."""
        while self._open and (first := next(iter(self._open))).due_s < now:
            self.came(first, now)
        one = self._classes.get(slo_class)
        if one is None or not one.off:
            return True
        one.turn += 1
        return one.turn % TRIES == 0

    def wonders(self, slo_class: str) -> bool:
        """Whether it needs to know what a pair gains, which takes some time to compute."""
        one = self._classes.get(slo_class)
        return one is not None and (one.off or one.later)

    def computed(self, foretold: Foretold, now: float) -> None:
        """The request's prompt is computed, on P."""
        if foretold.handed:
            foretold.computed_s = now
            if foretold.streamed:
                self._open[foretold] = None

    def gone(self, foretold: Foretold) -> None:
        """The request's answer will not begin, for a reason other than the hand-over."""
        self._open.pop(foretold, None)

    def came(self, foretold: Foretold, began_s: float) -> None:
        """The request's answer has begun, unless that was assumed earlier."""
        if foretold.handed and not self._ends(foretold):
            return
        one = self._classes.get(foretold.slo_class)
        if one is None:
            one = self._classes[foretold.slo_class] = _Class()
        one.came(foretold, began_s)

    def _ends(self, foretold: Foretold) -> bool:
        """Whether the pause of a handed-over request ends now: its prompt was computed, and no end was assumed."""
        if not foretold.streamed:
            return foretold.computed_s >= 0
        return self._open.pop(foretold, self) is not self

    def off(self) -> dict[str, bool]:
        """By known class: whether its requests are served aggregated now."""
        return {name: one.off for name, one in self._classes.items()}

    def served_whole(self) -> list[str]:
        """The classes that are served aggregated now, in order."""
        return sorted(name for name, off in self.off().items() if off)
