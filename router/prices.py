"""What a place for one request costs the fleet, by row of its columns. Pure.

A price is a part of what was promised: a first token after half of its target costs one half, and the more the less
there is left (`_barrier`); a target missed costs `MISS`, whosever it is. Without targets, `LOOSE` times an idle
instance's latency takes their place. `router.policy.workload` says which parts there are and compares them;
`router.admission` looks at the same predictions for what is promised.

Everything is computed once for all rows, and not before somebody asks: a choice among 16 instances has some 60 µs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from cluster.instance import Role
from router.book import SPREAD
from router.columns import Bools, Floats
from router.prefixes import Match, rows_of

if TYPE_CHECKING:
    from router.records import Wanted
    from router.view import Fleet

MISS: Final = 30.0
"""Of a missed target: nobody saves time for others by missing one, and of two places that miss it the faster one is
still taken."""

LOOSE: Final = 5.0

BARRIER_MAX: Final = 0.8
"""What is left of a budget counts as a fifth at least: being late must not cost more than several misses of others."""

RAMP: Final[tuple[float, ...]] = (0.85, 1.1)
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

SHARES: Final[tuple[float, ...]] = (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
"""Of answers, for which `Wanted.output_lengths` says how long they are at most: the short ones most closely, as a pause
is spread over their tokens."""

SHORT, MIDDLE = SHARES.index(0.1), SHARES.index(0.5)
"""Places of a short one and of one in the middle."""

LENGTHS_UNKNOWN: Final = tuple(OUTPUT_UNKNOWN * part for part in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0))
"""Where nobody predicts: about as broad as `router.lengths`' prior."""

_REACHES: Final = tuple(RAMP[0] + (RAMP[1] - RAMP[0]) * (at + 0.5) / 4 for at in range(4))
"""Parts of a target up to which a prediction may come out as met, equally likely."""


class _Table:
    """A function of the part of a budget that is used, as straight lines between equally spaced points."""

    POINTS: Final = 121
    EACH: Final = 0.01

    def __init__(self, of: Callable[[Floats], Floats]) -> None:
        self.used: Final[Floats] = np.concatenate([np.arange(self.POINTS) * self.EACH, [1e6]])
        self.costs: Final[Floats] = of(self.used)
        self._slope: Final[Floats] = np.diff(self.costs) / np.diff(self.used)
        self._rest: Final[Floats] = self.costs[:-1] - self._slope * self.used[:-1]

    def at(self, used: Floats) -> Floats:
        """What these cost, none of them negative. (`np.interp` would search for each.)"""
        line = (used * (1.0 / self.EACH)).astype(np.int64)
        found = self._slope.take(line, mode="clip")
        found *= used
        found += self._rest.take(line, mode="clip")
        return found


