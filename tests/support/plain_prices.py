"""The workload policy's choice, computed instance by instance with every formula written out. It is slow.

`router.scheduler.scoring.prices`, `router.scheduler.scoring.workload` and
`router.scheduler.flow_control.saturation` compute the same by columns and short cuts, and have to agree with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.predict.answer_lengths import OUTPUT_UNKNOWN, SHARES
from router.predict.inflight_load import SPREAD
from router.predict.shared_beginnings import beginnings, lengths_within
from router.predict.step_model import UNKNOWN, Make
from router.predict.transfer_model import FADES_S, LEAST_MS
from router.scheduler.flow_control.saturation import AHEAD_MS
from router.scheduler.scoring.budget import BARRIER_MAX, MISS, RAMP
from router.scheduler.scoring.figures import COPY_MS_MAX, LOOSE, ONE_STEP_TOKENS, PULL_MS, PULL_STEPS
from router.scheduler.scoring.filters import ready, saturation_of
from router.scheduler.scoring.prices import HOLDS_FREE
from router.scheduler.scoring.workload import ALIKE, HYSTERESIS, WAITING, K

_POINTS = np.concatenate([np.linspace(0.0, 1.2, 121), [1e6]])


def missed(ratio: float) -> float:
    return min(1.0, max(0.0, (ratio - RAMP[0]) / (RAMP[1] - RAMP[0])))


_NEAR = [1.0 / (1.0 - min(used, BARRIER_MAX)) for used in _POINTS]
_OWN = [used * near for used, near in zip(_POINTS, _NEAR, strict=True)]
_OWN_MISSED = [own + MISS * missed(used) for own, used in zip(_OWN, _POINTS, strict=True)]


def looked_up(used: float, table: list[float]) -> float:
    return float(np.interp(used, _POINTS, table))


@dataclass
class Row:
    """The figures of one instance for one request. Times are in milliseconds, prices in shares of a request."""

    place: bool
    open: bool
    fits: bool
    answers: bool
    ttft: float
    tpot: float
    prompt: float
    stall: float
    step: float
    prefill: float = 0.0
    decode: float = 0.0
    harm: float = 0.0


class Plain:
    """The computation of one choice."""

    def __init__(self, fleet: FleetSnapshot, wanted: Wanted) -> None:
        self.fleet, self.wanted, self.inflight = fleet, wanted, fleet.inflight
        self.saturation = saturation_of(wanted)
        self.step_model = fleet.inflight.step_model
        self.tokens = max(1, wanted.prompt_tokens)
        self.output = wanted.output_tokens or OUTPUT_UNKNOWN
        unknown = (10.0, 20.0, 40.0, 100.0, 200.0, 400.0, 800.0)
        self.lengths = [float(each) for each in wanted.output_lengths or unknown]
        self.middle = max(2.0, self.lengths[SHARES.index(0.5)])
        self.context = self.tokens + wanted.answers * self.output / 2
        waited = (wanted.now - wanted.arrived) * 1000.0 if wanted.arrived else 0.0
        self.waited = max(0.0, waited)
        self.ttft_unit = wanted.ttft_ms or LOOSE * min((self._alone(row) for row in self.may()), default=math.inf)
        decoding = [row for row in self.may() if fleet.columns.decodes[row]] or self.may()
        speeds = [self.step_model.rows[row] for row in decoding]
        alone = [speed.context * self.context + speed.request * wanted.answers + speed.floor for speed in speeds]
        makes = [] if alone else self.step_model.present()
        alone += [make.decode.requests_ms(wanted.answers) + make.decode.context_ms * self.context for make in makes]
        self.tpot_unit = wanted.tpot_ms or LOOSE * min(alone)
        found = fleet.ready_for(wanted)
        urgency = 0.0 if wanted.lengths_within < 1.0 else wanted.urgency
        self.delay = MISS * urgency / max(1, len(found.prefills) or len(found.any)) if self.may() else 0.0
        lone = [self._whole_ms(row) for row in self.may() if not fleet.columns.decodes[row]]
        ratio = max(each for each in lone if each < 4 * min(lone)) / min(lone) if lone else 1.0
        self.answering_dearer = ratio if ratio > 1.5 else 1.0
        self.least = min((self._prompt(row) * self._time_worth(row) for row in self.may()), default=0.0)
        self.rows = {view.row: self._row(view.row) for view in fleet}

    def may(self) -> list[int]:
        """The rows of instances that serve the request's model and its tenant."""
        model, tenant = self.wanted.model, self.wanted.tenant
        serving = [view for view in self.fleet if view.ready and (model is None or model in view.models)]
        return sorted(view.row for view in serving if not view.instance.tenants or tenant in view.instance.tenants)

    def _make(self, row: int) -> Make:
        return self.step_model.make(row)

    def cached(self, row: int) -> int:
        prefixes, wanted = self.fleet.prefixes, self.wanted
        if prefixes is None or not wanted.prefix:
            return 0
        chunks = prefixes.match(wanted.prefix).chunks_of(row)
        return min(int(chunks * wanted.prefix_block_tokens), self.tokens - 1)

    def _shared(self, row: int) -> float:
        """The tokens of the prompt's beginning that answers on this row hold already."""
        prefixes, names = self.fleet.prefixes, self.wanted.prefix
        if prefixes is None or not names:
            return 0.0
        cached = prefixes.in_cache(row, names, prefixes.match(names).chunks_of(row))
        each, tokens = self.wanted.prefix_block_tokens, self.wanted.prompt_tokens
        return self.inflight.rows[row].shared.among(beginnings(names), lengths_within(cached), each, tokens)

    def _plain_ms(self, row: int) -> float:
        held = self.cached(row)
        return self._make(row).prompt_ms(self.tokens - held, held) * self.step_model.rows[row].prefill_factor

    def _prompt(self, row: int) -> float:
        return self._plain_ms(row) + self.inflight.rows[row].beside * self._steps(row)

    def _whole_ms(self, row: int) -> float:
        return self._make(row).prompt_ms(self.tokens, 0) * self.step_model.rows[row].prefill_factor

    def _time_worth(self, row: int) -> float:
        return self.answering_dearer if self.fleet.columns.decodes[row] else 1.0

    def _steps(self, row: int) -> float:
        return self._make(row).steps(self.tokens - self.cached(row))

    def _alone(self, row: int) -> float:
        return self._prompt(row) + self.step_model.rows[row].first + self.step_model.rows[row].overhead + self.waited

    def _row(self, row: int) -> Row:
        inflight, step_model, wanted, saturation, columns = (
            self.inflight,
            self.step_model,
            self.wanted,
            self.saturation,
            self.fleet.columns,
        )
        place = bool(columns.inflight[row] < columns.limits(wanted.routers)[row])
        waits = self.waits(row)
        make = self._make(row)
        shared = self._steps(row) * make.decode.decode_ms * step_model.rows[row].prefill_factor
        longer = wanted.answers * step_model.rows[row].request + step_model.rows[row].context * self.context
        idle = inflight.idle(wanted.now)[row]
        found = Row(
            place=place,
            open=place,
            fits=True,
            answers=True,
            ttft=self._alone(row) + waits,
            tpot=(inflight.rows[row].step + longer) / idle,
            prompt=self._prompt(row),
            stall=max(0.0, self._plain_ms(row) - shared),
            step=inflight.rows[row].step + longer,
        )
        empty = inflight.rows[row].decoding == 0
        needed = inflight.rows[row].kv_mean + SPREAD * math.sqrt(inflight.rows[row].kv_variance)
        own = wanted.prompt_tokens + wanted.answers * self.output
        own += SPREAD * math.sqrt(wanted.answers * wanted.output_variance)
        own -= self._shared(row)
        found.fits = bool(empty or needed + own <= step_model.rows[row].capacity)
        found.fits |= wanted.beyond_memory is not None and row not in wanted.beyond_memory
        found.answers = place and found.fits
        if saturation is not None:
            if wanted.ttft_ms:
                left = inflight.rows[row].ends - wanted.now * 1000.0
                together = inflight.rows[row].uncomputed + self.tokens - self.cached(row)
                soon = left <= step_model.rows[row].first + AHEAD_MS or inflight.rows[row].prompts < 2
                told = step_model.rows[row].make is not UNKNOWN and bool(columns.prefills[row])
                found.open &= bool(soon or (told and not wanted.sheds and together <= ONE_STEP_TOKENS))
                ready = self.fleet.ready_for(wanted)
                taken = [at for at, count in saturation._late.items() if count and at in ready.any]
                if wanted.late and len(taken) >= saturation._lanes(wanted, len(ready.any), len(ready.prefills)):
                    found.open &= row in taken
            own_ms = wanted.tpot_ms or math.inf
            alone_ms = step_model.rows[row].floor_least + longer
            if not wanted.sheds and alone_ms > own_ms:
                own_ms = math.inf
            own_margins = inflight.margins.of_class(sheds=wanted.sheds)
            limit_ms = min(inflight.margins.limit_ms(inflight.rows[row].strictest), own_margins.limit_ms(own_ms))
            found.answers &= bool(empty or found.tpot <= limit_ms)
        self._price(found, row, longer, idle)
        return found

    def _price(self, found: Row, row: int, longer: float, idle: float) -> None:
        inflight, wanted, saturation = self.inflight, self.wanted, self.saturation
        if saturation is not None and saturation.queue and not found.open:
            found.ttft += saturation.queue_ms(self.wanted, self.fleet)
        table = _OWN_MISSED if wanted.ttft_ms and not wanted.late else _OWN
        near = looked_up(inflight.rows[row].step / idle / self.tpot_unit, _NEAR)
        others = inflight.rows[row].decoding * found.stall * near / (self.tpot_unit * self.middle)
        found.prefill = looked_up(found.ttft / self.ttft_unit, table) + others
        later = looked_up((found.ttft - self._copy(row, found.prompt)) / self.ttft_unit, _OWN)
        found.prefill -= looked_up(found.ttft / self.ttft_unit, _OWN) - later
        found.prefill += self.delay * max(0.0, found.prompt * self._time_worth(row) - self.least)
        used = found.tpot / self.tpot_unit
        others = inflight.rows[row].decoding * longer / idle / self.tpot_unit * looked_up(used, _NEAR)
        found.decode = looked_up(used, _OWN_MISSED if wanted.tpot_ms else _OWN) + others
        if wanted.ttft_ms or wanted.tpot_ms:
            limit = inflight.rows[row].strictest * idle
            pushed = missed(found.step / limit) - missed(inflight.rows[row].step / limit)
            found.decode += pushed * inflight.rows[row].decoding * MISS
            if inflight.rows[row].decoding:
                found.harm = MISS * self._harmed(row, found.stall)

    def _copy(self, row: int, prompt: float) -> float:
        """Milliseconds of this prompt that others pay, who will use its beginning there."""
        prefixes, wanted, worth = self.fleet.prefixes, self.wanted, 0.0
        if prefixes is None or not wanted.prefix:
            return 0.0
        match = prefixes.match(wanted.prefix)
        for depth, uses in self.fleet.prefix_uses.shared(wanted.prefix, match, wanted.now, wanted.routers):
            held = min(int(depth * wanted.prefix_block_tokens), self.tokens - 1)
            make, beside = self._make(row), self.inflight.rows[row].beside
            cached = make.prompt_ms(self.tokens - held, held) * self.step_model.rows[row].prefill_factor
            saved = prompt - cached - beside * make.steps(self.tokens - held)
            if depth > match.chunks_of(row) and saved <= COPY_MS_MAX and depth <= prefixes.room(row):
                worth = max(worth, saved * (1.0 - 1.0 / uses))
        return worth

    def _harmed(self, row: int, stall: float) -> float:
        """The running requests whose limit this prompt's stall may break, weighted by probability."""
        at, found = self.inflight.rows[row], 0.0
        busy = 1.0 - float(self.inflight.idle(self.wanted.now)[row])
        at.outlive(self.wanted.now)
        for share, limits, tokens in zip(
            (0.3, 0.7), at.limits.by_length, (max(2.0, self.lengths[0]), self.middle), strict=True
        ):
            mean = busy / (1.0 - busy) * at.step * tokens / 2
            wide = mean + 0.1 * at.step * tokens + stall
            begin = max(0.0, mean - wide / 2)
            found += share * sum(begin < limit - at.stalled <= begin + wide for limit in limits) * stall / wide
        return found

    def waits(self, row: int) -> float:
        """Milliseconds until the instance's prompts end. A prompt that is overdue is taken to need as long again as it
        is late.
        """
        return (
            abs(float(self.inflight.rows[row].ends) - self.wanted.now * 1000.0)
            if self.inflight.rows[row].prompts
            else 0.0
        )

    def pause(self, first: int, second: int) -> float:
        row, fleet = self.rows[second], self.fleet
        pause = PULL_MS + PULL_STEPS * row.step
        one, other = (self.fleet.at(at).instance.node for at in (first, second))
        near = one == other and one != ""
        lacks = self.wanted.prompt_tokens - self.cached(second)  # D pulls what it lacks; no scene has tiers
        told = self.step_model.handoff_ms(lacks, first, second, near=near)
        pause += told if fleet.columns.prefills[second] else self._pulled(first, second, told, pause, near=near)
        now_ms = self.wanted.now * 1000.0
        comes_ms = now_ms + self.rows[first].ttft - self.waited + pause
        if not fleet.columns.prefills[second]:
            return pause + max(0.0, self.inflight.rows[second].ends - comes_ms)
        both = [at for at in self.may() if fleet.columns.prefills[at] and fleet.columns.decodes[at]]
        usual = sum(map(self.waits, both)) / len(both)
        return pause + max(usual, self.inflight.rows[second].ends - comes_ms)

    def _pulled(self, first: int, second: int, told: float, pause: float, *, near: bool) -> float:
        """Milliseconds to move the request's KV to D, and to end the pulls that D does before it."""
        pulls, now = self.inflight.pulls(second), self.wanted.now
        network = pulls._near if near else pulls._far
        moving = told
        if network._line.count:
            held = math.exp(-(now - network._last_s) / FADES_S)
            moving = (1 - held) * told + held * (network._rest_ms + network._slope * told)
        if not pulls._under_way:
            return moving
        oldest, every = next(iter(pulls._under_way)), [each.moving_ms for each in pulls._under_way]
        since = max(pulls.since_s, oldest.computed_s + oldest.unmoved_ms / 1000)
        moved = max(LEAST_MS, min(sum(every), len(every) * oldest.moving_ms))
        slower = max(1.0, (now - since) * 1000 / moved)
        ends = pulls.since_s * 1000 + slower * sum(every)
        comes = now * 1000 + self.rows[first].ttft - self.waited
        before = ends - comes - pause
        return moving * slower + max(0.0, before)

    def shorter(self, than: float) -> float:
        lengths = [min(2.0, self.lengths[0]), *self.lengths, 2 * self.lengths[-1]]
        return float(np.interp(than, lengths, [0.0, *SHARES, 1.0]))

    def handoff(self, first: int, second: int) -> float:
        pause = self.pause(first, second)
        if self.wanted.unseeded or not self.fleet.at(second).instance.pins:
            table = _OWN_MISSED if self.wanted.ttft_ms and not self.wanted.late else _OWN
            ttft = self.rows[first].ttft
            return looked_up((ttft + pause) / self.ttft_unit, table) - looked_up(ttft / self.ttft_unit, table)
        price = pause / (self.tpot_unit * self.output)
        target = self.wanted.tpot_ms
        if target:
            used, steps = self.rows[second].tpot / target, [(at + 0.5) / 4 for at in range(4)]
            reaches = [RAMP[0] + (RAMP[1] - RAMP[0]) * at for at in steps]
            slow = [self.shorter(1 + pause / target / (each - used)) for each in reaches if each > used]
            price += MISS * sum(slow) / len(reaches)
        return price

    def name(self, row: int) -> str:
        return self.fleet.at(row).instance.weights

    def kinds(self) -> list[set[str]]:
        names = {self.name(view.row) for view in self.fleet}
        return [{name, ""} for name in sorted(names - {""})] or [{""}]

    def hold(self, first: int, second: int) -> float:
        columns = self.fleet.columns
        over = (columns.kv_usage[first] - HOLDS_FREE) / (1 - HOLDS_FREE)
        if over <= 0:
            return 0.0
        part = min(1.0, self.tokens / self.step_model.rows[first].capacity)
        return float((1 + columns.waiting[first]) * over * part * self.pause(first, second) / self.ttft_unit)

    def dearer(self, first: int, second: int) -> float:
        columns = self.fleet.columns
        either = columns.decodes[first] and columns.prefills[second]
        return 1 + (ALIKE if either and self._make(first) == self._make(second) else HYSTERESIS)


