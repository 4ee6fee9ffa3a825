"""Learns online by how much steps differ from their prediction.

A prediction has two parts, matrix products and attention (`StepCost.parts`); the correction is a factor on each, found
by recursive least squares with forgetting on relative errors: with shares z = parts/prediction and
y = observed/prediction, it keeps the factors f that minimise Σ λ^age · (y − f·z)².

Three guards, because an observation is not always of the steady state:

- An error counts as at most `CLIP` times the usual one, so that one cold sample (graphs captured, kernels compiled, a
  stall) moves little. `CHANGE` such errors in a row, all to one side, are a change and no cold samples: from then on
  they count in full, and what was learned before counts for nothing.
- Factors stay within `FACTOR_MIN` and `FACTOR_MAX`.
- The uncertainty of a direction that is never observed (decode without context, say) stays bounded. With forgetting
  alone it would grow until one sample could throw the factors anywhere.

Pure: `update` takes a state and returns the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from costs.step import ByKind, StepCost, StepKind, StepWork, kind_of

FORGETTING = 0.98
"""λ: half the weight is on the last 34 steps. Engines change with their batch, not from step to step."""

PRIOR = 0.25
"""Variance of a factor before the first sample, in units of a sample's: the profile is worth a handful of samples."""

VARIANCE_MAX = 10.0
"""The largest variance, and the variance after a change: the next samples then decide alone."""

USUAL_START = 0.1
"""The usual relative error at first: profiles fit to 1 to 3 %, engines add 5 to 10 %."""

USUAL_MIN, USUAL_MAX = 0.02, 0.3
"""Bounds of the usual error. Timers and schedulers alone cause errors of the lower bound; above the upper bound every
error would count as usual."""

USUAL_RATE = 0.05
"""How fast the usual error follows the observed errors."""

CLIP = 3.0
"""Errors beyond this many usual errors are cut to it."""

CHANGE = 8
"""A change is this many large errors to one side in a row. An engine that starts has fewer cold steps."""

FACTOR_MIN, FACTOR_MAX = 0.2, 5.0
"""Bounds of a factor. A step that differs more is not of this model on this hardware."""

UNKNOWN = (VARIANCE_MAX, 0.0, VARIANCE_MAX)

Pair = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Factors on matrix products and attention, and how sure they are."""

    factors: Pair = (1.0, 1.0)
    variance: tuple[float, float, float] = (PRIOR, 0.0, PRIOR)
    """Variance of the first factor, covariance of both, variance of the second."""
    usual: float = USUAL_START
    """Mean relative error of recent samples."""
    samples: int = 0
    clipped: int = 0
    """Samples that were cut. Many cut samples mean that the prediction is for another model or other hardware."""
    streak: int = 0
    """Large errors in a row: positive if steps took longer than predicted, negative if they took less."""

    def __str__(self) -> str:
        matrices, attention = self.factors
        return f"online correction × {matrices:.2f} (matrices), × {attention:.2f} (attention) from {self.samples} steps"


def update(state: Correction, features: Pair, observed_ms: float) -> Correction:
    """Fold one observed step in. `features` are the uncorrected parts of its prediction, in ms.

    A sample without meaning (no prediction, no time, not a number) leaves the state unchanged.
    """
    predicted = features[0] + features[1]
    if not (predicted > 0 and observed_ms > 0 and math.isfinite(predicted) and math.isfinite(observed_ms)):
        return state
    shares = (features[0] / predicted, features[1] / predicted)
    error = observed_ms / predicted - _dot(state.factors, shares)
    limit = CLIP * state.usual
    streak = _streak(state.streak, error, limit)
    changed = abs(streak) >= CHANGE
    cut = error if changed else max(-limit, min(limit, error))
    gain, variance = _gain(UNKNOWN if abs(streak) == CHANGE else state.variance, shares)
    return replace(
        state,
        factors=(_bounded(state.factors[0] + gain[0] * cut), _bounded(state.factors[1] + gain[1] * cut)),
        variance=variance,
        usual=max(USUAL_MIN, min(USUAL_MAX, state.usual + USUAL_RATE * (min(abs(error), limit) - state.usual))),
        samples=state.samples + 1,
        clipped=state.clipped + (cut != error),
        streak=streak,
    )


def _streak(before: int, error: float, limit: float) -> int:
    """The streak after one more error: longer on the same side, 1 on the other side, 0 if the error is small."""
    if abs(error) <= limit:
        return 0
    if error > 0:
        return max(before, 0) + 1
    return min(before, 0) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """One correction for each kind of step: an effect that slows decode down need not slow prefill down."""

    prefill: Correction = Correction()
    decode: Correction = Correction()
    mixed: Correction = Correction()

    def of(self, kind: StepKind) -> Correction:
        """The correction of one kind."""
        if kind is StepKind.PREFILL:
            return self.prefill
        return self.decode if kind is StepKind.DECODE else self.mixed

    @property
    def samples(self) -> int:
        """Steps seen."""
        return self.prefill.samples + self.decode.samples + self.mixed.samples

    def observe(self, plain: ByKind, work: StepWork, observed_ms: float) -> Corrections:
        """Fold one observed step in. `plain` are the uncorrected coefficients."""
        kind = kind_of(work)
        after = update(self.of(kind), plain.of(kind).parts(work), observed_ms)
        if kind is StepKind.PREFILL:
            return replace(self, prefill=after)
        return replace(self, decode=after) if kind is StepKind.DECODE else replace(self, mixed=after)

    def apply(self, plain: ByKind) -> ByKind:
        """The coefficients, corrected."""
        return ByKind(
            prefill=_corrected(plain.prefill, self.prefill),
            decode=_corrected(plain.decode, self.decode),
            mixed=_corrected(plain.mixed, self.mixed),
        )


UNCORRECTED = Corrections()


def _corrected(cost: StepCost, correction: Correction) -> StepCost:
    return cost.scaled(*correction.factors) if correction.samples else cost


def _dot(left: Pair, right: Pair) -> float:
    return left[0] * right[0] + left[1] * right[1]


def _bounded(factor: float) -> float:
    return max(FACTOR_MIN, min(FACTOR_MAX, factor))


def _gain(variance: tuple[float, float, float], shares: Pair) -> tuple[Pair, tuple[float, float, float]]:
    """The step of recursive least squares for two terms: the gain, and the variance after it."""
    first, both, second = variance
    seen = (first * shares[0] + both * shares[1], both * shares[0] + second * shares[1])
    scale = FORGETTING + _dot(seen, shares)
    gain = (seen[0] / scale, seen[1] / scale)
    first = (first - gain[0] * seen[0]) / FORGETTING
    both = (both - gain[0] * seen[1]) / FORGETTING
    second = (second - gain[1] * seen[1]) / FORGETTING
    largest = max(first, second)
    if largest > VARIANCE_MAX:  # scaled as a whole, so that it stays a variance
        shrink = VARIANCE_MAX / largest
        first, both, second = first * shrink, both * shrink, second * shrink
    return gain, (max(first, 0.0), both, max(second, 0.0))
