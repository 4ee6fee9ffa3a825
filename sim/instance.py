"""One instance: a twin, the agent beside it, and the world's state of both. The world carries out their effects.

The twin keeps its own time, which runs slower than the world's during a fault that starves the whole process (`Slow`);
all other times in this module are the world's. If the engine dies, its agent restarts it under the next epoch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from cluster.ids import InstanceId, RequestId
from cluster.instance import Instance, Load, Role
from cluster.wire import TransferFields
from decode.rules import DecodeRules
from engine.agent.machine import AgentMachine, AgentState, Effect, LoadRead
from engine.agent.rules import RoleRules
from engine.twin import events as ev
from engine.twin.machine import Twin
from engine.twin.request import TwinRequest
from engine.vllm import supervise
from engine.vllm.supervise import Supervisor
from prefill.rules import PrefillRules
from router.core.values import Reported
from sim.fleet import SimulatedMember
from sim.link import Nic

if TYPE_CHECKING:
    from sim.passage import Passage
    from sim.sourcing import SimulatedSourcing


def rules_of(member: SimulatedMember, role: Role | None = None) -> RoleRules:
    """The rules of its agent, as `baton engine` sets them: credits for as many streams as its engine runs at once.

    `role`: a role taken later than the start; the engine's settings stay.
    """
    if (role or member.role) is Role.PREFILL:
        return PrefillRules()
    return DecodeRules(streams_max=member.config.max_num_seqs)


class SimulatedLeg:
    """One leg of a request at one instance. It has many attributes: router and engine both keep their state of it."""

    __slots__ = (
        "at",
        "beginning",
        "detached",
        "first_ns",
        "last_ns",
        "local_ns",
        "number",
        "outlasted",
        "outputs",
        "over",
        "over_ns",
        "passage",
        "prefill",
        "request",
        "second_ns",
        "sourcing",
    )

    def __init__(self, passage: Passage, at: SimInstance, request: TwinRequest, number: int, *, prefill: bool) -> None:
        self.passage = passage
        self.at = at
        self.request = request
        self.number = number
        """The leg's number within its request."""
        self.prefill = prefill
        self.first_ns = self.second_ns = self.last_ns = -1
        """The times at which the engine had these tokens."""
        self.local_ns = (-1, -1)
        """First and second token on the twin's own clock: their times in the world may still change with it."""
        self.outputs = 0
        self.over = False
        """Its engine has answered, refused, or lost it."""
        self.over_ns = -1
        """When it did."""
        self.detached = False
        """The router has stopped reading the leg."""
        self.outlasted = False
        """The request goes on without this prefill leg; only the leg's hold is still to be released."""
        self.sourcing: SimulatedSourcing | None = None
        """The purpose of a source leg; None: the leg is none."""
        self.beginning: TransferFields | None = None
        """The hold of a source that the leg pulls; None again once its answer has begun."""

    def transfer(self, finished: ev.RequestFinished) -> TransferFields | None:
        """The hold in P's answer (live: `cluster.wire.read_transfer`); None: P holds nothing."""
        hold = finished.hold
        if hold is None:
            return None
        engine = f"{self.at.name}@{hold.transfer.producer_epoch}"
        fields = {"source": hold.source(self.at.name), "remote_engine_id": engine, "remote_num_tokens": hold.tokens}
        return TransferFields(fields)