@dataclass(frozen=True)
class Said:
    """A choice: its rows (None: no instance), its price, and the price of the best choice of the other kind."""

    prefill: int | None
    decode: int | None
    wait: bool
    price: float = math.inf
    other: float = math.inf


def choose(fleet: FleetSnapshot, wanted: Wanted) -> Said:
    """The choice that `router.scheduler.scoring.workload.workload` has to make."""
    found = ready(fleet, wanted)
    plain = Plain(fleet, wanted)
    assert found.any.tolist() == [row for row in plain.may() if fleet.at(row).id not in wanted.excluded]
    if not len(found.any):
        return Said(None, None, wait=False)
    able = found.any if wanted.prefill_only or not wanted.hand_over or not len(found.decodes) else found.decodes
    options = _aggregated(plain, [row for row in able.tolist() if plain.rows[row].answers])
    if wanted.hand_over:
        pairs: list[_Option] = []
        for names in plain.kinds():
            firsts = [row for row in found.prefills.tolist() if plain.rows[row].place and plain.name(row) in names]
            seconds = [row for row in found.decodes.tolist() if plain.rows[row].answers and plain.name(row) in names]
            pairs += _pairs(plain, firsts, seconds)
        for begins in (True, False):
            some = [each for each in pairs if each[4] == begins]
            options += [min(some, key=lambda each: each[0])] if some else []
    best = min(options, key=lambda each: each[0], default=None)
    can = [each for each in options if each[4]]
    if best is None or not can:
        return Said(None, None, wait=True)
    now = min(can, key=lambda each: each[0])
    if not best[4] and best[0] * WAITING < now[0]:
        return Said(None, None, wait=True)
    others = [each[1] for each in can if each is not now]
    return Said(now[2], now[3], wait=False, price=now[1], other=others[0] if others else math.inf)


