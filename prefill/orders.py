"""Orders of a producer's scheduler for its ranks, sent with each step. Pure data: it travels between processes
(pickled).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtransfer.hold_marks import Slot


@dataclass(slots=True)
class Orders:
    """The orders for the engine's next step; the ranks apply them in this order."""

    dropped: list[str] = field(default_factory=list)
    """Legs that leave no hold: applied first, as another leg may take their slots in the same step."""
    opened: dict[str, Slot | None] = field(default_factory=dict)
    """New legs: their marks are written before any of their tokens is computed. None: no slot was free."""
    held: list[str] = field(default_factory=list)
    """Legs that have ended with a hold: the lease starts."""
    released: list[str] = field(default_factory=list)
    """Holds that a router gave up."""

    def __bool__(self) -> bool:
        return bool(self.dropped or self.opened or self.held or self.released)
