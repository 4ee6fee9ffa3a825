"""What one request's places cost: worked out once for each time that it asks. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from router.scheduler.scoring.prices import Prices, Saturation
from router.scheduler.scoring.prices_few import RowByRow
from router.scheduler.scoring.prices_many import ByColumns

if TYPE_CHECKING:
    from router.core.values import Wanted
    from router.fleet.snapshot import FleetSnapshot

_COMPILED: Final = not __file__.endswith(".py")

FEW: Final = 64 if _COMPILED else 12
"""Rows up to which they are taken one by one. Interpreted a row costs some 4 µs, compiled an eighth of that; what
numpy takes for its seventy calls hardly grows with the rows (docs/benchmarks.md)."""


class Scoring:
    """What one scheduler's scoring goes by beside the fleet and a request; and the last prices that it worked out."""

    def __init__(self, saturation: Saturation | None) -> None:
        """`saturation`: where there is room without breaking a promise; None: nothing is promised."""
        self.saturation: Final = saturation
        self.priced: Prices | None = None
        """What the last request was told."""


def prices_of(fleet: FleetSnapshot, wanted: Wanted) -> Prices:
    """Policy, admission and placement look at the same ones."""
    scoring: Scoring | None = wanted.scoring
    if scoring is not None:
        known = scoring.priced
        if known is not None and known.wanted is wanted and known.turn == fleet.book.turn:
            return known
    saturation = None if scoring is None else scoring.saturation
    few = fleet.columns.top <= FEW
    found: Prices = RowByRow(fleet, wanted, saturation) if few else ByColumns(fleet, wanted, saturation)
    if scoring is not None:
        scoring.priced = found
    return found
