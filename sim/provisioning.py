"""A fleet that changes while it serves: instances are asked for, start, drain, flip and end, within a budget.

Carries out `goodput.actions` on virtual time, as an actuator does on a real cluster. The agent's machine and the
engine's supervisor make all decisions of an instance. This module has only what lies between: the way to the agent, the
GPUs that are free, and what all instances together use at each instant.

An instance counts against the budget from the action that asks for it until its process has ended. The *site* is what
GPUs there are: an instance that is within the budget and finds no free GPU waits for one, as a pod that cannot be
placed does, and starts when a GPU becomes free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cluster.ids import InstanceId
from engine.agent import machine as agents
from goodput import actions as do
from goodput.budget import NO_BUDGET, Budget, Footprint, Usage
from sim.checks import law
from sim.kernel import NS
from sim.result import FleetEvent

if TYPE_CHECKING:
    from sim.fleet import SimulatedMember
    from sim.instance import SimInstance
    from sim.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The pools, the budget and the GPUs of a fleet that may change."""

    pools: Mapping[str, SimulatedMember] = field(default_factory=dict)
    """By pool, the template of one more instance; the action gives its name."""
    budget: Budget = NO_BUDGET
    """What the fleet may use at most."""
    gpus: Mapping[str, int] = field(default_factory=dict)
    """By type of GPU, how many exist; of a type that is not named, any number."""


class Timed(NamedTuple):
    """An action, and when it is given."""

    at_s: float
    action: do.ScriptedAction


