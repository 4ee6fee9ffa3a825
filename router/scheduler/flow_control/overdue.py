"""Overdue requests: which requests may go beyond the memory that instances are foretold to have, and where. Pure.

Memory that short requests leave free is taken by the next short ones, so a long request would wait for an instance
without any answer, perhaps for ever. An engine that has it serves first come, first served, and makes room. So a
request that has waited `OVERDUE_S` goes to an instance although its memory is foretold to be too small; and one whose
prompt no instance's cache can hold goes at once, as an engine answers at once that it is too long.

In an overload many requests are overdue, and an engine that gets all of them would stop and recompute answers. So an
instance takes such a request only if the answers there are foretold to fit its memory: it is over by one request at
most. Where they do not fit, because of a request as long as the cache perhaps, it takes another one `OVERDUE_S` after
the last one, once that one's answer has begun.
"""

from __future__ import annotations

import math
from typing import Final

from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot

OVERDUE_S: Final = 10.0
"""Seconds from its arrival after which memory does not hold a request back. An answer of usual length ends within it,
so memory that comes by itself has come. Chosen, not measured."""


class Overdue:
    """What one router has sent beyond its instances' memory."""

    def __init__(self) -> None:
        self._last_s: Final[dict[int, float]] = {}
        """When a row has got the last such request, in monotonic seconds."""
        self.unopened: Final[dict[object, int]] = {}
        """The rows of such requests whose answers have not begun."""

    def except_at(self, fleet: FleetSnapshot, wanted: Wanted) -> tuple[int, ...] | None:
        """The rows where memory holds the request back all the same (`Wanted.beyond_memory`); None: it does so
        everywhere.
        """
        found = fleet.ready_for(wanted)
        rows: list[int] = (found.decodes if len(found.decodes) else found.any).tolist()
        if not is_overdue(wanted) and not _too_long(fleet, wanted, rows):
            return None
        loads, waiting, soonest_s = fleet.inflight.rows, {*self.unopened.values()}, wanted.now - OVERDUE_S
        full = tuple(
            [
                row
                for row, last_s in self._last_s.items()
                if loads[row].kv_free < 0.0 and (row in waiting or last_s > soonest_s)
            ]
        )
        return None if set(rows).issubset(full) else full

    def took(self, request: object, row: int, now: float) -> None:
        """The request goes beyond the memory of this row."""
        self._last_s[row] = now
        self.unopened[request] = row

    def opened(self, request: object) -> None:
        """The request's answer has begun, or will not begin there."""
        self.unopened.pop(request, None)


def is_overdue(wanted: Wanted) -> bool:
    """Whether the request has waited so long that memory does not hold it back."""
    return bool(wanted.arrived) and wanted.now - wanted.arrived >= OVERDUE_S


def overdue_s(fleet: FleetSnapshot, wanted: Wanted, now: float, routers: int) -> float:
    """When, in monotonic seconds, a request that found no place gets overdue; infinite: it waits for legs to end, not
    for memory. `now` counts where its arrival is not known. `routers`: how many share the instances' credits.
    """
    found = fleet.ready_for(wanted)
    rows = found.decodes if len(found.decodes) else found.any
    columns = fleet.columns
    room = columns.inflight[rows] < columns.limits(routers)[rows]
    return (wanted.arrived or now) + OVERDUE_S if room.any() else math.inf


def _too_long(fleet: FleetSnapshot, wanted: Wanted, rows: list[int]) -> bool:
    """Whether its prompt alone is larger than the whole KV cache of each of these rows."""
    speeds = fleet.inflight.step_model.rows
    return all(wanted.prompt_tokens > speeds[row].capacity for row in rows)
