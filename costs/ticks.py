"""Step times in whole nanoseconds, for machines that must count exactly: the engine twin and the simulator.

The same form as `step`, in integers. Coefficients are rounded once to 2⁻³⁰ ns; everything after that is exact and the
same on every machine. A step's time is the sum of its terms, rounded down.

Decode steps grow by one token per request and step, so that a run of k steps takes

    Σ_{i<k} ⌊(D(B) + context·(C + i·B)) / 2³⁰⌋

which `run_ns` computes in closed form (the classical floor-sum, O(log) steps) and which equals the sum of the single
steps to the nanosecond.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from costs.step import KNEE_TOKENS, StepCost, StepWork

SHIFT = 30
"""Coefficients are kept to 2⁻³⁰ ns: 10⁹ token pairs of attention are still right to the nanosecond."""

CHANCE_BITS = 60
"""Probabilities are kept to 2⁻⁶⁰."""


def floor_sum(count: int, modulus: int, slope: int, start: int) -> int:
    """Σ_{i=0}^{count−1} ⌊(slope·i + start) / modulus⌋, for slope and start ≥ 0."""
    assert count >= 0 and modulus > 0 and slope >= 0 and start >= 0
    total = 0
    while count:
        total += (slope // modulus) * (count * (count - 1) // 2) + (start // modulus) * count
        slope, start = slope % modulus, start % modulus
        last = slope * count + start
        if last < modulus:
            break
        # Count the lattice points under the line along the other axis.
        count, start, modulus, slope = last // modulus, last % modulus, slope, modulus
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticks:
    """`StepCost` in units of 2⁻³⁰ ns."""

    floor: int
    start: int
    token: int
    area: int
    decode: int
    context: int
    request: int
    cached: int
    crowd: int
    crowd_start: int
    """Where the bend's line crosses zero: crowd × crowd_from."""
    experts: int
    miss: int
    """Probability in units of 2⁻⁶⁰."""

    @classmethod
    def of(cls, cost: StepCost) -> Ticks:
        """The coefficients of `cost`, rounded."""

        def ticks(milliseconds: float) -> int:
            return round(milliseconds * 1_000_000 * (1 << SHIFT))

        return cls(
            floor=ticks(cost.floor_ms),
            start=ticks(cost.start_ms),
            token=ticks(cost.token_ms),
            area=ticks(cost.area_ms),
            decode=ticks(cost.decode_ms),
            context=ticks(cost.context_ms),
            request=ticks(cost.request_ms),
            cached=ticks(cost.cached_ms),
            crowd=ticks(cost.crowd_ms),
            crowd_start=ticks(cost.crowd_ms * cost.crowd_from),
            experts=ticks(cost.experts_ms),
            miss=round(cost.expert_miss * (1 << CHANCE_BITS)),
        )

    def step_ns(self, work: StepWork) -> int:
        """The time of one step; 0 without work, at least 1 otherwise."""
        if not work.new_tokens and not work.batch:
            return 0
        attention = max(self.area * work.area, self.cached * work.longest_cached) + self.context * work.sum_context
        return max(1, (self._matrices(work.new_tokens, work.batch) + attention) >> SHIFT)

    def decode_step_ns(self, batch: int, sum_context: int) -> int:
        """Time to make one token for each of `batch` requests whose contexts sum up to `sum_context`."""
        return self.decode_run_ns(batch, sum_context, 1)

    def decode_run_ns(self, batch: int, sum_context: int, steps: int) -> int:
        """Time of `steps` decode steps in a row, each with `batch` more tokens of context than the one before."""
        assert batch >= 0 and sum_context >= 0 and steps >= 0
        if not batch:
            return 0
        first = self._requests(batch) + self.context * sum_context
        if steps == 1:
            return max(1, first >> SHIFT)
        if first < 1 << SHIFT:  # a step takes time: at least 1 ns, far below any real cost
            return sum(max(1, (first + self.context * batch * at) >> SHIFT) for at in range(steps))
        return floor_sum(steps, 1 << SHIFT, self.context * batch, first)

    def decode_steps_for(self, batch: int, sum_context: int, duration_ns: int) -> int:
        """The fewest decode steps that together take at least `duration_ns`: a run that is cut there ends with a whole
        step.
        """
        assert batch > 0
        if duration_ns <= 0:
            return 0
        per_step, growth = self.decode_step_ns(batch, sum_context), self.context * batch / (1 << SHIFT)
        steps = _positive_root(growth / 2, per_step, duration_ns)
        while self.decode_run_ns(batch, sum_context, steps) < duration_ns:
            steps += 1
        while steps and self.decode_run_ns(batch, sum_context, steps - 1) >= duration_ns:
            steps -= 1
        return steps

    def _matrices(self, new_tokens: int, batch: int) -> int:
        if not new_tokens:
            return self._requests(batch)
        if not batch:
            return self._products(new_tokens)
        return max(self._requests(batch), self._products(new_tokens + batch) + self.request * batch)

    def _requests(self, batch: int) -> int:
        crowd = max(0, self.crowd * batch - self.crowd_start)
        return self.decode + self.request * batch + crowd + self._experts_read(batch)

    def _products(self, tokens: int) -> int:
        all_read = self.floor + self.experts
        knee = max(all_read, self.start + self.token * KNEE_TOKENS)
        if tokens >= KNEE_TOKENS:
            return max(knee, self.start + self.token * tokens)
        square = (knee**2 - all_read**2) * tokens**2 // KNEE_TOKENS**2
        return math.isqrt((self.floor + self._experts_read(tokens)) ** 2 + square)

    def _experts_read(self, tokens: int) -> int:
        if not self.experts:
            return 0
        missed, factor, left = 1 << CHANCE_BITS, self.miss, tokens
        while left:  # miss ** tokens in fixed point, by squaring
            if left & 1:
                missed = missed * factor >> CHANCE_BITS
            factor = factor * factor >> CHANCE_BITS
            left >>= 1
        return self.experts * ((1 << CHANCE_BITS) - missed) >> CHANCE_BITS


def _positive_root(square: float, linear: float, constant: float) -> int:
    """The x, rounded down, at which square·x² + linear·x reaches about `constant`."""
    if square <= 0:
        return int(constant // linear)
    return int((math.sqrt(linear * linear + 4 * square * constant) - linear) / (2 * square))
