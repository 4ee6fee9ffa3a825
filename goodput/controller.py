"""The goodput controller: observations in, actions out, each with its because. A pure machine (law 2).

Each look ends in one decision about all roles together. The quickest change that helps comes first:

1. *Flip*: a role is short and another one has an instance too many, or both are short and another split serves more.
2. *Up*: all instances at once that the forecast needs by the time a start is over.
3. *Down*: one instance at a time, if the fleet without it was large enough for a whole start-up time, and will be.

Unknown values hold the fleet as it is. Everything that was asked for counts against the budget until it is gone. A new
controller knows only what it observes: its target is the fleet that exists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from cluster.instance import Role
from goodput import actions as do
from goodput.changes import Changes
from goodput.control_rules import ControlRules
from goodput.counters import Counters
from goodput.decision import (
    Act,
    Answered,
    Check,
    Checked,
    Decision,
    Effect,
    Event,
    Need,
    Observed,
    Pause,
    Renewed,
    Resize,
    Told,
    What,
)
from goodput.demand import ClassPromise
from goodput.manual import Manual
from goodput.needs import Needs, Outlook
from goodput.observation import InstanceSeen, Observation
from goodput.overdue import Overdue
from goodput.pools import Kinds, ScalingPool
from goodput.standing import StandingInstances
from goodput.startups import StartUps


class Controller:
    """Sizes the fleet of one model."""

    def __init__(
        self, pools: Sequence[ScalingPool], promises: Mapping[str, ClassPromise], rules: ControlRules | None = None
    ) -> None:
        """For these pools.

        Args:
            pools: the pools that may be resized, the preferred ones of each role first; at least one.
            promises: by SLO class, its targets.
            rules: None: the defaults.
        """
        self.rules: Final = rules or ControlRules()
        self.kinds: Final = Kinds.of(pools)
        self.needs: Final = Needs(self.kinds, promises, self.rules)
        self.standing: Final = StandingInstances(self.kinds.pools, self.rules.unseen_s)
        self.startups: Final = StartUps(self.kinds.pools)
        self.manual: Final = Manual(self.rules.manual_s)
        self._counters: Final = Counters()
        self.overdue: Final = Overdue(self.startups, self.rules.start_max_s)
        self._changes: Final = Changes(self.kinds, self.standing, self.rules, self.overdue)
        self._paused = ""
        self._due_s: float | None = None
        self._checks = 0
        self._wanted: tuple[int, do.Action, Decision] | None = None
        """An action that waits for its check, and the decision that it is part of."""

    def next_wakeup(self) -> float | None:
        """Time of the next look; None: before the first look."""
        return self._due_s

    def handle(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Fold one event in."""
        match event:
            case Observed(seen):
                self._due_s = now + self.rules.every_s
                return self._observed(seen, now)
            case Answered():
                return self._answered(event, now)
            case Checked():
                return self._checked(event, now)
            case Resize(role, count, operator):
                self._wanted = None  # what was to leave may now be wanted
                self.manual.resize(role, count, operator)
                return ()
            case Pause(paused, operator):
                self._wanted = None
                self._paused = f"paused by {operator}" if paused else ""
                return ()
            case Renewed(promises):
                self.needs.promises = promises
                return ()

    # --- a look -------------------------------------------------------------------------------------------------------

    def _observed(self, seen: Observation, now: float) -> tuple[Effect, ...]:
        between = self._counters.see(seen.routers, now)
        silent = self._counters.silent
        if between is not None:
            self.needs.add(between, now)
        if self._idle(seen):
            self._wanted = None
        if seen.instances is None:
            return self._hold(now, "the actuator could not say what instances there are", unknown="instances")
        self.manual.saw(seen.instances, self.standing, now, leads=seen.leads)
        self.standing.see(seen.instances, now)
        self.standing.elsewhere = seen.elsewhere
        self.startups.saw(seen.instances)
        self.overdue.saw(self.standing.instances, now)
        self._changes.saw(now)
        if self.needs.prompts_wait(self._ready()) and not silent:
            self._due_s = now + min(self.rules.hurry_s, self.rules.every_s)
        if silent:
            return self._given(seen, now, silent, unknown="metrics")
        return self._decide(seen, now)

    def _given(self, seen: Observation, now: float, because: str, unknown: str = "") -> tuple[Effect, ...]:
        """Decide without the load, which is unknown: pools' `min` and operators' orders need no measurement."""
        asked = self.needs.traffic.counted > 0
        chosen = self._changes.without_traffic(self.manual.orders(now), now, asked=asked)
        if chosen is None or self._idle(seen):
            return self._hold(now, because, unknown)
        conditions = (*self._changes.conditions(now), *((f"unknown: {unknown}",) if unknown else ()))
        told = f"{chosen.because} ({because})"
        return self._carry_out(
            Decision(at_s=now, what=chosen.what, because=told, actions=chosen.actions, conditions=conditions), now
        )

    def _decide(self, seen: Observation, now: float) -> tuple[Effect, ...]:
        horizon_s = self.startups.longest_s() + self.rules.every_s
        outlook = self.needs.look(now, horizon_s, self._ready())
        too_few = self.needs.too_few()
        if outlook is None or too_few:
            return self._given(seen, now, too_few or "no arrivals are counted yet")
        needs = self._weighed(outlook, seen, now)
        learned = self._learn(needs, now)
        missing = self._counters.missing
        chosen = self._changes.choose(needs, outlook, now, horizon_s, self.manual.orders(now), takes=not missing)
        because = "; ".join(part for part in (chosen.because, learned) if part)
        idle = self._idle(seen)
        decision = Decision(
            at_s=now,
            what=What.HOLD if idle else chosen.what,
            because=f"{idle}: would {chosen.what.value}: {because}" if idle and chosen.actions else idle or because,
            actions=chosen.actions,
            needs=needs,
            rate=outlook.rate,
            expected=outlook.ahead.upper,
            forecaster=outlook.ahead.who,
            horizon_s=horizon_s,
            conditions=(*self._changes.conditions(now), *((f"{missing}: nothing ends or flips",) if missing else ())),
            dry=bool(idle),
        )
        if idle:
            return (Told(decision),)
        if chosen.ordered:
            self._wanted = None  # a simulation under way has an instance that leaves
        elif chosen.what is What.DOWN and self.rules.checks:
            return self._ask(decision, outlook, now)
        return self._carry_out(decision, now)

    def _ready(self) -> dict[Role, float]:
        return {role: float(len(self.standing.ready(role))) for role in Role}

    def _idle(self, seen: Observation) -> str:
        """Why this controller only observes; empty: it acts."""
        if self._paused:
            return self._paused
        if not seen.leads:
            return "another controller holds the lock"
        return "dry run" if self.rules.dry else ""

    def _hold(self, now: float, because: str, unknown: str = "") -> tuple[Effect, ...]:
        """Leave the fleet as it is, because too little is known."""
        self._changes.down.held()
        conditions = (*self._changes.conditions(now), *((f"unknown: {unknown}",) if unknown else ()))
        return (Told(Decision(at_s=now, what=What.HOLD, because=because, conditions=conditions)),)

    def _weighed(self, outlook: Outlook, seen: Observation, now: float) -> dict[Role, Need]:
        """By role: the instances that are needed, within the limits of pools and operators, and those that exist."""
        found = {}
        for role in self.kinds.roles:
            low, high, operator = self._limits(role, now)
            there = (each for each in self.standing.staying(role) if self._comes(each, now))
            have = sum(self.kinds.worth(each.pool, role, outlook.load) for each in there)
            ready = sum(self.kinds.worth(each.pool, role, outlook.load) for each in self.standing.ready(role))
            (at_once, _), (then, because), (keep, _) = outlook.now[role], outlook.then[role], outlook.keep[role]
            full = self._full(role)
            at_once, then, keep = (max(each, full) for each in (at_once, then, keep))
            lasting = max(low, outlook.lasting[role][0], then)
            found[role] = Need(
                now=min(high, max(low, at_once)),
                ahead=min(high, lasting),
                keep=min(high, max(lasting, keep)),
                have=have,
                ready=ready,
                because=f"{operator} wants {low}" if operator else because,
            )
        return found

    def _comes(self, each: InstanceSeen, now: float) -> bool:
        """Whether an instance serves or will serve. One that has waited for a GPU or started for too long is none:
        others start in its stead, in pools that have GPUs and whose instances become ready.
        """
        return each.waited_s(now) <= self.rules.pending_s and not self.overdue.late_s(each, now)

    def _limits(self, role: Role, now: float) -> tuple[int, int, str]:
        """Fewest and most instances of a role, and the operator who decides on them; empty: none does."""
        low, high, operator = self.manual.limits(role, now)
        pools = [each for each in self.kinds.pools.values() if each.role is role]
        least, most = sum(each.min for each in pools), sum(each.max for each in pools)
        if any(each.flips for each in self.kinds.pools.values()):
            least, most = min(least, 1), max(most, sum(each.max for each in self.kinds.pools.values() if each.flips))
        return max(least, 1, min(low, most)), min(most, high), operator

    def _full(self, role: Role) -> int:
        """Instances that the KV caches in use need: answers that grow longer than recent ones show there first."""
        used = [each.kv_usage for each in self.standing.ready(role) if each.kv_usage is not None]
        if role is Role.PREFILL or not used or sum(used) / len(used) < _FULL:
            return 0
        return math.ceil(len(self.standing.ready(role)) * sum(used) / len(used) / _FULL)

    def _learn(self, needs: Mapping[Role, Need], now: float) -> str:
        told = []
        for role, margin in self.needs.margins.items():
            need = needs[role]
            fair = need.ready >= need.ahead and not self._changes.lately(now)
            said = margin.look(self.needs.allowed, now, fair=fair)
            told += [f"{role.value}: {said}"] if said else []
        return "; ".join(told)

    # --- acting -------------------------------------------------------------------------------------------------------

    def _ask(self, decision: Decision, outlook: Outlook, now: float) -> tuple[Effect, ...]:
        """Ask for a simulation of the fleet without the instance first; one at a time."""
        if self._wanted is not None and now - self._wanted[2].at_s < CHECK_S:
            because = f"waits for the simulation of the fleet without {self._wanted[1].instance}"
            return (Told(replace(decision, what=What.HOLD, because=because, actions=())),)
        self._checks += 1
        action = decision.actions[0]
        fleet: dict[str, dict[Role, int]] = {}
        for each in self.standing.staying():
            if each.id != action.instance:
                roles = fleet.setdefault(each.pool, {})
                roles[each.role] = roles.get(each.role, 0) + 1
        self._wanted = (self._checks, action, decision)
        return (
            Check(
                number=self._checks,
                fleet=fleet,
                rate=outlook.keep_rate,
                lengths=outlook.load.lengths,
                dispersion=outlook.load.dispersion,
                because=decision.because,
            ),
        )

    def _checked(self, event: Checked, now: float) -> tuple[Effect, ...]:
        if self._wanted is None or self._wanted[0] != event.number:
            return ()
        _, action, decision = self._wanted
        self._wanted = None
        if event.holds is False:
            self._changes.down.held()
            because = f"a simulation of recent requests without {action.instance}: {event.because or 'misses targets'}"
            return (Told(Decision(at_s=now, what=What.HOLD, because=because, needs=decision.needs)),)
        there = self.standing.instances.get(action.instance)
        if there is None or now - decision.at_s > CHECK_S or not self._changes.down.spare(there.role):
            return ()  # the simulated fleet is not the one that would result now
        return self._carry_out(decision, now)

    def _carry_out(self, decision: Decision, now: float) -> tuple[Effect, ...]:
        for action in decision.actions:
            self.standing.asked(action, now)
            self._changes.gave(action, now)
        return (Told(decision), *(Act(action) for action in decision.actions))

    def _answered(self, event: Answered, now: float) -> tuple[Effect, ...]:
        action, refusal = event.action, event.refusal
        if not refusal:
            return ()
        if not event.unsure:
            self.standing.refused(action)
        self._changes.refused(event, now)
        because = f"{type(action).__name__.lower()} {action.instance} was refused: {refusal}"
        conditions = self._changes.conditions(now)
        return (Told(Decision(at_s=now, what=What.HOLD, because=because, conditions=conditions)),)


CHECK_S: Final = 30.0
"""Seconds after which a simulation without a verdict is taken to be lost."""
_FULL: Final = 0.93
"""Mean share of KV caches in use that counts as full."""
