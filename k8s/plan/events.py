"""Which events are written: the same one once in `AGAIN_S`, and at most `BURST` of an object in that time. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

AGAIN_S: Final = 600.0
"""Seconds after which the same event of the same object is written again."""
BURST: Final = 25
"""Most events of one object within `AGAIN_S`, as in Kubernetes' own clients."""
OBJECTS_MAX: Final = 1000
"""Objects whose events are remembered; those with the oldest ones are forgotten."""


@dataclass(slots=True)
class EventBudget:
    """The events written lately, by object."""

    told: OrderedDict[str, dict[tuple[str, str], float]] = field(default_factory=OrderedDict)
    """By UID of the object: reason and message of each event, and when it was written."""

    def allows(self, uid: str, reason: str, message: str, now: float) -> bool:
        """Whether to write this event; if so, notes it as written. `now`: Unix seconds."""
        lately = self.told.setdefault(uid, {})
        self.told.move_to_end(uid)
        if len(self.told) > OBJECTS_MAX:
            self.told.popitem(last=False)
        for key in [key for key, at in lately.items() if now - at >= AGAIN_S]:
            del lately[key]
        if (reason, message) in lately or len(lately) >= BURST:
            return False
        lately[reason, message] = now
        return True
