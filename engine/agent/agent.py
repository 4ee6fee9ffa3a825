"""Runs one instance: its engine, its heartbeats, its admin port, under the rules of `AgentMachine`. A shell."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cluster.background import keep_running
from cluster.errors import EngineFailed
from cluster.ids import InstanceId
from cluster.instance import Load, Role
from cluster.registry.membership import Member
from cluster.registry.registry import Registry
from cluster.telemetry import tracing
from engine.agent.announcer import Announcer
from engine.agent.config import AgentConfig
from engine.agent.grants import concerning
from engine.agent.http import Gate, agent_app, listen
from engine.agent.introductions import Introductions
from engine.agent.kv_events import follow, leave_nothing, make_room
from engine.agent.machine import (
    AgentMachine,
    AgentState,
    DrainAsked,
    Effect,
    EngineIs,
    Leave,
    LoadRead,
    Publish,
    ResumeAsked,
    RoleAsked,
    RoutersHeard,
    Say,
    StopAsked,
    StopEngine,
)
from engine.agent.rank import Rank, RankMachines
from engine.agent.readings import EngineReadings
from engine.agent.report import InstanceReport
from engine.agent.rules import RoleRules
from engine.agent.transfers import MEETING_S
from engine.vllm.child import EngineChange, EngineProcess
from engine.vllm.evictions import events_path
from engine.vllm.tier_speeds import TierCounts
from kvtransfer.seal import Identity

logger = logging.getLogger("baton.agent")

GOODBYE_S = 5.0
"""How long leaving the registry may take: a few of the registry's time limits, in case the name is contested or the
connection is broken."""


class Agent:
    """One instance of the fleet: wires the parts of an agent together. `run` returns the process's exit code.

    It is long and has many attributes: a reference to each part that it wires, and what passes between two of them.
    """

    def __init__(
        self,
        engine: EngineProcess,
        rules: RoleRules,
        config: AgentConfig,
        registry: Registry | None,
        tell: Callable[[EngineChange], None],
        say: Callable[[str], None],
        flips: Mapping[Role, RoleRules] | None = None,
        identities: Callable[[], Identity] | None = None,
    ) -> None:
        self.engine = engine
        self.spec = engine.spec
        tiered = self.spec.tiers is not None
        self.config = config
        self.ranks = tuple(
            Rank(AgentMachine(name=name, rules=rules, role=self.spec.role, flips=flips or {}), tiered=tiered)
            for name in self.spec.instances
        )
        self._machines = RankMachines(self.ranks, self._act)
        self._readings = EngineReadings(
            self.spec, config, serves=lambda: self._machines.serving, loaded=self._loaded, changed=self._nudge
        )
        agent = secrets.token_hex(8)
        self.report = InstanceReport(agent, engine, config, self.ranks, self._readings)
        self._tell = tell
        self._say = say
        self._code: asyncio.Future[int] | None = None
        self._news: asyncio.Queue[EngineChange] = asyncio.Queue()
        self._change: EngineChange | None = None
        """The change that is being handled; if that fails, it is handled again."""
        self._engine_running = False
        self._local_epoch = 0
        self.announcer: Announcer | None = None
        """Its part in the registry; None: it has no registry."""
        self._introductions: Introductions | None = None
        """None: its engine meets no others."""
        if registry is not None:
            beat = self.report.heartbeat
            heard, lost = self._routers_heard, self._name_lost
            self.announcer = Announcer(registry, agent, self.ranks, beat=beat, heard=heard, lost=lost, say=say)
            if identities is not None and self.spec.door:
                models = self._readings.names
                self._introductions = Introductions(
                    registry, identities, agent, self.spec, self.ranks, models=models, on_change=self._nudge
                )

    @property
    def machine(self) -> AgentMachine:
        """The machine of its engine, or of the first of the engine's ranks: their states are those of the engine."""
        return self.ranks[0].machine

    @property
    def url(self) -> str:
        """Base URL of the agent's own HTTP; empty: it does not answer yet."""
        return self.report.agent_url

    # -- running --

    async def run(self) -> int:
        """Run until the instance has left: 0, or 1 if its engine cannot be kept alive.

        Raises:
            UsageError: the agent's port or the instance's name is taken.
            EngineFailed: the engine failed; carries its last log lines.
        """
        self._code = asyncio.get_running_loop().create_future()
        config = self.config
        gate = Gate(self.spec.instance, ticket_keys=config.ticket_keys, admin_keys=config.admin_keys, bound=config.host)
        traced = tracing("baton-agent")
        runner, self.report.agent_url = await listen(
            agent_app(self, self.report, gate, traced), config.host, config.port
        )
        try:
            if self.announcer is not None:
                await self.announcer.claim(self._code)
            return self._code.result() if self._code.done() else await self._run_tasks(self._code)
        finally:
            with contextlib.suppress(TimeoutError):  # without a goodbye the names are free after a ttl
                async with asyncio.timeout(GOODBYE_S):
                    if self.announcer is not None:
                        await self.announcer.say_goodbye()
            await runner.cleanup()
            if traced is not None:
                await asyncio.to_thread(traced.close)

    async def _run_tasks(self, code: asyncio.Future[int]) -> int:
        failure: EngineFailed | None = None
        tasks = [
            _spawn(keep_running(work, f"{instance}: {name}", logger), name) for instance, name, work in self._works()
        ]
        engine = _spawn(self.engine.run(), "engine")
        self._engine_running = True
        try:
            ends: set[asyncio.Future[Any]] = {engine, code}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({engine})  # nothing of the engine is left after this
            with contextlib.suppress(EngineFailed):
                engine.result()
            exception = engine.exception()
            failure = exception if isinstance(exception, EngineFailed) else None
            while not self._news.empty():
                await self._engine_changed(self._news.get_nowait())
        finally:
            self._readings.stop()
            if self.announcer is not None:
                self.announcer.stop()
            for task in tasks:
                task.cancel()
            for rank in self.ranks if self.spec.evictions else ():
                leave_nothing(self._events_path(rank))
            self._machines.stop()
        if failure is not None:
            raise failure
        return code.result() if code.done() else 0

    def _works(self) -> list[tuple[InstanceId, str, Callable[[], Awaitable[None]]]]:
        """What runs beside the engine: each work's instance, its name, and what begins it."""
        mine = self.spec.instance
        works: list[tuple[InstanceId, str, Callable[[], Awaitable[None]]]] = [
            (mine, "engine's states", self._follow_engine),
            (mine, "engine's load", self._readings.run),
        ]
        if self.announcer is None:
            return works
        works.append((mine, "heartbeats", self.announcer.run))
        for rank in self.ranks:
            if self.spec.evictions:
                path = self._events_path(rank)
                make_room(path)
                works.append((rank.id, "KV events", partial(follow, path, rank.evictions)))
            if self._introductions is not None:
                works.append((rank.id, "introductions", self._introductions.begin(rank).run))
        return works

    def _events_path(self, rank: Rank) -> Path:
        """The socket on which the engine tells of this rank's KV cache."""
        return Path(events_path(self.spec.evictions, self.spec.first_rank + rank.number))

    # -- requests from outside --

    def ask_leave(self) -> None:
        """Handle SIGTERM: drain and end; on a second one, end at once."""
        self._machines.feed(DrainAsked(self.config.drain_s, leave=True, linger_s=self.config.linger_s))

    def ask_drain(self, deadline_s: float) -> None:
        """Take no new work, keep running."""
        self._machines.feed(DrainAsked(deadline_s, leave=False))

    def ask_resume(self) -> None:
        """Take work again."""
        self._machines.feed(ResumeAsked())

    def ask_role(self, role: Role) -> str | None:
        """Take another role. Returns why it cannot, or None."""
        refusal = self.machine.refuses(role)
        if refusal is None:
            self._machines.feed(RoleAsked(role))
        return refusal

    def ask_stop(self) -> None:
        """End now."""
        self._machines.feed(StopAsked())

    def engine_changed(self, change: EngineChange) -> None:
        """Take a change of the engine's process; pass this method to the process as `on_change`."""
        self._news.put_nowait(change)

    def is_ready(self) -> bool:
        """Whether the instance takes work."""
        return all(rank.machine.state is AgentState.READY for rank in self.ranks)

    # -- the ranks' machines --

    def _act(self, effect: Effect) -> None:
        match effect:
            case Publish():
                self._nudge()
                self._readings.look()
            case Say(line):
                self._say(line)
            case StopEngine() if self._machines.need_engine:
                pass  # another rank still needs the engine: the last rank's effect stops it
            case StopEngine() if self._engine_running:
                self.engine.stop(at_once=True)
            case StopEngine():
                self._end(0)
            case Leave(code):
                self._end(code)

    def _end(self, code: int) -> None:
        if self._code is not None and not self._code.done():
            self._code.set_result(code)

    # -- the engine --

    async def _follow_engine(self) -> None:
        while True:
            if self._change is None:
                self._change = await self._news.get()
            await self._engine_changed(self._change)
            self._change = None

    async def _engine_changed(self, change: EngineChange) -> None:
        if change.state == "starting" and self.machine.state is not AgentState.STOPPING:
            await self._number_start(change)
        if change.state == "ready":
            await self._readings.learn_models()
            await self._meet_peers()
        if change.state == "stopping":
            return  # the agent's own doing
        self._machines.feed_each((rank, EngineIs(change.state, change.detail, rank.epoch)) for rank in self.ranks)
        epoch = self.ranks[0].epoch
        self._tell(EngineChange(instance=change.instance, state=change.state, detail=change.detail, epoch=epoch))

    async def _number_start(self, change: EngineChange) -> None:
        """Give every start of the engine an epoch that this name never had: an old reference must not match."""
        if change.epoch == self._local_epoch:
            return
        first = self._local_epoch == 0
        await self._readings.restart()
        for rank in self.ranks:
            rank.restart()
            if first and rank.epoch > 0:
                continue  # drawn together with the name
            if self.announcer is not None:
                await self.announcer.draw_epoch(rank)
            else:
                rank.epoch += 1
        self._local_epoch = change.epoch  # last: a start that could not be numbered is numbered again

    async def _meet_peers(self) -> None:
        """Meet enough peers before the instance takes work; say so if the time was too short."""
        if self._introductions is None or await self._introductions.meet_enough(lambda: not self._news.empty()):
            return
        self._say(
            f"{self.spec.instance} has not met enough others in {MEETING_S:g} s; it takes work that is not handed over"
        )

    def _loaded(self, loads: tuple[Load, ...], tiers: tuple[TierCounts, ...]) -> None:
        for rank, counts in zip(self.ranks, tiers, strict=False):  # without tiers there are none
            rank.speeds.hear(counts)
        for rank, load in zip(self.ranks, loads, strict=True):
            self._machines.feed_each([(rank, LoadRead(rank.read(load)))])

    # -- the registry --

    def _routers_heard(self, routers: list[Member]) -> None:
        """Tell each rank which routers share its credits, and how many legs each router wants."""
        for rank in self.ranks:
            role, names = rank.machine.role, self._readings.names()
            said = (concerning(each.beat, rank.id, role, names, self.config.tenants) for each in routers)
            self._machines.feed_each([(rank, RoutersHeard(tuple(said)))])

    def _name_lost(self, because: str) -> None:
        self._say(f"{self.spec.instance} lost its name: {because}")
        self._machines.feed(DrainAsked(self.config.drain_s, leave=True, own=True))

    def _nudge(self) -> None:
        """What the heartbeats say has changed."""
        if self.announcer is not None:
            self.announcer.nudge()


def _spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(work, name=name)
