"""Filters: which instances may be considered at all, before a policy scores them; and the least instance by columns."""

from __future__ import annotations

from typing import Final

import numpy as np

from cluster.instance import Role
from router.core.arrays import Bools, Floats, Ints
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot, ReadyRows
from router.scheduler.scoring.figures import Saturation
from router.scheduler.scoring.prices import Scoring, prices_of

_EMPTY: Final = np.zeros(0, dtype=np.int64)


def ready(fleet: FleetSnapshot, wanted: Wanted) -> ReadyRows:
    """Rows of ready instances that serve the model and the tenant, with the needed weights, and have not failed this
    request. Where one rank of an engine has failed it, its other ranks count only if there is no other engine: they
    mostly end together.
    """
    found = fleet.ready_for(wanted)
    if not wanted.excluded and not wanted.meaning and not wanted.weights:
        return found
    named = [fleet.by_id[name].row for name in wanted.excluded if name in fleet.by_id]
    beside = [fleet.by_id[other].row for name in wanted.excluded for other in fleet.beside(name)]
    if len(beside) > len(named) and len(_without(found.any, np.array(beside, dtype=np.int64))):
        named = beside
    if wanted.meaning or wanted.weights:
        named += [row for row in found.any.tolist() if not fleet.pairing.continues(row, wanted)]
    out = np.array(named, dtype=np.int64)
    return ReadyRows(
        any=_without(found.any, out),
        prefills=_without(found.prefills, out),
        decodes=_without(found.decodes, out),
        of={role: _without(rows, out) for role, rows in found.of.items()},
        alike=found.alike,
        adapters=found.adapters,
    )


def _without(rows: Ints, out: Ints) -> Ints:
    return rows[~np.isin(rows, out)]


def of_role(found: ReadyRows, role: Role) -> Ints:
    """The rows of one role."""
    return found.of.get(role, _EMPTY)


def with_place(fleet: FleetSnapshot, rows: Ints, wanted: Wanted) -> Ints:
    """Those with room for one more leg of this router: by credits, and by saturation if it limits the request."""
    if not len(rows):
        return rows
    if saturation_of(wanted) is None:
        columns = fleet.columns
        room: Bools = columns.inflight[rows] < columns.limits(wanted.routers)[rows]
        return rows if room.all() else rows[room]
    return _unsaturated(fleet, rows, wanted)


def saturation_of(wanted: Wanted) -> Saturation | None:
    """The saturation limits that hold for this request beside credits; None: none."""
    scoring: Scoring | None = wanted.scoring
    return None if scoring is None else scoring.saturation


def _unsaturated(fleet: FleetSnapshot, rows: Ints, wanted: Wanted) -> Ints:
    """Those with room for all that their role may do: a place, a prompt if it prefills, an answer if it decodes. For
    policies that count legs alone, and do not say which leg a row is for.
    """
    prices = prices_of(fleet, wanted)
    prefills, decodes = fleet.columns.prefills, fleet.columns.decodes
    among: list[int] = rows.tolist()
    found = [
        row
        for row in among
        if prices.place_at(row)
        and (prices.open_at(row) or not prefills.item(row))
        and (prices.answers_at(row) or not decodes.item(row))
    ]
    return rows if len(found) == len(among) else np.array(found, dtype=np.int64)


def least(rows: Ints, *columns: Ints | Floats) -> int | None:
    """The row that is least by the first column, on a tie by the second, and so on; None without rows."""
    if not len(rows):
        return None
    for column in columns:
        if len(rows) == 1:
            break
        values = column[rows]
        rows = rows[values == values.min()]
    return int(rows[0])
