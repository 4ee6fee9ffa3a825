"""The values that policies compare of each instance, in numpy columns that are updated in place. Pure.

One row per instance; a row that is free has `ready` false. Python loops over a thousand instances would cost each
choice a millisecond, a column a few microseconds. `router.fleet.snapshot` writes, policies read.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cluster.instance import Load
from router.core.arrays import Bools, Floats, Ints, grow

NO_LIMIT: Final = 1 << 62
"""The credits of an instance without an agent, which has no limit."""

NO_GRANT: Final = -1
"""The grant of an instance whose agent does not grant credits to routers by name."""

_FIRST_ROWS = 16


_WAITING_BITS = 32
_WAITING_MAX = (1 << _WAITING_BITS) - 1


class Columns:
    """The rows. `version` counts changes of the set that may be chosen; load and legs do not count."""

    inflight: Ints
    """This router's legs that run at the instance."""
    busy: Ints
    """`inflight` with `waiting` as tie-break, in one number, to save a second comparison."""
    sent: Ints
    """All legs ever sent to the instance."""
    running: Ints
    waiting: Ints
    kv_usage: Floats
    """What the engine reports (`cluster.instance.Load`)."""
    credits: Ints
    """Legs that all routers together may have at the instance; `NO_LIMIT` if unknown."""
    grants: Ints
    """Legs of those credits that the instance's agent has granted to this router; `NO_GRANT` if it grants none
    by name."""
    order: Ints
    """Rank of the instance's id among all ids: the last tie-break."""
    weights: Ints
    """Number of the weights that the instance serves (`number`); 0: unknown."""
    node: Ints
    """Number of the machine that the instance is on."""
    gives: Ints
    """Number of the circle in which the instance is proven as a producer; 0: none."""
    takes: Ints
    """The same as a consumer (`router.fleet.pair_proofs`)."""
    pins: Bools
    """Whether its engine can be told its first token (`cluster.instance.Instance.pins`)."""
    ready: Bools
    prefills: Bools
    decodes: Bools

    _KINDS: Final = {
        "inflight": np.int64,
        "busy": np.int64,
        "sent": np.int64,
        "running": np.int64,
        "waiting": np.int64,
        "kv_usage": np.float64,
        "credits": np.int64,
        "grants": np.int64,
        "order": np.int64,
        "weights": np.int64,
        "node": np.int64,
        "gives": np.int64,
        "takes": np.int64,
        "pins": np.bool_,
        "ready": np.bool_,
        "prefills": np.bool_,
        "decodes": np.bool_,
    }

    def __init__(self) -> None:
        for name, kind in self._KINDS.items():
            setattr(self, name, np.zeros(_FIRST_ROWS, dtype=kind))
        self.version = 0
        self.top = 0
        """Rows from here on were never used: returned rows are reused first."""
        self._free = list(range(_FIRST_ROWS - 1, -1, -1))
        self._limits: dict[int, Ints] = {}
        self._numbers: Final[dict[str, int]] = {"": 0}

    def number(self, name: str) -> int:
        """The number of a name; numbers are compared for equality only. 0: no name."""
        return self._numbers.setdefault(name, len(self._numbers))

    def take(self) -> int:
        """A free row, all zero."""
        if not self._free:
            rows = len(self.ready)
            grow(self, self._KINDS, 2 * rows)
            self._free = list(range(2 * rows - 1, rows - 1, -1))
            self._limits.clear()
        row = self._free.pop()
        self.top = max(self.top, row + 1)
        return row

    def give_back(self, row: int) -> None:
        """The instance is removed: free its row."""
        for name in self._KINDS:
            getattr(self, name)[row] = 0
        self._free.append(row)
        self.changed()

    def changed(self) -> None:
        """The set of instances that may be chosen has changed: drop what was derived from it."""
        self.version += 1

    def set_inflight(self, row: int, legs: int) -> None:
        """Set the legs, and what is derived from them."""
        self.inflight[row] = legs
        self.busy[row] = legs << _WAITING_BITS | int(self.waiting[row])

    def set_load(self, row: int, load: Load) -> None:
        """Set the load that the engine reports."""
        waiting = min(max(load.waiting, 0), _WAITING_MAX)
        self.running[row], self.waiting[row], self.kv_usage[row] = load.running, waiting, load.kv_usage
        self.busy[row] = int(self.inflight[row]) << _WAITING_BITS | waiting

    def set_credits(self, row: int, legs: int | None) -> None:
        """Set the credits, and drop limits derived from them."""
        value = NO_LIMIT if legs is None else legs
        if self.credits[row] != value:
            self.credits[row] = value
            self._limits.clear()

    def set_grant(self, row: int, legs: int | None) -> None:
        """Set the grant, as `set_credits` does the credits."""
        value = NO_GRANT if legs is None else legs
        if self.grants[row] != value:
            self.grants[row] = value
            self._limits.clear()

    def limits(self, routers: int) -> Ints:
        """The number of legs that this router may have at each instance: its grant.

        Without a grant it is an equal part of the credits, as one of `routers`, at least one.
        """
        found = self._limits.get(routers)
        if found is None:
            share = max(1, routers)
            found = np.maximum(1, -(-self.credits // share))
            found[self.credits >= NO_LIMIT] = NO_LIMIT
            found = np.where(self.grants >= 0, self.grants, found)
            self._limits[routers] = found
        return found
