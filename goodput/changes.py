"""Which change comes next, each kind with intervals of its own. Pure.

In this order: failed and long pending instances end, pools get their `min`, flips (`flips`), starts, then ends
(`scale_down`). This module only chooses; `goodput.controller` decides whether the change is carried out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from cluster.instance import Role
from goodput import actions as do
from goodput.blocked import Blocked
from goodput.budget import Usage
from goodput.control_rules import ControlRules
from goodput.decision import Answered, Need, What
from goodput.failed_starts import FailedStarts
from goodput.flips import Flips
from goodput.needs import Outlook
from goodput.observation import InstanceSeen, Phase
from goodput.overdue import Overdue
from goodput.pools import Kinds, ScalingPool
from goodput.scale_down import ROUND, ScaleDown
from goodput.standing import StandingInstances


@dataclass(frozen=True, slots=True)
class ChosenChange:
    """The change to make now; `What.HOLD` has no actions."""

    what: What
    because: str
    actions: tuple[do.Action, ...] = ()
    ordered: bool = False
    """Whether an operator wants it: no simulation is asked first."""


class Changes:
    """Chooses one controller's changes; remembers when it made the last ones, and what was refused.

    Long, as each kind of change is a short method or two, and their order stands in one place.
    """

    def __init__(self, kinds: Kinds, standing: StandingInstances, rules: ControlRules, overdue: Overdue) -> None:
        self._kinds: Final = kinds
        self._overdue: Final = overdue
        self._standing: Final = standing
        self._rules: Final = rules
        self._blocked: Final = Blocked()
        self._failed: Final = FailedStarts(rules.unseen_s, rules.blocked_s)
        self._flips: Final = Flips(kinds, standing, rules)
        self.down: Final = ScaleDown(kinds, standing, rules)
        self._up_s = self._changed_s = -math.inf
        self._names = 0

    def conditions(self, now: float) -> tuple[str, ...]:
        """What prevents changes now, as sentences."""
        return self._blocked.told(now)

    def lately(self, now: float) -> bool:
        """Whether the fleet changed within the last minute: what is measured is then partly of the fleet before."""
        return now - self._changed_s < 60.0

    def saw(self, now: float) -> None:
        """Note what the last look found: a pool whose instances fail before they are ready pauses."""
        for each, pause_s in self._failed.saw(self._standing.instances, now):
            because = f"{each.id} has failed before it was ready{_why(each)}"
            self._blocked.add(each.pool, because, now, pause_s, "starts fail")

    def gave(self, action: do.Action, now: float) -> None:
        """Note an action that is carried out."""
        self._changed_s = now
        if isinstance(action, do.Start):
            self._up_s = now
        elif isinstance(action, do.Flip):
            self._flips.gave(action, now)
        else:
            self.down.gave(now)

    def refused(self, event: Answered, now: float) -> None:
        """Note an action that the actuator has refused, or not answered: that one is tried again soon."""
        action, for_s = event.action, self._rules.unseen_s if event.unsure else self._rules.blocked_s
        if isinstance(action, do.Start):
            self._blocked.add(action.pool, event.refusal, now, for_s, "refused")
        elif isinstance(action, do.Flip):
            if not event.unsure:
                self._flips.refused(action, now)
        else:
            self.down.refused(action.instance, now, for_s)

    def choose(
        self,
        needs: Mapping[Role, Need],
        outlook: Outlook,
        now: float,
        horizon_s: float,
        orders: Mapping[Role, tuple[int, str]],
        *,
        takes: bool = True,
    ) -> ChosenChange:
        """One change, or none.

        Args:
            needs: by role, what is needed and what exists.
            outlook: the forecast that `needs` come from.
            now: seconds of the controller's clock.
            horizon_s: how long a start takes.
            orders: by role, the size that an operator wants, and the operator.
            takes: whether a role may lose an instance. False: `needs` are the least that is needed, so instances only
                start, but for orders.
        """
        first = self._cancel(now) or self._fewest(orders, now)
        if takes:
            self.down.see(needs, now)
            found = first or self._flip(needs, outlook, now, orders) or self._up(needs, now)
            found = found or self._shrunk(orders, now) or self._down(needs, outlook, now, horizon_s)
        else:
            self.down.held()
            found = first or self._up(needs, now, flips=False) or self._as_ordered(orders, now)
        return found or ChosenChange(What.HOLD, _told(needs))

    def without_traffic(
        self, orders: Mapping[Role, tuple[int, str]], now: float, *, asked: bool
    ) -> ChosenChange | None:
        """Changes that need no measurement: failed instances end, pools get their `min`, operators' orders hold, and an
        empty fleet begins if it was `asked` for answers.
        """
        found = self._cancel(now) or self._fewest(orders, now) or self._as_ordered(orders, now)
        return found or (self._woken(orders, now) if asked else None)

    def _woken(self, ordered: Collection[Role], now: float) -> ChosenChange | None:
        """The first instances for prompts and for answers, where none is there or coming. Nothing else would start
        them: sizes are computed from complete answers. Not in a role whose size an operator decides.
        """
        if now - self._up_s < self._rules.up_every_s:
            return None
        staying, usage, actions = self._standing.staying(), self._standing.usage(), list[do.Action]()
        prompts, answers = any(each.role.prefills for each in staying), any(each.role.decodes for each in staying)
        lacking = [role for role, there in ((Role.PREFILL, prompts), (Role.DECODE, answers)) if not there]
        for role in dict.fromkeys(role if role in self._kinds.roles else Role.BOTH for role in lacking):
            if role in ordered:
                continue
            pool, lacks = self._pool_for(role, usage, now)
            if pool is None:
                self._blocked.budget(role.value, lacks, now)
                continue
            because = f"{role.value}: requests come, and no instance for them is there or coming"
            actions.append(self._start(pool, because, usage, now))
        return ChosenChange(What.UP, actions[0].because, tuple(actions)) if actions else None

    # --- pending ------------------------------------------------------------------------------------------------------

    def _cancel(self, now: float) -> ChosenChange | None:
        """Instances that have waited too long for a GPU or do not become ready, and those that have failed. One that
        its pool needs for its `min` stays: another one would fare no better, and Kubernetes refuses to shrink the pool.
        """
        for each in self._standing.instances.values():
            if self.down.stays(each.id, now):
                continue
            if each.phase is Phase.FAILED and not self._standing.mine(each.id):
                because = f"{each.id} has failed{_why(each)}"
                return ChosenChange(What.CANCEL, because, (do.Stop(instance=each.id, because=because),))
            late = None if each.leaving else self._late(each, now)
            if late is not None:
                because, kind = late
                kept = self._standing.staying_in(each.pool) <= self._kinds.pools[each.pool].min
                kept = kept or self._nodes_may_come(each, now)
                for_s = self._rules.unseen_s if kept else self._rules.blocked_s
                self._blocked.add(each.pool, because, now, for_s, kind)
                if kept:
                    continue
                return ChosenChange(What.CANCEL, because, (do.Drain(instance=each.id, because=because),))
        return None

    def _nodes_may_come(self, each: InstanceSeen, now: float) -> bool:
        """Whether an instance goes on waiting for a GPU: its role has no other pool, so that nothing is gained by
        giving it up, and a cluster that adds nodes takes minutes for one.
        """
        pool = self._kinds.pools[each.pool]
        others = [
            other
            for other in self._kinds.pools.values()
            if other.role is pool.role and other is not pool and other.name not in self._rules.holds
        ]
        return self._rules.pending_s < each.waited_s(now) <= self._rules.node_s and not others

    def _late(self, each: InstanceSeen, now: float) -> tuple[str, str] | None:
        """Why an instance is given up, and the first words of the condition that says so; None: it may yet come."""
        if each.waited_s(now) > self._rules.pending_s:
            return f"{each.id} has waited {each.waited_s(now):.0f} s for a GPU{_why(each)}", "no GPU"
        late_s = self._overdue.late_s(each, now)
        return (
            (f"{each.id} is not ready {late_s:.0f} s after its start began{_why(each)}", "starts fail")
            if late_s
            else None
        )

    # --- flips --------------------------------------------------------------------------------------------------------

    def _flip(
        self, needs: Mapping[Role, Need], outlook: Outlook, now: float, orders: Mapping[Role, tuple[int, str]]
    ) -> ChosenChange | None:
        kept = {role for role, (count, _) in orders.items() if len(self._standing.staying(role)) <= count}
        found = self._flips.choose(needs, outlook, now, kept)
        return None if found is None else ChosenChange(What.FLIP, found.because, (found,))

    # --- pools' minimum, operators' orders ----------------------------------------------------------------------------

    def _fewest(self, ordered: Collection[Role], now: float) -> ChosenChange | None:
        """Start what a pool lacks of its `min`, whatever the load is; not in a role whose size an operator decides."""
        if now - self._up_s < self._rules.up_every_s:
            return None
        usage, actions = self._standing.usage(), list[do.Action]()
        for pool in self._kinds.pools.values():
            there = pool.min if pool.role in ordered else self._standing.staying_in(pool.name)
            for number in range(there, pool.min):
                lacks = self._lacks(pool, usage, now)
                if lacks:
                    self._blocked.budget(pool.role.value, lacks, now)
                    break
                because = f"{pool.name}: {number} there or coming, its fewest are {pool.min}"
                actions.append(self._start(pool, because, usage, now))
        return ChosenChange(What.UP, actions[0].because, tuple(actions)) if actions else None

    def _as_ordered(self, orders: Mapping[Role, tuple[int, str]], now: float) -> ChosenChange | None:
        """One step towards an operator's size of a role."""
        for role, (count, operator) in orders.items():
            staying = self._standing.staying(role)
            if len(staying) < count and now - self._up_s >= self._rules.up_every_s:
                because = f"{role.value}: {len(staying)} there or coming, {operator} wants {count}"
                usage = self._standing.usage()
                pool, lacks = self._pool_for(role, usage, now)
                if pool is not None:
                    return ChosenChange(What.UP, because, (self._start(pool, because, usage, now),), ordered=True)
                self._blocked.budget(role.value, lacks, now)
        return self._shrunk(orders, now)

    def _shrunk(self, orders: Mapping[Role, tuple[int, str]], now: float) -> ChosenChange | None:
        """The end of one instance of a role that has more than an operator wants."""
        for role, (count, operator) in orders.items():
            there = len(self._standing.staying(role))
            because = f"{role.value}: {there} there or coming, {operator} wants {count}"
            ended = self.down.as_ordered(role, because, now) if there > max(count, 1) else None
            if ended is not None:
                return ChosenChange(What.DOWN, because, (ended,), ordered=True)
        return None

    # --- up -----------------------------------------------------------------------------------------------------------

    def _up(self, needs: Mapping[Role, Need], now: float, *, flips: bool = True) -> ChosenChange | None:
        if now - self._up_s < self._rules.up_every_s:
            return None
        usage, actions, told = self._standing.usage(), list[do.Action](), list[str]()
        for role, short in sorted(self._short(needs, now, flips=flips).items(), key=lambda each: -each[1]):
            for _ in range(short):
                pool, lacks = self._pool_for(role, usage, now)
                if pool is None:
                    self._blocked.budget(role.value, lacks, now)
                    break
                need = needs[role]
                because = f"{role.value}: {need.ahead} needed, {need.have:.3g} there or coming; {need.because}"
                actions.append(self._start(pool, because, usage, now))
                told += [because] if because not in told else []
        return ChosenChange(What.UP, "; ".join(told), tuple(actions)) if actions else None

    def _start(self, pool: ScalingPool, because: str, usage: Usage, now: float) -> do.Start:
        self._names += 1
        name = do.new_name(pool.name, now, self._names)
        usage.add(name, pool.footprint)
        return do.Start(instance=name, pool=pool.name, because=because)

    def _short(self, needs: Mapping[Role, Need], now: float, *, flips: bool) -> dict[Role, int]:
        """By role, how many instances to start: those that are missing, less those that flip from another role if
        `flips`, less those whose work instances of role `both` take over.
        """
        missing = {role: max(0, math.ceil(need.ahead - need.have - ROUND)) for role, need in needs.items()}
        both = needs.get(Role.BOTH)
        if both is not None and len(needs) > 1:  # beside pools of one role, instances that do both replace missing ones
            left = math.floor(both.have)
            del missing[Role.BOTH]
            for role in (Role.DECODE, Role.PREFILL):
                taken = min(left, missing.get(role, 0))
                if taken:
                    missing[role] -= taken
                    left -= taken
        for role, given in (self._flips.to_give(needs, now) if flips else {}).items():
            for other, count in missing.items():
                if other is not role:
                    missing[other] = max(0, count - given)
        return {role: count for role, count in missing.items() if count > 0}

    def _pool_for(self, role: Role, usage: Usage, now: float) -> tuple[ScalingPool | None, str]:
        """The pool of the next instance: the first of the role that is not blocked and fits the budget; or why none."""
        lacks = f"there is no pool of role {role.value}"
        for pool in self._kinds.pools.values():
            if pool.role is not role or pool.name in self._rules.holds:
                continue
            lacks = self._lacks(pool, usage, now)
            if not lacks:
                return pool, ""
        return None, lacks

    def _lacks(self, pool: ScalingPool, usage: Usage, now: float) -> str:
        """Why no instance of a pool can start now; empty: one can."""
        blocked = self._blocked.why(pool.name, now)
        if blocked:
            return blocked
        if self._standing.of_pool(pool.name) >= pool.max:
            return f"{pool.name} has its most, {pool.max}"
        return usage.lacks(self._rules.budget, pool.footprint)

    # --- down ---------------------------------------------------------------------------------------------------------

    def _down(self, needs: Mapping[Role, Need], outlook: Outlook, now: float, horizon_s: float) -> ChosenChange | None:
        found = self.down.choose(needs, outlook, now, horizon_s)
        return None if found is None else ChosenChange(What.DOWN, found.because, (found,))


def _why(each: InstanceSeen) -> str:
    return f" ({each.because})" if each.because else ""


def _told(needs: Mapping[Role, Need]) -> str:
    """One line for a fleet that needs no change."""
    return ", ".join(
        f"{role.value}: {need.have:.3g} there, {need.now} needed now, {need.ahead} ahead, {need.keep} kept"
        for role, need in needs.items()
    )
