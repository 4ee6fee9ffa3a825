"""What a producer's scheduler tells its ranks with each step. Pure data: it travels between processes (pickled)."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtransfer.slots import Slot


@dataclass(slots=True)
class Orders:
    """What the ranks are told with the engine's next step, in this order."""

    dropped: list[str] = field(default_factory=list)
    """Legs that leave nothing: first, as their slots may be others' in the same step."""
    opened: dict[str, Slot | None] = field(default_factory=dict)
    """New legs: their marks are written before anything of them is computed. None: no slot was free."""
    held: list[str] = field(default_factory=list)
    """Legs that have ended with a hold: the lease starts."""
    released: list[str] = field(default_factory=list)
    """Holds that a router gave up."""

    def __bool__(self) -> bool:
        return bool(self.dropped or self.opened or self.held or self.released)
