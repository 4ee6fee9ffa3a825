"""Sizes that operators have changed by hand, and for how long the controller keeps them. Pure.

An order (`Resize`) holds until it is taken back. An operator may also start or drain an instance without the
controller: the role then keeps its new size for `manual_s`. A drain counts for nothing once its instance has failed (an
instance that dies may say that it drains) or serves again, and a drain of a role's last instance fixes no size. A
restarted controller does not know such changes, and one that begins to lead does not: it begins with the fleet that
exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput.observation import InstanceSeen, Phase
from goodput.standing import StandingInstances

_MOST: Final = 1 << 20


@dataclass(slots=True, kw_only=True)
class _Notice:
    """One change by hand that was noticed."""

    until_s: float
    """Until when the role keeps this size."""
    count: int
    """Instances of the role after the change."""
    operator: str
    """The operator, for people."""
    drained: InstanceId | None = None
    """The instance that drains; None: an instance was started."""


class Manual:
    """Orders, and changes by hand that were noticed."""

    def __init__(self, respected_s: float) -> None:
        self._respected_s: Final = respected_s
        self._orders: Final[dict[Role, tuple[int, str]]] = {}
        self._noticed: Final[dict[Role, list[_Notice]]] = {}
        """By role, the notices that still hold; the newest, which is the last, decides."""
        self._known: dict[InstanceId, InstanceSeen] | None = None
        """The instances of the last look at which this controller led."""

    def resize(self, role: Role, count: int | None, operator: str) -> None:
        """Note an order; None takes it back. Both forget the changes by hand that were noticed in this role."""
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
        if not noticed or now >= noticed[-1].until_s or noticed[-1].count < 1:
            return 0, _MOST, ""
        return noticed[-1].count, noticed[-1].count, noticed[-1].operator

    def orders(self, now: float) -> dict[Role, tuple[int, str]]:
        """By role, the size that an operator wants, and that operator."""
        return {role: self.limits(role, now)[1:] for role in Role if self.limits(role, now)[2]}

    def saw(self, instances: Iterable[InstanceSeen], standing: StandingInstances, now: float, *, leads: bool) -> None:
        """Compare with the last look. Call it before `standing` sees the instances. While this controller does not
        lead, it cannot tell an operator's changes from the leader's.
        """
        seen = {each.id: each for each in instances}
        self._withdraw(seen)
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
                self._notice(was.role, seen, now, f"an operator (who drained {name})", drained=name)

    def _notice(
        self,
        role: Role,
        seen: dict[InstanceId, InstanceSeen],
        now: float,
        operator: str,
        drained: InstanceId | None = None,
    ) -> None:
        staying = [each for each in seen.values() if each.role is role and not each.leaving and _serves(each)]
        notice = _Notice(until_s=now + self._respected_s, count=len(staying), operator=operator, drained=drained)
        self._noticed[role] = [*(each for each in self._noticed.get(role, ()) if now < each.until_s), notice]

    def _withdraw(self, seen: dict[InstanceId, InstanceSeen]) -> None:
        """Forget drains of instances that have failed or serve again: nobody wants the role smaller by these."""
        for role, notices in self._noticed.items():
            kept, void = list[_Notice](), 0
            for notice in notices:
                drained = None if notice.drained is None else seen.get(notice.drained)
                if drained is not None and (drained.phase is Phase.FAILED or not drained.leaving):
                    void += 1
                else:
                    notice.count += void  # it was counted without these instances
                    kept.append(notice)
            self._noticed[role] = kept


def _serves(each: InstanceSeen) -> bool:
    return each.phase not in (Phase.FAILED, Phase.DRAINING)


def _on_the_way_out(standing: StandingInstances, name: InstanceId) -> bool:
    known = standing.instances.get(name)
    return known is not None and known.leaving