_Option = tuple[float, float, int | None, int, bool]


def _aggregated(plain: Plain, rows: list[int]) -> list[_Option]:
    found = []
    for begins in (True, False):
        priced = []
        for row in rows:
            at = plain.rows[row]
            if at.open == begins:
                priced.append((at.prefill + (0.0 if plain.wanted.prefill_only else at.decode), row))
        some = [(price + plain.rows[row].harm, row) for price, row in sorted(priced)[:K]]
        if some:
            price, row = min(some)
            found.append((price, price, None, row, begins))
    return found


def _pairs(plain: Plain, prefills: list[int], decodes: list[int]) -> list[_Option]:
    firsts = sorted(prefills, key=lambda row: (plain.rows[row].prefill, row))
    seconds = sorted(decodes, key=lambda row: (plain.rows[row].decode, row))[:K]
    near = firsts[:K]
    if not any(plain.rows[row].open for row in near):
        near += [row for row in firsts if plain.rows[row].open][:1]
    found = []
    for begins in (True, False):
        priced = [
            (price * plain.dearer(first, second), price, first, second)
            for first in near
            if plain.rows[first].open == begins
            for second in seconds
            if first != second
            for price in [_pair(plain, first, second)]
        ]
        if priced:
            found.append((*min(priced, key=lambda each: each[0]), begins))
    return found


def _pair(plain: Plain, first: int, second: int) -> float:
    p, d = plain.rows[first], plain.rows[second]
    return p.prefill + p.harm + d.decode + plain.handoff(first, second) + plain.hold(first, second)
