"""Stand-ins for parts of the controller's loop: a controller with a script, and an actuator in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput.actions import Action, Drain, Flip, Start, Stop
from goodput.actuate.existing import Existing, ExistingFleet, InstanceLife
from goodput.decision import Act, Decision, Effect, Event, Told, What
from goodput.decision import Observed as Look
from goodput.observation import InstanceSeen, Observation, Phase

MODEL = "meta-llama/Llama-3.1-8B"
FILE = """\
models:
  - name: meta-llama/Llama-3.1-8B
    pools:
      prefill: {min: 1, max: 3, gpu: L4}
      decode: {min: 1, max: 3, gpu: L4}
slo:
  chat: {ttft_ms: 6000, tpot_ms: 150, attainment: 0.9}
"""
"""A cluster file whose pools may be resized."""


@dataclass
class Scripted:
    """A controller that wants `wanted` instances of each pool. A look drains at most one instance of each pool."""

    wanted: Callable[[Observation], dict[str, int]]
    looks: list[Observation] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    every_s: float = 0.3
    due: float | None = None
    used: set[str] = field(default_factory=set)
    """Names of all instances so far: no name is used twice."""

    def handle(self, event: Event, now: float) -> tuple[Effect, ...]:
        self.events.append(event)
        if not isinstance(event, Look):
            return ()
        self.due = now + self.every_s
        self.looks.append(event.seen)
        if event.seen.instances is None or not event.seen.leads:
            return (Told(Decision(at_s=now, what=What.HOLD, because="unknown")),)
        actions = [*self._actions(event.seen.instances, self.wanted(event.seen))]
        what = What.UP if actions and isinstance(actions[0], Start) else What.DOWN if actions else What.HOLD
        told = Told(Decision(at_s=now, what=what, because="the script", actions=tuple(actions)))
        return (told, *map(Act, actions))

    def _actions(self, seen: tuple[InstanceSeen, ...], wanted: dict[str, int]) -> Iterable[Action]:
        self.used.update(each.id for each in seen)
        for pool, count in wanted.items():
            mine = [each for each in seen if each.pool == pool and not each.leaving and each.phase is not Phase.FAILED]
            staying = sorted(mine, key=lambda each: each.id)
            free = (name for number in range(99) if (name := InstanceId(f"{pool}-{number}")) not in self.used)
            for _ in range(count - len(staying)):
                yield Start(instance=next(free), pool=pool, because="the script")
            for each in staying[count:][-1:]:
                yield Drain(instance=each.id, deadline_s=20.0, because="the script")

    def next_wakeup(self) -> float | None:
        return self.due


class InMemory:
    """An actuator whose instances are only names. It records which instances it has started and flipped."""

    def __init__(self) -> None:
        self.there: dict[InstanceId, Existing] = {}
        self.started: list[InstanceId] = []
        self.flipped: list[tuple[InstanceId, Role]] = []
        self.down = False

    async def observe(self) -> ExistingFleet:
        return ExistingFleet(now_s=0.0, instances=tuple(self.there.values()))

    async def start(self, action: Start) -> str:
        if action.instance not in self.there:
            self.started.append(action.instance)
            self.there[action.instance] = Existing(
                instance=action.instance, pool=action.pool, life=InstanceLife.RUNNING
            )
        return ""

    async def flip(self, action: Flip) -> str:
        self.flipped.append((action.instance, action.role))
        return ""

    async def drain(self, action: Drain) -> str:
        self.there.pop(action.instance, None)
        return ""

    async def stop(self, action: Stop) -> str:
        self.there.pop(action.instance, None)
        return ""
