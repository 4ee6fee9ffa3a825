"""A fleet without engines for tests of the goodput controller: counters of requests, and instances with start-up times.

It runs hours of controller time in seconds. Requests end at once, and all meet their targets unless a test sets `met`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cluster.ids import InstanceId
from cluster.instance import Role
from costs import shipped
from goodput import actions as do
from goodput.budget import Budget, Footprint
from goodput.control_rules import ControlRules
from goodput.controller import Controller
from goodput.decision import Act, Answered, Check, Checked, Decision, Effect, Event, Observed, Told
from goodput.decisionlog import encode
from goodput.demand import ClassPromise
from goodput.observation import ClassCounts, InstanceSeen, Observation, Phase, RouterCounts
from goodput.pools import ScalingPool
from goodput.sketch import Counting
from sim.experiments.scaling import TARGETS, engine_of_member
from sim.experiments.systems import EqualInstances, Shelf

PROMISE = ClassPromise(ttft_ms=TARGETS.ttft_ms, tpot_ms=TARGETS.tpot_ms, attainment=0.95)


def pools(startup_s: float = 60.0, **rest: Any) -> list[ScalingPool]:
    """A prefill pool and a decode pool of the same engine, whose instances can flip roles."""
    shelf = Shelf(shipped.models(), shipped.profiles())
    found = []
    for role in (Role.PREFILL, Role.DECODE):
        one = shelf.member("Qwen/Qwen3-32B", EqualInstances(role=role, count=1, tp=2, gpu="A100"))
        fields: dict[str, Any] = {"min": 1, "max": 16, "flips": True, "startup_s": startup_s, **rest}
        found.append(
            ScalingPool(
                name=role.value,
                role=role,
                engine=engine_of_member(one),
                footprint=Footprint(gpu="A100", gpus=2, price_per_hour=3.0, power_w=800.0),
                first_token_ms=one.prompt_front_ns / 1e6,
                **fields,
            )
        )
    return found


@dataclass
class PretendFleet:
    """The actuator and the router's counters in one object."""

    startup_s: float = 60.0
    instances: dict[InstanceId, InstanceSeen] = field(default_factory=dict)
    gpus: int | None = None
    """How many GPUs exist; None: no limit."""
    taken: int = 0
    """How many of `gpus` other programs use."""
    elsewhere: dict[str, int] = field(default_factory=dict)
    """GPUs that other models' instances use, by type."""
    life: str = "1"
    actions: list[tuple[float, do.Action]] = field(default_factory=list)
    most_gpus: int = 0
    prompts: Counting = field(default_factory=Counting)
    answers: Counting = field(default_factory=Counting)
    arrivals: int = 0
    ended: int = 0
    met: int = 0
    hears: bool = True
    waiting: int = 0
    prompt: int = 8000
    answer: int = 1000
    starts_fail: bool = False
    failing: frozenset[str] = frozenset()
    """Pools whose instances fail five seconds after they were asked for."""
    stuck: frozenset[str] = frozenset()
    """Pools whose instances start for ever."""
    refuses: Callable[[do.Action], str] = lambda _: ""
    """Why an action is refused; empty: it is not."""
    drained: set[InstanceId] = field(default_factory=set)
    """Instances that were seen to drain at the last look: they are gone at the next one."""

    @staticmethod
    def of(prefills: int, decodes: int, **rest: Any) -> PretendFleet:
        fleet = PretendFleet(**rest)
        for role, count in ((Role.PREFILL, prefills), (Role.DECODE, decodes)):
            for number in range(count):
                name = InstanceId(f"{role.value}-first-{number}")
                fleet.instances[name] = InstanceSeen(id=name, pool=role.value, role=role, phase=Phase.READY, flips=True)
        return fleet

    def arrive(self, count: int, met: float = 1.0) -> None:
        """Count so many requests, which end at once. `met`: the share that meets its targets."""
        for _ in range(count):
            self.prompts.add(self.prompt)
            self.answers.add(self.answer)
        self.arrivals += count
        self.ended += count
        self.met += round(count * met)

    def counts(self, now: float) -> RouterCounts:
        row = ClassCounts(
            arrivals=self.arrivals,
            prompts=self.prompts.state(),
            answers=self.answers.state(),
            computed_tokens=self.arrivals * self.prompt,
            ended=self.ended,
            met=self.met,
            late_first=self.ended - self.met,
        )
        return RouterCounts(
            router="r0", life=self.life, at_s=now, classes={"": row}, waiting=self.waiting, oldest_wait_s=0.0
        )

    def heard(self, now: float) -> tuple[RouterCounts, ...]:
        """The counters of the routers that answer."""
        return (self.counts(now),) if self.hears else ()

    def observe(self, now: float) -> tuple[InstanceSeen, ...]:
        """The instances now. Instances whose start-up time is over are ready, drained ones are gone."""
        for name in self.drained & self.instances.keys():
            del self.instances[name]
        self.drained = {name for name, each in self.instances.items() if each.leaving}
        for name, each in [*self.instances.items()]:
            if each.phase is Phase.PENDING and not self._full(each):
                self.instances[name] = replace(each, phase=Phase.STARTING)
        for name, each in [*self.instances.items()]:
            if each.phase is not Phase.STARTING or each.asked_s is None or each.pool in self.stuck:
                continue
            if each.pool in self.failing and now - each.asked_s >= 5.0:
                self.instances[name] = replace(each, phase=Phase.FAILED, because="exit status 1")
            elif now - each.asked_s >= self.startup_s:
                if self.starts_fail:
                    del self.instances[name]
                else:
                    self.instances[name] = replace(each, phase=Phase.READY, ready_s=now)
        self.most_gpus = max(self.most_gpus, 2 * len(self.instances))
        return tuple(self.instances.values())

    def _full(self, each: InstanceSeen) -> bool:
        placed = sum(one.phase is not Phase.PENDING for one in self.instances.values())
        return self.gpus is not None and 2 * placed + self.taken + 2 > self.gpus

    def give(self, action: do.Action, now: float) -> str:
        """Carry out an action; idempotent, as actuators are."""
        self.actions.append((now, action))
        refusal, name = self.refuses(action), action.instance
        if refusal:
            return refusal
        match action:
            case do.Start(pool=pool):
                if name not in self.instances:
                    role = Role(pool.removesuffix("-other"))
                    seen = InstanceSeen(id=name, pool=pool, role=role, phase=Phase.PENDING, asked_s=now, flips=True)
                    self.instances[name] = seen if self._full(seen) else replace(seen, phase=Phase.STARTING)
            case do.Flip(role=role):
                self.instances[name] = replace(self.instances[name], role=role)
            case do.Drain() | do.Stop():
                if name in self.instances:
                    self.instances[name] = replace(self.instances[name], leaving=True, phase=Phase.DRAINING)
            case _:
                raise AssertionError(action)
        self.most_gpus = max(self.most_gpus, 2 * len(self.instances))
        return ""

    def of_role(self, role: Role) -> int:
        return sum(each.role is role and not each.leaving for each in self.instances.values())


