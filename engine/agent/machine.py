"""Decides the actions of an agent: pure (law 2).

An instance is *ready* when its engine is. It is *draining* from a drain request until it has shown no unfinished work
for `QUIET_S` on end: routers must have heard of the drain before the last look counts. An engine that does not answer
shows nothing. If the instance is to leave, the agent then stops the engine, and leaves the registry last. Work that is
still unfinished at the deadline is cut, and reported.

A request to leave may ask it to *linger*: it takes work for a while longer and drains then. Where routers and instances
are told to end at the same time, requests that routers have admitted still find it.

An instance that was started with the flag for it takes another *role* on request. Its engine can do both, so work under
way goes on (holds are pulled, streams end), and only new work is of the new role. Routers learn it with the next
heartbeat.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cluster.instance import Load, Role
from engine.agent.grants import Grants, Order, RouterSays
from engine.agent.rules import RoleRules

QUIET_S = 2.0
"""For how many seconds an instance must show no work before it may leave: four times the routers' reading interval. A
router that had not read of the drain may have sent one more leg, and the engine shows it by then. The last look must
come in the second half of that time, or later."""


class AgentState(StrEnum):
    """The states of an instance in the fleet; the words of its heartbeat."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineIs:
    """The engine's process changed: one of starting, ready, restarting, stopped, failed."""

    state: str
    detail: str
    epoch: int


@dataclass(frozen=True, slots=True)
class LoadRead:
    """A new reading of the engine's own metrics."""

    load: Load


@dataclass(frozen=True, slots=True)
class RoutersHeard:
    """The announcements of all living routers."""

    routers: tuple[RouterSays, ...]


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Take no new work. With `leave`, end when no work is unfinished, or at the deadline; a second time, at once.

    `linger_s`: an instance that is ready and is to leave takes work for so long before it drains.
    `own`: the agent leaves by itself, as its name is lost. That counts neither as a first nor as a second time.
    """

    deadline_s: float
    leave: bool
    linger_s: float = 0.0
    own: bool = False


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    """Take work again. Too late after the engine's stop has begun."""


@dataclass(frozen=True, slots=True)
class RoleAsked:
    """Take another role. Ignored if `AgentMachine.refuses` gives a reason."""

    role: Role


@dataclass(frozen=True, slots=True)
class StopAsked:
    """End now, whatever work is unfinished."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The time that `next_wakeup` asked for has come."""


Event = EngineIs | LoadRead | RoutersHeard | DrainAsked | ResumeAsked | RoleAsked | StopAsked | Tick


@dataclass(frozen=True, slots=True)
class Publish:
    """Write to the registry at once instead of with the next heartbeat."""


@dataclass(frozen=True, slots=True)
class Say:
    """A line for people."""

    line: str


@dataclass(frozen=True, slots=True)
class StopEngine:
    """End the engine without a drain of its own: it has no work left, or has to go anyway."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the registry and end with this exit code. Always the last effect."""

    code: int


Effect = Publish | Say | StopEngine | Leave


