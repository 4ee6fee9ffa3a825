"""The lives of engines: agents, heartbeats, the registry as the router reads it, the router's prober.

The agent's machine decides what a state means and how many credits it brings; the supervisor (`engine.vllm.supervise`)
decides when an engine is restarted or given up; the view decides what a reading changes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from cluster.ids import engine_of
from engine.agent import machine as agents
from engine.agent.machine import EngineIs, Leave, Publish, StopEngine
from engine.twin import events as ev
from engine.vllm import supervise
from engine.vllm.supervise import Announce, ChildExited, Healthy, KillChild, StartChild, StopChild, StopSupervised
from router.fleet import events as d
from sim.instance import SimInstance, SimulatedLeg
from sim.kernel import NS, Kernel

if TYPE_CHECKING:
    from sim.front import SimulatedRouter
    from sim.world import World

KILLED: Final = 137
"""Exit code of a process that was killed: 128 + SIGKILL."""


class Lives:
    """Starts, deaths, slowness and silence of one world's instances."""

    def __init__(self, world: World) -> None:
        self._world: Final = world
        self._kernel: Final[Kernel] = world.kernel
        settings = world.settings
        self._beat_ns: Final = round(settings.beat_every_s * NS)
        self._read_ns: Final = round(settings.read_every_s * NS)
        self._ttl_ns: Final = round(settings.ttl_s * NS)
        self._exit_ns: Final = round(settings.exit_s * NS)

    def begin(self) -> None:
        """Start heartbeats, one after the other, and readings."""
        self._read(None)
        self._kernel.at(self._read_ns, self._read_again)
        for at in self._world.instances:
            self._world.rough.begin(at)
            self._kernel.at(at.index * self._beat_ns // len(self._world.instances), self._beat, at)

    # --- engines and agents -------------------------------------------------------------------------------------------

    def start(self, at: SimInstance) -> None:
        """The instance's agent begins, and starts its engine."""
        self._engine(at, supervise.Begin())

    def join(self, at: SimInstance) -> None:
        """The same during the run: the instance sends heartbeats from now on."""
        self.start(at)
        self._world.rough.begin(at)
        self._beat(at)

    def ask(self, at: SimInstance, event: agents.Event) -> None:
        """A request over HTTP to the instance's agent."""
        if not at.gone:
            self._agent(at, at.agent.handle(event, self._kernel.now_s))

    def _agent(self, at: SimInstance, effects: tuple[agents.Effect, ...]) -> None:
        """Carry out the agent's effects."""
        for effect in effects:
            if isinstance(effect, StopEngine):
                self._engine(at, StopSupervised(at_once=True))
            elif isinstance(effect, Leave):
                self._leave(at, effect.code)
            elif isinstance(effect, Publish):
                self._publish(at)
        self._wind(at)

    def _engine(self, at: SimInstance, event: supervise.Event) -> None:
        """An event of the engine's process; carry out the supervisor's effects."""
        for effect in at.engine.handle(event, self._kernel.now_s):
            if isinstance(effect, StartChild):
                self._spawn(at)
            elif isinstance(effect, KillChild | StopChild):
                self._kernel.at(self._kernel.now_ns + self._exit_ns, self._exit, (at, at.epoch))
            elif isinstance(effect, Announce):
                self._announce(at, effect)
        self._wind(at)

    def _announce(self, at: SimInstance, said: Announce) -> None:
        if said.state is supervise.EngineState.STOPPING:
            return  # the agent caused it
        at.epoch = at.engine.epoch
        self._world.provisioning.noted(at, said.state.value, said.because)
        self._agent(at, at.agent.handle(EngineIs(said.state.value, said.because, at.epoch), self._kernel.now_s))

    def _wind(self, at: SimInstance) -> None:
        """Set the timer that wakes its agent and its supervisor."""
        due_s = at.next_wakeup()
        if due_s is None or at.gone:
            return
        due_ns = max(self._kernel.now_ns, math.ceil(due_s * NS))
        while due_ns / NS < due_s:
            due_ns += 1
        if not self._kernel.now_ns <= at.rung_ns <= due_ns:
            at.rung_ns = due_ns
            self._kernel.at(due_ns, self._ring, at)

    def _ring(self, at: SimInstance) -> None:
        at.rung_ns = -1
        if at.gone:
            return
        self._agent(at, at.agent.handle(agents.Tick(), self._kernel.now_s))
        self._engine(at, supervise.Tick())

    def _spawn(self, at: SimInstance) -> None:
        """Begin a process of the engine: after its start-up time it is ready, or fails."""
        delay_ns, fails = self._start_up(at)
        if fails:
            self._kernel.at(self._kernel.now_ns + delay_ns, self._fail, (at, at.epoch))
        elif delay_ns:
            self._kernel.at(self._kernel.now_ns + delay_ns, self._up, (at, at.epoch))
        else:
            self._up((at, at.epoch))

    def _start_up(self, at: SimInstance) -> tuple[int, bool]:
        member, settings = at.member, self._world.settings
        if not self._kernel.events and at.epoch == 1 and not settings.cold_start:
            return 0, False  # it was there before the run
        if member.startup is None:
            return member.start_up_ns, False
        return member.startup.draw(settings.seed, at.name, at.epoch)

    def _up(self, word: tuple[SimInstance, int]) -> None:
        at, epoch = word
        if at.epoch == epoch and at.engine.state is supervise.EngineState.STARTING:
            self._world.tell(at, ev.StartEngine(epoch))

    def _fail(self, word: tuple[SimInstance, int]) -> None:
        at, epoch = word
        if at.epoch == epoch and at.engine.state is supervise.EngineState.STARTING:
            self._world.counts["starts_failed"] += 1
            self._engine(at, ChildExited(epoch, 1))

    def ready(self, at: SimInstance, _: ev.EngineReady) -> None:
        """The engine has started, and takes requests."""
        at.ready = True
        self._engine(at, Healthy(at.epoch))

    def kill(self, at: SimInstance) -> None:
        """The process is killed, and the other data parallel ranks of its engine end with it; its agent sees that at
        once, and starts another.
        """
        if at.ready or at.engine.state is supervise.EngineState.STARTING:
            self._world.counts["killed"] += 1
            for rank in self._ranks(at):
                self._exit((rank, rank.epoch))

    def _ranks(self, at: SimInstance) -> list[SimInstance]:
        """An instance, or all ranks of its engine."""
        if at.member.shape.dp == 1:
            return [at]
        return [each for each in self._world.living if engine_of(each.name) == engine_of(at.name)]

    def _exit(self, word: tuple[SimInstance, int]) -> None:
        """The process ends, with everything in it."""
        at, epoch = word
        if at.epoch != epoch or at.gone:
            return
        if at.ready:
            at.ready = False
            self._world.pulls.break_off(at, wait_ns=self._world.hop_ns)
            self._world.tell(at, ev.Die())
            self._world.energy.died(at)
        self._engine(at, ChildExited(epoch, KILLED))

    def _leave(self, at: SimInstance, code: int) -> None:
        """The agent leaves the registry and ends."""
        self._publish(at)
        at.gone = True
        del self._world.living[at]
        self._world.provisioning.left(at, code)

    def slow(self, at: SimInstance, rate: tuple[int, int], cause: str = "fault") -> None:
        """The process runs at another rate from now on, as far as this cause goes: the rates of all causes multiply."""
        at.slow(self._kernel.now_ns, rate, cause)
        for leg in at.young:
            if leg.first_ns > self._kernel.now_ns:
                self._world.legs.announce(at, leg)
        self._world.arm(at)

    def cut_off(self, at: SimInstance) -> None:
        """No message gets in or out; both ends wait, and give up after `pull_timeout_s` or `stall_s`."""
        at.cut_off = True
        self._world.counts["cut_off"] += 1
        self._world.pulls.break_off(at, wait_ns=round(self._world.settings.pull_timeout_s * NS))
        stalled_ns = self._kernel.now_ns + round(self._world.settings.stall_s * NS)
        for leg in at.legs.values():
            self._kernel.at(stalled_ns, self._stalled, leg)

    def heal(self, at: SimInstance) -> None:
        """The instance can be reached again: waiting messages arrive now."""
        at.cut_off = False
        for call, word in at.held:
            self._kernel.at(self._kernel.now_ns + self._world.hop_ns, call, word)
        at.held.clear()

    def _stalled(self, leg: SimulatedLeg) -> None:
        if leg.at.cut_off:
            leg.passage.lost(leg, f"nothing for {self._world.settings.stall_s:g} s")

    def _beat(self, at: SimInstance) -> None:
        """An agent reads its engine and reports; the router's prober probes."""
        if at.gone:
            return
        if at.ready:
            self._world.tell(at, ev.ReadLoad())
            self._agent(at, at.load_read(at.load_said, self._kernel.now_s))
            if at.pulling:
                self._world.pulls.keep_alive(at)
        if not at.cut_off:
            at.report(self._kernel.now_ns)
            at.heard_ns = self._kernel.now_ns
        self._probe(at)
        if self._world.busy:
            self._kernel.at(self._kernel.now_ns + self._beat_ns, self._beat, at)

    def _tell(self, front: SimulatedRouter, event: d.FleetEvent) -> tuple[d.InstanceLost, ...]:
        """Send an event to a router's view of the fleet."""
        return front.fleet.handle(event, self._kernel.now_ns / NS)

    def _probe(self, at: SimInstance) -> None:
        for front in self._world.fronts:
            view = front.scheduler.view
            if not view.knows(at.name):
                continue
            seen = view.get(at.name)
            if at.ready and not at.cut_off:
                if not seen.up or seen.failures:
                    self._tell(front, d.ProbeSucceeded(at.name, None, None))
                    front.tell(d.FleetMoved())
            elif self._tell(front, d.ProbeFailed(at.name)):
                front.announce_lost(at.name, list(at.legs.values()))

    def _publish(self, at: SimInstance) -> None:
        """Publish a report that does not wait for the next heartbeat; the registry wakes the router."""
        if at.cut_off:
            return
        at.report(self._kernel.now_ns)
        at.heard_ns = self._kernel.now_ns
        if self._kernel.events:
            self._kernel.at(self._kernel.now_ns + round(self._world.settings.registry_ms * 1e6), self._read)

    def _read(self, _: object) -> None:
        """The routers read the registry, as `router.fleet.discovery` does."""
        now_ns, ttl_ns = self._kernel.now_ns, self._ttl_ns
        heard = tuple(at.reported for at in self._world.living if now_ns - at.heard_ns <= ttl_ns)
        for front in self._world.fronts:
            for lost in self._tell(front, d.Folded(heard)):
                front.announce_lost(lost.instance, list(self._world.by_name[lost.instance].legs.values()))
            front.tell(d.FleetMoved())

    def _read_again(self, _: object) -> None:
        self._read(None)
        if self._world.on_progress is not None:
            self._world.on_progress(self._world)
        if self._world.busy:
            self._kernel.at(self._kernel.now_ns + self._read_ns, self._read_again)
