"""The saturation detector: where there is room for one more request *without breaking a promise*, for every policy
alike. Pure.

An engine whose prompts already wait for longer than a step gets no more of them: no request in an engine's queue can be
put behind a more urgent one. Prompts that are short together have room all the same (`ONE_STEP_TOKENS`). An engine
that decodes as many answers as its strictest target allows gets no more answers. Without targets there is no
saturation: for best effort, only the agents' credits limit.
"""

from __future__ import annotations

import math
from typing import Final

from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.scheduler.flow_control.in_time import PlacesInTime
from router.scheduler.flow_control.queue import FlowControlQueue, place_of
from router.scheduler.scoring.figures import Saturation, any_step_room

AHEAD_MS: Final = 10.0
"""The work that an engine gets ahead, besides what its front end needs: a step of a few hundred tokens. The engine must
never run dry; more work could no longer be reordered here."""

LATE_LANES: Final = 4
"""One in so many instances may always compute a late prompt: late prompts are long, and no engine stops one for
another. More may, where prompts that can be in time leave them idle."""

IN_TIME_SPARE: Final = 1.5
"""Instances kept for prompts that can be in time, over those that such prompts have kept busy: they come in bursts."""

IN_TIME_LEAST: Final = 0.05
"""A smaller part of an instance's time keeps no instance for prompts in time."""


def servers_for(wanted: Wanted, fleet: FleetSnapshot) -> float:
    """The instances that may compute such prompts; of several routers, this one's part of them."""
    ready = fleet.ready_for(wanted)
    return max(1, len(ready.prefills) or len(ready.any)) / wanted.routers


class SaturationDetector(Saturation):
    """Where one more request has room. Policies ask it for the rows that they are about to price."""

    def __init__(self, line: FlowControlQueue) -> None:
        self._line: Final = line
        self._late: Final[dict[int, int]] = {}
        """This router's late prompts by row."""
        self._in_time: Final = PlacesInTime()

    def opens_until_ms(self, wanted: Wanted) -> float:
        """The time in ms up to which a row may open (`RowLoad.opens`) so that the prompt would be computed there at
        once, or nearly so.
        """
        return wanted.now * 1000.0 + AHEAD_MS if wanted.ttft_ms else math.inf

    def lanes(self, wanted: Wanted, fleet: FleetSnapshot) -> list[int] | None:
        """The only rows that may take a late prompt; None: all rows may."""
        if not wanted.late:
            return None
        ready = fleet.ready_for(wanted)
        own = set(ready.any.tolist())
        taken = [row for row, count in self._late.items() if count and row in own]
        return taken if len(taken) >= self._lanes(wanted, len(own), len(ready.prefills)) else None

    def _lanes(self, wanted: Wanted, servers: int, prefills: int) -> int:
        """The number of instances on which this router's late prompts may be computed at a time.

        The fleet's number is divided among the routers: the first ones get what is left, and each gets one at least. So
        all routers together have as many as a router alone would have, or one each if that is more. Each router takes
        the others to have as many prompts in time as it has.
        """
        routers = max(1, wanted.routers)
        busy = routers * self._in_time.of(place_of(wanted)).busy(wanted.now)
        kept = math.ceil(IN_TIME_SPARE * busy - IN_TIME_LEAST)
        each, left = divmod(max(1, servers // LATE_LANES, prefills - kept), routers)
        return max(1, each + (wanted.router_number < left))

    @property
    def queue(self) -> int:
        """The number of requests that wait for places."""
        return len(self._line)

    def queue_ms(self, wanted: Wanted, fleet: FleetSnapshot) -> float:
        """The time, in ms, until the requests that wait for the same instances now have places."""
        return 1000.0 * self._line.drains_s(wanted, servers_for(wanted, fleet))

    def opens_at(self, fleet: FleetSnapshot, now: float) -> float:
        """The predicted time, in seconds, at which a queued prompt could begin on some instance: no request need be
        asked before. Infinite if no instance can compute it. Where no prefill instance is ready, other instances serve
        requests whole.
        """
        found = [fleet.ready(None, whose) for whose in self._line.whose()]
        able = [each.prefills if len(each.prefills) else each.any for each in found]
        if any(any_step_room(fleet, rows) for rows in able):
            return now
        opens_ms = min([fleet.inflight.opens_ms(rows) for rows in able], default=math.inf)
        return max(now, (opens_ms - AHEAD_MS) / 1000.0)

    def pause_ms(self, wanted: Wanted) -> float:
        """The predicted delay of such a request's first token by its hand-over, in ms (`InTime.pause_ms`)."""
        return self._in_time.of(place_of(wanted)).pause_ms

    def took_in_time(self, wanted: Wanted, prompt_ms: float, pause_ms: float) -> None:
        """A prompt that can be in time is placed: an instance computes it for `prompt_ms`, and its hand-over delays the
        first token by `pause_ms`.
        """
        self._in_time.took(place_of(wanted), prompt_ms, pause_ms, wanted.now)

    def took(self, row: int) -> None:
        """A late prompt goes to this row."""
        self._late[row] = self._late.get(row, 0) + 1

    def gave_back(self, row: int) -> None:
        """The late prompt is done."""
        self._late[row] = max(0, self._late.get(row, 0) - 1)
