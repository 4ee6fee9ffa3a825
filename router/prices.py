"""What a place for one request costs the fleet, by row of its columns. Pure.

A price is a part of what was promised: a first token after half of its target costs one half, and the more the less
there is left (`_barrier`); a target missed costs `MISS`, whosever it is. Without targets, `LOOSE` times an idle
instance's latency takes their place. `router.policy.workload` says which parts there are and compares them;
`router.admission` looks at the same predictions for what is promised.

Everything is computed once for all rows, and not before somebody asks: a choice among 16 instances has some 60 µs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from router.book import SHORT_ONES, SPREAD
from router.columns import Bools, Floats

if TYPE_CHECKING:
    from router.policy.candidates import Wanted
    from router.view import Fleet

MISS: Final = 30.0
"""Of a missed target: nobody saves time for others by missing one, and of two places that miss it the faster one is
still taken."""

LOOSE: Final = 5.0

BARRIER_MAX: Final = 0.8
"""What is left of a budget counts as a fifth at least: being late must not cost more than several misses of others."""

RAMP: Final = (0.85, 1.1)
"""From this part of a target on, a prediction counts as partly missed, beyond this as missed: what is predicted here
comes out within some 10 % (docs/policy.md)."""

PULL_MS, PULL_STEPS = 3.0, 3.0
"""A handoff's pause beside its bytes: its engine's front end and the messages, and steps of D's: the one under way when
the leg comes, the one after which the blocks are there (steps are decided ahead), and the one that makes the seeded
token once more (seen on the twin: 24.7 ms where a step takes 7.2).
"""

OUTPUT_UNKNOWN: Final = 200.0
"""Tokens of an answer where nobody predicts: `router.lengths.PRIOR_P50`."""

_SLOPE: Final = 1.0 / (RAMP[1] - RAMP[0])


def _tables() -> tuple[Floats, Floats, Floats, Floats]:
    """What a part of a budget costs, as points to look it up from: the more, the less there is left of it."""
    used = np.concatenate([np.linspace(0.0, 1.2, 121), [1e6]])
    near = 1.0 / (1.0 - np.minimum(used, BARRIER_MAX))
    return used, near, used * near, used * near + MISS * _missed(used)


def prices_of(fleet: Fleet, wanted: Wanted) -> Prices:
    """Computed once for each time a request asks: policy, admission and book look at the same ones."""
    known = fleet.priced
    if known is not None and known.wanted is wanted and known.turn == fleet.book.turn:
        return known
    found = fleet.priced = Prices(fleet, wanted)
    return found


class Prices:
    """Everything that one choice compares, by row of the columns."""

    def __init__(self, fleet: Fleet, wanted: Wanted) -> None:
        book = fleet.book
        self.fleet: Final = fleet
        self.wanted: Final = wanted
        self.turn: Final = book.turn
        self.output: Final = wanted.output_tokens or OUTPUT_UNKNOWN
        self.short: Final = max(2.0, wanted.output_short or OUTPUT_UNKNOWN)
        self.middle: Final = max(2.0, wanted.output_middle or OUTPUT_UNKNOWN)
        """Tokens that a pause is spread over, in a short answer and in one in the middle."""
        self.ttft_ms: Final = 0.0 if wanted.late else wanted.ttft_ms
        self.tpot_ms: Final = wanted.tpot_ms
        self.promised: Final = bool(wanted.ttft_ms or wanted.tpot_ms)
        self.places: Final[Bools] = fleet.columns.inflight < fleet.columns.limits(wanted.routers)
        tokens = max(1, wanted.prompt_tokens)
        speeds = book.speeds
        self.waits: Final[Floats] = book.waits_ms(wanted.now)
        self.prompt: Floats = speeds.prompts_ms(tokens)
        self.cached: Final[dict[int, int]] = {}
        self._less_cached(tokens)
        self.stall: Final[Floats] = np.maximum(self.prompt - speeds.shared_ms(tokens), 0.0)
        """Milliseconds that answers there would wait for its prompt."""
        self.prompt = self.prompt + book.beside * speeds.steps(tokens)
        waited_ms = max(0.0, wanted.now - wanted.arrived) * 1000.0 if wanted.arrived else 0.0
        self.alone: Final[Floats] = self.prompt + (speeds.lead + waited_ms)
        """Its first token with nobody before it."""
        self.ttft: Floats = self.alone + self.waits
        gate = fleet.gate
        self.open: Bools = self.places
        """Rows where its prompt would be computed at once, or nearly so."""
        if gate is not None:
            self.open = self.places & gate.prompts(self)
            if gate.queue and not self.open.all():  # elsewhere it is not the only one that waits
                self.ttft = np.where(self.open, self.ttft, self.ttft + gate.queue_ms(len(fleet)))
        context = tokens + self.output / 2
        self.longer: Final[Floats] = speeds.request + speeds.context * context
        """By how much it makes a step longer."""
        self.idle: Final[Floats] = book.idle(wanted.now)
        self.step: Final[Floats] = book.step + self.longer
        self.tpot: Final[Floats] = self.step / self.idle
        self.ttft_unit: Final = wanted.ttft_ms or LOOSE * float(self.alone.min())
        self.tpot_unit: Final = wanted.tpot_ms or LOOSE * self._step_alone_ms(context)
        self._handoffs: Final[dict[tuple[int, int], float]] = {}
        self._of_prefill: Floats | None = None
        self._of_decode: Floats | None = None

    def _less_cached(self, tokens: int) -> None:
        """What is in an instance's cache is not computed again; its last token always is."""
        fleet, wanted = self.fleet, self.wanted
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

    def _step_alone_ms(self, context: float) -> float:
        """An idle instance's step with nothing but this answer, on the fastest make there is."""
        speeds = self.fleet.book.speeds
        return min(make.decode.requests_ms(1) + make.decode.context_ms * context for make in speeds.present())

    # --- prices -------------------------------------------------------------------------------------------------------

    def of_prefill(self) -> Floats:
        """By row, without what exactly it does to the targets of those who decode there (`harm`)."""
        if self._of_prefill is None:
            book = self.fleet.book
            price = np.interp(self.ttft * (1.0 / self.ttft_unit), _USED, _OWN_MISSED if self.ttft_ms else _OWN)
            if book.answers:
                near = np.interp(book.step / (self.idle * self.tpot_unit), _USED, _NEAR)
                price += book.decoding * self.stall * near * (1.0 / (self.tpot_unit * self.middle))
            self._of_prefill = price
        return self._of_prefill

    def harm(self, row: int) -> float:
        """What this prompt does to the targets of answers there."""
        if not self.promised or not self.fleet.book.decoding.item(row):
            return 0.0
        return MISS * self.fleet.book.harmed(row, self.stall.item(row))

    def of_decode(self) -> Floats:
        """By row: its own time, and what its part of each step takes from the others."""
        if self._of_decode is None:
            book = self.fleet.book
            used = self.tpot * (1.0 / self.tpot_unit)
            others = book.decoding * self.longer / (self.idle * self.tpot_unit)
            price = np.interp(used, _USED, _OWN_MISSED if self.tpot_ms else _OWN)
            price += others * np.interp(used, _USED, _NEAR)
            if self.promised:
                limit = book.strictest * self.idle
                if (self.step > RAMP[0] * limit).any():
                    price += self._pushed_over(limit)
            self._of_decode = price
        return self._of_decode

    def _pushed_over(self, limit: Floats) -> Floats:
        """Targets of answers there that are missed for one more beside them; `limit`: steps that just keep them."""
        book = self.fleet.book
        found: Floats = (_missed(self.step / limit) - _missed(book.step / limit)) * (book.decoding * MISS)
        return found

    def handoff(self, prefill: int, decode: int) -> float:
        """A pause between the first and the second token; the same from all prefill instances of one make."""
        speeds = self.fleet.book.speeds
        pair = (speeds.kind(prefill), decode)
        known = self._handoffs.get(pair)
        if known is None:
            known = self._handoffs[pair] = self._pause(decode, self.pause_ms(prefill, decode))
        return known

    def pause_ms(self, prefill: int, decode: int) -> float:
        """How long a client waits between the first and the second token beside a step."""
        moving_ms = self.fleet.book.speeds.handoff_ms(self.wanted.prompt_tokens, prefill, decode)
        return PULL_MS + PULL_STEPS * self.step.item(decode) + moving_ms

    def _pause(self, decode: int, pause_ms: float) -> float:
        price = pause_ms / (self.tpot_unit * self.output)
        if self.tpot_ms:
            used = self.tpot.item(decode) / self.tpot_ms
            short, middle = (used + pause_ms / ((each - 1) * self.tpot_ms) for each in (self.short, self.middle))
            more = SHORT_ONES * _share_missed(short) + (1 - SHORT_ONES) * _share_missed(middle)
            price += MISS * (more - _share_missed(used))
        return price

    def fits(self) -> Bools:
        """Rows with memory left for its prompt and answer; an empty one always has."""
        book, wanted = self.fleet.book, self.wanted
        if not book.answers:
            return self.places
        own = wanted.prompt_tokens + self.output + SPREAD * math.sqrt(wanted.output_variance)
        found: Bools = (book.kv_needed <= book.speeds.capacity - own) | (book.decoding == 0)
        return found


def _share_missed(ratio: float) -> float:
    return min(1.0, max(0.0, (ratio - RAMP[0]) * _SLOPE))


def _missed(ratio: Floats) -> Floats:
    """A prediction over its target as a share of a miss."""
    found: Floats = np.minimum(np.maximum((ratio - RAMP[0]) * _SLOPE, 0.0), 1.0)
    return found


_USED, _NEAR, _OWN, _OWN_MISSED = _tables()
"""The part used; over what is left; the part over what is left; and what misses cost."""
