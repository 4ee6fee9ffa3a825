"""How full engines may be filled so that targets of time per token are kept: learned from answers that ended. Pure.

An answer's time per token is predicted when its instance is chosen. Answers that join later, prompts that are computed
beside it and a pause that is longer than foretold make the real time longer, by an amount that depends on the load. So
there is one margin for each target: the share of the target up to which a prediction has room. After each answer that
was let in by a margin, the margin takes a step: down if the answer missed its target, up (`MISSED_AIM` as far) if not.
In the long run the share of answers that miss is `MISSED_AIM` then, whatever the errors look like (adaptive conformal
inference, Gibbs and Candès 2021), unless the margin is at one of its bounds.

Classes that refuse (`when_missed: shed`) have promised what they let in. Other classes have margins of their own with a
wider aim, `SERVED_AIM`: a narrower margin makes more of their requests late, which are served as well, so it pays only
where many answers miss (`TpotMargins`; docs/policy.md).

Answers end seconds after they were let in. An answer that was let in under a much wider margin than the present one
says nothing about the present one: the margin has taken its steps for such answers already (`STEPS_AHEAD`).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from router.core.arrays import Floats

MISSED_AIM: Final = 0.015
"""Share of answers let in that may miss: half of the 3 % that docs/policy.md allows. First tokens, and the time before
a margin is learned, need the other half."""

SERVED_AIM: Final = 0.1
"""`MISSED_AIM` of classes that serve late requests: where more answers miss, an overload lasts, and fewer answers at a
time keep more targets (docs/policy.md has the simulated figures)."""

WIDEST: Final = 0.93
"""The share of a target at which a margin begins, and its upper bound: a request's own mean scatters around what is
predicted for all."""

NARROWEST: Final = 0.6
"""The lower bound: below it a fleet serves half of what it could, and something other than the margin is wrong."""

SERVED_NARROWEST: Final = 0.8
"""The same for classes that serve late requests. When engines that were slow for a while are quick again, a margin
widens by a hundredth with each two or three answers, and until then requests wait for nothing."""

STEP: Final = 0.04
"""The share of itself by which a margin narrows after an answer that missed."""

STEPS_AHEAD: Final = 3.0
"""A missed answer narrows the margin only if the margin that let it in was at most so many steps wider than now."""

PROMPTLY: Final = 0.92
"""`WIDEST` of a TTFT target: a request that is planned to begin at the last moment begins too late half of the time."""

FIRST_AIM: Final = 0.005
"""Share of first tokens that may be late. It is smaller than that of answers, as a narrower margin costs less here:
requests are refused after a shorter wait, and engines compute as many prompts."""

SAVED: Final = 5.0
"""The most misses that a class can save up by missing less than its aim, and then have before its margin narrows. With
none saved, every miss of a class that misses less than its aim would narrow its margin for a while."""


class Margins:
    """One router's margins for one kind of target (TPOT or TTFT), by target in milliseconds."""

    __slots__ = ("_aim", "_levels", "_lowest", "_widest", "step")

    def __init__(self, widest: float = WIDEST, aim: float = MISSED_AIM, narrowest: float = NARROWEST) -> None:
        """`widest`: where a margin begins, and its upper bound. `aim`: the share that may miss. `narrowest`: the lower
        bound.
        """
        self._levels: Final[dict[float, float]] = {}
        """By target: logarithm of its margin over the widest; above 0, what is saved."""
        self._widest: Final = widest
        self._lowest: Final = math.log(narrowest / widest)
        self._aim: Final = aim
        self.step = STEP

    def of(self, target_ms: float) -> float:
        """The margin: the share of the target up to which a prediction has room."""
        level = self._levels.get(target_ms, 0.0)
        return self._widest * math.exp(level) if level < 0.0 else self._widest

    def limit_ms(self, target_ms: float) -> float:
        """The same in milliseconds; an infinite target (none) gives infinity."""
        return target_ms * self.of(target_ms)

    def limits_ms(self, targets_ms: Floats) -> Floats:
        """`limit_ms` of many targets."""
        limits: Floats = targets_ms * self._widest
        for target_ms, level in self._levels.items():
            if level < 0.0:
                limits[targets_ms == target_ms] = self.limit_ms(target_ms)
        return limits

    def ended(self, target_ms: float, under: float, observed_ms: float) -> None:
        """An answer has ended, or a first token has come.

        Args:
            target_ms: its target.
            under: the margin that it was let in under.
            observed_ms: its mean time per token, or the time to its first token.
        """
        level = self._levels.get(target_ms, 0.0)
        if observed_ms <= target_ms:
            level += self.step * self._aim
        elif under <= self.of(target_ms) * math.exp(self.step * STEPS_AHEAD):
            level -= self.step * (1.0 - self._aim)
        self._levels[target_ms] = min(self.step * SAVED, max(self._lowest, level))

    def widen(self, target_ms: float) -> None:
        """A request that the margin would have refused was in time, so nothing under the margin would have missed.
        Widen it by a whole step, up to the widest.
        """
        level = self._levels.get(target_ms, 0.0)
        if level < 0.0:
            self._levels[target_ms] = min(0.0, level + self.step)


class TpotMargins:
    """One router's margins for TPOT targets: those of classes that refuse, and those of all others."""

    __slots__ = ("served", "shed")

    def __init__(self) -> None:
        self.shed: Final = Margins()
        """Of classes that refuse."""
        self.served: Final = Margins(aim=SERVED_AIM, narrowest=SERVED_NARROWEST)
        """Of classes that serve late requests."""

    def of_class(self, *, sheds: bool) -> Margins:
        """Those of a class."""
        return self.shed if sheds else self.served

    def limit_ms(self, target_ms: float) -> float:
        """The predicted time per token, in ms, up to which an instance with this strictest target has room. The target
        may be of either kind of class: the narrower margin counts.
        """
        return min(self.shed.limit_ms(target_ms), self.served.limit_ms(target_ms))

    def limits_ms(self, targets_ms: Floats) -> Floats:
        """`limit_ms` of many targets."""
        limits: Floats = np.minimum(self.shed.limits_ms(targets_ms), self.served.limits_ms(targets_ms))
        return limits
