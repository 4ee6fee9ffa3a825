"""What one request's places cost: worked out once for each time that it asks. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from router.scheduler.scoring.prices import Prices
from router.scheduler.scoring.prices_few import RowByRow
from router.scheduler.scoring.prices_many import ByColumns

if TYPE_CHECKING:
    from router.core.values import Wanted
    from router.fleet.snapshot import Fleet

_COMPILED: Final = not __file__.endswith(".py")

FEW: Final = 64 if _COMPILED else 12
"""Rows up to which they are taken one by one. Interpreted a row costs some 4 µs, compiled an eighth of that; what
numpy takes for its seventy calls hardly grows with the rows (docs/benchmarks.md)."""


def prices_of(fleet: Fleet, wanted: Wanted) -> Prices:
    """Policy, admission and book look at the same ones."""
    known = fleet.priced
    if known is not None and known.wanted is wanted and known.turn == fleet.book.turn:
        return known
    found: Prices = RowByRow(fleet, wanted) if fleet.columns.top <= FEW else ByColumns(fleet, wanted)
    fleet.priced = found
    return found