class Provisioning:
    """The changes of one world's fleet. It has many attributes: for each instance and GPU, its state and its times."""

    def __init__(self, world: World, site: Site) -> None:
        self._world: Final = world
        self._site: Final = site
        self.usage: Final = Usage()
        """What all instances use that were asked for and are not gone."""
        self.events: Final[list[FleetEvent]] = []
        self._pending: Final[dict[InstanceId, SimulatedMember]] = {}
        """Instances that wait for a GPU, oldest first."""
        self._placed: Final[dict[str, int]] = {}
        """By type of GPU, how many GPUs processes have."""
        self._names: Final[set[InstanceId]] = set()
        self._since_ns: Final[dict[InstanceId, int]] = {}
        """When each instance got its GPUs, of those that have them."""
        self._there_ns: Final[dict[InstanceId, int]] = {}
        """How long each instance had its GPUs, of those that are gone."""
        self._gpu_ns: Final[dict[str, int]] = {}
        """By type of GPU, GPU time of the instances that are gone."""
        self._planned = 0
        """Actions that are still to be given."""
        self._leaving: Final[set[InstanceId]] = set()
        self.peak_gpus = 0

    # --- calls from outside -------------------------------------------------------------------------------------------

    def schedule(self, timed: Iterable[Timed]) -> None:
        """Give these actions at their times."""
        for at_s, action in timed:
            self._planned += 1
            self._world.kernel.at(round(at_s * NS), self._give, action)

    def _give(self, action: do.ScriptedAction) -> None:
        self._planned -= 1
        self.carry_out(action)

    def carry_out(self, action: do.ScriptedAction) -> str:
        """Carry out an action now. Returns an empty text, or why it is refused; a refusal changes nothing."""
        refusal = _CARRY_OUT[type(action)](self, action)
        if refusal:
            self._world.counts["actions_refused"] += 1
            self._note(action.instance, "refused", refusal)
        over = self.usage.within(self._site.budget)
        law(not over, over)
        return refusal

    @property
    def busy(self) -> bool:
        """Whether heartbeats are still needed: for actions to come, or for instances that are to leave."""
        return self._planned > 0 or bool(self._leaving)

    @property
    def pending(self) -> tuple[InstanceId, ...]:
        """Instances that wait for a GPU, oldest first."""
        return tuple(self._pending)

    def member_of(self, pending: InstanceId) -> SimulatedMember:
        """The member that an instance which waits for a GPU will be."""
        return self._pending[pending]

    def gpu_seconds(self, end_ns: int) -> dict[str, float]:
        """By type of GPU: the GPU seconds of all processes until `end_ns`."""
        found = dict(self._gpu_ns)
        for name, since_ns in self._since_ns.items():
            member = self._world.by_name[name].member
            found[member.gpu] = found.get(member.gpu, 0) + max(0, end_ns - since_ns) * member.gpus
        return {gpu: spent / NS for gpu, spent in sorted(found.items())}

    def there_s(self, at: SimInstance, end_ns: int) -> float:
        """The seconds for which an instance had its GPUs, until `end_ns`."""
        since_ns = self._since_ns.get(at.name)
        there_ns = self._there_ns.get(at.name, 0) if since_ns is None else end_ns - since_ns
        return max(0, there_ns) / NS

    # --- instances ----------------------------------------------------------------------------------------------------

    def already(self, at: SimInstance) -> None:
        """Count an instance of the first fleet. Raises ValueError if budget or GPUs are not enough for it."""
        self._names.add(at.name)
        lacks = self.usage.lacks(self._site.budget, at.member.footprint) or self._no_gpu(at.member.footprint)
        if lacks:
            raise ValueError(f"{at.name}: {lacks}")
        self.usage.add(at.name, at.member.footprint)
        self._place(at.member)

    def _start(self, action: do.Start) -> str:
        template = self._site.pools.get(action.pool)
        if template is None:
            return f"there is no pool {action.pool!r}; there is {', '.join(self._site.pools) or 'none'}"
        if action.instance in self._names:
            return f"the name {action.instance} is taken, or was"
        member = replace(template, name=action.instance)
        lacks = self.usage.lacks(self._site.budget, member.footprint)
        if lacks:
            return lacks
        self._names.add(member.name)
        self.usage.add(member.name, member.footprint)
        self._note(member.name, "asked", action.because)
        self._pending[member.name] = member
        if self._no_gpu(member.footprint):
            self._note(member.name, "pending", self._no_gpu(member.footprint))
        self._place_pending()
        return ""

    def _no_gpu(self, wanted: Footprint) -> str:
        """Why it cannot be placed now; empty: it can."""
        there = self._site.gpus.get(wanted.gpu)
        used = self._placed.get(wanted.gpu, 0)
        if there is None or used + wanted.gpus <= there:
            return ""
        return f"no GPU is free: {used} of {there} × {wanted.gpu or 'GPU'} are in use, {wanted.gpus} wanted"

    def _place_pending(self) -> None:
        """The oldest instance that finds its GPUs free starts first; one that needs many does not block the others."""
        for name, member in [*self._pending.items()]:
            if not self._no_gpu(member.footprint):
                del self._pending[name]
                self._place(member)
                self._world.add(member)

    def _place(self, member: SimulatedMember) -> None:
        self._placed[member.gpu] = self._placed.get(member.gpu, 0) + member.gpus
        self._since_ns[member.name] = self._world.kernel.now_ns
        self.peak_gpus = max(self.peak_gpus, sum(self._placed.values()))

    def left(self, at: SimInstance, code: int) -> None:
        """The instance's agent has ended, and its GPUs are free."""
        member = at.member
        self._leaving.discard(at.name)
        self.usage.remove(at.name)
        self._placed[member.gpu] -= member.gpus
        there_ns = self._there_ns[at.name] = self._world.kernel.now_ns - self._since_ns.pop(at.name)
        self._gpu_ns[member.gpu] = self._gpu_ns.get(member.gpu, 0) + there_ns * member.gpus
        self._world.counts["instances_failed" if code else "instances_left"] += 1
        self._place_pending()

    def noted(self, at: SimInstance, what: str, because: str) -> None:
        """Record a change of the engine's state."""
        self._note(at.name, what, because)

    def _note(self, instance: InstanceId, what: str, because: str) -> None:
        self.events.append(FleetEvent(self._world.kernel.now_ns, instance, what, because))

    # --- actions for agents -------------------------------------------------------------------------------------------

    def _drain(self, action: do.Drain) -> str:
        if action.instance in self._pending:
            del self._pending[action.instance]
            self.usage.remove(action.instance)
            self._note(action.instance, "cancelled", action.because)
            return ""
        return self._ask(action, "draining", agents.DrainAsked(action.deadline_s, action.leave), leaves=action.leave)

    def _resume(self, action: do.Resume) -> str:
        at = self._world.by_name.get(action.instance)
        if at is not None and at.agent.state is agents.AgentState.DRAINING and at.agent.leaving:
            return f"{action.instance} is leaving: too late to resume"
        return self._ask(action, "resumed", agents.ResumeAsked())

    def _flip(self, action: do.Flip) -> str:
        at = self._world.by_name.get(action.instance)
        refusal = None if at is None else at.agent.refuses(action.role)
        return refusal or self._ask(action, action.role.value, agents.RoleAsked(action.role))

    def _stop(self, action: do.Stop) -> str:
        if action.instance in self._pending:
            return self._drain(do.Drain(instance=action.instance, because=action.because))
        return self._ask(action, "stopping", agents.StopAsked(), leaves=True)

    def _ask(self, action: do.ScriptedAction, what: str, event: agents.Event, *, leaves: bool = False) -> str:
        """Send an event to an agent, where it arrives after a hop. The agent decides what follows."""
        at = self._world.by_name.get(action.instance)
        if at is None or at.gone:
            return f"there is no instance {action.instance}"
        if at.cut_off:
            return f"{action.instance} cannot be reached"
        if leaves:
            self._leaving.add(at.name)
        self._note(at.name, what, action.because)
        self._world.kernel.at(self._world.kernel.now_ns + self._world.hop_ns, self._said, (at, event))
        return ""

    def _said(self, word: tuple[SimInstance, agents.Event]) -> None:
        self._world.lives.ask(*word)


_CARRY_OUT: Final[dict[type, Callable[[Provisioning, Any], str]]] = {
    do.Start: Provisioning._start,  # noqa: SLF001 - a table of this class's own methods
    do.Drain: Provisioning._drain,  # noqa: SLF001
    do.Resume: Provisioning._resume,  # noqa: SLF001
    do.Flip: Provisioning._flip,  # noqa: SLF001
    do.Stop: Provisioning._stop,  # noqa: SLF001
}
