"""How much longer prompts may keep the answers of one instance waiting, by their targets of time per token. Pure.

Each answer with a target has two limits: for a short answer and for a median one. So the harm that a prompt would do to
the answers there is a count of limits that it pushes over, and not a guess.

Waits are told on the instance's own clock (`stalled_ms`): the milliseconds of prompts ever placed there. What an answer
had to wait for is a difference of two readings.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from heapq import heapify, heappop, heappush
from typing import Final

SHORT_ONES: Final = 0.3
"""The share of all answers that a short answer represents; a median answer represents the others."""

STEPS_WITHIN: Final = 0.1
"""How far the time that an answer still decodes may be from what is predicted, as a share: predictions here are right
within some 10 % (docs/policy.md)."""

NEARLY: Final = 0.93
"""The share of a target to plan with: steps get longer during an answer, as other answers join it."""

OVER_MAX: Final = 64
"""`StallLimits.outlived` has at most so many entries more than four times as many as there are living limits."""

STEP_MS_MIN: Final = 0.01
"""The shortest step assumed, whatever a cost profile says."""


class LengthLimit:
    """The wait up to which an answer of a given length meets its target. Once the answer is longer, the limit is for
    twice the length.
    """

    __slots__ = ("among", "at", "from_ms", "over", "pause_ms", "prompts", "tokens", "tpot_ms", "until_ms")

    def __init__(
        self, at: StallLimits, among: list[float], tokens: float, from_ms: float, tpot_ms: float, pause_ms: float
    ) -> None:
        self.at = at
        """The limits of the same instance."""
        self.among = among
        """All limits of this kind there, sorted."""
        self.prompts = at.prompts
        """The number of prompts placed there before the answer began: `from_ms` includes their stalls."""
        self.tokens = tokens
        self.from_ms = from_ms
        """`stalled_ms` when the answer began."""
        self.tpot_ms = tpot_ms
        """The answer's target."""
        self.pause_ms = pause_ms
        """Its expected pause after the first token."""
        self.until_ms = 0.0
        """The value of `stalled_ms` from which the target is missed."""
        self.over = False
        """The limit is not needed any more."""

    def place(self, step_ms: float) -> None:
        """Compute `until_ms` for an answer of `tokens` tokens with steps of `step_ms`, and add it to `among`."""
        spare_ms = (NEARLY * self.tpot_ms - step_ms) * max(self.tokens - 1, 1.0) - self.pause_ms
        self.until_ms = self.from_ms + max(0.0, spare_ms)
        insort(self.among, self.until_ms)

    def lower(self, ms: float) -> None:
        """The instance's clock is set back by `ms` that had passed on it when the answer began."""
        del self.among[bisect_left(self.among, self.until_ms)]
        self.from_ms -= ms
        self.until_ms -= ms
        insort(self.among, self.until_ms)


