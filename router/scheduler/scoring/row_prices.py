"""The scorer: what one request costs at an instance, row by row. Among 16 rows a call of numpy costs more than it
saves. Pure.

A price is a share of what was promised: a first token after half of its target costs one half, and more the less of the
target is left (`budget`); a missed target costs `MISS`, for any request. Without targets, `LOOSE` times an idle
instance's latency takes their place. In a small fleet all rows are priced at once; in a large one only the requested
rows and the best of each `shortlist`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from router.core.arrays import Ints
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.predict.inflight_load import IDLE_MIN
from router.scheduler.scoring.budget import MISS, NEAR, OWN, OWN_MISSED, RAMP, missed_one
from router.scheduler.scoring.figures import LOOSE, Figures, Saturation
from router.scheduler.scoring.shortlist import Shortlist, listed

FEW: Final = 64
"""Up to this number of rows, all are priced. Compiled, a row costs half a microsecond; columns cost sixty at any
length."""

Priced = list[tuple[float, int]]
"""Rows with their prices, the cheapest first; of equal ones the lower row."""

_PRICE: Final = itemgetter(0)

_AGGREGATED: Final = 0
_PREFILL: Final = 1
_DECODE: Final = 2
"""The legs that a place is wanted for."""


class RowPrices(Figures):
    """One formula a method, for some rows at a time. Lists are by position: in a small fleet that is the row.

    The class is long because each part of a price is made of the parts before it.
    """

    def __init__(self, fleet: FleetSnapshot, wanted: Wanted, saturation: Saturation | None, few: int = FEW) -> None:
        """`few`: up to this number of rows, all are priced."""
        super().__init__(fleet, wanted, saturation)
        self._at: Final[dict[int, int]] = {}
        """Positions by row, in a large fleet."""
        self._prompt: Final[list[float]] = []
        self._stall: Final[list[float]] = []
        self._alone: Final[list[float]] = []
        self._ttft: Final[list[float]] = []
        self._longer: Final[list[float]] = []
        self._used: Final[list[float]] = []
        self._before: Final[list[float]] = []
        """As `_used`, without this request's answer."""
        self._more: Final[list[float]] = []
        """What this request's answer adds, as a share of `tpot_unit`."""
        self._places: Final[list[bool]] = []
        self._open: Final[list[bool]] = []
        self._prefill: Final[list[float]] = []
        self._decode: Final[list[float]] = []
        self._answers: Final[list[bool]] = []
        columns = fleet.columns
        self._few: Final = columns.top <= few
        self._shortlist: Final = None if self._few else Shortlist(self)
        if self._few:
            self._time(range(columns.top), None)

    def _position(self, row: int) -> int:
        """The position of a row in the lists."""
        if self._few:
            return row
        if row not in self._at:
            self._add([row])
        return self._at[row]

    def _add(self, rows: list[int]) -> None:
        """Price these rows as well, in a large fleet."""
        new = [row for row in rows if row not in self._at]
        if new:
            for row in new:
                self._at[row] = len(self._at)
            of = np.array(new, dtype=np.int64)
            self._time(new, of)
            self._price(of)
            self._take_answers(of)

    def _time(self, rows: Sequence[int], of: Ints | None) -> None:
        """The first token and the steps at these rows. `of`: the same rows, to index columns with; None: all."""
        columns = self.fleet.columns
        inflight, limits = _read(columns.inflight, of), _read(columns.limits(self.wanted.routers), of)
        self._places.extend([inflight[at] < limits[at] for at in range(len(rows))])
        self._time_prompts(rows, of)
        self._open.extend(self._opened(rows, of))
        self._time_firsts(len(rows), of)
        self._time_steps(len(rows), of)

    def _time_prompts(self, rows: Sequence[int], of: Ints | None) -> None:
        """The prompt's time at each row, without what is cached there."""
        step_model, first = self.fleet.inflight.step_model, len(self._prompt)
        kinds: list[int] = _read(step_model.make_of_row, of)
        by_kind = step_model.of_prompt_by_make(self.tokens)
        factors: list[float] = _read(step_model.prefill_factor, of)
        for at in range(len(rows)):
            ms, stall_ms, _ = by_kind[kinds[at]]
            self._prompt.append(factors[at] * ms)
            self._stall.append(factors[at] * stall_ms)
        if self.match is not None:
            mask = -1 if of is None else sum([1 << row for row in rows])
            for chunks, bits in self.match.levels:
                left = bits & mask
                cached = step_model.of_prompt_by_make(self.tokens, self.held(chunks)) if left else by_kind
                while left:
                    row = left.bit_length() - 1
                    left ^= 1 << row
                    place = row if of is None else self._at[row]
                    ms, stall_ms, _ = cached[kinds[place - first]]
                    self._prompt[place] = factors[place - first] * ms
                    self._stall[place] = factors[place - first] * stall_ms
        beside: list[float] = _read(self.fleet.inflight.beside, of)
        for at in range(len(rows)):
            steps = by_kind[kinds[at]][2]
            self._prompt[first + at] += beside[at] * steps

    def _opened(self, rows: Sequence[int], of: Ints | None) -> list[bool]:
        places = self._places[len(self._open) :]
        until = math.inf if self.saturation is None else self.saturation.opens_until_ms(self.wanted)
        if self.saturation is None or until == math.inf:
            return places
        opens: list[float] = _read(self.fleet.inflight.opens, of)
        found = [places[at] and opens[at] <= until for at in range(len(rows))]
        lanes = self.saturation.lanes(self.wanted, len(self.fleet))
        if lanes is not None:
            found = [found[at] and rows[at] in lanes for at in range(len(rows))]
        return found

    def _time_firsts(self, count: int, of: Ints | None) -> None:
        """The first token's time at each row."""
        inflight, saturation, now_ms = self.fleet.inflight, self.saturation, self.wanted.now * 1000.0
        lead: list[float] = _read(inflight.step_model.lead, of)
        ends: list[float] = _read(inflight.ends, of)
        queue_ms = 0.0
        if saturation is not None and saturation.queue:  # elsewhere other requests wait, too
            queue_ms = saturation.queue_ms(len(self.fleet))
        waited_ms, first = self.waited_ms, len(self._ttft)
        for at in range(count):
            alone = self._prompt[first + at] + lead[at] + waited_ms
            wait = abs(ends[at] - now_ms)  # `InflightLoad.waits_ms`
            ttft = (wait if wait < math.inf else 0.0) + alone
            if not self._open[first + at]:
                ttft += queue_ms
            self._alone.append(alone)
            self._ttft.append(ttft)
        if not self.ttft_unit:
            rows = self.fleet.ready_for(self.wanted).any
            self.ttft_unit = LOOSE * (self.least_alone_ms(rows) if len(rows) else math.inf)

    def _time_steps(self, count: int, of: Ints | None) -> None:
        """The time of the answer's steps at each row."""
        inflight = self.fleet.inflight
        request: list[float] = _read(inflight.step_model.request, of)
        context: list[float] = _read(inflight.step_model.context, of)
        step: list[float] = _read(inflight.step, of)
        recent: list[float] = _read(inflight.recent, of)
        faded, per = -inflight.faded(self.wanted.now), 1.0 / self.tpot_unit
        for at in range(count):
            per_ms = per / max(recent[at] * faded + 1.0, IDLE_MIN)
            longer = context[at] * self.context + request[at]
            more = longer * per_ms
            before = step[at] * per_ms
            self._longer.append(longer)
            self._more.append(more)
            self._before.append(before)
            self._used.append(before + more)

    def _prices(self) -> tuple[list[float], list[float]]:
        """The prices of both legs at each row."""
        if len(self._prefill) < len(self._ttft):
            self._price(None)
        return self._prefill, self._decode

    def _price(self, of: Ints | None) -> None:
        """Price the rows that were timed last."""
        inflight, per, begin = self.fleet.inflight, 1.0 / self.ttft_unit, len(self._prefill)
        own, second = OWN_MISSED if self.ttft_ms else OWN, OWN_MISSED if self.tpot_ms else OWN
        end = len(self._ttft)
        self._prefill.extend([own.of(self._ttft[at] * per) for at in range(begin, end)])
        self._decode.extend([second.of(self._used[at]) for at in range(begin, end)])
        if not inflight.answers:
            return
        decoding: list[float] = _read(inflight.decoding, of)
        per_stall = 1.0 / (self.tpot_unit * self.middle)
        for at in range(begin, end):
            others = decoding[at - begin]
            if others:
                self._prefill[at] += NEAR.of(self._before[at]) * others * self._stall[at] * per_stall
                self._decode[at] += NEAR.of(self._used[at]) * others * self._more[at]
        if self.promised:
            self._push_over(decoding, begin, of)

    def _push_over(self, decoding: list[float], begin: int, of: Ints | None) -> None:
        """The targets of answers there that one more answer would break."""
        strictest: list[float] = _read(self.fleet.inflight.strictest, of)
        near = RAMP[0] / self.tpot_unit
        for at in range(begin, len(self._decode)):
            strict = strictest[at - begin]
            if self._used[at] > strict * near:
                part = self.tpot_unit / strict
                pushed = missed_one(self._used[at] * part) - missed_one(self._before[at] * part)
                self._decode[at] += pushed * (decoding[at - begin] * MISS)

    def _answering(self) -> list[bool]:
        """Whether there is room for the answer, by row."""
        if len(self._answers) < len(self._places):
            self._take_answers(None)
        return self._answers

    def _take_answers(self, of: Ints | None) -> None:
        inflight, own, begin = self.fleet.inflight, self.own_tokens(), len(self._answers)
        free: list[float] = _read(inflight.kv_free, of)
        self._answers.extend([self._places[at] and free[at - begin] >= own for at in range(begin, len(self._places))])
        if self.saturation is not None:
            strictest: list[float] = _read(inflight.strictest, of)
            vacant: list[bool] = _read(inflight.vacant, of)
            target, margin = self.tpot_ms or math.inf, self.saturation.margin / self.tpot_unit
            for at in range(begin, len(self._answers)):
                if not vacant[at - begin] and self._used[at] > min(strictest[at - begin], target) * margin:
                    self._answers[at] = False

    # --- at one row ---------------------------------------------------------------------------------------------------

    def prompt_at(self, row: int) -> float:
        """Milliseconds of the prompt with what decodes beside it."""
        return self._prompt[self._position(row)]

    def stall_at(self, row: int) -> float:
        """Milliseconds that answers there would wait for the prompt."""
        return self._stall[self._position(row)]

    def ttft_at(self, row: int) -> float:
        """Milliseconds until the first token, from the request's arrival."""
        return self._ttft[self._position(row)]

    def longer_at(self, row: int) -> float:
        """Milliseconds by which the answer makes a step there longer."""
        return self._longer[self._position(row)]

    def used_at(self, row: int) -> float:
        """The TPOT there, as a share of `tpot_unit`."""
        return self._used[self._position(row)]

    def open_at(self, row: int) -> bool:
        """Whether the prompt would be computed at once, or nearly so."""
        return self._open[self._position(row)]

    def answers_at(self, row: int) -> bool:
        """Whether there is room for the answer: a place, memory, and every target kept."""
        at = self._position(row)
        return self._answering()[at]

    def prefill_at(self, row: int) -> float:
        """The cost of computing the prompt there, without the exact effect on the targets of answers that decode there
        (`harm`).
        """
        at = self._position(row)
        return self._prices()[0][at]

    def decode_at(self, row: int) -> float:
        """The cost of the answer there: its own time, and what its part of each step takes from the others."""
        at = self._position(row)
        return self._prices()[1][at]

    # --- of some rows -------------------------------------------------------------------------------------------------

    def best_aggregated(self, rows: Ints, count: int) -> tuple[Priced, Priced]:
        """The cheapest rows for both legs, of those with room for the answer: those that can begin now, and those that
        cannot.
        """
        now: Priced = []
        later: Priced = []
        among: list[int] = self._worth(rows, _AGGREGATED)
        answers, (prefill, decode), opened = self._answering(), self._prices(), self._open
        for at, row in zip(self._positions(among), among, strict=True):
            if answers[at]:
                price = prefill[at] if self.wanted.prefill_only else prefill[at] + decode[at]
                (now if opened[at] else later).append((price, row))
        return _best(now, count), _best(later, count)

    def best_prefills(self, rows: Ints, count: int) -> Priced:
        """The cheapest rows for the prompt, of those with a place; if none of these can begin now, also the cheapest
        that can.
        """
        among: list[int] = self._worth(rows, _PREFILL)
        (prefill, _), places, opened = self._prices(), self._places, self._open
        able = [(prefill[at], row) for at, row in zip(self._positions(among), among, strict=True) if places[at]]
        found = sorted(able, key=_PRICE)
        best = found[:count]
        if not any(opened[self._position(row)] for _, row in best):
            for each in found[count:]:
                if opened[self._position(each[1])]:
                    best.append(each)
                    break
        return best

    def best_decodes(self, rows: Ints, count: int) -> Priced:
        """The cheapest rows for the answer, of those with room for it."""
        among: list[int] = self._worth(rows, _DECODE)
        answers, (_, decode) = self._answering(), self._prices()
        able = [(decode[at], row) for at, row in zip(self._positions(among), among, strict=True) if answers[at]]
        return _best(able, count)

    def _positions(self, rows: list[int]) -> list[int]:
        return rows if self._few else [self._at[row] for row in rows]

    def _worth(self, rows: Ints, legs: int) -> list[int]:
        """The rows of these that are priced, ascending: in a large fleet the best by rank that have room, and the best
        of these that can begin now.
        """
        shortlist = self._shortlist
        if shortlist is None:
            among: list[int] = rows.tolist()
            return among
        prefill, decode = shortlist.ranks()
        rows = rows[(shortlist.places if legs == _PREFILL else shortlist.answers())[rows]]
        rank = decode if legs == _DECODE else prefill
        if legs == _AGGREGATED and not self.wanted.prefill_only:
            rank = prefill + decode
        found = listed(rows, rank)
        if legs != _DECODE:
            now = shortlist.open[rows]
            if not now.all():
                found = sorted({*found, *listed(rows[now], rank)})
        self._add(found)
        return found

    def least_prompt_ms(self, rows: Ints) -> float:
        """The prompt's time at the quickest of these rows, of which there is at least one."""
        if self._shortlist is not None:
            return float(self._shortlist.prompt[rows].min())
        among: list[int] = rows.tolist()
        return min([self._prompt[row] for row in among])

    def least_alone_ms(self, rows: Ints) -> float:
        """The time until the first token without other prompts, at the quickest of these rows, of which there is at
        least one.
        """
        if self._shortlist is not None:
            return float(self._shortlist.alone[rows].min())
        among: list[int] = rows.tolist()
        return min([self._alone[row] for row in among])


def _read(column: NDArray[Any], of: Ints | None) -> list[Any]:
    """A column's values, at these rows or all, as Python's own numbers."""
    found: list[Any] = column.tolist() if of is None else column[of].tolist()
    return found


def _best(priced: Priced, count: int) -> Priced:
    """The cheapest; of equal ones the first, as sorting keeps their order."""
    return sorted(priced, key=_PRICE)[:count] if len(priced) > 1 else priced
