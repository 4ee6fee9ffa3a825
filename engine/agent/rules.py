"""The rules of a role: how much work an instance may get, and when none of it is left."""

from __future__ import annotations

from typing import Protocol

from cluster.instance import Load


class RoleRules(Protocol):
    """The rules of one role. Implementations are pure."""

    def credits(self, load: Load) -> int:
        """How many legs of all routers may be in flight here at this load; at least 1: an idle instance takes work."""

    def unfinished(self, load: Load) -> str | None:
        """The work that would be lost if the engine stopped now, in words; None if none would."""
