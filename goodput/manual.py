"""What operators have changed by hand, and for how long the controller keeps it. Pure.

An order (`Resize`) holds until it is taken back. An instance that came or went without the controller, and without
having failed, is an operator's doing as well: the role keeps its new size for `manual_s`. After a restart it is
unknown who changed what; the controller begins with the fleet that exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput.observation import InstanceSeen, Phase
from goodput.standing import StandingInstances

_MOST: Final = 1 << 20


class Manual:
    """Orders, and what was noticed."""

    def __init__(self, respected_s: float) -> None:
        self._respected_s: Final = respected_s
        self._orders: Final[dict[Role, tuple[int, str]]] = {}
        self._noticed: Final[dict[Role, tuple[float, int, str]]] = {}
        """Until when a role keeps which size, and why."""
        self._known: dict[InstanceId, InstanceSeen] | None = None

    def resize(self, role: Role, count: int | None, who: str) -> None:
        """An order; None takes it back, and what was noticed with it."""
        self._noticed.pop(role, None)
        self._orders.pop(role, None)
        if count is not None:
            self._orders[role] = (max(0, count), who)

    def limits(self, role: Role, now: float) -> tuple[int, int, str]:
        """Fewest and most, and the operator who says so; an empty text: no operator does."""
        if role in self._orders:
            count, who = self._orders[role]
            return count, count, who
        noticed = self._noticed.get(role)
        if noticed is None or now >= noticed[0]:
            return 0, _MOST, ""
        return noticed[1], noticed[1], noticed[2]

    def orders(self, now: float) -> dict[Role, tuple[int, str]]:
        """By role, the size that an operator wants, and who says so."""
        return {role: self.limits(role, now)[1:] for role in Role if self.limits(role, now)[2]}

    def saw(self, instances: Iterable[InstanceSeen], standing: StandingInstances, now: float) -> None:
        """Compare with what was there, before `standing` takes it in."""
        seen = {each.id: each for each in instances}
        known, self._known = self._known, seen
        if known is None:
            return
        for name, each in seen.items():
            if name not in known and name not in standing.instances:
                self._notice(each.role, seen, now, f"an operator (who started {name})")
        for name, was in known.items():
            now_seen = seen.get(name)
            left = now_seen is not None and now_seen.leaving and not was.leaving
            if left and not standing.mine(name) and not _on_the_way_out(standing, name):
                self._notice(was.role, seen, now, f"an operator (who drained {name})")

    def _notice(self, role: Role, seen: dict[InstanceId, InstanceSeen], now: float, who: str) -> None:
        staying = [each for each in seen.values() if each.role is role and not each.leaving and _serves(each)]
        self._noticed[role] = (now + self._respected_s, len(staying), who)


def _serves(each: InstanceSeen) -> bool:
    return each.phase not in (Phase.FAILED, Phase.DRAINING)


def _on_the_way_out(standing: StandingInstances, name: InstanceId) -> bool:
    known = standing.instances.get(name)
    return known is not None and known.leaving
