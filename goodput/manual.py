"""Sizes that operators have changed by hand, and for how long the controller keeps them. Pure.

An order (`Resize`) holds until it is taken back. An operator may also start or drain an instance without the
controller: the role then keeps its new size for `manual_s`. A restarted controller does not know such changes, and one
that begins to lead does not: it begins with the fleet that exists.
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
    """Orders, and changes by hand that were noticed."""

    def __init__(self, respected_s: float) -> None:
        self._respected_s: Final = respected_s
        self._orders: Final[dict[Role, tuple[int, str]]] = {}
        self._noticed: Final[dict[Role, tuple[float, int, str]]] = {}
        """Until when a role keeps which size, and why."""
        self._known: dict[InstanceId, InstanceSeen] | None = None
        """The instances of the last look at which this controller led."""

    def resize(self, role: Role, count: int | None, operator: str) -> None:
        """Note an order; None takes it back. Both forget the change by hand that was noticed in this role."""
        self._noticed.pop(role, None)
        self._orders.pop(role, None)
        if count is not None:
            self._orders[role] = (max(0, count), operator)

    def limits(self, role: Role, now: float) -> tuple[int, int, str]:
        """Fewest and most instances of a role, and the operator who decides so; empty: none does."""
        if role in self._orders:
            count, operator = self._orders[role]
            return count, count, operator
        noticed = self._noticed.get(role)
        if noticed is None or now >= noticed[0]:
            return 0, _MOST, ""
        return noticed[1], noticed[1], noticed[2]

    def orders(self, now: float) -> dict[Role, tuple[int, str]]:
        """By role, the size that an operator wants, and that operator."""
        return {role: self.limits(role, now)[1:] for role in Role if self.limits(role, now)[2]}

    def saw(self, instances: Iterable[InstanceSeen], standing: StandingInstances, now: float, *, leads: bool) -> None:
        """Compare with the last look. Call it before `standing` sees the instances. While this controller does not
        lead, it cannot tell an operator's changes from the leader's.
        """
        seen = {each.id: each for each in instances}
        known, self._known = self._known, seen if leads else None
        if known is None or not leads:
            return
        for name, each in seen.items():
            if name not in known and not standing.started(name):
                self._notice(each.role, seen, now, f"an operator (who started {name})")
        for name, was in known.items():
            now_seen = seen.get(name)
            left = now_seen is not None and now_seen.leaving and not was.leaving
            if left and not standing.mine(name) and not _on_the_way_out(standing, name):
                self._notice(was.role, seen, now, f"an operator (who drained {name})")

    def _notice(self, role: Role, seen: dict[InstanceId, InstanceSeen], now: float, operator: str) -> None:
        staying = [each for each in seen.values() if each.role is role and not each.leaving and _serves(each)]
        self._noticed[role] = (now + self._respected_s, len(staying), operator)


def _serves(each: InstanceSeen) -> bool:
    return each.phase not in (Phase.FAILED, Phase.DRAINING)


def _on_the_way_out(standing: StandingInstances, name: InstanceId) -> bool:
    known = standing.instances.get(name)
    return known is not None and known.leaving
