"""What a place for one request costs the fleet: between two instances, and for the requests that run there. Pure.

`router.scheduler.scoring.workload` names the parts and compares them; admission uses the same predictions for promises.
`prices_of` computes them once for each time that a request asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from cluster.instance import Role
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.predict.answer_lengths import SHARES
from router.predict.margins import WIDEST
from router.scheduler.scoring.budget import MISS, OWN, OWN_MISSED, RAMP
from router.scheduler.scoring.figures import PULL_MS, PULL_STEPS, Saturation
from router.scheduler.scoring.row_prices import FEW, RowPrices

SHED_WEIGHT: Final = 3.0
"""A prompt of a class that refuses (`when_missed: shed`) counts each answer that is expected to miss because of it so
many times: the answers were let in on a promise, and this prompt is not in yet, so it can wait or be refused. Chosen on
simulated loads (docs/policy.md). What an answer does to others (`_push_over`) counts once; no other weight was tried.
"""

HOLDS_FREE: Final = 0.5
"""Up to this share of P's memory in use, holds there cost nothing: new prompts find room. Chosen, not measured."""

_REACHES: Final = tuple(RAMP[0] + (RAMP[1] - RAMP[0]) * (at + 0.5) / 4 for at in range(4))
"""Shares of a target up to which a prediction may still be met, equally likely."""


