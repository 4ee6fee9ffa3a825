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
from typing import Final

import numpy as np

from router.core.arrays import Ints
from router.core.events import PrefixSource
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.predict.inflight_load import IDLE_MIN
from router.scheduler.scoring.budget import MISS, NEAR, OWN, OWN_MISSED, RAMP, missed_one
from router.scheduler.scoring.figures import LOOSE, Figures, Saturation
from router.scheduler.scoring.shortlist import Shortlist, listed

FEW: Final = 64
"""Up to this number of rows, all are priced. Compiled, a row costs half a microsecond; columns cost sixty at any
length."""

PULL_MS, PULL_STEPS = 3.0, 3.0
"""A pause for blocks from elsewhere, besides their bytes: the engine's front end and the messages, and steps of the
pulling engine: the one under way when the leg comes, the one after which the blocks are there (steps are decided
ahead), and the one that makes the seeded token once more (seen on the twin: 24.7 ms where a step takes 7.2)."""

CLEAR, LEAST_MS = 0.3, 10.0
"""A prompt's beginning is pulled from a peer if that saves this share of its time, and so many milliseconds: a failed
pull costs its time, and no model knows all that two more messages cost. Chosen, not measured."""

SOURCE_S_MIN, SOURCE_S_MAX = 0.05, 2.0
"""Bounds of the wait for a source. Between them it is the time that the prompt takes without one: a source that does
not answer at most doubles it."""

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
        self._sources: Final[dict[int, PrefixSource]] = {}
        """By row: where it would pull the prompt's beginning from."""
        columns = fleet.columns
        self._few: Final = columns.top <= few
        self._shortlist: Final = None if self._few else Shortlist(self)
        if self._few:
            rows = range(columns.top)
            inflight, limits = columns.inflight.tolist(), columns.limits(wanted.routers).tolist()
            self._places.extend([inflight[row] < limits[row] for row in rows])
            self._open.extend(self._opened(rows))
            self._time(rows)

    def _position(self, row: int) -> int:
        """Where a row stands in the lists."""
        if self._shortlist is None:
            return row
        if row not in self._at:
            self._add([row], self._shortlist)
        return self._at[row]

    def _add(self, rows: list[int], shortlist: Shortlist) -> None:
        """Price these as well, of a large fleet: where there is room its columns know."""
        new = [row for row in rows if row not in self._at]
        if new:
            for row in new:
                self._at[row] = len(self._at)
            of = np.array(new, dtype=np.int64)
            self._places.extend(shortlist.places[of].tolist())
            self._open.extend(shortlist.open[of].tolist())
            self._answers.extend(shortlist.answers()[of].tolist())
            self._time(new)
            self._price(new)

    def _time(self, rows: Sequence[int]) -> None:
        """Its first token and its steps at these rows."""
        self._time_prompts(rows)
        self._time_firsts(rows)
        self._time_steps(rows)

    def _time_prompts(self, rows: Sequence[int]) -> None:
        """Its prompt at each row, what is cached there left out."""
        step_model, first = self.fleet.inflight.step_model, len(self._prompt)
        by_kind, speeds = step_model.of_prompt_by_make(self.tokens), step_model.rows
        for row in rows:
            speed = speeds[row]
            ms, stall_ms, _ = by_kind[speed.kind]
            self._prompt.append(speed.prefill_factor * ms)
            self._stall.append(speed.prefill_factor * stall_ms)
        if self.match is not None:
            mask = -1 if self._few else sum([1 << row for row in rows])
            for chunks, bits in self.match.levels:
                left = bits & mask
                cached = step_model.of_prompt_by_make(self.tokens, self.held(chunks)) if left else by_kind
                while left:
                    row = left.bit_length() - 1
                    left ^= 1 << row
                    place, speed = row if self._few else self._at[row], speeds[row]
                    ms, stall_ms, _ = cached[speed.kind]
                    self._prompt[place] = speed.prefill_factor * ms
                    self._stall[place] = speed.prefill_factor * stall_ms
            if self.fleet.sharing and self.wanted.one_prompt:
                self._find_sources(rows, first)
        loads = self.fleet.inflight.rows
        for at, row in enumerate(rows):
            beside = loads[row].beside
            if beside:
                self._prompt[first + at] += beside * by_kind[speeds[row].kind][2]

    def _find_sources(self, rows: Sequence[int], first: int) -> None:
        """The rows that would do better with the prompt's beginning from another instance: `CLEAR` of their time and
        `LEAST_MS` are saved. Of the instances that have more of it, those with the most are compared.
        """
        fleet, match = self.fleet, self.match
        assert match is not None
        sources = fleet.sources(match, self.wanted)
        if not sources:
            return
        step_model, speeds = fleet.inflight.step_model, fleet.inflight.step_model.rows
        for at, row in enumerate(rows, first):
            own, own_ms = match.chunks_of(row), self._prompt[at]
            for chunks, source in sources:
                if chunks <= own:
                    break
                cached = self.held(chunks)
                ms, stall_ms, _ = step_model.of_prompt_by_make(self.tokens, cached)[speeds[row].kind]
                ms *= speeds[row].prefill_factor
                if ms > own_ms * (1.0 - CLEAR) or ms > own_ms - LEAST_MS or not fleet.shares(source, row, self.wanted):
                    continue
                leg_ms = self._source_ms(source)
                ms += (
                    leg_ms
                    + fleet.inflight.source_delay.ms(self.wanted.now)
                    + self._pull_ms(source, row, cached - self.held(own))
                )
                if ms <= own_ms * (1.0 - CLEAR) and ms <= own_ms - LEAST_MS:
                    self._prompt[at], self._stall[at] = ms, speeds[row].prefill_factor * stall_ms
                    wait_s = min(SOURCE_S_MAX, max(SOURCE_S_MIN, own_ms / 1000.0))
                    self._sources[row] = PrefixSource(fleet.at(source).id, cached, wait_s, leg_ms)
                    break

    def _source_ms(self, source: int) -> float:
        """The time until a source has answered: what it has to compute before, a message, the step under way if it
        decodes, and one for the leg.
        """
        there = self.fleet.inflight.rows[source]
        wait = max(0.0, there.ends - self.wanted.now * 1000.0)
        return wait + PULL_MS + there.step * (2 if there.decoding else 1)

    def _pull_ms(self, source: int, row: int, tokens: int) -> float:
        """The time to pull so many tokens from there then: a message, the move, a step before and after it if it
        decodes (an idle engine looks at once), and its front end, which is as late as the source's.
        """
        inflight, now = self.fleet.inflight, self.wanted.now
        here, near = inflight.rows[row], self.fleet.near(source, row)
        told_ms = inflight.step_model.handoff_ms(tokens, source, row, near=near)
        moving_ms = inflight.pulls(row).expects_ms(told_ms, now, near=near)
        return PULL_MS + moving_ms + (2 * here.step if here.decoding else 0.0) + inflight.source_delay.ms(now)

    def source_at(self, row: int) -> PrefixSource | None:
        """Where this row would pull the prompt's beginning from; None: it computes what it lacks."""
        return self._sources.get(row)

    def _opened(self, rows: Sequence[int]) -> list[bool]:
        """Of a small fleet, where its prompt would be computed at once."""
        until = math.inf if self.saturation is None else self.saturation.opens_until_ms(self.wanted)
        if self.saturation is None or until == math.inf:
            return self._places
        loads = self.fleet.inflight.rows
        found = [self._places[row] and loads[row].opens <= until for row in rows]
        prefills = len(self.fleet.ready_for(self.wanted).prefills)
        lanes = self.saturation.lanes(self.wanted, len(self.fleet), prefills)
        return found if lanes is None else [found[row] and row in lanes for row in rows]

    def _time_firsts(self, rows: Sequence[int]) -> None:
        """Its first token at each row."""
        loads, speeds = self.fleet.inflight.rows, self.fleet.inflight.step_model.rows
        saturation, now_ms = self.saturation, self.wanted.now * 1000.0
        queue_ms = 0.0
        if saturation is not None and saturation.queue:  # elsewhere other requests wait, too
            queue_ms = saturation.queue_ms(len(self.fleet))
        waited_ms = self.waited_ms
        for row in rows:
            at = len(self._ttft)
            alone = self._prompt[at] + speeds[row].lead + waited_ms
            wait = abs(loads[row].ends - now_ms)  # `InflightLoad.waits_ms`
            ttft = (wait if wait < math.inf else 0.0) + alone
            if not self._open[at]:
                ttft += queue_ms
            self._alone.append(alone)
            self._ttft.append(ttft)
        if not self.ttft_unit:
            able = self.fleet.ready_for(self.wanted).any
            self.ttft_unit = LOOSE * (self.least_alone_ms(able) if len(able) else math.inf)

    def _time_steps(self, rows: Sequence[int]) -> None:
        """Its answer's steps at each row."""
        inflight = self.fleet.inflight
        loads, speeds = inflight.rows, inflight.step_model.rows
        faded, per, context = -inflight.faded(self.wanted.now), 1.0 / self.tpot_unit, self.context
        for row in rows:
            load, speed = loads[row], speeds[row]
            per_ms = per / max(load.recent * faded + 1.0, IDLE_MIN)
            longer = speed.context * context + speed.request
            more = longer * per_ms
            before = load.step * per_ms
            self._longer.append(longer)
            self._more.append(more)
            self._before.append(before)
            self._used.append(before + more)

    def _prices(self) -> tuple[list[float], list[float]]:
        """The prices of both legs at each row."""
        if len(self._prefill) < len(self._ttft):
            self._price(range(len(self._ttft)))
        return self._prefill, self._decode

    def _price(self, rows: Sequence[int]) -> None:
        """Of the rows that were timed last."""
        inflight, per, begin = self.fleet.inflight, 1.0 / self.ttft_unit, len(self._prefill)
        own, second = OWN_MISSED if self.ttft_ms else OWN, OWN_MISSED if self.tpot_ms else OWN
        end = len(self._ttft)
        self._prefill.extend([own.of(self._ttft[at] * per) for at in range(begin, end)])
        self._decode.extend([second.of(self._used[at]) for at in range(begin, end)])
        if not inflight.answers:
            return
        loads, per_stall = inflight.rows, 1.0 / (self.tpot_unit * self.middle)
        for number, row in enumerate(rows):
            others, at = loads[row].decoding, begin + number
            if others:
                self._prefill[at] += NEAR.of(self._before[at]) * others * self._stall[at] * per_stall
                self._decode[at] += NEAR.of(self._used[at]) * others * self._more[at]
        if self.promised:
            self._push_over(rows, begin)

    def _push_over(self, rows: Sequence[int], begin: int) -> None:
        """Targets of answers there that are missed for one more beside them."""
        loads, near = self.fleet.inflight.rows, RAMP[0] / self.tpot_unit
        for number, row in enumerate(rows):
            strict, at = loads[row].strictest, begin + number
            if self._used[at] > strict * near:
                part = self.tpot_unit / strict
                pushed = missed_one(self._used[at] * part) - missed_one(self._before[at] * part)
                self._decode[at] += pushed * (loads[row].decoding * MISS)

    def _answering(self) -> list[bool]:
        """Whether there is room for the answer, by row."""
        if len(self._answers) < len(self._places):
            self._take_answers(range(len(self._places)))
        return self._answers

    def _take_answers(self, rows: Sequence[int]) -> None:
        """Of a small fleet."""
        loads, own = self.fleet.inflight.rows, self.own_tokens()
        self._answers.extend([self._places[row] and loads[row].kv_free >= own for row in rows])
        if self.saturation is not None:
            margins, limit_ms, hopeless_ms = self.fleet.inflight.margins, self.tpot_limit_ms(), self.hopeless_ms
            speeds = self.fleet.inflight.step_model.rows
            for row in rows:
                load = loads[row]
                if load.decoding:
                    own_ms = limit_ms if speeds[row].floor + self._longer[row] <= hopeless_ms else math.inf
                    until_ms = min(margins.limit_ms(load.strictest), own_ms)
                    if self._used[row] * self.tpot_unit > until_ms:
                        self._answers[row] = False

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
        self._add(found, shortlist)
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


def _best(priced: Priced, count: int) -> Priced:
    """The cheapest; of equal ones the first, as sorting keeps their order."""
    return sorted(priced, key=_PRICE)[:count] if len(priced) > 1 else priced