@dataclass
class Drive:
    """A controller with a pretended fleet."""

    controller: Controller
    fleet: PretendFleet
    now: float = 0.0
    decisions: list[Decision] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    """The controller's decision log, if `keeps` is set."""
    keeps: bool = False
    leads: bool = True
    kill_after: int | None = None
    """After so many actions the controller is killed, before it gives the next one to the actuator; `make` makes a new
    one."""
    make: Callable[[], Controller] | None = None
    answered: Callable[[do.Action, str], Answered] = Answered
    check: Callable[[Check], Checked | None] | None = None
    """Answers whether a fleet would keep the promises. If it returns None, the test answers later by `feed`."""

    def look(self) -> None:
        """Let the controller observe the fleet, and carry out the effects."""
        seen = Observation(
            at_s=self.now,
            routers=self.fleet.heard(self.now),
            instances=self.fleet.observe(self.now),
            leads=self.leads,
            elsewhere=self.fleet.elsewhere,
        )
        self.feed(Observed(seen))

    def feed(self, event: Event) -> None:
        effects = self.controller.handle(event, self.now)
        if self.keeps:
            self.lines.append(encode(self.now, event, effects))
        self._carry_out(effects)

    def _carry_out(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case Told(decision):
                    self.decisions.append(decision)
                case Act(action):
                    if self.kill_after is not None and len(self.fleet.actions) == self.kill_after:
                        assert self.make is not None
                        self.controller, self.kill_after = self.make(), None
                        return
                    self.feed(self.answered(action, self.fleet.give(action, self.now)))
                case Check() if self.check is not None:
                    answer = self.check(effect)
                    if answer is not None:
                        self.feed(answer)
                case _:
                    raise AssertionError(effect)

    def run(
        self, rate: Callable[[float], float], seconds: float, rng: np.random.Generator | None = None, met: float = 1.0
    ) -> None:
        """Look every five seconds, with Poisson arrivals in between; without `rng`, with the mean number of them."""
        until = self.now + seconds
        while self.now < until:
            self.now += 5.0
            mean = rate(self.now) * 5.0
            self.fleet.arrive(round(mean) if rng is None else int(rng.poisson(mean)), met)
            self.look()


def drive(
    prefills: int = 2,
    decodes: int = 2,
    startup_s: float = 60.0,
    rules: ControlRules | None = None,
    budget: Budget | None = None,
    kinds: list[ScalingPool] | None = None,
    **rest: Any,
) -> Drive:
    """A controller with a fleet of so many ready instances."""
    rules = rules or ControlRules(**({} if budget is None else {"budget": budget}))
    listed = kinds or pools(startup_s)

    def made() -> Controller:
        return Controller(listed, {"": PROMISE}, rules)

    return Drive(made(), PretendFleet.of(prefills, decodes, startup_s=startup_s, **rest), make=made)


def ways(actions: list[tuple[float, do.Action]]) -> list[str]:
    """The directions of these actions, `up` or `down`: one word for each change of direction."""
    found: list[str] = []
    for _, action in actions:
        way = "up" if isinstance(action, do.Start) else "down" if isinstance(action, do.Drain | do.Stop) else ""
        if way and (not found or found[-1] != way):
            found.append(way)
    return found
