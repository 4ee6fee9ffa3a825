"""Who may be considered at all, before any policy scores anybody; and who is least by a row of columns."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

import msgspec
import numpy as np

from cluster.ids import InstanceId
from cluster.instance import Role
from router.columns import Bools, Floats, Ints
from router.view import Fleet, Ready

_EMPTY: Final = np.zeros(0, dtype=np.int64)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks of the fleet. A Struct, since two are made of each request."""

    model: str | None
    """None: any model, as vLLM's own server treats a request that names none."""
    hand_over: bool
    """Whether prefill and decode may run on two instances."""
    prefill_only: bool = False
    """The whole answer is one token: a prefill instance's work."""
    excluded: frozenset[InstanceId] = frozenset()
    routers: int = 1
    """Routers that share the instances' credits."""
    prompt_tokens: int = 0
    """About so many; 0: nobody has estimated it."""
    prefix: tuple[int, ...] = ()
    """Names of the prompt's blocks from its beginning, where somebody has hashed them."""
    prefix_block_tokens: float = 0
    """Tokens behind each of them."""
    tenant: str = ""
    slo_class: str = ""
    output_tokens: float = 0.0
    """Expected length of its answer; 0: nobody has predicted it."""
    output_lengths: tuple[int, ...] = ()
    """Lengths that so many of such answers do not exceed (`router.prices.SHARES`); none: nobody has predicted it."""
    output_variance: float = 0.0
    ttft_ms: float = 0.0
    """Its class's target for the first token, from its arrival; 0: none."""
    tpot_ms: float = 0.0
    """And for each token after it."""
    arrived: float = 0.0
    now: float = 0.0
    """Monotonic seconds: of its arrival, and of this choice."""
    late: bool = False
    """It is taken to miss its target for the first token anyway (`router.admission`)."""

    @property
    def kind(self) -> Hashable:
        """Two requests of one kind are told the same: where one finds no place, the other finds none either."""
        return (self.model, self.hand_over, self.prefill_only, self.excluded)


def ready(fleet: Fleet, wanted: Wanted) -> Ready:
    """Rows of ready instances that serve the model and have not failed this request."""
    found = fleet.ready(wanted.model)
    if not wanted.excluded:
        return found
    out = np.array([fleet.by_id[name].row for name in wanted.excluded if name in fleet.by_id], dtype=np.int64)
    return Ready(
        any=_without(found.any, out),
        prefills=_without(found.prefills, out),
        decodes=_without(found.decodes, out),
        of={role: _without(rows, out) for role, rows in found.of.items()},
    )


def _without(rows: Ints, out: Ints) -> Ints:
    return rows[~np.isin(rows, out)]


def of_role(found: Ready, role: Role) -> Ints:
    """Those of one role."""
    return found.of.get(role, _EMPTY)


def with_place(fleet: Fleet, rows: Ints, wanted: Wanted) -> Ints:
    """Those whose credits leave room for one more leg of ours."""
    columns = fleet.columns
    room: Bools = columns.inflight[rows] < columns.limits(wanted.routers)[rows]
    if fleet.gate is not None and len(rows):
        room &= fleet.gate.for_rows(fleet, rows, wanted)
    return rows if room.all() else rows[room]


def least(rows: Ints, *columns: Ints | Floats) -> int | None:
    """The row that is least by the first column, where that ties by the second, and so on; None where there is none."""
    if not len(rows):
        return None
    for column in columns:
        if len(rows) == 1:
            break
        values = column[rows]
        rows = rows[values == values.min()]
    return int(rows[0])
