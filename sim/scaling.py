"""A scaler, ours or a rival, that resizes a simulated fleet on virtual time, through the actuators' protocol.

Everything but the scaler is the same for all: load, routing policy, admission, start-up times, budget. A scaler sees
only what a live one could: a router's published counts, and heartbeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from cluster.ids import InstanceId
from engine.agent import machine as agents
from goodput import actions as do
from goodput.observation import InstanceSeen, Phase
from loadgen.arrival import Arrival
from loadgen.report import Targets
from sim.instance import SimInstance
from sim.kernel import NS
from sim.meters import Meters
from sim.result import Result
from sim.world import World

_PHASES: Final = {
    agents.AgentState.STARTING: Phase.STARTING,
    agents.AgentState.RESTARTING: Phase.STARTING,
    agents.AgentState.READY: Phase.READY,
    agents.AgentState.DRAINING: Phase.DRAINING,
    agents.AgentState.STOPPING: Phase.DRAINING,
    agents.AgentState.FAILED: Phase.FAILED,
}


class SimActuator:
    """The actuators' protocol for a world: the same methods and meanings, answered at once, on virtual time."""

    def __init__(self, world: World, pools: Mapping[InstanceId, str]) -> None:
        """`pools`: the pools of the world's first instances."""
        self._world: Final = world
        self._pools: Final = dict(pools)
        self._asked_s: Final[dict[InstanceId, float]] = {}
        self._ready_s: Final[dict[InstanceId, float]] = {}
        self.blind = False
        """Whether `observe` fails, for tests."""
        self.actions: Final[list[tuple[float, do.Action]]] = []
        """Those that were carried out."""

    def observe(self) -> tuple[InstanceSeen, ...] | None:
        """All instances that were asked for and are not gone."""
        if self.blind:
            return None
        return (*map(self._seen, self._world.living), *map(self._pending, self._world.provisioning.pending))

    def _seen(self, at: SimInstance) -> InstanceSeen:
        agent = at.agent
        phase = _PHASES[agent.state]
        if phase is Phase.READY:
            self._ready_s.setdefault(at.name, self._world.kernel.now_s)
        said = phase in (Phase.READY, Phase.DRAINING)
        return InstanceSeen(
            id=at.name,
            pool=self._pools[at.name],
            role=agent.role,
            phase=phase,
            asked_s=self._asked_s.get(at.name),
            ready_s=self._ready_s.get(at.name),
            flips=at.member.flips,
            leaving=agent.leaving,
            running=agent.load.running if said else None,
            waiting=agent.load.waiting if said else None,
            kv_usage=agent.load.kv_usage if said else None,
        )

    def _pending(self, name: InstanceId) -> InstanceSeen:
        member = self._world.provisioning.member_of(name)
        return InstanceSeen(
            id=name,
            pool=self._pools[name],
            role=member.role,
            phase=Phase.PENDING,
            asked_s=self._asked_s.get(name),
            flips=member.flips,
            because="no GPU is free",
        )

    def start(self, action: do.Start) -> str:
        """Start an instance; nothing if its name was used before. Returns why it is refused, or an empty text."""
        if action.instance in self._pools:
            return ""
        refusal = self._carry_out(action)
        if not refusal:
            self._pools[action.instance] = action.pool
            self._asked_s[action.instance] = self._world.kernel.now_s
        return refusal

    def flip(self, action: do.Flip) -> str:
        """Give an instance another role. Returns why it is refused, or an empty text."""
        return self._carry_out(action)

    def drain(self, action: do.Drain) -> str:
        """Drain an instance; nothing if it leaves already, or is gone."""
        at = self._world.by_name.get(action.instance)
        gone = at is None and action.instance not in self._world.provisioning.pending
        if gone or (at is not None and (at.gone or at.agent.leaving)):
            return ""
        return self._carry_out(action)

    def stop(self, action: do.Stop) -> str:
        """Stop an instance now; nothing if it is gone."""
        at = self._world.by_name.get(action.instance)
        return "" if at is not None and at.gone else self._carry_out(action)

    def _carry_out(self, action: do.Action) -> str:
        refusal = self._world.provisioning.carry_out(action)
        if not refusal:
            self.actions.append((self._world.kernel.now_s, action))
        return refusal

    def give(self, action: do.Action) -> str:
        """Carry out any action."""
        match action:
            case do.Start():
                return self.start(action)
            case do.Flip():
                return self.flip(action)
            case do.Drain():
                return self.drain(action)
            case do.Stop():
                return self.stop(action)


class Sight:
    """What a scaler may read: time, the actuator, the router's figures."""

    def __init__(self, world: World, actuator: SimActuator, meters: Meters) -> None:
        self.actuator: Final = actuator
        self.meters: Final = meters
        self._world: Final = world

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self._world.kernel.now_s

    def instances(self) -> tuple[InstanceSeen, ...]:
        """The fleet; empty if the actuator cannot observe it."""
        return self.actuator.observe() or ()


class SimulatedScaler(Protocol):
    """Resizes a fleet."""

    @property
    def every_s(self) -> float:
        """Seconds between two looks."""
        ...

    def act(self, sight: Sight) -> None:
        """Look once, and give actions to the actuator."""
        ...


class Scaled:
    """A world with a scaler on it."""

    def __init__(
        self,
        world: World,
        scaler: SimulatedScaler,
        targets: Mapping[str, Targets],
        pools: Mapping[InstanceId, str],
        *,
        usual: str = "",
        until_s: float | None = None,
    ) -> None:
        """Wire a world, a scaler, meters and an actuator.

        Args:
            world: not run yet.
            scaler: resizes it.
            targets: by class, for what counts as met in published counts.
            pools: the pools of the instances that exist at the start.
            usual: the class of requests that name none.
            until_s: the time after which the scaler acts no more; None: it acts to the end.
        """
        self.world: Final = world
        self.meters: Final = Meters(world, targets, usual)
        self.actuator: Final = SimActuator(world, pools)
        self.sight: Final = Sight(world, self.actuator, self.meters)
        self._scaler = scaler
        self._until_s: Final = until_s

    def replace(self, scaler: SimulatedScaler) -> None:
        """Use another scaler from the next look on, as after a controller was killed and started again."""
        self._scaler = scaler

    def run(self, arrivals: Iterable[Arrival]) -> Result:
        """Run the world to its end."""
        self.world.kernel.at(self.world.kernel.now_ns, self._look)
        return self.world.run(self.meters.through(arrivals))

    def _look(self, _: object) -> None:
        kernel = self.world.kernel
        if not self.world.busy or (self._until_s is not None and kernel.now_s > self._until_s):
            return
        self._scaler.act(self.sight)
        kernel.at(kernel.now_ns + round(self._scaler.every_s * NS), self._look)


def direction_changes(actions: Sequence[tuple[float, do.Action]]) -> int:
    """How often starting followed draining, or the other way round."""
    found, last = 0, ""
    for _, action in actions:
        way = {do.Start: "up", do.Drain: "down", do.Stop: "down"}.get(type(action), "")
        found += bool(way and last and way != last)
        last = way or last
    return found
