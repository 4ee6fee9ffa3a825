"""How full engines may be filled so that targets of time per token are kept: learned from answers that ended. Pure.

A prediction of an answer's time per token is of the moment of its choice. Answers that join later, prompts that are
computed beside it and a pause that is longer than foretold make it come out higher, by an amount that depends on the
load. So there is one margin for each target: the part of it up to which a prediction has room. After each answer that
was let in by a margin, the margin takes a step: down if the answer missed its target, up (`MISSED_AIM` as far) if not.
In the long run the share of answers that miss is `MISSED_AIM` then, whatever the errors look like (adaptive conformal
inference, Gibbs and Candès 2021), unless the margin is at one of its bounds.

Answers end seconds after they were let in. An answer that was let in under a much wider margin than the present one
says nothing about the present one: the margin has taken its step for those already (`STEPS_AHEAD`).
"""

from __future__ import annotations

import math
from typing import Final

MISSED_AIM: Final = 0.02
"""Share of answers let in that may miss: a third less than what is promised, for the time in which it is learned."""

WIDEST: Final = 0.93
"""Of a target: a request's own mean scatters around what is predicted for all. Where a margin begins, and its upper
bound."""

NARROWEST: Final = 0.6
"""And the lower bound: below, a fleet serves half of what it could, and what is wrong is not the margin."""

STEP: Final = 0.04
"""By which a margin narrows after an answer that missed, as a part of itself."""

STEPS_AHEAD: Final = 3.0
"""Steps by which a margin may be ahead of what answers that end now were let in under."""


class Margins:
    """Of one router: by target, milliseconds."""

    __slots__ = ("_by_target",)

    def __init__(self) -> None:
        self._by_target: Final[dict[float, float]] = {}

    def of(self, target_ms: float) -> float:
        """Up to which part of the target a prediction has room."""
        return self._by_target.get(target_ms, WIDEST)

    def limit_ms(self, target_ms: float) -> float:
        """The same in milliseconds; infinite where there is no target."""
        return target_ms * self._by_target.get(target_ms, WIDEST)

    def narrowed(self) -> dict[float, float]:
        """Margins that are not the widest, by target."""
        return self._by_target

    def ended(self, target_ms: float, under: float, observed_ms: float) -> None:
        """An answer has ended.

        Args:
            target_ms: its target.
            under: the margin that it was let in under.
            observed_ms: its mean time per token.
        """
        margin = self.of(target_ms)
        if observed_ms <= target_ms:
            margin *= math.exp(STEP * MISSED_AIM)
        elif under <= margin * math.exp(STEP * STEPS_AHEAD):
            margin *= math.exp(-STEP * (1.0 - MISSED_AIM))
        if margin >= WIDEST:
            self._by_target.pop(target_ms, None)
        else:
            self._by_target[target_ms] = max(NARROWEST, margin)
