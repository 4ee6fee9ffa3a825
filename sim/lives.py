"""The lives of engines, and who hears of them: agents, heartbeats, the registry as the router reads it, its prober.

What a state means and how many credits it brings is the agent's machine's business; what a reading changes, the view's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.agent.machine import State
from engine.twin import events as ev
from sim.instance import Leg, SimInstance
from sim.kernel import NS, Kernel

if TYPE_CHECKING:
    from sim.world import World


class Lives:
    """Starts, deaths, slowness and silence of one world's instances."""

    def __init__(self, world: World) -> None:
        self._world: Final = world
        self._kernel: Final[Kernel] = world.kernel
        settings = world.settings
        self._beat_ns: Final = round(settings.beat_every_s * NS)
        self._read_ns: Final = round(settings.read_every_s * NS)
        self._ttl_ns: Final = round(settings.ttl_s * NS)

    def begin(self) -> None:
        """Heartbeats, one after the other, and readings."""
        self._read(None)
        self._kernel.at(self._read_ns, self._read_again)
        for at in self._world.instances:
            self._kernel.at(at.index * self._beat_ns // len(self._world.instances), self._beat, at)

    def start(self, at: SimInstance) -> None:
        at.epoch += 1
        at.engine_is("starting", self._kernel.now_s)
        if self._world.settings.cold_start:
            self._kernel.at(self._kernel.now_ns + at.member.start_up_ns, self._up, at)
        else:
            self._up(at)

    def _up(self, at: SimInstance) -> None:
        self._world.tell(at, ev.Start(at.epoch))

    def ready(self, at: SimInstance, _: ev.Ready) -> None:
        at.ready = True
        at.engine_is("ready", self._kernel.now_s)
        self._publish(at)

    def kill(self, at: SimInstance) -> None:
        """Its process is gone; its agent sees that at once, and starts another."""
        if not at.ready:
            return
        self._world.counts["killed"] += 1
        at.ready = False
        self._world.pulls.break_off(at, wait_ns=self._world.hop_ns)
        self._world.tell(at, ev.Die())
        at.epoch += 1
        at.engine_is("restarting", self._kernel.now_s)
        self._publish(at)
        self._kernel.at(self._kernel.now_ns + at.member.start_up_ns, self._up, at)

    def slow(self, at: SimInstance, rate: tuple[int, int]) -> None:
        """Its process runs at another rate from now on."""
        at.slow(self._kernel.now_ns, rate)
        self._world.counts["slowed"] += rate[0] < rate[1]
        for leg in at.young:
            if leg.first_ns > self._kernel.now_ns:
                self._world.announce(at, leg)
        self._world.arm(at)

    def cut_off(self, at: SimInstance) -> None:
        """No message gets in or out; both ends wait, and give up after a while."""
        at.cut_off = True
        self._world.counts["cut_off"] += 1
        self._world.pulls.break_off(at, wait_ns=round(self._world.settings.pull_timeout_s * NS))
        stalled_ns = self._kernel.now_ns + round(self._world.settings.stall_s * NS)
        for leg in at.legs.values():
            self._kernel.at(stalled_ns, self._stalled, leg)

    def heal(self, at: SimInstance) -> None:
        """It can be reached again: what was held back comes now."""
        at.cut_off = False
        for call, word in at.held:
            self._kernel.at(self._kernel.now_ns + self._world.hop_ns, call, word)
        at.held.clear()

    def _stalled(self, leg: Leg) -> None:
        if leg.at.cut_off:
            leg.passage.lost(leg, f"nothing for {self._world.settings.stall_s:g} s")

    def _beat(self, at: SimInstance) -> None:
        """An agent looks at its engine and says how it is; the router's prober knocks."""
        if at.ready:
            self._world.tell(at, ev.ReadLoad())
            at.load_read(at.load_said, self._kernel.now_s)
            if at.pulling:
                self._world.pulls.keep_alive(at)
        if not at.cut_off:
            at.report()
            at.heard_ns = self._kernel.now_ns
        self._probe(at)
        if self._world.busy:
            self._kernel.at(self._kernel.now_ns + self._beat_ns, self._beat, at)

    def _probe(self, at: SimInstance) -> None:
        if not self._world.view.knows(at.name):
            return
        seen = self._world.view.get(at.name)
        if at.ready and not at.cut_off:
            if not seen.up or seen.failures:
                self._world.view.seen(at.name, None, None)
                self._world.front.call(self._world.front.desk.fleet_changed())
        elif self._world.view.probe_failed(at.name):
            self._world.front.announce_lost(at.name, list(at.legs.values()))

    def _publish(self, at: SimInstance) -> None:
        """Word that does not wait for the next heartbeat; the registry wakes the router."""
        if at.cut_off:
            return
        at.report()
        at.heard_ns = self._kernel.now_ns
        if self._kernel.events:
            self._kernel.at(self._kernel.now_ns + round(self._world.settings.registry_ms * 1e6), self._read)

    def _read(self, _: object) -> None:
        """The router reads the registry, as `router.watch` does."""
        now_ns, ttl_ns = self._kernel.now_ns, self._ttl_ns
        heard = tuple(
            at.reported
            for at in self._world.instances
            if now_ns - at.heard_ns <= ttl_ns and at.agent.state is not State.STARTING
        )
        for name in sorted(self._world.view.fold(heard)):  # a set: in the same order at every run
            self._world.front.announce_lost(name, list(self._world.by_name[name].legs.values()))
        self._world.front.call(self._world.front.desk.fleet_changed())

    def _read_again(self, _: object) -> None:
        self._read(None)
        if self._world.on_progress is not None:
            self._world.on_progress(self._world)
        if self._world.busy:
            self._kernel.at(self._kernel.now_ns + self._read_ns, self._read_again)
