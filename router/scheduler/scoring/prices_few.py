"""Prices of few instances, row by row: among 16 a call of numpy costs more than all that it saves. Pure.

Every formula stands in `many` as well, in the same order of operations; tests/property/test_choosing.py compares them
to the last bit.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from router.core.arrays import Ints
from router.predict.inflight_load import IDLE_MIN
from router.scheduler.scoring.budget import MISS, NEAR, OWN, OWN_MISSED, RAMP, missed_one
from router.scheduler.scoring.prices import LOOSE, Priced, Prices, Saturation

if TYPE_CHECKING:
    from router.core.values import Wanted
    from router.fleet.snapshot import FleetSnapshot

_PRICE: Final = itemgetter(0)


class RowByRow(Prices):
    """In lists, by row."""

    def __init__(self, fleet: FleetSnapshot, wanted: Wanted, saturation: Saturation | None) -> None:
        super().__init__(fleet, wanted, saturation)
        columns, gate = fleet.columns, saturation
        self._prompt: Final[list[float]] = []
        self._stall: Final[list[float]] = []
        self._alone: Final[list[float]] = []
        self._ttft: Final[list[float]] = []
        self._longer: Final[list[float]] = []
        self._used: Final[list[float]] = []
        self._before: Final[list[float]] = []
        """As `_used`, without its answer."""
        self._more: Final[list[float]] = []
        """What its answer adds, of `tpot_unit`."""
        self._prefill: list[float] = []
        self._decode: list[float] = []
        self._answers: list[bool] = []
        self._rows: Final = columns.top
        inflight: list[int] = columns.inflight.tolist()
        limits: list[int] = columns.limits(wanted.routers).tolist()
        self._places: Final[list[bool]] = [inflight[row] < limits[row] for row in range(self._rows)]
        self._open: list[bool] = self._places
        self._time_prompts()
        if gate is not None:
            self._open = self._opened()
        self._time_firsts()
        self._time_steps()

    def _time_prompts(self) -> None:
        """Its prompt at each row, what is cached there left out."""
        speeds, book = self.fleet.book.speeds, self.fleet.book
        kinds: list[int] = speeds.make_of_row.tolist()
        by_kind = speeds.of_prompt_by_make(self.tokens)
        factors: list[float] = speeds.prefill_factor.tolist()
        for row in range(self._rows):
            ms, stall_ms, _ = by_kind[kinds[row]]
            self._prompt.append(factors[row] * ms)
            self._stall.append(factors[row] * stall_ms)
        if self.match is not None:
            for chunks, bits in self.match.levels:
                cached = speeds.of_prompt_by_make(self.tokens, self.held(chunks))
                left = bits
                while left:
                    row = left.bit_length() - 1
                    left ^= 1 << row
                    ms, stall_ms, _ = cached[kinds[row]]
                    self._prompt[row] = factors[row] * ms
                    self._stall[row] = factors[row] * stall_ms
        beside: list[float] = book.beside.tolist()
        for row in range(self._rows):
            steps = by_kind[kinds[row]][2]
            self._prompt[row] += beside[row] * steps

    def _opened(self) -> list[bool]:
        gate = self.saturation
        assert gate is not None
        until = gate.opens_until_ms(self.wanted)
        if until == math.inf:
            return self._places
        opens: list[float] = self.fleet.book.opens.tolist()
        found = [self._places[row] and opens[row] <= until for row in range(self._rows)]
        lanes = gate.lanes(self.wanted, len(self.fleet))
        if lanes is not None:
            found = [found[row] and row in lanes for row in range(self._rows)]
        return found

    def _time_firsts(self) -> None:
        """Its first token at each row."""
        book, gate, now_ms = self.fleet.book, self.saturation, self.wanted.now * 1000.0
        lead: list[float] = book.speeds.lead.tolist()
        ends: list[float] = book.ends.tolist()
        queue_ms = 0.0
        if gate is not None and gate.queue:  # elsewhere it is not the only one that waits
            queue_ms = gate.queue_ms(len(self.fleet))
        waited_ms = self.waited_ms
        for row in range(self._rows):
            alone = self._prompt[row] + lead[row] + waited_ms
            wait = abs(ends[row] - now_ms)  # `InflightLoad.waits_ms`
            ttft = (wait if wait < math.inf else 0.0) + alone
            if not self._open[row]:
                ttft += queue_ms
            self._alone.append(alone)
            self._ttft.append(ttft)
        if not self.ttft_unit:
            rows = self.fleet.ready_for(self.wanted).any
            self.ttft_unit = LOOSE * (self.least_alone_ms(rows) if len(rows) else math.inf)

    def _time_steps(self) -> None:
        """Its answer's steps at each row."""
        book = self.fleet.book
        request: list[float] = book.speeds.request.tolist()
        context: list[float] = book.speeds.context.tolist()
        step: list[float] = book.step.tolist()
        recent: list[float] = book.recent.tolist()
        faded, per = -book.faded(self.wanted.now), 1.0 / self.tpot_unit
        for row in range(self._rows):
            per_ms = per / max(recent[row] * faded + 1.0, IDLE_MIN)
            longer = context[row] * self.context + request[row]
            more = longer * per_ms
            before = step[row] * per_ms
            self._longer.append(longer)
            self._more.append(more)
            self._before.append(before)
            self._used.append(before + more)

    def _prices(self) -> tuple[list[float], list[float]]:
        """Of both legs at each row."""
        if not self._prefill:
            self._price()
        return self._prefill, self._decode

    def _price(self) -> None:
        book, per = self.fleet.book, 1.0 / self.ttft_unit
        first, second = OWN_MISSED if self.ttft_ms else OWN, OWN_MISSED if self.tpot_ms else OWN
        self._prefill = [first.of(self._ttft[row] * per) for row in range(self._rows)]
        self._decode = [second.of(self._used[row]) for row in range(self._rows)]
        if not book.answers:
            return
        decoding: list[float] = book.decoding.tolist()
        per_stall = 1.0 / (self.tpot_unit * self.middle)
        for row in range(self._rows):
            others = decoding[row]
            if others:
                self._prefill[row] += NEAR.of(self._before[row]) * others * self._stall[row] * per_stall
                self._decode[row] += NEAR.of(self._used[row]) * others * self._more[row]
        if self.promised:
            self._push_over(decoding)

    def _push_over(self, decoding: list[float]) -> None:
        """Targets of answers there that are missed for one more beside them."""
        strictest: list[float] = self.fleet.book.strictest.tolist()
        near = RAMP[0] / self.tpot_unit
        for row in range(self._rows):
            if self._used[row] > strictest[row] * near:
                part = self.tpot_unit / strictest[row]
                pushed = missed_one(self._used[row] * part) - missed_one(self._before[row] * part)
                self._decode[row] += pushed * (decoding[row] * MISS)

    def _answering(self) -> list[bool]:
        """Where there is room for its answer."""
        if not self._answers:
            self._take_answers()
        return self._answers

    def _take_answers(self) -> None:
        book, gate, own = self.fleet.book, self.saturation, self.own_tokens()
        free: list[float] = book.kv_free.tolist()
        self._answers = [self._places[row] and free[row] >= own for row in range(self._rows)]
        if gate is not None:
            strictest: list[float] = book.strictest.tolist()
            vacant: list[bool] = book.vacant.tolist()
            target, margin = self.tpot_ms or math.inf, gate.margin / self.tpot_unit
            for row in range(self._rows):
                if not vacant[row] and self._used[row] > min(strictest[row], target) * margin:
                    self._answers[row] = False

    # --- at one row ---------------------------------------------------------------------------------------------------

    def prompt_at(self, row: int) -> float:
        """See `Prices`."""
        return self._prompt[row]

    def stall_at(self, row: int) -> float:
        """See `Prices`."""
        return self._stall[row]

    def ttft_at(self, row: int) -> float:
        """See `Prices`."""
        return self._ttft[row]

    def longer_at(self, row: int) -> float:
        """See `Prices`."""
        return self._longer[row]

    def used_at(self, row: int) -> float:
        """See `Prices`."""
        return self._used[row]

    def open_at(self, row: int) -> bool:
        """See `Prices`."""
        return self._open[row]

    def answers_at(self, row: int) -> bool:
        """See `Prices`."""
        return self._answering()[row]

    def prefill_at(self, row: int) -> float:
        """See `Prices`."""
        return self._prices()[0][row]

    def decode_at(self, row: int) -> float:
        """See `Prices`."""
        return self._prices()[1][row]

    # --- of some rows -------------------------------------------------------------------------------------------------

    def best_wholes(self, rows: Ints, count: int) -> tuple[Priced, Priced]:
        """See `Prices`."""
        now: Priced = []
        later: Priced = []
        among: list[int] = rows.tolist()
        answers, (prefill, decode), opened = self._answering(), self._prices(), self._open
        for row in among:
            if answers[row]:
                price = prefill[row] if self.wanted.prefill_only else prefill[row] + decode[row]
                (now if opened[row] else later).append((price, row))
        return _best(now, count), _best(later, count)

    def best_prefills(self, rows: Ints, count: int) -> Priced:
        """See `Prices`."""
        among: list[int] = rows.tolist()
        (prefill, _), places = self._prices(), self._places
        found = sorted([(prefill[row], row) for row in among if places[row]], key=_PRICE)
        best = found[:count]
        if not any(self._open[row] for _, row in best):
            for each in found[count:]:
                if self._open[each[1]]:
                    best.append(each)
                    break
        return best

    def best_decodes(self, rows: Ints, count: int) -> Priced:
        """See `Prices`."""
        among: list[int] = rows.tolist()
        answers, (_, decode) = self._answering(), self._prices()
        return _best([(decode[row], row) for row in among if answers[row]], count)

    def least_prompt_ms(self, rows: Ints) -> float:
        """See `Prices`."""
        among: list[int] = rows.tolist()
        return min([self._prompt[row] for row in among])

    def least_alone_ms(self, rows: Ints) -> float:
        """See `Prices`."""
        among: list[int] = rows.tolist()
        return min([self._alone[row] for row in among])


def _best(priced: Priced, count: int) -> Priced:
    """The cheapest; of equal ones the first, as sorting keeps their order."""
    return sorted(priced, key=_PRICE)[:count] if len(priced) > 1 else priced
