"""One mock instance: a twin, its clock, its port, and the lives of its engine. A shell."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from cluster.errors import bad_request
from cluster.ids import InstanceId, engine_of, rank_of
from cluster.instance import Load
from cluster.readable import json_in
from cluster.urls import netloc
from engine.mock.clock import Clock, WallTime
from engine.mock.faults import ON_INSTANCE, Active, FaultKind, MockFaults, read_faults
from engine.mock.frontend import Frontend
from engine.mock.handoffs import MockHandoffs, Spawn
from engine.mock.listener import MockListener
from engine.mock.metrics import Metrics
from engine.mock.peers import HttpPeers
from engine.mock.routes import Routes
from engine.mock.serving import Serving
from engine.mock.settings import MockSettings
from engine.mock.transfer import Producer
from engine.twin.events import (
    Die,
    Effect,
    EngineReady,
    GiveBack,
    HoldEnded,
    LoadIs,
    NotUsed,
    Preempted,
    PullBlocks,
    ReadLoad,
    RequestFinished,
    RequestLost,
    RequestRefused,
    StartEngine,
)
from engine.twin.machine import Twin

logger = logging.getLogger("baton.mock")


class MockInstance:
    """One engine, as its clients see it. `begin` starts it; `ready` is set while it takes requests.

    It has many attributes because it wires all parts of a mock together: each part is one, and needs several others.
    """

    def __init__(
        self,
        settings: MockSettings,
        host: str,
        port: int,
        peers: HttpPeers,
        spawn: Spawn,
        siblings: Mapping[str, MockInstance],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.settings = settings
        self.ready = asyncio.Event()
        self.epoch = 0
        self.rank = rank_of(InstanceId(settings.name))
        sizes = settings.config.block_size, settings.config.num_blocks
        self.metrics = Metrics(settings.model, *sizes, engine=self.rank or 0)
        self.faults = MockFaults(random.Random(f"{settings.seed}/{settings.name}").random)
        self.routes = Routes(self, siblings)
        self.listener = MockListener(host, port, self.routes)
        self._siblings = siblings
        self._spawn = spawn
        self._loop = loop
        self._peers = peers
        self._timers: dict[int, asyncio.TimerHandle] = {}
        twin = Twin(settings.config, settings.costs)
        self.clock = Clock(
            twin, settings.costs, self._made, self._told, self._moment_over, WallTime(loop), speed=settings.speed
        )
        self.handoffs = MockHandoffs(settings, self.clock, self.faults, self.metrics, peers, spawn)
        here = Producer("", reachable(host), self.listener.port)
        self.serving = Serving(settings, self.clock, self.handoffs, self.metrics, here)
        self.frontend = Frontend(settings, self.faults, self.handoffs, self.serving.start)
        peers.add(here.host, here.port, self.handoffs)

    @property
    def ranks(self) -> list[MockInstance]:
        """The data parallel ranks of its engine, in order; of an engine without ranks, itself alone."""
        if self.rank is None:
            return [self]
        engine = engine_of(InstanceId(self.settings.name))
        found = [each for each in self._siblings.values() if engine_of(InstanceId(each.settings.name)) == engine]
        return sorted(found, key=lambda each: each.rank or 0)

    @property
    def front(self) -> MockListener:
        """The port at which its engine answers."""
        return self.ranks[0].listener

    @property
    def url(self) -> str:
        """Base URL at which its engine answers."""
        return f"http://{netloc(reachable(self.front.host), self.front.port)}"

    @property
    def alive(self) -> bool:
        """Whether its engine runs or starts."""
        return bool(self.handoffs.engine_id)

    def begin(self) -> None:
        """Start the engine, under a new epoch."""
        self.epoch += 1
        engine_id = str(uuid.uuid4())
        self.handoffs.begin_life(self.epoch, engine_id)
        self.serving.replies.here = Producer(engine_id, self.serving.replies.here.host, self.serving.replies.here.port)
        self.clock.tell(StartEngine(self.epoch))

    def die(self) -> None:
        """End the engine's process, and with it all connections and holds."""
        self.ready.clear()
        self.listener.shut()
        self.clock.tell(Die())
        self.handoffs.begin_life(self.epoch, "")
        self.listener.drop_all()
        self.metrics = self.metrics.anew()
        self.handoffs.metrics = self.serving.metrics = self.metrics

    def close(self) -> None:
        """Stop the clock and close the port, for good."""
        for timer in self._timers.values():
            timer.cancel()
        self.clock.stop()
        self.handoffs.stop()
        self._peers.remove(self.serving.replies.here.host, self.serving.replies.here.port)
        self.listener.close()

    # -- the twin's effects --

    def _made(self, request: Any, key: int, first: int, count: int) -> None:
        self.serving.made(request, key, first, count)

    def _moment_over(self) -> None:
        self.serving.replies.flush()

    def _told(self, effect: Effect) -> None:
        match effect:
            case RequestFinished():
                self.serving.finished(effect)
            case PullBlocks():
                self.handoffs.pull(effect)
            case GiveBack(source=source):
                self.handoffs.give_back(source)
            case NotUsed(request=request):
                self.serving.not_used(request)
            case HoldEnded():
                self.handoffs.ended(effect)
            case RequestRefused(request=request) if not self.ready.is_set():
                self.serving.lost(request)  # it was on its way to an engine that died
            case RequestRefused(request=request, because=because):
                self.serving.refused(request, because)
            case RequestLost(request=request):
                self.serving.lost(request)
            case Preempted():
                self.metrics.counts["num_preemptions"] += 1
            case EngineReady():
                self._spawn(self._open())
            case _:
                pass  # answers to questions (`Clock.read`)

    async def _open(self) -> None:
        if not self.faults.has(FaultKind.CLOSE):
            await self.listener.open()
        self.ready.set()
        logger.info("%s: engine ready at %s, epoch %d", self.settings.name, self.url, self.epoch)

    # -- its state --

    def load(self) -> Load:
        """Its load now, as its `/metrics` report it."""
        answer = self.clock.read(ReadLoad())
        assert isinstance(answer, LoadIs)
        return answer.load

    def state(self) -> dict[str, Any]:
        """What `GET /mock/state` answers."""
        load = self.load()
        return {
            "instance": self.settings.name,
            "role": self.settings.role.value,
            "url": self.url,
            "model": self.settings.model,
            "epoch": self.epoch,
            "engine_id": self.handoffs.engine_id,
            "ready": self.ready.is_set(),
            "speed": self.settings.speed,
            "load": {"running": load.running, "waiting": load.waiting, "kv_usage": load.kv_usage},
            "requests": self.serving.open_requests,
            "holds": self.handoffs.holds(),
            "lateness": self.clock.lateness.as_json(),
            **self.faults.as_json(),
        }

    # -- faults --

    def set_faults(self, raw: bytes) -> dict[str, Any]:
        """Set faults from JSON, and begin those of the whole instance.

        Raises:
            ApiError: this is no fault, or no list of faults.
        """
        try:
            body = json_in(raw)
        except msgspec.DecodeError as error:
            raise bad_request(f"This is not JSON: {error}") from None
        for active in self.faults.add(read_faults(body)):
            self._strike(active)
        return self.faults.as_json()

    def clear_faults(self) -> dict[str, Any]:
        """Take all faults back. An engine that a fault has ended is started now."""
        for active in self.faults.clear():
            self._over(active)
        return self.faults.as_json()

    def _strike(self, active: Active) -> None:
        """Begin a fault, if it is one of the whole instance."""
        fault = active.fault
        if fault.fault not in ON_INSTANCE:
            return
        logger.info("%s: %s", self.settings.name, active.as_json())
        active.struck += 1
        if fault.fault is FaultKind.DIE:
            self._loop.call_soon(self._die, active)  # the request that set the fault is answered first
            return
        if fault.fault is FaultKind.CLOSE:
            self.front.shut()
        elif fault.fault is FaultKind.SLOW:
            self._set_speed()
        self._end_in_time(active)

    def _die(self, active: Active) -> None:
        if active not in self.faults.active:
            return  # removed before it struck
        for rank in self.ranks:  # vLLM ends the whole server with one of its engine cores
            rank.die()
        self._end_in_time(active)

    def _end_in_time(self, active: Active) -> None:
        seconds = active.fault.seconds
        if seconds is not None:
            self._timers[active.number] = self._loop.call_later(seconds, self._end, active)

    def _end(self, active: Active) -> None:
        self.faults.end(active.number)
        self._over(active)

    def _over(self, active: Active) -> None:
        if timer := self._timers.pop(active.number, None):
            timer.cancel()
        match active.fault.fault:
            case FaultKind.DIE if not any(rank.faults.has(FaultKind.DIE) for rank in self.ranks):
                for rank in self.ranks:
                    if not rank.alive:  # alive: another fault's end has started it, or none had struck
                        rank.begin()
            case FaultKind.CLOSE if self.ready.is_set() and not self.faults.has(FaultKind.CLOSE):
                self._spawn(self.front.open())
            case FaultKind.SLOW:
                self._set_speed()
            case FaultKind.HANG_PULL:
                self.handoffs.fail_hung()
            case _:
                pass

    def _set_speed(self) -> None:
        self.clock.set_speed(self.settings.speed / self.faults.factor)


def reachable(host: str) -> str:
    """The address at which other programs of this machine reach a server that listens on `host`."""
    return "127.0.0.1" if host in {"", "0.0.0.0", "::"} else host  # noqa: S104 - recognised, not listened on
