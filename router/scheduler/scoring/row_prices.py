"""The scorer: what one request costs at an instance, row by row. Among 16 rows a call of numpy costs more than it
saves. Pure.

A price is a share of what was promised: a first token after half of its target costs one half, and more the less of the
target is left (`budget`); a missed target costs `MISS`, for any request (`Prices.harm` weighs it where the prompt's
class refuses). Without targets, `LOOSE` times an idle
instance's latency takes their place. In a small fleet all rows are priced at once; in a large one only the requested
rows and the best of each `shortlist`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Final

import numpy as np

from router.core.arrays import Ints
from router.core.events import PrefixSource
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.scheduler.scoring.budget import MISS, NEAR, OWN, OWN_MISSED, RAMP, missed_one
from router.scheduler.scoring.figures import Figures, RowTimes, Saturation, step_room
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
    """One formula a method, for some rows at a time. Lists are by position, as in `RowTimes`.

    Longer than 250 lines, as every price of a row is one more short formula of the same lists.
    """

    def __init__(self, fleet: FleetSnapshot, wanted: Wanted, saturation: Saturation | None, few: int = FEW) -> None:
        """`few`: up to this number of rows, all are priced."""
        super().__init__(fleet, wanted, saturation)
        self._places: Final[list[bool]] = []
        self._open: Final[list[bool]] = []
        self._prefill: Final[list[float]] = []
        self._decode: Final[list[float]] = []
        self._answers: Final[list[bool]] = []
        self._times: Final = RowTimes()
        columns = fleet.columns
        self._shortlist: Final = None if columns.top <= few else Shortlist(self)
        self._at: Final[dict[int, int]] = {}
        """Positions by row, in a large fleet."""
        self._delay_price: Final = self.delay_price()
        if self._shortlist is None:
            rows = range(columns.top)
            inflight, limits = columns.inflight.tolist(), columns.limits(wanted.routers).tolist()
            self._places.extend([inflight[row] < limits[row] for row in rows])
            self._open.extend(_opened(self, self._places, rows))
            self._times.add(self, rows, self._open)

    def _position(self, row: int) -> int:
        """Where a row stands in the lists."""
        if self._shortlist is None:
            return row
        if row not in self._at:
            self._add([row], self._shortlist)
        return self._at[row]

    def _add(self, rows: list[int], shortlist: Shortlist) -> None:
        """Price these rows as well, in a large fleet; the shortlist's columns tell where there is room."""
        new = [row for row in rows if row not in self._at]
        if new:
            for row in new:
                self._at[row] = len(self._at)
            of = np.array(new, dtype=np.int64)
            self._places.extend(shortlist.places[of].tolist())
            self._open.extend(shortlist.open[of].tolist())
            self._answers.extend(shortlist.answers()[of].tolist())
            self._times.add(self, new, self._open, self._at)
            self._price(new)

    def source_at(self, row: int) -> PrefixSource | None:
        """Where this row would pull the prompt's beginning from; None: it computes what it lacks."""
        sources = self._times.sources
        return None if sources is None else sources.get(row)

    def copied_at(self, row: int) -> int:
        """The prompt's tokens that this row would get as a copy that later requests are charged a part of; 0: none."""
        at, worth = self._position(row), self._times.copy
        return self.held(self.shared[0][0]) if worth and worth[at] else 0

    def _prices(self) -> tuple[list[float], list[float]]:
        """The prices of both legs at each row."""
        if len(self._prefill) < len(self._places):
            self._price(range(len(self._places)))
        return self._prefill, self._decode

    def _price(self, rows: Sequence[int]) -> None:
        """Price the rows that were timed last."""
        inflight, per, begin, times = self.fleet.inflight, 1.0 / self.ttft_unit, len(self._prefill), self._times
        own, second = OWN_MISSED if self.ttft_ms else OWN, OWN_MISSED if self.tpot_ms else OWN
        end, ttft, used = len(times.ttft), times.ttft, times.used
        self._prefill.extend([own.of(ttft[at] * per) for at in range(begin, end)])
        if times.copy:  # a missed target counts as it is
            copy, paid = times.copy, self._prefill
            for at in range(begin, end):
                paid[at] -= OWN.of(ttft[at] * per) - OWN.of((ttft[at] - copy[at]) * per)
        self._decode.extend([second.of(used[at]) for at in range(begin, end)])
        if self._delay_price:
            self._delay_waiting(rows, begin)
        if not inflight.answers:
            return
        loads, per_stall = inflight.rows, 1.0 / (self.tpot_unit * self.middle)
        for number, row in enumerate(rows):
            others, at = loads[row].decoding, begin + number
            if others:
                self._prefill[at] += NEAR.of(times.before[at]) * others * times.stall[at] * per_stall
                self._decode[at] += NEAR.of(used[at]) * others * times.more[at]
        if self.promised:
            self._push_over(rows, begin)

    def _delay_waiting(self, rows: Sequence[int], begin: int) -> None:
        """Add the cost to requests that wait in the router, of the prompt's work beyond the least at any instance."""
        able: list[int] = self.fleet.ready_for(self.wanted).any.tolist()
        if not able:
            return
        prompt, decodes, shortlist = self._times.prompt, self.fleet.columns.decodes, self._shortlist
        dearer = self.answers_dearer() if shortlist is None else shortlist.dearer
        if shortlist is None:
            least_ms = min([prompt[row] * (dearer if decodes.item(row) else 1.0) for row in able])
        else:
            least_ms = float(shortlist.work()[able].min())
        for at, row in enumerate(rows, begin):
            work_ms = prompt[at] * dearer if decodes.item(row) else prompt[at]
            self._prefill[at] += self._delay_price * max(0.0, work_ms - least_ms)

    def _push_over(self, rows: Sequence[int], begin: int) -> None:
        """Add the cost of targets of answers there that would be missed because of one more answer."""
        loads, near = self.fleet.inflight.rows, RAMP[0] / self.tpot_unit
        used, before = self._times.used, self._times.before
        for number, row in enumerate(rows):
            strict, at = loads[row].strictest, begin + number
            if used[at] > strict * near:
                part = self.tpot_unit / strict
                pushed = missed_one(used[at] * part) - missed_one(before[at] * part)
                self._decode[at] += pushed * (loads[row].decoding * MISS)

    def _answering(self) -> list[bool]:
        """Whether there is room for the answer, by row."""
        if len(self._answers) < len(self._places):
            self._take_answers(range(len(self._places)))
        return self._answers

    def _take_answers(self, rows: Sequence[int]) -> None:
        """Find out, in a small fleet, which rows have room for the answer."""
        loads, own = self.fleet.inflight.rows, self.own_tokens()
        places = self._places
        self._answers.extend(
            [
                places[row] and (loads[row].kv_free >= own or self.fits_shared(row, own) or self.goes_beyond(row))
                for row in rows
            ]
        )
        if self.saturation is not None:
            margins, limit_ms, hopeless_ms = self.fleet.inflight.margins, self.tpot_limit_ms(), self.hopeless_ms
            speeds, times = self.fleet.inflight.step_model.rows, self._times
            for row in rows:
                load = loads[row]
                if load.decoding:
                    own_ms = limit_ms if speeds[row].floor_least + times.longer[row] <= hopeless_ms else math.inf
                    until_ms = min(margins.limit_ms(load.strictest), own_ms)
                    if times.used[row] * self.tpot_unit > until_ms:
                        self._answers[row] = False

    # --- at one row ---------------------------------------------------------------------------------------------------

    def prompt_at(self, row: int) -> float:
        """Milliseconds of the prompt with what decodes beside it."""
        return self._times.prompt[self._position(row)]

    def stall_at(self, row: int) -> float:
        """Milliseconds that answers there would wait for the prompt."""
        return self._times.stall[self._position(row)]

    def ttft_at(self, row: int) -> float:
        """Milliseconds until the first token, from the request's arrival."""
        return self._times.ttft[self._position(row)]

    def longer_at(self, row: int) -> float:
        """Milliseconds by which the answer makes a step there longer."""
        return self._times.longer[self._position(row)]

    def used_at(self, row: int) -> float:
        """The TPOT there, as a share of `tpot_unit`."""
        return self._times.used[self._position(row)]

    def place_at(self, row: int) -> bool:
        """Whether credits leave room for one more leg."""
        return self._places[self._position(row)]

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
        return rows if self._shortlist is None else [self._at[row] for row in rows]

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
        self._add(found, shortlist)
        return found

    def least_prompt_ms(self, rows: Ints) -> float:
        """The prompt's time at the quickest of these rows, of which there is at least one."""
        if self._shortlist is not None:
            return float(self._shortlist.prompt[rows].min())
        among: list[int] = rows.tolist()
        prompt = self._times.prompt
        return min([prompt[row] for row in among])

    def least_alone_ms(self, rows: Ints) -> float:
        """The time until the first token without other prompts, at the quickest of these rows, of which there is at
        least one.
        """
        if self._shortlist is not None:
            return float(self._shortlist.alone[rows].min())
        among: list[int] = rows.tolist()
        alone = self._times.alone
        return min([alone[row] for row in among])


def _opened(of: Figures, places: list[bool], rows: Sequence[int]) -> list[bool]:
    """In a small fleet: whether the prompt would be computed at once, by row. `places`: whether there is room."""
    saturation, wanted, fleet = of.saturation, of.wanted, of.fleet
    until = math.inf if saturation is None else saturation.opens_until_ms(wanted)
    if saturation is None or until == math.inf:
        return places
    loads = fleet.inflight.rows
    found = [places[row] and (loads[row].opens <= until or _in_one_step(of, row)) for row in rows]
    lanes = saturation.lanes(wanted, fleet)
    return found if lanes is None else [found[row] and row in lanes for row in rows]


def _in_one_step(of: Figures, row: int) -> bool:
    """Whether one step computes the prompt with those that wait there."""
    return not of.wanted.sheds and of.tokens - of.cached_at(row) <= step_room(of.fleet, row)


def _best(priced: Priced, count: int) -> Priced:
    """The cheapest; of equal ones the first, as sorting keeps their order."""
    return sorted(priced, key=_PRICE)[:count] if len(priced) > 1 else priced
