"""Admission: which promises can still be kept, and what becomes of requests whose promise cannot. Pure.

A request whose first token would be late gets its class's second promise, or is *late*: it waits behind those that can
be in time, or is refused, as its class says. `router.scheduler.flow_control` decides which waiting request is next
(`queue`), and where there is room (`saturation`).
"""

from __future__ import annotations

import math
from typing import Final

from msgspec.structs import replace

from router.core.arrays import Ints
from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.predict.margins import PROMPTLY
from router.predict.step_model import ASSUMED
from router.predict.tries import TRY_S
from router.scheduler.flow_control.queue import FlowControlQueue
from router.scheduler.flow_control.saturation import AHEAD_MS, SaturationDetector, servers_for
from router.scheduler.placements import SchedulingContext, rows_of
from router.scheduler.scoring.prices import Prices, prices_of

TRIED_ROWS: Final = 64
"""In a larger fleet, the first rows stand for all when a try is looked for."""


class Admission:
    """The admission of one router's requests."""

    def __init__(self, fleet: FleetSnapshot, line: FlowControlQueue) -> None:
        self._fleet: Final = fleet
        self._line: Final = line
        self.saturation: Final = SaturationDetector(line)

    def judged(self, context: SchedulingContext, wanted: Wanted, *, let_in: bool) -> Wanted:
        """Judge whether the request can still have its first token in time, on the best instance and without other
        prompts. Returns what it wants from now on: its class's second promise, or nothing but to be served late.

        `let_in`: the request had a place before, and its instance has failed or is silent. Once it is late it has no
        target for its first token any more: it is not refused, and needs no lane (`SaturationDetector.lanes`).
        """
        if urgency := self._line.urgency(context, wanted):
            wanted = replace(wanted, urgency=urgency * wanted.routers)
        if not wanted.ttft_ms:
            return wanted
        if not context.late:
            rows = _timed(self._fleet, wanted)
            if not len(rows) or not self._fleet.inflight.step_model.sure(rows):
                return wanted
            if prices_of(self._fleet, wanted).least_alone_ms(rows) <= wanted.ttft_ms:
                return wanted
            if wanted.sheds and not let_in and _may_try(self._fleet, wanted, rows):
                context.tried = True
                return wanted
            _cannot(context)
        late, promise = context.late, context.promise
        if late and let_in:
            return replace(wanted, ttft_ms=0.0, tpot_ms=promise.tpot_ms, late=False)
        return replace(wanted, ttft_ms=promise.ttft_ms, tpot_ms=promise.tpot_ms, late=late)

    def refuses(self, context: SchedulingContext, wanted: Wanted, chosen: Chosen) -> bool:
        """Whether to refuse the request: its class refuses late requests, and where the policy would send it the first
        token would be late, by the margin learned for its target. The hand-over's part of the time is known by now.
        Assumed speeds refuse nothing, and tries are not refused.
        """
        if not wanted.sheds or chosen.decode is None or not wanted.ttft_ms or context.tried:
            return False
        inflight = self._fleet.inflight
        row, answer_row = rows_of(self._fleet, chosen)
        first_ms = prices_of(self._fleet, wanted).first_ms(row, answer_row)
        late = first_ms > inflight.first_margins.limit_ms(wanted.ttft_ms)
        if not late or inflight.step_model.known(row, answer_row) == ASSUMED:
            return False
        if first_ms <= PROMPTLY * wanted.ttft_ms:  # the margin alone refuses it
            due = inflight.tries.due(wanted.ttft_ms, wanted.now)
            context.tried = due and not inflight.rows[row].prompts
        else:
            context.tried = _may_try(self._fleet, wanted, _timed(self._fleet, wanted))
        if not context.tried:
            _cannot(context)
        return not context.tried

    def refusal(self, wanted: Wanted) -> Chosen:
        """The reply to a request that is refused."""
        wait_s = self._line.drains_s(wanted, servers_for(wanted, self._fleet))
        because = f"its first token would come after {wanted.ttft_ms:g} ms, and its class is refused then"
        return Chosen(None, None, because, shed_s=max(1, math.ceil(wait_s)))

    def enter(self, context: SchedulingContext, wanted: Wanted) -> tuple[object, ...]:
        """Put the request in the queue. Returns queued requests that have lost their promise by it: these ask again,
        with their second promise or to be refused.
        """
        fleet = self._fleet
        rows = fleet.ready_for(wanted).prefills
        prices = prices_of(fleet, wanted)
        work_ms = prices.least_prompt_ms(rows) if len(rows) else 0.0
        speeds = fleet.inflight.step_model.rows
        lead_ms = AHEAD_MS + min([speeds[row].lead for row in rows.tolist()]) if len(rows) else 0.0
        promptly = PROMPTLY
        if wanted.sheds:
            promptly = fleet.inflight.first_margins.of(wanted.ttft_ms)
        lead_ms += self.saturation.pause_ms(wanted) + (1 - promptly) * wanted.ttft_ms
        self._line.enter(context, wanted, work_ms, lead_ms)
        calls: tuple[object, ...] = ()
        sure = len(rows) and fleet.inflight.step_model.sure(rows)
        servers = servers_for(wanted, fleet)  # other routers' queues take as much
        for hopeless in self._line.hopeless(wanted, servers) if sure else ():
            assert isinstance(hopeless, SchedulingContext)
            _cannot(hopeless)
            if not hopeless.late or hopeless.promise.sheds:
                calls += (hopeless,)
        self._line.age(wanted.now)
        return calls

    def placed(self, context: SchedulingContext, wanted: Wanted, chosen: Chosen, prices: Prices, share: float) -> None:
        """The request has found a place, at these prices. `share`: its tenant's."""
        row, answer_row = rows_of(self._fleet, chosen)
        prompt_ms = prices.prompt_at(row)
        answer_ms = prices.output * prices.longer_at(answer_row)
        self._line.gave(wanted.tenant, (prompt_ms + answer_ms) / share)
        self._line.took(wanted, prompt_ms)
        if wanted.ttft_ms and not wanted.late:
            self._line.given_up.add(wanted.prompt_tokens, gone=False)
            pause_ms = context.ttft_ms - prices.ttft_at(row)
            self.saturation.took_in_time(wanted, prompt_ms, pause_ms)
        self.leave_lane(context)  # that of an earlier prefill leg, which was silent
        if wanted.late:
            context.lane = row
            self.saturation.took(row)

    def leave_lane(self, context: SchedulingContext) -> None:
        """The request leaves its lane, if it has one: its prompt is computed, or will not be."""
        if context.lane >= 0:
            self.saturation.gave_back(context.lane)
            context.lane = -1


