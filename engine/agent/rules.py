"""What an agent must be told about its role: how much work it may be given, and when nothing of it is left."""

from __future__ import annotations

from typing import Protocol

from cluster.instance import Load


class Rules(Protocol):
    """The rules of one role. Implementations are pure."""

    def credits(self, load: Load) -> int:
        """How many legs may be in flight here, all routers taken together. At least 1: an idle instance takes work."""

    def unfinished(self, load: Load) -> str | None:
        """What would be lost if the engine stopped now, in words; None when nothing would."""