@dataclass(slots=True, kw_only=True)
class AgentMachine:
    """The state of one instance.

    It has many attributes: what the instance is, what its engine last showed, and where its drain stands.
    """

    name: str
    rules: RoleRules
    role: Role = Role.BOTH
    flips: Mapping[Role, RoleRules] = field(default_factory=dict)
    """The rules of every role that the instance may take; empty if its engine was started for one role."""
    state: AgentState = AgentState.STARTING
    engine: AgentState = AgentState.STARTING
    """The last state of its engine; while the instance drains or stops, `state` differs from it."""
    detail: str = ""
    epoch: int = 0
    load: Load = field(default_factory=Load)
    drained: bool = False
    """Whether it drains and has shown no unfinished work for long enough."""
    doubted: bool = False
    """It is drained, and its last load showed work: perhaps its own question for a token (`engine.vllm.canary`)."""
    leaving: bool = False
    asked: bool = False
    """Whether it was told to leave."""
    deadline: float = math.inf
    """When the drain's time is up, in seconds of `now`."""
    drain_s: float = 0.0
    """The time that the drain was given."""
    leave_at: float = math.inf
    """When an instance that lingers begins to drain."""
    idle_since: float | None = None
    """While it drains: since when its engine has shown no unfinished work."""
    read_at: float = -math.inf
    """When its engine's load was last read."""
    gone: bool = False
    """Whether its engine has ended for good: no event changes anything any more."""
    shared: Grants = field(init=False)
    """The division of its credits among routers."""

    def __post_init__(self) -> None:
        self.shared = Grants(self.name)

    @property
    def credits(self) -> int:
        """Legs that may be in flight here, of all routers; 0 unless ready."""
        return self.rules.credits(self.load) if self.state is AgentState.READY else 0

    def grants(self, order: Order) -> dict[str, int]:
        """The credits by router, for the heartbeat of this order: from then on they count as granted."""
        return self.shared.issue(order, self.credits)

    def next_wakeup(self) -> float | None:
        """The end of the lingering, of the quiet time, or the drain's deadline; None: no `Tick` is needed."""
        if self.state is not AgentState.DRAINING:
            return None if self.gone or self.leave_at == math.inf else self.leave_at
        due = min(self._quiet_at(), self.deadline)
        return None if due == math.inf else due

    def _quiet_at(self) -> float:
        """When it will have shown no unfinished work for long enough, by what was read so far; inf: not known."""
        if self.idle_since is None or self.drained:
            return math.inf
        # An engine that is not ready has no work, and cannot be read.
        seen = self.engine is not AgentState.READY or self.read_at >= self.idle_since + QUIET_S / 2
        return self.idle_since + QUIET_S if seen else math.inf

    def handle(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Fold one event in, at `now` (seconds). Returns the effects to carry out, in order."""
        if self.gone:
            return ()
        match event:
            case EngineIs():
                return self._engine_is(event, now)
            case LoadRead(load):
                return self._load_read(load, now)
            case RoutersHeard(routers):
                self.shared.heard(routers, now)
                return ()
            case DrainAsked():
                return self._drain(event, now)
            case ResumeAsked():
                return self._resume()
            case RoleAsked(role):
                return self._turn(role)
            case StopAsked():
                return self._stop("stopped at once")
            case Tick():
                return self._tick(now)

    def _engine_is(self, event: EngineIs, now: float) -> tuple[Effect, ...]:
        self.epoch = event.epoch
        if event.state in {"stopped", "failed"}:
            return self._ended(event)
        self.engine = AgentState(event.state)
        if self.state is AgentState.STOPPING:
            return ()
        if event.state != "ready":
            self.load = Load()  # a new engine holds nothing
            self.shared.engine_lost()
        if self.state is AgentState.DRAINING:
            if event.state == "ready":
                return ()
            # The engine died while draining: its work is lost already, and a new engine would get no work.
            if self.leaving:
                return self._stop(f"its engine died ({event.detail})")
            self.idle_since = now if self.idle_since is None else self.idle_since
        return self._set(event)

    def _set(self, event: EngineIs) -> tuple[Effect, ...]:
        changed = self.state != event.state
        if self.state is not AgentState.DRAINING:
            self.state = AgentState(event.state)
        self.detail = event.detail
        return (Publish(),) if changed else ()

    def _ended(self, event: EngineIs) -> tuple[Effect, ...]:
        failed = event.state == "failed" or not (self.leaving or self.state is AgentState.STOPPING)
        self.state = AgentState.FAILED if failed else AgentState.STOPPING
        self.detail = event.detail
        self.gone = True
        return (Publish(), Leave(1 if failed else 0))

    def _drain(self, event: DrainAsked, now: float) -> tuple[Effect, ...]:
        if self.state is AgentState.STOPPING:
            return ()
        if event.leave and self.state in {AgentState.STARTING, AgentState.RESTARTING}:
            self.leaving = True
            return self._stop("stopped before it was ready")
        first, self.asked = not self.asked, self.asked or (event.leave and not event.own)
        if event.leave and self.leaving:
            return () if event.own or first else self._stop("told a second time to stop")
        if event.linger_s and event.leave and self.state is AgentState.READY:
            return self._linger(event, now)
        self.leave_at = math.inf
        leaves = self.leaving and not event.leave
        if leaves and self.state is AgentState.DRAINING:
            return ()  # it leaves by the deadline that it was given: a later one would come after its end
        self.drain_s = min(event.deadline_s, self.drain_s) if leaves else event.deadline_s
        self.leaving = self.leaving or event.leave
        drained = self.state is AgentState.DRAINING and self.drained
        self.deadline = math.inf if drained else now + self.drain_s
        if self.state is not AgentState.DRAINING:
            self.state, self.drained = AgentState.DRAINING, False
            self.idle_since = now if self.rules.unfinished(self.load) is None else None
        elif self.drained and self.leaving:
            return self._stop("drained")
        self.detail = self.rules.unfinished(self.load) or "nothing left"
        return (Publish(), Say(f"{self.name} drains: {self.detail}"))

    def _linger(self, event: DrainAsked, now: float) -> tuple[Effect, ...]:
        self.leaving, self.drain_s, self.leave_at = True, event.deadline_s, now + event.linger_s
        return (Say(f"{self.name} drains in {event.linger_s:g} s, and takes work until then"),)

    def _load_read(self, load: Load, now: float) -> tuple[Effect, ...]:
        self.load, self.read_at = load, now
        self.shared.engine_has(load, now)
        if self.state is not AgentState.DRAINING:
            return ()
        left = self.rules.unfinished(load)
        self.detail = left or "nothing left"
        if left is not None:
            if self.drained and not self.doubted:
                self.doubted = True
                return ()
            if self.drained:
                self.deadline = now + self.drain_s
            self.idle_since, self.drained = None, False
            return ()
        self.doubted = False
        if self.idle_since is None:
            self.idle_since = now
        return self._tick(now)

    def _tick(self, now: float) -> tuple[Effect, ...]:
        if now >= self.leave_at:
            self.leave_at, self.leaving = math.inf, False
            return self._drain(DrainAsked(self.drain_s, leave=True), now)
        if self.state is not AgentState.DRAINING:
            return ()
        if now >= self._quiet_at():
            self.drained = True
            self.deadline = math.inf
            return self._stop("drained") if self.leaving else (Say(f"{self.name} is drained"), Publish())
        if now < self.deadline:
            return ()
        self.deadline = math.inf
        silent = self.engine is AgentState.READY and now >= self.read_at + QUIET_S
        left = self.rules.unfinished(self.load) or ("what it has had since it last answered" if silent else None)
        cut = f"{self.name} was not drained within {self.drain_s:g} s"
        if not self.leaving:
            return (Say(f"{cut}: {left or 'quiet for too short a time'}; it goes on draining"),)
        return self._stop(f"{cut}; cut off: {left or 'nothing'}")

    def _resume(self) -> tuple[Effect, ...]:
        if self.state is not AgentState.DRAINING or self.leaving:
            return ()
        self.state, self.drained, self.idle_since, self.deadline = self.engine, False, None, math.inf
        if self.engine is AgentState.READY:
            self.detail = ""
            return (Publish(), Say(f"{self.name} takes work again"))
        return (Publish(), Say(f"{self.name} takes work again once its engine is ready"))

    def refuses(self, role: Role) -> str | None:
        """Why the instance cannot take this role, as a sentence for people; None if it can."""
        if role is self.role:
            return None
        if role not in self.flips:
            return (
                f"The role of {self.name} is fixed: {self.role.value}. "
                "Start an instance with --flips (pools: `flips: true`) and it can change."
            )
        if self.gone or self.state in {AgentState.DRAINING, AgentState.STOPPING, AgentState.FAILED}:
            return f"{self.name} is {self.state.value}: it takes no new work, and so no other role."
        return None

    def _turn(self, role: Role) -> tuple[Effect, ...]:
        if role is self.role or self.refuses(role) is not None:
            return ()
        before, self.role, self.rules = self.role, role, self.flips[role]
        return (Publish(), Say(f"{self.name} was {before.value} and is {role.value} now"))

    def _stop(self, because: str) -> tuple[Effect, ...]:
        if self.state is AgentState.STOPPING:
            return ()
        self.leaving = True
        self.state, self.detail = AgentState.STOPPING, because
        return (Publish(), Say(f"{self.name} stops: {because}"), StopEngine())
