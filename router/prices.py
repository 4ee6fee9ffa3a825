"""What a place for one request costs the fleet, by row of its columns: time, and targets missed. Pure.

The price of a place, in milliseconds, is what all requests together lose by it (`router.policy.workload` says which
parts there are, and compares them; `router.admission` looks at the same predictions for what is promised).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from router.columns import Bools, Floats, Ints

if TYPE_CHECKING:
    from router.policy.candidates import Wanted
    from router.view import Fleet

MISS: Final = 10.0
"""A missed target is worth so many times a request's whole latency at its targets: nobody saves time for others by
missing one, and of two places that miss it the faster one is still taken."""

LOOSE: Final = 5.0
"""Without targets, time is counted in so many times what an idle instance would take."""

BARRIER_MAX: Final = 0.95

RAMP: Final = (0.85, 1.1)
"""From this part of a target on, a prediction counts as partly missed, beyond this as missed: what is predicted here
comes out within some 10 % (docs/policy.md)."""

PULL_MS: Final = 4.0
"""A decode leg's way to its pull beside the bytes: two milliseconds of its engine's front end, and half a step."""

OUTPUT_UNKNOWN: Final = 200.0
"""Tokens of an answer where nobody predicts: `router.lengths.PRIOR_P50`."""


class Prices:
    """Everything that one choice compares, by row of the columns."""

    def __init__(self, fleet: Fleet, wanted: Wanted) -> None:
        book, now = fleet.book, wanted.now
        self.fleet: Final = fleet
        self.wanted: Final = wanted
        self.output = wanted.output_tokens or OUTPUT_UNKNOWN
        self.short = max(2.0, wanted.output_middle or OUTPUT_UNKNOWN)
        """Tokens that a pause is spread over: of half of such answers, or fewer."""
        self.waited_ms = max(0.0, now - wanted.arrived) * 1000.0 if wanted.arrived else 0.0
        binding = not wanted.late
        self.ttft_ms = wanted.ttft_ms if binding else 0.0
        self.tpot_ms = wanted.tpot_ms
        self.promised = bool(wanted.ttft_ms or wanted.tpot_ms)
        self.limits: Ints = fleet.columns.limits(wanted.routers)
        self.places: Bools = fleet.columns.inflight < self.limits
        tokens = max(1, wanted.prompt_tokens)
        speeds = book.speeds
        self.waits: Floats = book.waits_ms(now)
        self.prompt: Floats = speeds.prompts_ms(tokens)
        self._less_cached(fleet, tokens)
        self.stall: Floats = np.maximum(0.0, self.prompt - speeds.shared_ms(tokens))
        self.prompt = self.prompt + speeds.steps(tokens) * book.beside
        self.ttft: Floats = self.waited_ms + self.waits + self.prompt + speeds.first + speeds.overhead
        gate = fleet.gate
        self.open: Bools = self.places if gate is None else self.places & gate.prompts(self)
        """Rows where its prompt would be computed at once, or nearly so."""
        if gate is not None and not self.open.all():  # elsewhere it is not the only one that waits
            self.ttft = np.where(self.open, self.ttft, self.ttft + gate.queue_ms(len(self.ttft)))
        self.duty: Floats = book.duty(now)
        context = tokens + self.output / 2
        self.longer: Floats = speeds.request + speeds.context * context
        self.step: Floats = book.step + self.longer
        alone: Floats = book.decoding == 0
        if alone.any():  # a first answer brings the step itself
            self.step = np.where(alone, self._steps_alone(context), self.step)
        self.tpot: Floats = self.step / (1.0 - self.duty)
        self.ttft_unit = wanted.ttft_ms or LOOSE * float((self.prompt + speeds.first).min())
        self.tpot_unit = wanted.tpot_ms or LOOSE * float(self._steps_alone(context).min())

    def _less_cached(self, fleet: Fleet, tokens: int) -> None:
        """What is in an instance's cache is not computed again; its last token always is."""
        self.cached: dict[int, int] = {}
        wanted = self.wanted
        if fleet.prefixes is None or not wanted.prefix:
            return
        speeds = fleet.book.speeds
        for chunks, bits in fleet.prefixes.match(wanted.prefix).levels:
            held = min(int(chunks * wanted.prefix_block_tokens), tokens - 1)
            left = bits
            while left:
                row = left.bit_length() - 1
                left ^= 1 << row
                self.cached[row] = held
                self.prompt[row] = speeds.prompt_ms(row, tokens - held, held)

    def _steps_alone(self, context: float) -> Floats:
        speeds = self.fleet.book.speeds
        each = np.array([make.decode.requests_ms(1) + make.decode.context_ms * context for make in speeds.makes])
        found: Floats = each[speeds.make_of_row] * speeds.decode_factor
        return found

    def handoff(self, prefill: int, decode: int) -> float:
        """Price of moving the KV from one to the other: a pause between the first and the second token."""
        pause_ms = PULL_MS + self.fleet.book.speeds.handoff_ms(self.wanted.prompt_tokens, prefill, decode)
        each_ms = pause_ms / (self.short - 1)
        price = pause_ms / (self.tpot_unit * self.output)
        if self.tpot_ms:
            tpot_ms = float(self.tpot[decode])
            more = _share_missed((tpot_ms + each_ms) / self.tpot_ms) - _share_missed(tpot_ms / self.tpot_ms)
            price += MISS * more
        return price

    # --- prices -------------------------------------------------------------------------------------------------------

    def of_prefill(self) -> Floats:
        """By row, without what exactly it does to the targets of those who decode there."""
        book = self.fleet.book
        near = _barrier(book.step / (1.0 - self.duty) / self.tpot_unit)
        stall = book.decoding * self.stall / (self.tpot_unit * self.output) * near
        price: Floats = self.ttft / self.ttft_unit * _barrier(self.ttft / self.ttft_unit) + stall
        if self.ttft_ms:
            price = price + MISS * _missed(self.ttft / self.ttft_ms)
        return price

    def harm(self, row: int) -> float:
        """What this prompt does to the targets of answers there."""
        if not self.promised or not self.fleet.book.decoding[row]:
            return 0.0
        return MISS * self.fleet.book.harmed(row, float(self.stall[row]))

    def of_decode(self) -> Floats:
        """By row."""
        book = self.fleet.book
        idle = 1.0 - self.duty
        used = self.tpot / self.tpot_unit
        price: Floats = (used + book.decoding * self.longer / idle / self.tpot_unit) * _barrier(used)
        if self.tpot_ms:
            price = price + MISS * _missed(self.tpot / self.tpot_ms)
        if self.promised:
            price = price + MISS * self._pushed_over(idle)
        return price

    def _pushed_over(self, idle: Floats) -> Floats:
        """Answers there that come to miss their target by one more beside them, as a number."""
        book = self.fleet.book
        strictest = np.where(book.strictest > 0, book.strictest, np.inf)
        more = _missed(self.tpot / strictest) - _missed(book.step / idle / strictest)
        found: Floats = book.decoding * more
        return found

    def fits(self) -> Bools:
        """Rows with memory left for its prompt and answer."""
        book = self.fleet.book
        variance = book.kv_variance + self.wanted.output_variance
        needed = book.kv_mean + self.wanted.prompt_tokens + self.output + 2.0 * np.sqrt(variance)
        found: Bools = needed <= book.speeds.capacity[: len(needed)]
        return found | (book.decoding == 0)


def _share_missed(ratio: float) -> float:
    low, high = RAMP
    return min(1.0, max(0.0, (ratio - low) / (high - low)))


def _barrier(used: Floats) -> Floats:
    """What a part of a budget costs: the more, the less there is left of it."""
    found: Floats = 1.0 / (1.0 - np.minimum(used, BARRIER_MAX))
    return found


def _missed(ratio: Floats) -> Floats:
    """A prediction over its target as a share of a miss."""
    low, high = RAMP
    found: Floats = np.clip((ratio - low) / (high - low), 0.0, 1.0)
    return found