def _near(used: Floats) -> Floats:
    """What a part of a budget costs, over that part: the more, the less there is left of it."""
    found: Floats = 1.0 / (1.0 - np.minimum(used, BARRIER_MAX))
    return found


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
        book, speeds = fleet.book, fleet.book.speeds
        self.fleet: Final = fleet
        self.wanted: Final = wanted
        self.turn: Final = book.turn
        self.output: Final = wanted.output_tokens or OUTPUT_UNKNOWN
        self.lengths: Final = wanted.output_lengths or LENGTHS_UNKNOWN
        self.middle: Final = max(2.0, self.lengths[MIDDLE])
        """Tokens that a pause is spread over, in an answer in the middle."""
        self.ttft_ms: Final = 0.0 if wanted.late else wanted.ttft_ms
        self.tpot_ms: Final = wanted.tpot_ms
        self.promised: Final = bool(wanted.ttft_ms or wanted.tpot_ms)
        self.places: Final[Bools] = fleet.columns.inflight < fleet.columns.limits(wanted.routers)
        tokens = max(1, wanted.prompt_tokens)
        ms, stall_ms, steps = speeds.of_prompt(tokens)
        self.prompt: Floats = speeds.prefill_factor * ms
        """Its time with what decodes beside it."""
        self.stall: Final[Floats] = speeds.prefill_factor * stall_ms
        """Milliseconds that answers there would wait for its prompt."""
        self._match: Match | None = None
        if fleet.prefixes is not None and wanted.prefix:
            self._match = fleet.prefixes.match(wanted.prefix)
            self._less_cached(tokens, self._match)
        self.prompt += book.beside if isinstance(steps, int) and steps == 1 else book.beside * steps
        self.alone: Floats = self.prompt + speeds.lead
        """Its first token with nobody before it."""
        self._waited_ms: Final = max(0.0, wanted.now - wanted.arrived) * 1000.0 if wanted.arrived else 0.0
        self.alone += self._waited_ms
        self.ttft: Floats = book.waits_ms(wanted.now)
        self.ttft += self.alone
        self.open: Bools = self.places
        """Rows where its prompt would be computed at once, or nearly so."""
        gate = fleet.gate
        if gate is not None:
            self.open = self.places & gate.prompts(self)
            if gate.queue and not self.open.all():  # elsewhere it is not the only one that waits
                self.ttft = np.where(self.open, self.ttft, self.ttft + gate.queue_ms(len(fleet)))
        context = tokens + self.output / 2
        self.longer: Floats = speeds.context * context
        """By how much it makes a step longer."""
        self.longer += speeds.request
        self.ttft_unit: Final = wanted.ttft_ms or LOOSE * self._fastest_ms()
        self.tpot_unit: Final = wanted.tpot_ms or LOOSE * self._step_alone_ms(context)
        per_ms = book.idle(wanted.now)
        np.divide(1.0 / self.tpot_unit, per_ms, out=per_ms)
        self._parts: Final[Floats] = np.empty((3, len(self.longer)))
        """Of `ttft_unit`, what its TTFT is; of `tpot_unit`, the TPOT there with its answer, and without it. One array:
        what costs are looked up for all of them at once."""
        _, self.used, self.used_before = self._parts
        np.multiply(book.step, per_ms, out=self.used_before)
        self._more: Final[Floats] = self.longer * per_ms
        np.add(self.used_before, self._more, out=self.used)
        self._usual_ms: float | None = None
        self._moving: Final[dict[tuple[int, int], float]] = {}
        self._paused: Final[dict[tuple[int, int], float]] = {}
        self._priced: tuple[Floats, Floats] | None = None

    def _fastest_ms(self) -> float:
        """The first token of the fastest instance that is ready, idle. Rows that nobody has are faster still."""
        return float(self.alone[self.fleet.ready(self.wanted.model).any].min(initial=math.inf))

    def _less_cached(self, tokens: int, match: Match) -> None:
        """What is in an instance's cache is not computed again; its last token always is."""
        speeds = self.fleet.book.speeds
        for chunks, bits in match.levels:
            rows = rows_of(bits)
            ms, stall_ms, _ = speeds.of_prompt(tokens, self._held(chunks))
            alike = isinstance(ms, float)
            factor = speeds.prefill_factor[rows]
            self.prompt[rows] = factor * (ms if alike else ms[rows])
            self.stall[rows] = factor * (stall_ms if alike else stall_ms[rows])

    def _held(self, chunks: int) -> int:
        """Tokens of it in so many chunks."""
        return min(int(chunks * self.wanted.prefix_block_tokens), max(1, self.wanted.prompt_tokens) - 1)

    def cached_at(self, row: int) -> int:
        """Tokens of it that this instance is taken to have."""
        return 0 if self._match is None else self._held(self._match.chunks_of(row))

    def tpot_at(self, row: int) -> float:
        """Milliseconds."""
        used: float = self.used.item(row)
        return used * self.tpot_unit

    def step_at(self, row: int) -> float:
        """Milliseconds of a step with its answer."""
        return self.fleet.book.step.item(row) + self.longer.item(row)

    def _step_alone_ms(self, context: float) -> float:
        """An idle instance's step with nothing but this answer, on the fastest make there is."""
        speeds = self.fleet.book.speeds
        return min(make.decode.requests_ms(1) + make.decode.context_ms * context for make in speeds.present())

    # --- prices -------------------------------------------------------------------------------------------------------

    def of_prefill(self) -> Floats:
        """By row, without what exactly it does to the targets of those who decode there (`harm`)."""
        return self._prices()[0]

    def of_decode(self) -> Floats:
        """By row: its own time, and what its part of each step takes from the others."""
        return self._prices()[1]

    def _prices(self) -> tuple[Floats, Floats]:
        """Of both legs."""
        if self._priced is None:
            book, parts = self.fleet.book, self._parts
            np.multiply(self.ttft, 1.0 / self.ttft_unit, out=parts[0])
            if bool(self.ttft_ms) is bool(self.tpot_ms):
                prefill, decode = (_OWN_MISSED if self.tpot_ms else _OWN).at(parts[:2])
            else:
                tables = (_OWN_MISSED, _OWN) if self.ttft_ms else (_OWN, _OWN_MISSED)
                prefill, decode = (table.at(part) for table, part in zip(tables, parts, strict=False))
            if book.answers:
                more, stalled = others = _NEAR.at(parts[1:])
                others *= book.decoding
                more *= self._more
                stalled *= self.stall
                stalled *= 1.0 / (self.tpot_unit * self.middle)
                prefill += stalled
                decode += more
                if self.promised and (self.used > book.strictest * (RAMP[0] / self.tpot_unit)).any():
                    decode += self._pushed_over()
            self._priced = (prefill, decode)
        return self._priced

    def harm(self, row: int) -> float:
        """What this prompt does to the targets of answers there."""
        if not self.promised or self.fleet.book.vacant.item(row):
            return 0.0
        return MISS * self.fleet.book.harmed(row, self.stall.item(row), self.wanted.now)

    def _pushed_over(self) -> Floats:
        """Targets of answers there that are missed for one more beside them."""
        book = self.fleet.book
        part = self.tpot_unit / book.strictest
        found: Floats = (_missed(self.used * part) - _missed(self.used_before * part)) * (book.decoding * MISS)
        return found

    def handoff(self, prefill: int, decode: int) -> float:
        """A pause between the first and the second token. The same for all P of a make, where D computes no prompts."""
        kind = prefill if self.fleet.columns.prefills.item(decode) else -1 - self.fleet.book.speeds.kind(prefill)
        price = self._paused.get((decode, kind))
        if price is None:
            price = self._paused[decode, kind] = self._pause(decode, self.pause_ms(prefill, decode))
        return price

    def pause_ms(self, prefill: int, decode: int) -> float:
        """How long a client waits between the first and the second token beside a step.

        Where D computes prompts as well, an answer that comes there waits for those before it: a prompt that runs takes
        what there is of each step's token budget, and only what is left goes to those who wait (vLLM's scheduler).
        """
        speeds = self.fleet.book.speeds
        kinds = (speeds.kind(prefill), speeds.kind(decode))
        moving_ms = self._moving.get(kinds)
        if moving_ms is None:
            moving_ms = self._moving[kinds] = speeds.handoff_ms(self.wanted.prompt_tokens, prefill, decode)
        pause_ms = PULL_MS + PULL_STEPS * self.step_at(decode) + moving_ms
        return pause_ms + self._queued_ms(prefill, decode, pause_ms)

    def _queued_ms(self, prefill: int, decode: int, pause_ms: float) -> float:
        """What is left of D's prompts when the answer comes there; or, as others may have come until then, what all who
        compute prompts beside answers have before them now, on average.
        """
        if not self.fleet.columns.prefills.item(decode):
            return 0.0
        ends_ms = self.fleet.book.ends.item(decode) - self.wanted.now * 1000.0
        comes_ms = self.ttft.item(prefill) - self._waited_ms + pause_ms
        return max(ends_ms - comes_ms, self._usual_queue_ms())

    def _usual_queue_ms(self) -> float:
        """Until the prompts are done that an instance of role both has now, on average."""
        if self._usual_ms is None:
            rows = self.fleet.ready(self.wanted.model).of.get(Role.BOTH, ())
            self._usual_ms = float(self.fleet.book.waits_ms(self.wanted.now)[rows].mean()) if len(rows) else 0.0
        return self._usual_ms

    def _pause(self, decode: int, pause_ms: float) -> float:
        price = pause_ms / (self.tpot_unit * self.output)
        if self.tpot_ms:
            price += MISS * self._slowed(self.used.item(decode), pause_ms / self.tpot_ms)
        return price

    def _slowed(self, used: float, pause: float) -> float:
        """Share of such answers that are over their TPOT target with a pause of so many targets, and not without it.

        Each is as long as it happens to be: those too short to spread the pause over miss. A prediction's own error is
        `RAMP`, here in equal steps.
        """
        missed = 0.0
        for reach in _REACHES:
            if reach > used:
                share = _share_shorter(self.lengths, 1.0 + pause / (reach - used))
                if share == 0.0:
                    break  # nor is any answer too short where there is more left
                missed += share
        return missed / len(_REACHES)

    def fits(self) -> Bools:
        """Rows with memory left for its prompt and answer; an empty one always has."""
        wanted = self.wanted
        own = wanted.prompt_tokens + self.output + SPREAD * math.sqrt(wanted.output_variance)
        found: Bools = self.fleet.book.kv_free >= own
        return found


def _share_shorter(lengths: Sequence[float], than: float) -> float:
    """Share of answers that are shorter: straight lines between `SHARES`, from two tokens (one has no TPOT) to twice
    the last length.
    """
    at = bisect_left(lengths, than)
    if at == len(lengths):
        return min(1.0, SHARES[-1] + (1.0 - SHARES[-1]) * (than / lengths[-1] - 1.0))
    below, low = (SHARES[at - 1], lengths[at - 1]) if at else (0.0, min(2.0, lengths[0]))
    wide = lengths[at] - low
    return below + (SHARES[at] - below) * max(0.0, than - low) / wide if wide > 0 else below


def _missed(ratio: Floats) -> Floats:
    """A prediction over its target as a share of a miss."""
    found: Floats = np.minimum(np.maximum((ratio - RAMP[0]) * _SLOPE, 0.0), 1.0)
    return found


_NEAR: Final = _Table(_near)
_OWN: Final = _Table(lambda used: used * _near(used))
"""What a part of a budget costs, and (`_OWN_MISSED`) with what it costs to miss it."""
_OWN_MISSED: Final = _Table(lambda used: used * _near(used) + MISS * _missed(used))