class StallLimits:
    """The limits of one instance's answers."""

    __slots__ = ("_numbered", "by_length", "living", "outlived", "prompts")

    def __init__(self) -> None:
        self.by_length: Final[tuple[list[float], list[float]]] = ([], [])
        """The limits (`until_ms`) for short answers and for median ones, sorted."""
        self.outlived: Final[list[tuple[float, int, LengthLimit]]] = []
        """A heap of limits by the time at which their answer will be longer than `LengthLimit.tokens`, on a clock that
        stands while prompts keep answers waiting (`RowLoad.progress`); the number tells equal times apart."""
        self.living: Final[dict[LengthLimit, None]] = {}
        """All limits that are not over, in the order in which they began."""
        self.prompts = 0
        """The number of prompts ever placed at the instance."""
        self._numbered = 0

    def begin(
        self, lengths: tuple[float, float], stalled_ms: float, step_ms: float, tpot_ms: float, pause_ms: float
    ) -> tuple[LengthLimit, LengthLimit]:
        """The limits of one more answer.

        Args:
            lengths: tokens of a short and of a median answer.
            stalled_ms: the instance's clock now.
            step_ms: a decode step there now.
            tpot_ms: the answer's target.
            pause_ms: its expected pause after the first token.
        """
        short = LengthLimit(self, self.by_length[0], lengths[0], stalled_ms, tpot_ms, pause_ms)
        middle = LengthLimit(self, self.by_length[1], lengths[1], stalled_ms, tpot_ms, pause_ms)
        short.place(step_ms)
        middle.place(step_ms)
        self.living[short] = self.living[middle] = None
        return short, middle

    def expect_longer(self, limit: LengthLimit, progress: float, tokens: float, step_ms: float) -> None:
        """The answer will be longer than the limit's length after `tokens` more tokens."""
        self._numbered += 1
        heappush(self.outlived, (progress + tokens * max(step_ms, STEP_MS_MIN), self._numbered, limit))
        # Their time may never come: where prompts take less than predicted, that clock stands, or goes back.
        if len(self.outlived) > OVER_MAX + 4 * len(self.living):
            self.outlived[:] = [each for each in self.outlived if not each[2].over]
            heapify(self.outlived)

    def outlive(self, progress: float, step_ms: float) -> None:
        """Answers that have become longer than their limit's length get a limit for twice the length. Their wait is
        spread over all of their tokens: most answers that pass a limit have long passed its length, too.
        """
        outlived = self.outlived
        while outlived and outlived[0][0] <= progress:
            when, _, limit = heappop(outlived)
            if limit.over:
                continue
            del limit.among[bisect_left(limit.among, limit.until_ms)]
            more = max(1.0, limit.tokens)
            limit.tokens = 2.0 * more
            limit.place(step_ms)
            self.expect_longer(limit, when, more, step_ms)

    def take_back(self, prompts: int, ms: float) -> None:
        """A prompt will not be computed: `ms` of its stall are taken from the instance's clock. The answers that began
        after it was placed began at a clock that was ahead by them.

        Args:
            prompts: the value of `prompts` once it was placed.
            ms: what it does not keep answers waiting for.
        """
        for limit in self.living:
            if limit.prompts >= prompts:
                limit.lower(ms)
        self.outlived[:] = [
            (when + ms if limit.prompts >= prompts else when, number, limit)
            for when, number, limit in self.outlived
            if not limit.over
        ]
        heapify(self.outlived)

    def pushed_over(
        self, ms: float, stalled_ms: float, step_ms: float, waits: float, lengths: tuple[float, float]
    ) -> float:
        """The expected number of answers that a prompt pushes over their limits.

        How long they will wait for other reasons is not known: later prompts come, as many as of late, and steps take
        longer than predicted. `_likely` says where each answer's wait will probably end.

        Args:
            ms: for how long the prompt's steps keep answers waiting.
            stalled_ms: the instance's clock now.
            step_ms: a decode step there now.
            waits: what answers have waited for of late, as a share of the time that they decoded.
            lengths: tokens of a short and of a median answer.
        """
        per_token_ms = max(step_ms, STEP_MS_MIN)
        of_short = _likely(self.by_length[0], stalled_ms, ms, per_token_ms * lengths[0], waits)
        of_middle = _likely(self.by_length[1], stalled_ms, ms, per_token_ms * lengths[1], waits)
        return SHORT_ONES * of_short + (1 - SHORT_ONES) * of_middle


def end(limits: tuple[LengthLimit, ...]) -> None:
    """Remove these limits from their lists: they are not needed any more."""
    for limit in limits:
        del limit.among[bisect_left(limit.among, limit.until_ms)]
        del limit.at.living[limit]
        limit.over = True


def _likely(limits: list[float], stalled: float, ms: float, decodes_ms: float, waits: float) -> float:
    """The expected number of answers that are pushed over these limits by `ms` of a prompt.

    Halfway through, an answer still decodes for half of `decodes_ms` and waits for `waits` times that, on average. Its
    wait is taken as equally likely anywhere in a span around that, as wide as this mean, `STEPS_WITHIN` of what it
    decodes, and the prompt. A limit in the span is passed with a probability of the prompt's part of the span.
    """
    mean_ms = waits * decodes_ms / 2
    wide_ms = mean_ms + STEPS_WITHIN * decodes_ms + ms
    low = stalled + max(0.0, mean_ms - wide_ms / 2)
    return _between(limits, low, low + wide_ms) * ms / wide_ms


def _between(limits: list[float], above: float, up_to: float) -> int:
    """How many of these sorted limits lie there."""
    return bisect_right(limits, up_to) - bisect_right(limits, above)
