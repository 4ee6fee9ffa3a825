"""Routers that share a fleet's credits, on virtual time: real views, schedulers and agents; engines are counters.

Heartbeats are encoded and decoded as in a registry; they are written and read at the real intervals. Clients are a
closed loop: each tenant keeps a fixed number of requests at a router. A real router's admission decides which tenant is
served next. Here it is the tenant with the least service by its weight at this router (`cluster.credits.local_shares`).
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from cluster.credits import local_shares
from cluster.ids import InstanceId
from cluster.instance import Load, Role
from cluster.registry.membership import Heartbeat, MemberKind, Membership, MemberState, decode, encode
from decode.rules import DecodeRules
from engine.agent.grants import concerning
from engine.agent.machine import AgentMachine, EngineIs, LoadRead, RoutersHeard
from prefill.rules import PrefillRules
from router.core.journey import Choose
from router.core.values import Wanted
from router.fleet.discovery import _by_tenant, _reported
from router.fleet.view import FleetView
from router.scheduler.demand import demands, legs_said
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import Scheduler
from router.scheduler.scoring.policies import POLICIES

ASK = Choose(frozenset(), hand_over=True)


class World:
    """A virtual clock, a registry, and all agents and routers."""

    def __init__(self, seed: int, shares: dict[str, float], *, equal: bool = False) -> None:
        self.now = 0.0
        self.equal = equal
        """For comparison: agents grant nothing to single routers; each router uses an equal share and plain weights."""
        self.rng = random.Random(seed)
        self.shares = shares
        self.kept: dict[tuple[MemberKind, str], Heartbeat] = {}
        self.down = False
        self._todo: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.agents: dict[str, Agent] = {}
        self.routers: dict[str, Front] = {}
        self.served: Counter[str] = Counter()

    def after(self, wait_s: float, do: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._todo, (self.now + wait_s, self._number, do))

    def run(self, until: float) -> None:
        while self._todo and self._todo[0][0] <= until:
            self.now, _, do = heapq.heappop(self._todo)
            do()
        self.now = until

    def write(self, beat: Heartbeat) -> None:
        kept, fault = decode(encode(beat))
        assert kept is not None, fault
        if not self.down:
            self.kept[beat.kind, beat.id] = kept

    def read(self, kind: MemberKind) -> list[Heartbeat]:
        return [beat for (each, _), beat in self.kept.items() if each is kind]


class Agent:
    """One instance: the agent's machine, and a counter of its engine's legs."""

    def __init__(self, world: World, name: str, role: Role, places: int) -> None:
        rules: Any = PrefillRules(legs_max=places) if role is Role.PREFILL else DecodeRules(streams_max=places)
        self.world, self.name, self.role, self.places = world, name, role, places
        self.machine = AgentMachine(name=name, rules=rules)
        self.machine.handle(EngineIs("ready", "", 1), 0.0)
        self.routers, self.seq = Membership(), 0
        self.legs = self.most = 0
        world.agents[name] = self
        world.after(world.rng.random(), self.beat)
        world.after(world.rng.random() / 2, self.look)

    def beat(self) -> None:
        world = self.world
        world.after(1.0, self.beat)
        if world.down:
            self.routers.deaf()
        elif not world.equal:
            self.routers.fold(world.read(MemberKind.ROUTER), world.now)
            said = (concerning(each.beat, self.name, self.role, ["m"]) for each in self.routers.snapshot())
            self.machine.handle(RoutersHeard(tuple(said)), world.now)
        self.seq += 1
        world.write(
            Heartbeat(
                id=InstanceId(self.name), agent="agent-" + self.name.replace("@", "-"), seq=self.seq, role=self.role,
                state=MemberState.READY, url="http://h", models=({"id": "m"},), load=self.machine.load,
                credits=self.machine.credits, grants=self.machine.grants((1, self.seq)),
            )
        )  # fmt: skip

    def look(self) -> None:
        self.world.after(0.5, self.look)
        running = min(self.legs, self.places // 2)
        self.machine.handle(LoadRead(Load(running=running, waiting=self.legs - running)), self.world.now)

    def take(self, leg_s: float, done: Callable[[], None]) -> None:
        self.legs += 1
        self.most = max(self.most, self.legs)
        assert self.legs <= self.places or self.world.equal, (
            f"{self.name} has {self.legs} legs at {self.world.now:.1f} s"
        )
        self.world.after(leg_s, lambda: self._end(done))

    def _end(self, done: Callable[[], None]) -> None:
        self.legs -= 1
        done()


class Front:
    """One router: its view, its scheduler and its clients."""

    def __init__(self, world: World, name: str, *, announces: bool = True) -> None:
        self.world, self.name, self.alive, self.announces = world, name, True, announces
        self.view = FleetView()
        self.scheduler = Scheduler(self.view, POLICIES["least_load"])
        self.scheduler.shares = world.shares
        self.instances, self.others, self.seq = Membership(), Membership(), 0
        self.line: dict[str, list[SchedulingContext]] = {}
        self.spent: dict[str, float] = {}
        """By tenant: legs served, divided by its weight. A tenant that comes later starts at `begun`."""
        self.begun = 0.0
        """`spent` of the tenant served last, before its leg was counted."""
        self.weights: dict[str, float] = {}
        world.routers[name] = self
        world.after(world.rng.random() / 2, self.read)
        world.after(world.rng.random(), self.announce)

    def read(self) -> None:
        if not self.alive:
            return None
        self.world.after(0.5, self.read)
        if self.world.down:
            self.instances.deaf()
            return self.others.deaf()
        self.instances.fold(self.world.read(MemberKind.INSTANCE), self.world.now)
        self.others.fold(self.world.read(MemberKind.ROUTER), self.world.now)
        self.view.routers = max(1, len(self.others.snapshot()))
        self.view.router_number = sum(each.id < self.name for each in self.others.snapshot())
        self.view.fold(tuple(_reported(each, InstanceId(self.name)) for each in self.instances.snapshot()))
        if self.world.equal:
            self.weights = self.world.shares
            return self.called(self.scheduler.fleet_changed())
        wants = {each.id: _by_tenant(each.beat) for each in self.others.snapshot()}
        self.weights = local_shares(wants.get(InstanceId(self.name), {}), wants.values(), self.world.shares)
        return self.called(self.scheduler.fleet_changed())

    def announce(self) -> None:
        if not self.alive or not self.announces:
            return
        self.world.after(1.0, self.announce)
        self.seq += 1
        goes_by = {each.id: each.beat.order for each in self.instances.snapshot()}
        self.world.write(
            Heartbeat(
                id=InstanceId(self.name), agent=self.name, kind=MemberKind.ROUTER, seq=self.seq, url="http://r",
                state=MemberState.READY, legs=legs_said(self.view, goes_by, self.seq), demand=demands(self.scheduler),
            )
        )  # fmt: skip

    def client(self, tenant: str, times: int = 1) -> None:
        """Add so many requests of this tenant at once. When a request ends, the next one follows."""
        for _ in range(times):
            if not self.line.get(tenant):
                self.spent[tenant] = max(self.spent.get(tenant, 0.0), self.begun)
            self.line.setdefault(tenant, []).append(SchedulingContext(Wanted(model="m", hand_over=True, tenant=tenant)))
            self.ask()

    def called(self, whom: tuple[object, ...]) -> None:
        for each in whom:
            self.world.after(0.0, lambda context=each: self.ask(context))

    def ask(self, called: object = None) -> None:
        """Ask the scheduler for the request whose turn it is. If another request was woken, pass its wake-up on."""
        waiting = [tenant for tenant, contexts in self.line.items() if contexts]
        if not waiting or not self.alive:
            return
        tenant = min(waiting, key=lambda each: (self.spent[each], each))
        context = self.line[tenant][0]
        chosen, calls = self.scheduler.choose(context, ASK, 0.0)
        if chosen.decode is None:
            for late in self.line.values():  # all enter the flow-control queue, so that all are counted
                for each in late:
                    self.scheduler.line.enter(each, each.wanted)
            self.called(calls + (self.scheduler.found_none(called) if isinstance(called, SchedulingContext) else ()))
            return
        if isinstance(called, SchedulingContext) and called is not context:
            calls += self.scheduler.found_none(called)
        self.called(calls)
        self.line[tenant].pop(0)
        self.begun = self.spent[tenant]
        self.spent[tenant] += 1 / self.weights.get(tenant, 1.0)
        assert chosen.prefill is not None
        prefill, decode = self.world.agents[chosen.prefill], self.world.agents[chosen.decode]
        self.view.leg_started(chosen.prefill)
        prefill_s, decode_s = self.world.rng.uniform(0.02, 0.06), self.world.rng.uniform(0.5, 1.5)
        prefill.take(prefill_s, lambda: self.prefilled(context, prefill, decode, decode_s))
        self.ask()

    def prefilled(self, context: SchedulingContext, prefill: Agent, decode: Agent, decode_s: float) -> None:
        if self.alive:
            self.called(self.scheduler.leg_ended(InstanceId(prefill.name)))
            decode.take(decode_s, lambda: self.over(context))

    def over(self, context: SchedulingContext) -> None:
        self.world.served[context.wanted.tenant] += 1
        if self.alive:
            self.called(self.scheduler.finish(context, 0.0))
            self.client(context.wanted.tenant)

    def kill(self) -> dict[str, int]:
        """End the router's process; legs that it has sent run on. Returns how many requests each tenant had."""
        self.alive = False
        had = Counter({tenant: len(contexts) for tenant, contexts in self.line.items()})
        for (_, tenant), legs in self.scheduler.legs.placed.items():
            had[tenant] += legs
        return had


def jain(values: list[float]) -> float:
    """Jain's fairness index. 1: all values are equal; 1/n: one of n values has everything."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))
