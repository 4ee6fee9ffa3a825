"""Grants of credits through a registry: routers' real discovery and agents' real machines, without engines."""

from __future__ import annotations

import time

from cluster.ids import InstanceId
from cluster.instance import Load, Role
from cluster.registry.membership import Heartbeat, MemberKind, Membership, MemberState
from cluster.registry.memory import MemoryRegistry
from decode.rules import DecodeRules
from engine.agent.grants import concerning
from engine.agent.machine import AgentMachine, EngineIs, LoadRead, RoutersHeard
from router.core.journey import Choose
from router.core.values import Reported, Wanted
from router.fleet.discovery import Discovery
from router.fleet.view import FleetView
from router.scheduler.demand import OwnWord
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import Scheduler
from router.scheduler.scoring.policies import POLICIES

D = InstanceId("d")


class Agent:
    """An agent's machine; each call of `beat` does what an agent does each second."""

    def __init__(self, registry: MemoryRegistry) -> None:
        self.registry, self.machine = registry, AgentMachine(name=D, rules=DecodeRules(streams_max=12))
        self.machine.handle(EngineIs("ready", "", 1), 0.0)
        self.members, self.seq = Membership(), 0

    async def beat(self) -> dict[str, int]:
        self.members.fold(await self.registry.read(MemberKind.ROUTER), float(self.seq))
        said = (concerning(each.beat, D, Role.BOTH, ["m"]) for each in self.members.snapshot())
        self.machine.handle(RoutersHeard(tuple(said)), float(self.seq))
        self.seq += 1
        beat = Heartbeat(
            id=D, agent="agent-d", seq=self.seq, state=MemberState.READY, url="http://d", models=({"id": "m"},),
            credits=self.machine.credits, grants=self.machine.grants((1, self.seq)),
        )  # fmt: skip
        await self.registry.beat(beat)
        return beat.grants


class Router:
    """A router's view, scheduler and discovery, without sockets."""

    def __init__(self, registry: MemoryRegistry) -> None:
        self.view = FleetView()
        self.scheduler = Scheduler(self.view, POLICIES["least_load"])
        self.watch = Discovery(registry, self.told)
        self.watch.own = OwnWord(self.scheduler)
        self.registry = registry

    def told(self, reported: tuple[Reported, ...], routers: int) -> None:
        self.view.routers = routers
        self.view.fold(reported)

    async def turn(self) -> int | None:
        await self.watch.read()
        await self.registry.beat(self.watch.announcement("http://r", "http://r"))
        return self.view.get(D).grant if self.view.knows(D) else None

    def arrive(self, tenant: str, count: int) -> int:
        """Let `count` requests arrive. Returns how many of them get a place."""
        contexts = [SchedulingContext(Wanted(model="m", hand_over=False, tenant=tenant)) for _ in range(count)]
        chosen = [self.scheduler.choose(context, Choose(frozenset(), hand_over=False), 0.0)[0] for context in contexts]
        return sum(each.decode is not None for each in chosen)


async def test_demand_moves_grants_from_router_to_router_never_beyond_the_credits() -> None:
    registry = MemoryRegistry(clock=time.monotonic)
    agent, one, two = Agent(registry), Router(registry), Router(registry)
    assert await agent.beat() == {}
    assert [await router.turn() for router in (one, two)] == [None, None]
    await agent.beat()
    assert [await router.turn() for router in (one, two)] == [6, 6], "without demand, each router has room for a burst"
    await agent.beat()
    assert one.arrive("acme", 30) == 6
    for _ in range(4):
        assert sum((await agent.beat()).values()) <= 12
        await one.turn()
        await two.turn()
        assert agent.machine.shared.bound <= 12
    assert [await router.turn() for router in (one, two)] == [11, 1]
    assert one.watch.local_shares() == {"acme": 1.0}
    assert one.arrive("acme", 9) == 5
    assert two.arrive("bolt", 5) == 1, "its first request needs no round trip"
    for _ in range(4):
        await agent.beat()
        await one.turn()
        await two.turn()
    assert two.view.get(D).grant == 1, "the other's legs are not over"
    assert one.watch.local_shares() == {"acme": 1.0}
    assert two.watch.local_shares() == {"bolt": 1.0}


async def test_grants_stay_while_the_registry_is_down() -> None:
    registry = MemoryRegistry(clock=time.monotonic)
    agent, one, two = Agent(registry), Router(registry), Router(registry)
    for _ in range(3):
        await agent.beat()
        await one.turn()
        await two.turn()
    registry.down = True
    for router in (one, two):
        await router.watch.read()
        assert router.view.get(D).grant == 6
        assert router.arrive("acme", 9) == 6


async def test_a_router_that_left_gives_its_grants_back() -> None:
    registry = MemoryRegistry(clock=time.monotonic)
    agent, one, two = Agent(registry), Router(registry), Router(registry)
    for _ in range(3):
        await agent.beat()
        await one.turn()
        await two.turn()
    await two.watch.close()
    assert sum((await agent.beat()).values()) == 6
    assert agent.machine.shared.ghosts == 6, "its engine may still have them"
    for tick in range(8):
        agent.machine.handle(LoadRead(Load()), 100.0 + tick / 2)
    assert sum((await agent.beat()).values()) == 12
