"""Which events are written: each once in a while, and never more than so many. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

AGAIN_S: Final = 600.0
"""The same event of the same object is written again after this."""
BURST: Final = 25
"""Events of one object within `AGAIN_S`, as Kubernetes' own clients have it."""
OBJECTS_MAX: Final = 1000


@dataclass(slots=True)
class EventBudget:
    """What was told lately, by object."""

    told: OrderedDict[str, dict[tuple[str, str], float]] = field(default_factory=OrderedDict)

    def allows(self, uid: str, reason: str, message: str, now: float) -> bool:
        """Whether to write this event; notes it where it is so."""
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