class Prices(RowPrices):
    """Everything that one choice compares: the prices at a row (`RowPrices`), and between two rows."""

    def __init__(self, fleet: FleetSnapshot, wanted: Wanted, saturation: Saturation | None, few: int = FEW) -> None:
        super().__init__(fleet, wanted, saturation, few)
        self._usual_ms = -1.0
        self._pulled: Final[dict[int, float]] = {}
        """By D: the time, in ms, at which all its current pulls will have ended, less `unmoved_ms` of the next one."""
        self._told: Final[dict[tuple[int, int, bool, int], float]] = {}
        self._pauses_ms: Final[dict[tuple[int, int, bool], float]] = {}
        self._paused: Final[dict[tuple[int, int, bool], float]] = {}
        """The costs of these pauses."""

    def tpot_at(self, row: int) -> float:
        """The TPOT there, in milliseconds."""
        return self.used_at(row) * self.tpot_unit

    def step_at(self, row: int) -> float:
        """Milliseconds of a step with its answer."""
        return self.fleet.inflight.rows[row].step + self.longer_at(row)

    def margin_at(self, row: int) -> float:
        """The share of its TPOT target up to which predictions have room; 0: it has no target, or is let in here
        although its prediction is over that share. An answer that is alone there is let in in any case, and shows
        whether the share is too small.
        """
        if not self.tpot_ms:
            return 0.0
        alone = not self.fleet.inflight.rows[row].decoding
        limit_ms = self.tpot_ms * WIDEST if alone else self.tpot_limit_ms()
        return self.margins.of(self.tpot_ms) if self.tpot_at(row) <= limit_ms else 0.0

    # --- effects on other requests ----------------------------------------------------------------------------------

    def harm(self, row: int) -> float:
        """The cost to answers there: `MISS` for each one that is expected to miss its target because of this prompt,
        `SHED_WEIGHT` times that if its class refuses.
        """
        if not self.promised or not self.fleet.inflight.rows[row].decoding:
            return 0.0
        short = max(2.0, self.lengths[0])
        miss = MISS * _shed_weight(self.wanted) if self.wanted.sheds else MISS
        return miss * self.fleet.inflight.harmed(row, self.stall_at(row), short, self.middle, self.wanted.now)

    def handoff(self, prefill: int, decode: int) -> float:
        """The cost of a pause, before the first token (`waits`) or between the first and the second. The latter is the
        same for all P of a make that are all on D's machine, or all elsewhere, if D computes no prompts and no earlier
        pull is in the way (`_way`).
        """
        way = self._way(prefill, decode)
        if self.waits(decode):
            return self._late(prefill, self._pause_ms(way, prefill, decode))
        price = self._paused.get(way)
        if price is None:
            price = self._paused[way] = self._pause(decode, self._pause_ms(way, prefill, decode))
        return price

    def waits(self, decode: int) -> bool:
        """Whether the first token of a handed-over request comes from this D: its engine cannot be told P's token, or
        this request may have no seed. Then the client waits for the pause, too.
        """
        return self.wanted.unseeded or not self.fleet.columns.pins.item(decode)

    def first_ms(self, prefill: int, decode: int) -> float:
        """Milliseconds until the client has the first token; equal rows for a single instance."""
        ms = self.ttft_at(prefill)
        return ms + self.pause_ms(prefill, decode) if prefill != decode and self.waits(decode) else ms

    def _late(self, prefill: int, pause_ms: float) -> float:
        """The cost of such a pause before the first token."""
        own, ms = OWN_MISSED if self.ttft_ms else OWN, self.ttft_at(prefill)
        return own.of((ms + pause_ms) / self.ttft_unit) - own.of(ms / self.ttft_unit)

    def _way(self, prefill: int, decode: int) -> tuple[int, int, bool]:
        """The key of pauses that are alike: a D, and a P, or any P of a make."""
        alone = self.learns(decode) and not self._behind_ms(prefill, decode)
        kind = -1 - self.fleet.inflight.step_model.kind(prefill) if alone else prefill
        return decode, kind, self.fleet.near(prefill, decode)

    def hold(self, prefill: int, decode: int) -> float:
        """The cost of keeping its blocks for D on P: blocks × seconds, as a share of P's memory, times the pause. So
        much of P's time is lost to waiting requests and to the next one, if memory is what they wait for.
        """
        used = self.fleet.columns.kv_usage.item(prefill)
        if used <= HOLDS_FREE:
            return 0.0
        part = min(1.0, self.tokens / max(1.0, self.fleet.inflight.step_model.rows[prefill].capacity))
        delayed = 1.0 + self.fleet.columns.waiting.item(prefill)
        lost_ms = (used - HOLDS_FREE) / (1.0 - HOLDS_FREE) * part * self.pause_ms(prefill, decode)
        return delayed * lost_ms / self.ttft_unit

    def pause_ms(self, prefill: int, decode: int) -> float:
        """How long the client waits between the first and the second token besides a step, in ms; before the first
        token if that comes from D (`waits`).

        If D computes prompts as well, an arriving answer waits for those before it: a running prompt takes what is left
        of each step's token budget, and only the remainder goes to waiting requests (vLLM's scheduler).
        """
        return self._pause_ms(self._way(prefill, decode), prefill, decode)

    def _pause_ms(self, way: tuple[int, int, bool], prefill: int, decode: int) -> float:
        found = self._pauses_ms.get(way)
        if found is None:
            found = self.unmoved_ms(decode) + self.moving_ms(prefill, decode) + self._behind_ms(prefill, decode)
            found += self._queued_ms(prefill, decode, found)
            self._pauses_ms[way] = found
        return found

    def _behind_ms(self, prefill: int, decode: int) -> float:
        """The wait on D for earlier pulls, in ms."""
        left_ms = self._pulled.get(decode)
        if left_ms is None:
            ends_ms = self.fleet.inflight.pulls(decode).ends_ms(self.wanted.now)
            left_ms = self._pulled[decode] = ends_ms - self.unmoved_ms(decode)
        return max(0.0, left_ms - self._comes_ms(prefill))

    def unmoved_ms(self, decode: int) -> float:
        """The pause in ms with an infinitely fast network, no earlier pull on D and no prompts there."""
        return PULL_MS + PULL_STEPS * self.step_at(decode)

    def learns(self, decode: int) -> bool:
        """Whether pauses there are learned from: not where prompts are in the way as well."""
        return not self.fleet.columns.prefills.item(decode) and not self.fleet.inflight.rows[decode].prompts

    def told_pause_ms(self, prefill: int, decode: int) -> float:
        """The pause in ms with the move's time by the cost profile alone, without learned pulls."""
        if self.learns(decode):
            return self.unmoved_ms(decode) + self.told_ms(prefill, decode)
        return self.pause_ms(prefill, decode)  # what it waits for there is prompts

    def handoff_told(self, prefill: int, decode: int) -> float:
        """The cost of the pause `told_pause_ms`."""
        pause_ms = self.told_pause_ms(prefill, decode)
        return self._late(prefill, pause_ms) if self.waits(decode) else self._pause(decode, pause_ms)

    def moving_ms(self, prefill: int, decode: int) -> float:
        """The time to move the KV, in ms, by the transfer model of D."""
        pulls, now, near = self.fleet.inflight.pulls(decode), self.wanted.now, self.fleet.near(prefill, decode)
        return pulls.expects_ms(self.told_ms(prefill, decode), now, near=near) * pulls.slower(now)

    def told_ms(self, prefill: int, decode: int) -> float:
        """The time to move the KV, in ms, by the cost profile alone. D pulls what its own cache lacks."""
        step_model, near = self.fleet.inflight.step_model, self.fleet.near(prefill, decode)
        had = self.in_cache_at(decode)
        kinds = (step_model.kind(prefill), step_model.kind(decode), near, had)
        told_ms = self._told.get(kinds)
        if told_ms is None:
            tokens = self.wanted.prompt_tokens - had
            told_ms = self._told[kinds] = step_model.handoff_ms(tokens, prefill, decode, near=near)
        return told_ms

    def _comes_ms(self, prefill: int) -> float:
        """The predicted time, in ms, at which the prompt will be computed there."""
        return self.wanted.now * 1000.0 + self.ttft_at(prefill) - self.waited_ms

    def _queued_ms(self, prefill: int, decode: int, pause_ms: float) -> float:
        """The time, in ms, that D's prompts still take when the answer arrives there, those of aggregated requests
        included. If D is of role both, more prompts may come until then: it is at least the present mean of all
        instances of role both.
        """
        left_ms = 0.0
        load = self.fleet.inflight.rows[decode]
        if load.prompts:
            left_ms = max(0.0, load.ends - self._comes_ms(prefill) - pause_ms)
        return max(left_ms, self._usual_queue_ms()) if self.fleet.columns.prefills.item(decode) else left_ms

    def _usual_queue_ms(self) -> float:
        """The mean time, in ms, until the present prompts of an instance of role both are computed."""
        if self._usual_ms < 0:
            rows = self.fleet.ready_for(self.wanted).of.get(Role.BOTH, ())
            self._usual_ms = float(self.fleet.inflight.waits_ms(self.wanted.now)[rows].mean()) if len(rows) else 0.0
        return self._usual_ms

    def _pause(self, decode: int, pause_ms: float) -> float:
        price = pause_ms / (self.tpot_unit * self.output)
        if self.tpot_ms:
            price += MISS * self._slowed(self.used_at(decode), pause_ms / self.tpot_ms)
        return price

    def _slowed(self, used: float, pause: float) -> float:
        """The share of answers that exceed their TPOT target with a pause of `pause` targets, and not without it.

        Answers have different lengths: those too short to spread the pause miss the target. A prediction's own error is
        `RAMP`, here in equal steps.
        """
        missed = 0.0
        for reach in _REACHES:
            if reach > used:
                share = _share_shorter(self.lengths, 1.0 + pause / (reach - used))
                if share == 0.0:
                    break  # with more left, no answer is too short either
                missed += share
        return missed / len(_REACHES)