class Slowness:
    """The twin's clock while it differs from the world's: from `begun_ns` on it runs at `rate[0] / rate[1]`."""

    __slots__ = ("begun_ns", "local_ns", "rate")

    def __init__(self, begun_ns: int, local_ns: int, rate: tuple[int, int]) -> None:
        self.begun_ns, self.local_ns, self.rate = begun_ns, local_ns, rate

    def local(self, now_ns: int) -> int:
        """The twin's time."""
        return self.local_ns + (now_ns - self.begun_ns) * self.rate[0] // self.rate[1]

    def world(self, local_ns: int) -> int:
        """The first time of the world at which the twin's clock has reached `local_ns`."""
        return self.begun_ns + -(-(local_ns - self.local_ns) * self.rate[1] // self.rate[0])


class SimInstance:
    """State of one instance. It has many attributes: its machines, and what is on its way to and from it."""

    def __init__(self, member: SimulatedMember, index: int, *, peers: bool = False, early: bool = False) -> None:
        """`peers`: whether it shares prompts' beginnings with others; `early`: whether it takes early legs."""
        self.early: Final = early
        self.member: Final = member
        self.name: Final = member.name
        self.index: Final = index
        self.peers: Final = peers
        """Whether it shares prompts' beginnings."""
        self.twin: Final = Twin(member.config, member.costs)
        flips = {role: rules_of(member, role) for role in Role} if member.flips else {}
        self.agent: Final = AgentMachine(name=member.name, rules=rules_of(member), role=member.role, flips=flips)
        self.engine: Final = Supervisor(supervise.SuperviseLimits())
        """Starts its engine, restarts it after a death, and gives it up, as an agent's child does."""
        self.nic: Final = Nic(member.nic_gb_s)
        self.epoch = 0
        self.ready = False
        self.gone = False
        """The agent has left: the instance no longer exists."""
        self.rung_ns = -1
        """The next wake-up of its agent or its supervisor, in ns; -1: none."""
        self.armed_ns = -1
        """The next wake-up of the twin, in ns; -1: none."""
        self.clock: Slowness | None = None
        self.rates: Final[dict[str, tuple[int, int]]] = {}
        """Why its clock is slower or faster, and how much."""
        self.legs: Final[dict[RequestId, SimulatedLeg]] = {}
        """The legs that its engine has, or that were sent to it."""
        self.awaited: Final[dict[RequestId, SimulatedLeg]] = {}
        """Legs whose first token has not been seen yet."""
        self.young: Final[list[SimulatedLeg]] = []
        """Legs that got their first token in the run under way: it may be cut before the second."""
        self.run_steps = 0
        """The steps of the run under way, cuts counted."""
        self.pulling: Final[dict[RequestId, Any]] = {}
        """Pulls that were ordered, or will be, with the time since which a heartbeat keeps their holds alive."""
        self.cut_off = False
        """No message gets in or out."""
        self.held: Final[list[tuple[Any, Any]]] = []
        """Messages that wait while the instance is cut off."""
        self.heard_ns = 0
        """The time of the registry's last report from its agent."""
        self.models: Final[tuple[dict[str, object], ...]] = ({"id": member.model},)
        self.reported = self._reported(0)
        self.load_said = self.agent.load
        """The twin's last answer to `ReadLoad`; below, to `ReadBlocks` and `ReadSlot`."""
        self.contents_said: tuple[int, ...] | None = None
        self.slot_said: bytes | None = None

    @property
    def instance(self) -> Instance:
        """The instance as the fleet addresses it."""
        return Instance(
            id=self.name,
            role=self.agent.role,
            url=f"http://{self.name}",
            epoch=self.epoch,
            pins=True,
            early=self.early,
        )

    def handle(self, event: ev.Event, now_ns: int) -> tuple[ev.Effect, ...]:
        """Send an event to the twin, on its own clock."""
        return self.twin.handle(event, now_ns if self.clock is None else self.clock.local(now_ns))

    def wakeup_ns(self) -> int | None:
        """When the twin wants to be woken, in the world's time."""
        due_ns = self.twin.next_wakeup()
        return due_ns if due_ns is None or self.clock is None else self.clock.world(due_ns)

    def world_ns(self, local_ns: int) -> int:
        """A time of the twin's in the world's time."""
        return local_ns if self.clock is None else self.clock.world(local_ns)

    def slow(self, now_ns: int, rate: tuple[int, int], cause: str) -> None:
        """The twin's clock runs at another rate from now on: at the product of all causes' rates."""
        self.rates[cause] = rate
        local_ns = now_ns if self.clock is None else self.clock.local(now_ns)
        over, under = (math.prod(each[side] for each in self.rates.values()) for side in (0, 1))
        self.clock = Slowness(now_ns, local_ns, (over, under))

    def load_read(self, load: Load, now_s: float) -> tuple[Effect, ...]:
        """The agent has read the engine's load; returns the agent's effects."""
        return self.agent.handle(LoadRead(self.agent.load if load == self.agent.load else load), now_s)

    def next_wakeup(self) -> float | None:
        """When its agent or its supervisor wants to be woken, in seconds of the world's time."""
        due = [each for each in (self.agent.next_wakeup(), self.engine.next_wakeup()) if each is not None]
        return min(due, default=None)

    def _shuns(self, now_ns: int) -> tuple[InstanceId, ...]:
        local_ns = now_ns if self.clock is None else self.clock.local(now_ns)
        return tuple(map(InstanceId, self.twin.shunned(local_ns)))

    def report(self, now_ns: int) -> None:
        """The agent's heartbeat with its current state."""
        agent, last = self.agent, self.reported
        same = last.instance.epoch == self.epoch and last.state == agent.state.value and last.load is agent.load
        same = same and last.shuns == self._shuns(now_ns)
        if not same or last.credits != agent.credits or last.instance.role is not agent.role:
            self.reported = self._reported(now_ns)

    def _reported(self, now_ns: int) -> Reported:
        agent = self.agent
        return Reported(
            instance=self.instance,
            state=agent.state.value,
            accepting=agent.state is AgentState.READY,
            credits=agent.credits,
            load=agent.load,
            models=self.models,
            shuns=self._shuns(now_ns),
            peers=self.peers,
        )
