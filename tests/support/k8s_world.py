"""A simulated cluster that carries out the plan's moves: it schedules, starts, drains and deletes instances."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from k8s.plan.fleet import moves
from k8s.plan.readiness import Known, PairsHeard, gate
from k8s.plan.values import (
    Drain,
    Move,
    Park,
    PlanLimits,
    PlannedObject,
    Remove,
    Resume,
    Start,
    Unpark,
    WantedModel,
    WantedPool,
)

STEP_S = 10.0


@dataclass
class World:
    """The cluster's instances, GPUs and clock. `gpus`: GPUs of all nodes together; None: no limit."""

    model: WantedModel
    gpus: int | None = None
    tell_free: bool = False
    chance: random.Random = field(default_factory=random.Random)
    longest_drain_s: float = 3 * STEP_S
    """The longest time in seconds from the beginning of a drain until the instance's streams end. It is drawn."""
    broken: frozenset[str] = frozenset()
    """Revisions whose engines never become ready."""
    agree: Callable[[PlannedObject, PlannedObject], bool] = lambda *_: True
    """Whether a proof of two instances passes."""
    instances: dict[str, PlannedObject] = field(default_factory=dict)
    now: float = 1000.0
    age: dict[str, int] = field(default_factory=dict)
    drains: dict[str, float] = field(default_factory=dict)
    """By instance: how many seconds its streams go on after the drain has begun."""

    def limits(self) -> PlanLimits:
        free = {} if self.gpus is None or not self.tell_free else {"": self.free()}
        return PlanLimits(drain_s=600, gang_s=60, free_gpus=free)

    def free(self) -> int:
        assert self.gpus is not None
        return self.gpus - sum(each.gpus for each in self.instances.values() if each.scheduled)

    def plan(self) -> tuple[Move, ...]:
        todo = moves("c", self.model, tuple(self.instances.values()), self.limits(), self.now)
        names = [each.name for each in todo]
        assert len(names) == len(set(names)), f"two moves of one instance: {todo}"
        return todo

    def run(self, steps: int = 1, *, crash: bool = False) -> None:
        """Plan moves and carry them out. `crash`: each step carries out only a random number of the first moves."""
        for _ in range(steps):
            todo = self.plan()
            self.carry_out(todo[: self.chance.randint(0, len(todo))] if crash else todo)
            self.pass_time()

    def settle(self, most: int = 400, *, crash: bool = False) -> int:
        """Run until the plan has no moves and nothing changes. Returns the number of steps."""
        quiet = 0
        for step in range(most):
            before = dict(self.instances)
            self.run(crash=crash)
            quiet = quiet + 1 if before == self.instances and not self.plan() else 0
            if quiet >= 6:  # more steps than any engine takes to start
                return step
        raise AssertionError(f"not settled after {most} steps: {self.plan()} {sorted(self.instances.items())}")

    def carry_out(self, todo: Iterable[Move]) -> None:
        pools = {pool.stem: pool for pool in self.model.pools}
        for move in todo:
            match move:
                case Start(stem, name):
                    self._start(pools[stem], name)
                case Drain(name):
                    self._change(name, draining_since=self.now)
                    self.drains[name] = self.chance.uniform(3 * STEP_S, self.longest_drain_s)
                case Resume(name):
                    self._change(name, draining_since=None, drained=False)
                case Remove(name):
                    self._change(name, deleting=True, ready=False)
                case Park(name):
                    self._change(name, parked=True, scheduled=False, started=False, healthy=False, ready=False)
                case Unpark(name):
                    self._change(name, parked=False, unschedulable_since=self.now)
                    self.age[name] = 0

    def _start(self, pool: WantedPool, name: str) -> None:
        assert name not in self.instances, "the name is taken"
        self.age[name] = 0
        self.instances[name] = PlannedObject(
            name=name,
            model=self.model.key,
            pool=pool.stem,
            role=pool.role,
            revision=pool.revision,
            family=pool.family,
            gpu=pool.gpu,
            gpus=pool.gpus,
            unschedulable_since=self.now,
        )

    def _change(self, name: str, **changes: object) -> None:
        if name in self.instances:
            self.instances[name] = dataclasses.replace(self.instances[name], **changes)

    def pass_time(self) -> None:
        self.now += STEP_S
        for name, each in list(self.instances.items()):
            if each.deleting:
                del self.instances[name]
        waiting = [name for name, each in self.instances.items() if not each.scheduled and not each.parked]
        self.chance.shuffle(waiting)
        for name in waiting:
            if self.gpus is None or self.free() >= self.instances[name].gpus:
                self._change(name, scheduled=True, unschedulable_since=None)
        for name, each in list(self.instances.items()):
            self._grow(name, each)
        self._open_gates()

    def _grow(self, name: str, each: PlannedObject) -> None:
        if each.scheduled and each.revision not in self.broken:
            self.age[name] += 1
            up = self.age[name] >= 3
            self._change(name, started=up, healthy=up and each.draining_since is None)
        if each.draining_since is not None and self.now - each.draining_since >= self.drains.get(name, 3 * STEP_S):
            self._change(name, drained=True)

    def _open_gates(self) -> None:
        """Let routers know all healthy instances and have proven all their pairs that `agree`, and set `ready` by the
        gates.
        """
        there = list(self.instances.values())
        healthy = [each for each in there if each.healthy]
        apart = frozenset(
            frozenset({one.name, other.name}) for one in healthy for other in healthy if not self.agree(one, other)
        )
        heard = PairsHeard(circles={each.name: None for each in healthy}, apart=apart)
        known_to = {each.name: frozenset({"r"}) for each in healthy}
        known = Known(routers=frozenset({"r"}), known_to=known_to, pairs=(heard,))
        for each in there:
            opened, _ = gate(each, there, known)
            self._change(each.name, ready=each.healthy and (each.ready or opened))