def _share_shorter(lengths: Sequence[float], than: float) -> float:
    """The share of shorter answers: linear between `SHARES`, from two tokens (one has no TPOT) to twice the last
    length.
    """
    at = bisect_left(lengths, than)
    if at == len(lengths):
        return min(1.0, SHARES[-1] + (1.0 - SHARES[-1]) * (than / lengths[-1] - 1.0))
    below, low = (SHARES[at - 1], lengths[at - 1]) if at else (0.0, min(2.0, lengths[0]))
    wide = lengths[at] - low
    return below + (SHARES[at] - below) * max(0.0, than - low) / wide if wide > 0 else below


class Scoring:
    """The inputs of one scheduler's scoring besides the fleet and a request, and the last prices it computed."""

    def __init__(self, saturation: Saturation | None) -> None:
        """`saturation`: where there is room without breaking a promise; None: nothing is promised."""
        self.saturation: Final = saturation
        self.shed_weight = SHED_WEIGHT
        """An experiment changes it."""
        self.priced: Prices | None = None
        """The prices of the last request."""


def _shed_weight(wanted: Wanted) -> float:
    scoring: Scoring | None = wanted.scoring
    return SHED_WEIGHT if scoring is None else scoring.shed_weight


def prices_of(fleet: FleetSnapshot, wanted: Wanted) -> Prices:
    """The prices of one request; policy, admission and placement use the same ones."""
    scoring: Scoring | None = wanted.scoring
    if scoring is not None:
        known = scoring.priced
        if known is not None and known.wanted is wanted and known.turn == fleet.inflight.turn:
            return known
    saturation = None if scoring is None else scoring.saturation
    found = Prices(fleet, wanted, saturation)
    if scoring is not None:
        scoring.priced = found
    return found
