"""Runs one chaos scenario, from the first request to the end of the last hold, with any router and the same mocks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Self

from support.chaos_fleet import ChaosFleet
from support.chaos_load import Kind, Verdict, asks, judge, load
from support.chaos_scenarios import LIMITS, LONG_LEASE_S, Limits, Scenario, Shape

from engine.mock.instance import MockInstance as Mock

SHAPE = Shape()
CLIENTS = 28
SPAN_S = 0.25
"""All clients send their requests within this many seconds."""

FEW_ALIKE, ALIKE = 0.3, 0.9
"""Shares of prompts that begin alike, without sources and with them."""

Router = Callable[[ChaosFleet, int], AbstractAsyncContextManager[str]]
"""Takes a fleet and a seed; yields the endpoint of a router that has seen every instance."""


@dataclass(slots=True)
class Outcome:
    """The result of one run."""

    scenario: Scenario
    seed: int
    verdicts: list[Verdict]
    strikes: int
    leaked: dict[str, int]
    """Holds that are left `Limits.released_s` (two seconds) after the last client's end, by instance."""
    free: bool
    """Whether nothing ran and nothing was held by then; where the scenario allows it, by the end of the leases."""
    starved_s: float
    """The worst second of the run: how many seconds of it the machine let this process wait for a CPU. Mocks, clients
    and router run in this process, so a starved process cannot keep its limits."""

    @property
    def kinds(self) -> Counter[Kind]:
        return Counter(each.kind for each in self.verdicts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a scenario is run."""

    scenario: Scenario
    router: Router
    seed: int = 0
    shape: Shape = SHAPE
    limits: Limits = LIMITS
    lease_s: float | None = None
    """Lease of holds in seconds. None: short where a scenario lets holds stay until their lease ends, else vLLM's."""
    clients: int = CLIENTS
    strike: Callable[[Mock], None] | None = None
    """Replaces the scenario's own fault."""

    async def outcome(self) -> Outcome:
        scenario, limits = self.scenario, self.limits
        lease_s = self.lease_s or (limits.lease_s if scenario.lease else LONG_LEASE_S)
        patience_s = 2.5 * limits.whole_s
        listed = asks(self.seed, self.clients, SPAN_S, scenario.leave, ALIKE if scenario.sources else FEW_ALIKE)
        async with (
            ChaosFleet(scenario, self.shape, limits, lease_s, self.seed) as fleet,
            _Turns() as turns,
            self.router(fleet, self.seed) as endpoint,
        ):
            fleet.arm(self.strike)
            heard = await load(endpoint, listed, patience_s)
            strikes = fleet.strikes
            verdicts = [judge(ask, one, limits) for ask, one in zip(listed, heard, strict=True)]
            leaked, free = await self._after(fleet)
            return Outcome(scenario, self.seed, verdicts, strikes, leaked, free, turns.starved_s)

    async def _after(self, fleet: ChaosFleet) -> tuple[dict[str, int], bool]:
        """Holds that were not released in time, and whether the fleet is free in the end."""
        limits = self.limits
        if self.scenario.stands_still:
            await fleet.released(limits.released_s)
            leaked = fleet.holds()
            fleet.heal()
            return leaked, await fleet.settled(limits.released_s)
        free = await fleet.settled(limits.released_s)
        leaked = fleet.holds()
        if not free and self.scenario.lease and self.lease_s is None:
            free = await fleet.settled(limits.lease_s + limits.grace_s)
        return leaked, free


class _Turns:
    """Measures how late the event loop's timers are, beyond the CPU time that this process uses itself."""

    EVERY_S = 0.02

    def __init__(self) -> None:
        self.starved_s = 0.0
        self._turns: deque[tuple[float, float, float]] = deque()
        """The turns of the last second. Of each: its time, the total lateness so far, the total CPU time so far."""
        self._late_s = 0.0
        self._next: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._next is not None:
            self._next.cancel()

    def _wait(self) -> None:
        self._next = asyncio.get_running_loop().call_later(self.EVERY_S, self._turn, time.monotonic())

    def _turn(self, since: float) -> None:
        now, cpu_s = time.monotonic(), time.process_time()
        self._turns.append((since, self._late_s, cpu_s))
        self._late_s += max(0.0, now - since - self.EVERY_S)
        while self._turns[0][0] < now - 1.0 and len(self._turns) > 1:
            self._turns.popleft()
        _, late_s, used_s = self._turns[0]
        self.starved_s = max(self.starved_s, self._late_s - late_s - (cpu_s - used_s))
        self._wait()
