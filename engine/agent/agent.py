"""Runs one instance: its engine, its heartbeats, its admin port, under the rules of `AgentMachine`. A shell."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.errors import EngineFailed
from cluster.instance import Role, total_load
from cluster.registry.membership import Heartbeat, Member, MemberState
from cluster.registry.registry import Registry, RegistryDown
from cluster.telemetry import tracing
from engine.agent.announcer import Announcer
from engine.agent.grants import concerning
from engine.agent.http import Gate, agent_app, listen
from engine.agent.kv_events import follow, make_room
from engine.agent.machine import (
    AgentMachine,
    AgentState,
    DrainAsked,
    Effect,
    EngineIs,
    Event,
    Leave,
    LoadRead,
    Publish,
    ResumeAsked,
    RoleAsked,
    RoutersHeard,
    Say,
    StopAsked,
    StopEngine,
    Tick,
)
from engine.agent.meetings import exposition
from engine.agent.rank import Rank, exposition_of, figures
from engine.agent.rules import RoleRules
from engine.agent.transfers import MEETING_S, Transfers
from engine.vllm.adapters import Adapters
from engine.vllm.child import EngineChange, EngineProcess
from engine.vllm.evictions import events_path
from engine.vllm.probe import Probe, Unwell
from kvtransfer.asks import door_of
from kvtransfer.seal import Identity
from kvtransfer.ticket import SigningKey

LOOK_EVERY_S = 0.5
"""Seconds between two readings of the engine's metrics: the figures in a heartbeat are never older than this plus one
heartbeat."""

MODELS_EVERY_LOOKS = 20
"""Readings of the metrics between two of the models: adapters are loaded and unloaded while an engine runs (ten
seconds)."""

ADAPTERS_EVERY_LOOKS = 2
"""The same for an engine that has adapters: a name with new weights is noticed within a second."""

GOODBYE_S = 5.0
"""How long leaving the registry may take: a few of its time limits, when its name is fought over or its connection is
broken."""

_SERVING = frozenset({AgentState.STARTING, AgentState.READY, AgentState.RESTARTING, AgentState.DRAINING})


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """The settings of an agent."""

    host: str = "127.0.0.1"
    port: int = 0
    """Port of the agent's own HTTP; 0 = a free one."""
    drain_s: float = 30.0
    """Longest drain after SIGTERM."""
    linger_s: float = 0.0
    """How long an instance that is ready takes work after SIGTERM, before it drains."""
    revision: str = ""
    weights: Callable[[], str] = str
    """Identifies the weights that the engine serves (`engine.vllm.weights`); may read files. Empty: unknown."""
    adapter: Callable[[str], str] = lambda _: ""
    """Identifies the files in a LoRA adapter's folder; may read them. Empty: unknown."""
    adapter_marks: Callable[[str], tuple[object, ...]] = lambda _: ()
    """Tells whether those files were touched since (`engine.vllm.adapters`)."""
    node: str = ""
    """Identifies the machine (`engine.agent.node`)."""
    tenants: tuple[str, ...] = ()
    """The only tenants whose requests the instance serves; none: all tenants."""
    ticket_keys: Callable[[], tuple[SigningKey, ...]] | None = None
    """Gives this instance's ticket keys, which check requests to its agent. None: it has no keys."""
    admin_keys: Callable[[], tuple[str, ...]] | None = None
    """Gives the digests of operators' keys, for requests from other machines. None: there are no such keys."""


