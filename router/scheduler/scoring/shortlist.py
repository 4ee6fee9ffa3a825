"""Shortlist: which of many instances are worth pricing for one request, filtered and ranked by columns. Pure.

The scorer works row by row (`router.scheduler.scoring.row_prices`), at half a microsecond a row. In a fleet of a
thousand, some twenty calls of numpy find the rows with room and rank them: the rank is a price with straight lines in
place of the cost of a budget's last part, and without missed targets (with both while requests wait in the router). The
best `LISTED` rows by rank are priced.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from router.core.arrays import Bools, Floats, Ints
from router.predict.prefix_cache import rows_of
from router.scheduler.scoring.budget import OWN, OWN_MISSED, RAMP
from router.scheduler.scoring.figures import COPY_MS_MAX, LOOSE, Figures, step_rooms

LISTED: Final = 12
"""Rows that are priced of those that are asked for; four are wanted of each kind (`workload.K`)."""


class Shortlist:
    """The shortlist for one request."""

    def __init__(self, of: Figures) -> None:
        """Sets the unit of first tokens if nothing is promised (`Figures.ttft_unit`)."""
        self._of: Final = of
        fleet, wanted, inflight, step_model = of.fleet, of.wanted, of.fleet.inflight, of.fleet.inflight.step_model
        self.places: Final[Bools] = fleet.columns.inflight < fleet.columns.limits(wanted.routers)
        ms, stall_ms, steps = step_model.of_prompt(of.tokens)
        self.prompt: Floats = step_model.column("prefill_factor") * ms
        self.prompt += inflight.column("beside") * steps
        self._stall: Floats = step_model.column("prefill_factor") * stall_ms
        self._less_cached()
        self.alone: Floats = self.prompt + step_model.column("lead")
        self.alone += of.waited_ms
        self.open: Final[Bools] = self._opened()
        if not of.ttft_unit:
            rows = fleet.ready_for(wanted).any
            of.ttft_unit = LOOSE * (float(self.alone[rows].min()) if len(rows) else math.inf)
        longer: Floats = step_model.column("context") * of.context
        longer += step_model.column("request") * of.answers
        self._alone_ms: Final[Floats] = longer + step_model.column("floor_least")
        per_ms = inflight.idle(wanted.now)
        np.divide(1.0 / of.tpot_unit, per_ms, out=per_ms)
        self._used: Final[Floats] = (inflight.column("step") + longer) * per_ms
        longer *= per_ms
        self._more: Final[Floats] = longer
        self._room: Bools | None = None
        self._dearer = 0.0
        self._ranks: tuple[Floats, Floats] | None = None

    def _less_cached(self) -> None:
        """Leave out what is in an instance's cache, as it is not computed again."""
        of, inflight, step_model = self._of, self._of.fleet.inflight, self._of.fleet.inflight.step_model
        for chunks, bits in () if of.match is None else of.match.levels:
            rows = rows_of(bits)
            ms, stall_ms, steps = step_model.of_prompt(of.tokens, of.held(chunks))
            if not isinstance(ms, float):
                ms, stall_ms, steps = ms[rows], stall_ms[rows], steps[rows]
            factor = step_model.column("prefill_factor")[rows]
            self.prompt[rows] = factor * ms + inflight.column("beside")[rows] * steps
            self._stall[rows] = factor * stall_ms

    def _opened(self) -> Bools:
        """Whether the prompt would be computed at once, or nearly so, by row."""
        of = self._of
        until = math.inf if of.saturation is None else of.saturation.opens_until_ms(of.wanted)
        if of.saturation is None or until == math.inf:
            return self.places
        found: Bools = of.fleet.inflight.column("opens") <= until
        if not of.wanted.sheds:
            found |= self._uncached() <= step_rooms(of.fleet)
        found &= self.places
        lanes = of.saturation.lanes(of.wanted, of.fleet)
        if lanes is not None:
            taken = np.zeros(len(found), dtype=np.bool_)
            taken[lanes] = True
            found &= taken
        return found

    def _uncached(self) -> Floats:
        """The prompt's tokens that are to be computed, by row."""
        of = self._of
        found: Floats = np.full(len(self.places), float(of.tokens))
        for chunks, bits in () if of.match is None else of.match.levels:
            found[rows_of(bits)] -= of.held(chunks)
        return found

    def answers(self) -> Bools:
        """Whether there is room for the answer, by row: a place, memory, and every target kept."""
        found = self._room
        if found is None:
            of, inflight = self._of, self._of.fleet.inflight
            found = self.places & self._with_memory()
            if of.saturation is not None:
                own: float | Floats = of.tpot_limit_ms()
                if of.hopeless_ms < math.inf:
                    own = np.where(self._alone_ms <= of.hopeless_ms, own, math.inf)
                limits = np.minimum(inflight.margins.limits_ms(inflight.column("strictest")), own)
                limits *= 1.0 / of.tpot_unit
                kept: Bools = self._used <= limits
                kept |= inflight.column("decoding") == 0
                found &= kept
            self._room = found
        return found

    def _with_memory(self) -> Bools:
        """Whether there is memory for the answer, by row."""
        of, free, needed = self._of, self._of.fleet.inflight.column("kv_free"), self._of.own_tokens()
        found: Bools = free >= needed
        if of.match is not None and of.match.levels:
            closely = ~found & self.places & (free + of.wanted.prompt_tokens >= needed)
            for row in closely.nonzero()[0].tolist():
                found[row] = of.fits_shared(row, needed)
        full = of.wanted.beyond_memory
        if full is not None:
            beyond = np.ones(len(found), dtype=np.bool_)
            beyond[list(full)] = False
            found |= beyond
        return found

    def ranks(self) -> tuple[Floats, Floats]:
        """The ranks of both legs, by row: less is better."""
        if self._ranks is None:
            of, inflight = self._of, self._of.fleet.inflight
            prefill = inflight.waits_ms(of.wanted.now)
            prefill += self.alone
            prefill *= 1.0 / of.ttft_unit
            decode = self._used
            paid = self._paid_by_others(prefill) if of.shared else 0.0
            if per := of.delay_price():
                prefill = self._with_misses(prefill)
                prefill += per * self.work()
                decode = (OWN_MISSED if of.tpot_ms else OWN).at(decode)
            if inflight.answers:
                decode = decode + self._more * inflight.column("decoding")
                stalled = inflight.column("decoding") * (1.0 / (of.tpot_unit * of.middle))
                stalled *= self._stall
                prefill += stalled
            prefill -= paid
            self._ranks = (prefill, decode)
        return self._ranks

    @property
    def dearer(self) -> float:
        """`Figures.answers_dearer`, computed once."""
        if self._dearer == 0.0:
            self._dearer = self._of.answers_dearer()
        return self._dearer

    def work(self) -> Floats:
        """The prompt's time, in ms, by row: that of instances where answers are made `dearer` times."""
        return np.where(self._of.fleet.columns.decodes[: len(self.prompt)], self.prompt * self.dearer, self.prompt)

    def _paid_by_others(self, used: Floats) -> Floats:
        """The part of the prompt's time that other requests are charged for, by row (`RowTimes.copy`).

        It is a share of the TTFT unit, and none where the request itself would miss its target. `used`: that share of
        its first token's time. Whether a copy has room there is looked at only where rows are priced.
        """
        of, inflight, step_model = self._of, self._of.fleet.inflight, self._of.fleet.inflight.step_model
        found: Floats = np.zeros(len(self.prompt))
        levels = () if of.match is None else of.match.levels
        for depth, uses in of.shared:
            ms, _, steps = step_model.of_prompt(of.tokens, of.held(depth))
            saved = self.prompt - step_model.column("prefill_factor") * ms - inflight.column("beside") * steps
            saved *= 1.0 - 1.0 / uses
            holders = 0
            for chunks, bits in levels:
                holders |= bits if chunks >= depth else 0
            saved[rows_of(holders)] = 0.0
            saved[saved > COPY_MS_MAX] = 0.0
            np.maximum(found, saved, out=found)
        if of.ttft_ms:
            found[used > RAMP[0]] = 0.0
        found *= 1.0 / of.ttft_unit
        return found

    def _with_misses(self, used: Floats) -> Floats:
        """The whole cost of these shares of the TTFT target. While requests wait in the router a quick instance that is
        late and an idle one that is slow differ in the order of their costs and of their shares.
        """
        of = self._of
        if of.saturation is not None and of.saturation.queue:
            queue_ms = of.saturation.queue_ms(of.wanted, of.fleet)
            used[~self.open] += queue_ms / of.ttft_unit
        return (OWN_MISSED if of.ttft_ms else OWN).at(used)


def listed(rows: Ints, rank: Floats) -> list[int]:
    """The best of these rows, in the order of rows. `rank`: of every row of the fleet."""
    if len(rows) > LISTED:
        best = rank[rows].argpartition(LISTED)[:LISTED]
        best.sort()
        rows = rows[best]
    found: list[int] = rows.tolist()
    return found
