"""The part of the fleet's work that aged requests get while requests wait that can be in time. Pure.

If aged requests went before all others, an overload that lasts would make every request late: each aged one takes the
place of one that can be in time, and that one ages next.
"""

from __future__ import annotations

from typing import Final

AGED_SHARE: Final = 0.125
"""The part of the work. The price of more is fewer requests in time, of less a longer wait of late ones: in simulated
overloads 0.03, an eighth, a quarter and a half kept 0.55, 0.52, 0.49 and 0.38 of all in time."""


class AgedShare:
    """How much work aged requests may still have of their part. Nothing is saved up while none is waiting."""

    __slots__ = ("_owed_ms", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        """The number of aged requests."""
        self._owed_ms = 0.0

    def took(self, work_ms: float, *, late: bool) -> None:
        """The fleet has taken a prompt of so much work; `late`: of a late request."""
        if not self.waiting:
            self._owed_ms = 0.0
        elif late:
            self._owed_ms = max(0.0, self._owed_ms - work_ms)
        else:
            self._owed_ms += AGED_SHARE / (1.0 - AGED_SHARE) * work_ms

    def due(self, work_ms: float) -> bool:
        """Whether an aged request of so much work is next."""
        return self._owed_ms >= work_ms