def _timed(fleet: FleetSnapshot, wanted: Wanted) -> Ints:
    """The rows that may compute its prompt: any, or prefill rows alone while the times of some rows are not trusted.
    (Rows that only decode time no prompts, so their times would never be.)
    """
    found = fleet.ready_for(wanted)
    return found.any if fleet.inflight.step_model.sure(found.any) else found.prefills


def _may_try(fleet: FleetSnapshot, wanted: Wanted, rows: Ints) -> bool:
    """Whether a request that cannot be in time on any of these rows is let in as a try. That is so if all rows are
    idle, no prompt was timed there within `TRY_S`, and it could be in time if a row were as quick as its costs say.
    """
    inflight, late_s = fleet.inflight, wanted.now - TRY_S
    if not inflight.tries.due(wanted.ttft_ms, wanted.now):
        return False
    among: list[int] = rows.tolist()
    if any(inflight.rows[row].prompts or inflight.rows[row].timed_s > late_s for row in among):
        return False
    prices, speeds, plain_ms = prices_of(fleet, wanted), inflight.step_model.rows, math.inf
    for row in among[:TRIED_ROWS]:
        plain_ms = min(plain_ms, prices.prompt_at(row) / speeds[row].prefill_factor + speeds[row].first)
    return plain_ms + prices.waited_ms <= PROMPTLY * wanted.ttft_ms


def _cannot(context: SchedulingContext) -> None:
    """The request's promise cannot be kept: it gets its class's second one, or is late."""
    if context.promise.degraded is not None:
        context.promise, context.degraded = context.promise.degraded, True
    else:
        context.late = True