class Agent:
    """One instance of the fleet. `run` returns the process's exit code.

    The class is long because it wires the parts of an agent together. The rules stand in the modules beside it; a
    method here is a few lines for one part, one effect or one clock.
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
        identity: Identity | None = None,
    ) -> None:
        self.engine = engine
        self.spec = engine.spec
        tiered = self.spec.tiers is not None
        self.config = config
        self.registry = registry
        self.ranks = tuple(
            Rank(AgentMachine(name=name, rules=rules, role=self.spec.role, flips=flips or {}), tiered=tiered)
            for name in self.spec.instances
        )
        self.url = ""
        self._identity = identity
        self._tell = tell
        self._say = say
        self._id = secrets.token_hex(8)
        self._models: tuple[dict[str, Any], ...] = ()
        self._weights = ""
        self._adapters = Adapters(config.adapter, config.adapter_marks)
        self._look = asyncio.Event()
        self._code: asyncio.Future[int] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._news: asyncio.Queue[EngineChange] = asyncio.Queue()
        self._engine_running = False
        self._local_epoch = 0
        self._over = False
        self.announcer = (
            None
            if registry is None
            else Announcer(
                registry,
                self._id,
                self.ranks,
                beat=self._heartbeat,
                heard=self._routers_heard,
                lost=self._name_lost,
                say=say,
            )
        )
        """Its part in the registry; None: it has no registry."""

    @property
    def machine(self) -> AgentMachine:
        """The machine of its engine, or of the first of the engine's ranks: their states are those of the engine."""
        return self.ranks[0].machine

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
        runner, self.url = await listen(agent_app(self, gate, traced), config.host, config.port)
        try:
            if self.announcer is not None:
                await self.announcer.claim(self._code)
            return self._code.result() if self._code.done() else await self._run_tasks(self._code)
        finally:
            with contextlib.suppress(TimeoutError):  # its lease ends without a goodbye, too
                async with asyncio.timeout(GOODBYE_S):
                    if self.announcer is not None:
                        await self.announcer.say_goodbye()
            await runner.cleanup()
            if traced is not None:
                await asyncio.to_thread(traced.close)

    async def _run_tasks(self, code: asyncio.Future[int]) -> int:
        failure: EngineFailed | None = None
        tasks = [self._spawn(work, name) for work, name in self._works()]
        engine = self._spawn(self.engine.run(), "engine")
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
            self._over = True
            if self.announcer is not None:
                self.announcer.stop()
            for task in tasks:
                task.cancel()
            self._disarm()
        if failure is not None:
            raise failure
        return code.result() if code.done() else 0

    def _works(self) -> list[tuple[Coroutine[Any, Any, None], str]]:
        works = [(self._follow_engine(), "news"), (self._watch_load(), "load")]
        if self.registry is None or self.announcer is None:
            return works
        works.append((self.announcer.run(), "beats"))
        for rank in self.ranks:
            if self.spec.evictions:
                path = Path(events_path(self.spec.evictions, self.spec.first_rank + rank.number))
                make_room(path)
                works.append((follow(path, rank.evictions), f"evictions of {rank.id}"))
            if self._identity is not None and self.spec.door:
                rank.transfers = self._transfers(rank, self._identity.of_rank(rank.id), self.registry)
                works.append((rank.transfers.run(), f"transfers of {rank.id}"))
        return works

    def _transfers(self, rank: Rank, identity: Identity, registry: Registry) -> Transfers:
        """The part that introduces a rank to its peers."""
        return Transfers(
            Path(door_of(self.spec.door, rank.number)),
            registry,
            identity,
            self._id,
            epoch=lambda: max(1, rank.machine.epoch),
            role=lambda: rank.machine.role,
            models=lambda: [str(entry["id"]) for entry in self._models if "id" in entry],
            shares=self.spec.has_peers,
            on_change=self._nudge,
        )

    @staticmethod
    def _spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, name=name)

        # -- requests from outside --

    def ask_leave(self) -> None:
        """Handle SIGTERM: drain and end; on a second one, end at once."""
        self._feed(DrainAsked(self.config.drain_s, leave=True, linger_s=self.config.linger_s))

    def ask_drain(self, deadline_s: float) -> None:
        """Take no new work, keep running."""
        self._feed(DrainAsked(deadline_s, leave=False))

    def ask_resume(self) -> None:
        """Take work again."""
        self._feed(ResumeAsked())

    def ask_role(self, role: Role) -> str | None:
        """Take another role; the reason if it cannot, else None."""
        refusal = self.machine.refuses(role)
        if refusal is None:
            self._feed(RoleAsked(role))
        return refusal

    def ask_stop(self) -> None:
        """End now."""
        self._feed(StopAsked())

    def engine_changed(self, change: EngineChange) -> None:
        """Take a change of the engine's process; pass this method to the process as `on_change`."""
        self._news.put_nowait(change)

    def is_ready(self) -> bool:
        """Whether the instance takes work."""
        return all(rank.machine.state is AgentState.READY for rank in self.ranks)

    def state(self) -> dict[str, Any]:
        """Everything that the agent knows of the instance."""
        machine = self.machine
        told = {
            "instance": self.spec.instance,
            "role": machine.role.value,
            "flips": sorted(role.value for role in machine.flips),
            "state": machine.state.value,
            "drained": all(rank.machine.drained for rank in self.ranks),
            "detail": machine.detail,
            "epoch": machine.epoch,
            "engine": self.spec.url,
            "agent": self.url,
            "pid": os.getpid(),
            "models": [entry.get("id") for entry in self._models],
            "weights": self._weights,
            "node": self.config.node,
            "credits": sum(rank.machine.credits for rank in self.ranks),
            "grants": self.ranks[0].grants(),
            "load": figures(total_load([rank.machine.load for rank in self.ranks])),
            "pulls": [
                asdict(each)
                for rank in self.ranks
                if rank.transfers is not None
                for each in rank.transfers.handoffs.pulls
            ],
            "log": str(self.engine.log_path),
        }
        return told if len(self.ranks) == 1 else {**told, "ranks": [rank.told() for rank in self.ranks]}

    def metrics(self) -> str:
        """The metrics as Prometheus text."""
        handoffs = {rank.id: rank.transfers.handoffs for rank in self.ranks if rank.transfers is not None}
        return exposition_of(self.ranks) + exposition(handoffs)

    # -- the machine --

    def _feed(self, event: Event) -> None:
        """Tell all ranks: what happens to an engine happens to each of them."""
        now = asyncio.get_running_loop().time()
        self._do([effect for rank in self.ranks for effect in rank.machine.handle(event, now)])

    def _feed_rank(self, rank: Rank, event: Event) -> None:
        self._do(rank.machine.handle(event, asyncio.get_running_loop().time()))

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Publish():
                    self._nudge()
                    self._look.set()
                case Say(line):
                    self._say(line)
                case StopEngine() if any(rank.machine.state in _SERVING for rank in self.ranks):
                    pass  # another rank has work: the last one of them stops the engine
                case StopEngine() if self._engine_running:
                    self.engine.stop(at_once=True)
                case StopEngine():
                    self._end(0)
                case Leave(code):
                    self._end(code)
        self._disarm()
        due = min((at for rank in self.ranks if (at := rank.machine.next_wakeup()) is not None), default=None)
        if due is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self._feed, Tick())

    def _end(self, code: int) -> None:
        if self._code is not None and not self._code.done():
            self._code.set_result(code)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- the engine --

    async def _follow_engine(self) -> None:
        while True:
            await self._engine_changed(await self._news.get())

    async def _engine_changed(self, change: EngineChange) -> None:
        if change.state == "starting" and self.machine.state is not AgentState.STOPPING:
            await self._number_start(change)
        if change.state == "ready":
            await self._learn_models()
            await self._meet_peers()
        if change.state == "stopping":
            return  # the agent's own doing
        now = asyncio.get_running_loop().time()
        events = [(rank, EngineIs(change.state, change.detail, rank.epoch)) for rank in self.ranks]
        self._do([effect for rank, event in events for effect in rank.machine.handle(event, now)])
        epoch = self.ranks[0].epoch
        self._tell(EngineChange(instance=change.instance, state=change.state, detail=change.detail, epoch=epoch))

    async def _number_start(self, change: EngineChange) -> None:
        """Give every start of the engine an epoch that this name never had: an old reference must not match."""
        if change.epoch == self._local_epoch:
            return
        first, self._local_epoch = self._local_epoch == 0, change.epoch
        self._adapters.restart()
        await self._name_weights()
        for rank in self.ranks:
            rank.evictions.restart()
            if first and rank.epoch > 0:
                continue  # drawn together with the name
            above, rank.epoch = rank.epoch, rank.epoch + 1
            if self.registry is not None:
                with contextlib.suppress(RegistryDown):
                    rank.epoch = await self.registry.next_epoch(rank.id, above)

    async def _name_weights(self) -> None:
        """Identify the weights at every start of the engine: the files may have changed."""
        self._weights = await asyncio.to_thread(self.config.weights)

    async def _meet_peers(self) -> None:
        """Meet enough peers before the instance takes work, within a time limit, so that no request waits for a
        handshake.
        """
        met = [rank.transfers for rank in self.ranks if rank.transfers is not None]
        if not met:
            return
        self._nudge()  # announce the models now, so that peers know to meet this engine
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MEETING_S):
                for each in met:
                    while not each.acquainted.enough and self._news.empty():
                        await each.looked()
                return
        self._say(
            f"{self.spec.instance} has not met enough others in {MEETING_S:g} s; it takes work that is not handed over"
        )

    async def _learn_models(self) -> None:
        if not self._weights:
            await self._name_weights()  # the engine may have downloaded them
        async with self._probe() as probe:
            with contextlib.suppress(Unwell):
                await self._hear_models(await probe.models())

    async def _hear_models(self, entries: tuple[dict[str, Any], ...]) -> None:
        """Publish the models only if one is new or gone: vLLM gives its entries a new date at every reading."""
        before = self._adapters.digests
        await asyncio.to_thread(self._adapters.look, entries)
        if [_meaning(entry) for entry in entries] != [_meaning(entry) for entry in self._models]:
            self._models = entries
        if before != self._adapters.digests:
            self._nudge()

    @property
    def _has_adapters(self) -> bool:
        return bool(self._adapters.digests)

    def _probe(self) -> Probe:
        return Probe(self.spec.url, self.spec.api_key(os.environ))

    async def _watch_load(self) -> None:
        looks = 0
        async with self._probe() as probe:
            while not self._over:
                if any(rank.machine.state in {AgentState.READY, AgentState.DRAINING} for rank in self.ranks):
                    with contextlib.suppress(Unwell):
                        for rank, load in zip(self.ranks, await probe.loads(len(self.ranks)), strict=True):
                            self._feed_rank(rank, LoadRead(rank.read(load)))
                        looks += 1
                        if self._adapters.check():
                            self._nudge()
                        if looks % (ADAPTERS_EVERY_LOOKS if self._has_adapters else MODELS_EVERY_LOOKS) == 0:
                            await self._hear_models(await probe.models())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._look.wait()
                self._look.clear()

    # -- the registry --

    def _heartbeat(self, rank: Rank) -> Heartbeat:
        rank.seq += 1
        machine = rank.machine
        epoch = max(1, machine.epoch)
        return Heartbeat(
            id=rank.id,
            agent=self._id,
            where=f"{socket.gethostname()}:{os.getpid()}",
            epoch=epoch,
            seq=rank.seq,
            role=machine.role,
            models=self._models,
            adapters=self._adapters.digests,
            url=self.spec.url,
            agent_url=self.url,
            state=MemberState(machine.state.value),
            detail=machine.detail[:500],
            load=machine.load,
            credits=machine.credits,
            grants=machine.grants((epoch, rank.seq)),
            shuns=rank.shuns(),
            peers=rank.transfers is not None and rank.transfers.shares,
            evicted=(rank.evictions.tokens, rank.evictions.clears),
            kept=rank.evictions.kept,
            revision=self.config.revision,
            weights=self._weights,
            node=self.config.node,
            tenants=self.config.tenants,
            pins=self.spec.pins,
            early=rank.transfers is not None and rank.transfers.early,
            sent_at=time.time(),  # noqa: TID251 - for information only, no decision depends on it
        )

    def _routers_heard(self, routers: list[Member]) -> None:
        """Tell each rank which routers share its credits, and how many each of them wants."""
        names = [str(entry["id"]) for entry in self._models if "id" in entry]
        for rank in self.ranks:
            said = (concerning(each.beat, rank.id, rank.machine.role, names, self.config.tenants) for each in routers)
            self._feed_rank(rank, RoutersHeard(tuple(said)))

    def _name_lost(self, because: str) -> None:
        self._say(f"{self.spec.instance} lost its name: {because}")
        self._feed(DrainAsked(self.config.drain_s, leave=True))

    def _nudge(self) -> None:
        """What the heartbeats say has changed."""
        if self.announcer is not None:
            self.announcer.nudge()


def _meaning(entry: dict[str, Any]) -> tuple[object, ...]:
    """The meaning of a ``/v1/models`` entry: the model and its name, without dates."""
    return entry.get("id"), entry.get("root"), entry.get("parent")
