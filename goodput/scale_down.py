"""Which instance ends, and when. Pure.

A role must have had an instance too many for `ControlRules.hold` times the time of a start, within `hold_least_s` and
`hold_most_s`. No instance of a pool at its `min` ends, and never the last ready instance of a role.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput import actions as do
from goodput.control_rules import ControlRules
from goodput.decision import Need
from goodput.forecasters import SEASONAL
from goodput.needs import Outlook
from goodput.observation import InstanceSeen, Phase
from goodput.pools import Kinds
from goodput.standing import StandingInstances

ROUND: Final = 1e-6
"""Numbers of instances that differ by less count as equal."""


class ScaleDown:
    """Chooses which instance of one controller's fleet ends; remembers since when roles have one too many."""

    def __init__(self, kinds: Kinds, standing: StandingInstances, rules: ControlRules) -> None:
        self._kinds: Final = kinds
        self._standing: Final = standing
        self._rules: Final = rules
        self._gave_s = -math.inf
        self._spare_since: Final[dict[Role, float]] = {}
        """Since when a role has had an instance too many."""
        self._stay: Final[dict[InstanceId, float]] = {}
        """By instance with a refused end: until when it is not chosen again."""

    def gave(self, now: float) -> None:
        """Note an end that is carried out."""
        self._gave_s = now

    def refused(self, instance: InstanceId, now: float, for_s: float) -> None:
        """Note an end that does not happen, and do not choose this instance again for so long."""
        for name in [name for name, until_s in self._stay.items() if until_s <= now]:
            del self._stay[name]
        self._stay[instance] = now + for_s

    def stays(self, instance: InstanceId, now: float) -> bool:
        """Whether the end of an instance was refused a short time ago."""
        return now < self._stay.get(instance, -math.inf)

    def see(self, needs: Mapping[Role, Need], now: float) -> None:
        """Note which roles have an instance too many. A role that is short now has none."""
        for role, need in needs.items():
            if need.have - 1 < need.keep - ROUND or need.ready < need.now - ROUND:
                self._spare_since.pop(role, None)
            else:
                self._spare_since.setdefault(role, now)

    def held(self) -> None:
        """Forget since when roles had an instance too many: the load was unknown, or a check failed."""
        self._spare_since.clear()

    def spare(self, role: Role) -> bool:
        """Whether a role had an instance too many at the last look."""
        return role in self._spare_since

    def choose(self, needs: Mapping[Role, Need], outlook: Outlook, now: float, horizon_s: float) -> do.Drain | None:
        """The instance to end, or None. `horizon_s`: how long a start takes, until its instance serves."""
        if not self._may(now):
            return None
        rules = self._rules
        hold_s = min(rules.hold_most_s, max(rules.hold_least_s, rules.hold * horizon_s))
        if outlook.ahead.who == SEASONAL:
            hold_s = rules.hold_least_s  # the load within a start is foreseen: no reason to wait longer
        for role, since_s in sorted(self._spare_since.items(), key=lambda each: each[1]):
            need = needs[role]
            coming = self._standing.coming(role)
            if now - since_s < (max(rules.hold_least_s, hold_s / 2) if coming else hold_s):
                continue
            able = [
                each
                for each in self._able(role, now)
                if need.have - self._kinds.worth(each.pool, role, outlook.load) >= need.keep - ROUND
            ]
            if able:
                because = (
                    f"{role.value}: {need.have:.3g} there, {need.keep} would do with {rules.room:.0%} more than the "
                    f"{rules.keep_quantile:.0%} quantile of the next {horizon_s:.0f} s, for {now - since_s:.0f} s"
                )
                return self._drain(able, because)
        return None

    def as_ordered(self, role: Role, because: str, now: float) -> do.Drain | None:
        """The instance of a role to end on an operator's order, whatever the load is, or None."""
        able = self._able(role, now) if self._may(now) else []
        return self._drain(able, because) if able else None

    def _may(self, now: float) -> bool:
        return now - self._gave_s >= self._rules.down_every_s

    def _drain(self, able: list[InstanceSeen], because: str) -> do.Drain:
        chosen = min(able, key=self._order)
        return do.Drain(instance=chosen.id, deadline_s=self._rules.drain_s, because=because)

    def _able(self, role: Role, now: float) -> list[InstanceSeen]:
        """Instances that may end, whatever the load is."""
        staying = self._standing.staying(role)
        ready = [each for each in staying if each.phase is Phase.READY]
        return [
            each
            for each in staying
            if each.pool not in self._rules.holds
            and not self.stays(each.id, now)
            and self._standing.staying_in(each.pool) > self._kinds.pools[each.pool].min
            and (each.phase is not Phase.READY or len(ready) > 1)
        ]

    def _order(self, each: InstanceSeen) -> tuple[int, float, float, str]:
        """Sort key: first instances that do not serve yet, then expensive ones, then those with the least work left."""
        rank = {Phase.PENDING: 0, Phase.STARTING: 1}.get(each.phase, 2)
        price = self._standing.footprint(each).price_per_hour
        busy = each.kv_usage if each.kv_usage is not None else 0.5
        return rank, -price, busy, each.id
