"""The fleet as a controller counts it: what was observed, corrected by its own actions under way. Pure.

Whatever was asked for and is not gone counts against the budget. An action whose effect is not observed after
`unseen_s` is taken to be lost: the next decision goes by what exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput import actions as do
from goodput.budget import Footprint, Usage
from goodput.observation import InstanceSeen, Phase
from goodput.pools import ScalingPool

GAVE_S: Final = 3600.0
"""An instance that this controller has asked for is remembered for at least so many seconds as its own."""

_COMES: Final = frozenset({Phase.PENDING, Phase.STARTING})


class StandingInstances:
    """Instances by name, corrected by actions under way."""

    def __init__(self, pools: Mapping[str, ScalingPool], unseen_s: float) -> None:
        self._pools: Final = pools
        self._unseen_s: Final = unseen_s
        self._asked: Final[dict[InstanceId, tuple[float, do.Action]]] = {}
        self._gave: dict[InstanceId, float] = {}
        """When each instance was asked for, refused and lost ones included."""
        self.instances: dict[InstanceId, InstanceSeen] = {}
        self.elsewhere: Mapping[str, int] = {}
        """GPUs that other models' instances use, by type."""

    def see(self, instances: Iterable[InstanceSeen], now: float) -> None:
        """Take over what exists now."""
        seen = {each.id: each for each in instances if each.pool in self._pools}
        for name, (at_s, action) in [*self._asked.items()]:
            if now - at_s > self._unseen_s or _carried_out(action, seen.get(name)):
                del self._asked[name]
        for name, (at_s, action) in self._asked.items():
            seen[name] = _as_asked(action, seen.get(name), at_s, self._pools)
        self.instances = dict(sorted(seen.items()))

    def asked(self, action: do.Action, now: float) -> None:
        """Note an action that is given to the actuator."""
        self._asked[action.instance] = (now, action)
        if isinstance(action, do.Start):
            recent = {name: at_s for name, at_s in self._gave.items() if now - at_s < GAVE_S}
            self._gave = recent | {action.instance: now}
        self.instances[action.instance] = _as_asked(action, self.instances.get(action.instance), now, self._pools)

    def refused(self, action: do.Action) -> None:
        """Forget an action that is not carried out."""
        self._asked.pop(action.instance, None)
        if isinstance(action, do.Start):
            self.instances.pop(action.instance, None)

    def mine(self, instance: InstanceId) -> bool:
        """Whether an action of this controller on this instance is under way."""
        return instance in self._asked

    def started(self, instance: InstanceId) -> bool:
        """Whether this controller has asked for this instance. It may exist although its start was refused: an answer
        that comes too late counts as a refusal.
        """
        return instance in self._gave

    # --- asked --------------------------------------------------------------------------------------------------------

    def staying(self, role: Role | None = None) -> list[InstanceSeen]:
        """Instances of a role (None: of all) that serve or will serve."""
        return [
            each
            for each in self.instances.values()
            if not each.leaving
            and each.phase not in (Phase.FAILED, Phase.DRAINING)
            and (role is None or each.role is role)
        ]

    def staying_in(self, pool: str) -> int:
        """How many instances of a pool serve or will serve."""
        return sum(each.pool == pool for each in self.staying())

    def ready(self, role: Role | None = None) -> list[InstanceSeen]:
        """Instances that serve now."""
        return [each for each in self.staying(role) if each.phase is Phase.READY]

    def coming(self, role: Role | None = None) -> list[InstanceSeen]:
        """Instances that wait for a GPU or start."""
        return [each for each in self.staying(role) if each.phase in _COMES]

    def usage(self) -> Usage:
        """What all instances that are not gone use, and the GPUs of other models."""
        found = Usage()
        found.also(self.elsewhere)
        for name, each in self.instances.items():
            found.add(name, self.footprint(each))
        return found

    def footprint(self, each: InstanceSeen) -> Footprint:
        """What one instance uses."""
        return self._pools[each.pool].footprint

    def of_pool(self, pool: str) -> int:
        """Instances that count against a pool's `max`."""
        return sum(each.pool == pool for each in self.instances.values())


def _carried_out(action: do.Action, seen: InstanceSeen | None) -> bool:
    """Whether the observed instance (None: gone) shows the action's effect."""
    if isinstance(action, do.Start):
        return seen is not None
    if isinstance(action, do.Flip):
        return seen is None or seen.role is action.role
    return seen is None or seen.leaving


def _as_asked(
    action: do.Action, seen: InstanceSeen | None, now: float, pools: Mapping[str, ScalingPool]
) -> InstanceSeen:
    """What an instance is once the action is carried out."""
    if isinstance(action, do.Start):
        pool = pools[action.pool]
        return seen or InstanceSeen(
            id=action.instance,
            pool=pool.name,
            role=pool.role,
            phase=Phase.PENDING,
            asked_s=now,
            flips=pool.flips,
        )
    assert seen is not None, f"{action.instance} is not there"
    if isinstance(action, do.Flip):
        return replace(seen, role=action.role)
    if isinstance(action, do.Stop):
        return replace(seen, leaving=True)
    return replace(seen, leaving=True, phase=Phase.DRAINING)
