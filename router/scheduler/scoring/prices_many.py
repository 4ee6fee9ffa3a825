"""Prices of many instances, by columns: a thousand rows cost hardly more than a hundred. Pure.

Every formula stands in `few` as well, in the same order of operations: tests/property/test_choosing.py compares them to
the last bit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from router.core.arrays import Bools, Floats, Ints
from router.predict.prefix_cache import rows_of
from router.scheduler.scoring.budget import MISS, NEAR, OWN, OWN_MISSED, RAMP, missed
from router.scheduler.scoring.prices import LOOSE, Priced, Prices, Saturation

if TYPE_CHECKING:
    from router.core.values import Wanted
    from router.fleet.snapshot import FleetSnapshot


class ByColumns(Prices):
    """In columns, as the fleet's."""

    def __init__(self, fleet: FleetSnapshot, wanted: Wanted, saturation: Saturation | None) -> None:
        super().__init__(fleet, wanted, saturation)
        book, speeds = fleet.book, fleet.book.speeds
        self._places: Final[Bools] = fleet.columns.inflight < fleet.columns.limits(wanted.routers)
        ms, stall_ms, steps = speeds.of_prompt(self.tokens)
        self._prompt: Floats = speeds.prefill_factor * ms
        self._stall: Final[Floats] = speeds.prefill_factor * stall_ms
        self._less_cached()
        self._prompt += book.beside if isinstance(steps, int) and steps == 1 else book.beside * steps
        self._alone: Floats = self._prompt + speeds.lead
        self._alone += self.waited_ms
        self._ttft: Floats = book.waits_ms(wanted.now)
        self._ttft += self._alone
        self._open: Bools = self._places
        gate = saturation
        if gate is not None:
            self._open = self._opened()
            if gate.queue and not self._open.all():  # elsewhere it is not the only one that waits
                self._ttft = np.where(self._open, self._ttft, self._ttft + gate.queue_ms(len(fleet)))
        self._longer: Floats = speeds.context * self.context
        self._longer += speeds.request
        if not self.ttft_unit:
            rows = fleet.ready_for(wanted).any
            self.ttft_unit = LOOSE * (self.least_alone_ms(rows) if len(rows) else math.inf)
        per_ms = book.idle(wanted.now)
        np.divide(1.0 / self.tpot_unit, per_ms, out=per_ms)
        self._parts: Final[Floats] = np.empty((3, len(self._longer)))
        """Of `ttft_unit`, what its TTFT is; of `tpot_unit`, the TPOT there with its answer, and without it. One array:
        what costs are looked up for all of them at once."""
        self._used: Final[Floats] = self._parts[1]
        self._before: Final[Floats] = self._parts[2]
        np.multiply(book.step, per_ms, out=self._before)
        self._more: Final[Floats] = self._longer * per_ms
        np.add(self._before, self._more, out=self._used)
        self._priced: tuple[Floats, Floats] | None = None
        self._room: Bools | None = None

    def _less_cached(self) -> None:
        """What is in an instance's cache is not computed again."""
        if self.match is None:
            return
        speeds = self.fleet.book.speeds
        for chunks, bits in self.match.levels:
            rows = rows_of(bits)
            ms, stall_ms, _ = speeds.of_prompt(self.tokens, self.held(chunks))
            alike = isinstance(ms, float)
            factor = speeds.prefill_factor[rows]
            self._prompt[rows] = factor * (ms if alike else ms[rows])
            self._stall[rows] = factor * (stall_ms if alike else stall_ms[rows])

    def _opened(self) -> Bools:
        gate = self.saturation
        assert gate is not None
        until = gate.opens_until_ms(self.wanted)
        if until == math.inf:
            return self._places
        found: Bools = self._places & (self.fleet.book.opens <= until)
        lanes = gate.lanes(self.wanted, len(self.fleet))
        if lanes is not None:
            taken = np.zeros(len(found), dtype=np.bool_)
            taken[lanes] = True
            found &= taken
        return found

    def _prices(self) -> tuple[Floats, Floats]:
        """Of both legs."""
        if self._priced is None:
            book, parts = self.fleet.book, self._parts
            np.multiply(self._ttft, 1.0 / self.ttft_unit, out=parts[0])
            if bool(self.ttft_ms) is bool(self.tpot_ms):
                prefill, decode = (OWN_MISSED if self.tpot_ms else OWN).at(parts[:2])
            else:
                tables = (OWN_MISSED, OWN) if self.ttft_ms else (OWN, OWN_MISSED)
                prefill, decode = (table.at(part) for table, part in zip(tables, parts, strict=False))
            if book.answers:
                more, stalled = others = NEAR.at(parts[1:])
                others *= book.decoding
                more *= self._more
                stalled *= self._stall
                stalled *= 1.0 / (self.tpot_unit * self.middle)
                prefill += stalled
                decode += more
                if self.promised:
                    self._push_over(decode)
            self._priced = (prefill, decode)
        return self._priced

    def _push_over(self, decode: Floats) -> None:
        """Targets of answers there that are missed for one more beside them."""
        book = self.fleet.book
        rows = (self._used > book.strictest * (RAMP[0] / self.tpot_unit)).nonzero()[0]
        if len(rows):
            part = self.tpot_unit / book.strictest[rows]
            pushed = missed(self._used[rows] * part) - missed(self._before[rows] * part)
            decode[rows] += pushed * (book.decoding[rows] * MISS)

    def _answers(self) -> Bools:
        """Where there is room for its answer."""
        found = self._room
        if found is None:
            book, gate = self.fleet.book, self.saturation
            found = self._places & (book.kv_free >= self.own_tokens())
            if gate is not None:
                limits = np.minimum(book.strictest, self.tpot_ms or math.inf)
                limits *= gate.margin / self.tpot_unit
                kept: Bools = self._used <= limits
                kept |= book.vacant
                found &= kept
            self._room = found
        return found

    # --- at one row ---------------------------------------------------------------------------------------------------

    def prompt_at(self, row: int) -> float:
        """See `Prices`."""
        return self._prompt.item(row)

    def stall_at(self, row: int) -> float:
        """See `Prices`."""
        return self._stall.item(row)

    def ttft_at(self, row: int) -> float:
        """See `Prices`."""
        return self._ttft.item(row)

    def longer_at(self, row: int) -> float:
        """See `Prices`."""
        return self._longer.item(row)

    def used_at(self, row: int) -> float:
        """See `Prices`."""
        return self._used.item(row)

    def open_at(self, row: int) -> bool:
        """See `Prices`."""
        return self._open.item(row)

    def answers_at(self, row: int) -> bool:
        """See `Prices`."""
        return self._answers().item(row)

    def prefill_at(self, row: int) -> float:
        """See `Prices`."""
        return self._prices()[0].item(row)

    def decode_at(self, row: int) -> float:
        """See `Prices`."""
        return self._prices()[1].item(row)

    # --- of some rows -------------------------------------------------------------------------------------------------

    def best_wholes(self, rows: Ints, count: int) -> tuple[Priced, Priced]:
        """See `Prices`."""
        rows = rows[self._answers()[rows]]
        if not len(rows):
            return [], []
        prefill, decode = self._prices()
        price = prefill if self.wanted.prefill_only else prefill + decode
        now = self._open[rows]
        if now.all():
            return _best(rows, price, count), []
        return _best(rows[now], price, count), _best(rows[~now], price, count)

    def best_prefills(self, rows: Ints, count: int) -> Priced:
        """See `Prices`."""
        rows, price = rows[self._places[rows]], self._prices()[0]
        best = _best(rows, price, count)
        if not any(self._open.item(row) for _, row in best):
            best += _best(rows[self._open[rows]], price, 1)
        return best

    def best_decodes(self, rows: Ints, count: int) -> Priced:
        """See `Prices`."""
        return _best(rows[self._answers()[rows]], self._prices()[1], count)

    def least_prompt_ms(self, rows: Ints) -> float:
        """See `Prices`."""
        return float(self._prompt[rows].min())

    def least_alone_ms(self, rows: Ints) -> float:
        """See `Prices`."""
        return float(self._alone[rows].min())


def _best(rows: Ints, price: Floats, count: int) -> Priced:
    """The cheapest; of equal ones the first. So few are found faster one by one than by sorting all."""
    left = price[rows]
    found = []
    for _ in range(min(count, len(rows))):
        at = int(left.argmin())
        found.append((left.item(at), rows.item(at)))
        left[at] = math.inf
    return found
